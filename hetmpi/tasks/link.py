"""Links of a knowledge graph: the missing entity of a triple, by scores against entities drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetmpi import _C
from hetmpi.data.batch import to_device
from hetmpi.data.source import Source
from hetmpi.data.triples.names import ENTITY, INVERSE, RELATION
from hetmpi.data.triples.source import KnownAnswers, TripleSamples
from hetmpi.errors import UserError, check_integer, check_number, doing, one_line
from hetmpi.table.spec import TableSpec
from hetmpi.tasks.ctr import row_dim_of
from hetmpi.tasks.evaluation import Evaluation
from hetmpi.tasks.ranking import ranks_of
from hetmpi.tasks.task import Task

TUNING, ALL = ("train", "valid"), ("train", "valid", "test")  # parts whose triples are known
HITS = (1, 3, 10)
MOST_NEGATIVES = 1 << 20
NEGATIVES = 3  # stream of random numbers


class TripleSource(Source, Protocol):
    """Requirements of this task on a source. Samples are hetmpi.data.triples.source.TripleSamples.

    seed
    num_entities, num_relations
    parts          train, valid and test: (n, 3) int64 each
    is_seen        (num_entities,) bool: entities with a training triple"""

    seed: int
    num_entities: int
    num_relations: int
    parts: dict[str, np.ndarray]
    is_seen: np.ndarray

    def known(self, parts: tuple[str, ...]) -> KnownAnswers:
        """The answers known from the triples of these parts."""


@dataclass
class Chunk:
    """Samples [begin, end) of a batch, with negatives (N,) int64, places in the rows of entities."""

    begin: int
    end: int
    negatives: Tensor


@dataclass
class LinkBatch:
    """Triples with their keys made unique. heads, relations, tails: (B,) int64, places in the rows of their table."""

    keys: dict[str, Tensor]
    heads: Tensor
    relations: Tensor
    tails: Tensor
    chunks: list[Chunk]

    def on(self, device: torch.device) -> LinkBatch:
        if device.type == "cpu":
            return self

        sent = partial(to_device, device=device)
        heads, relations, tails = map(sent, (self.heads, self.relations, self.tails))
        chunks = [replace(chunk, negatives=sent(chunk.negatives)) for chunk in self.chunks]
        return replace(self, heads=heads, relations=relations, tails=tails, chunks=chunks)


class SoftmaxLoss(torch.nn.Module):
    """Cross entropy of the true entity among it and the negatives."""

    def forward(self, positive: Tensor, negative: Tensor) -> Tensor:
        """positive (n,), negative (n, N) -> ()."""
        return (torch.logaddexp(positive, negative.logsumexp(1)) - positive).mean()


class LogisticLoss(torch.nn.Module):
    """Binary cross entropy of the true entity and of the negatives, half each; negatives count by a softmax of their
    scores times `temperature`, in which no gradient flows (Sun et al., ICLR 2019, equation 5); 0 for equal weights."""

    def __init__(self, temperature: float = 1.0):
        super().__init__()
        check_number("loss.temperature", temperature, 0)
        self.temperature = temperature

    def forward(self, positive: Tensor, negative: Tensor) -> Tensor:
        softplus = torch.nn.functional.softplus
        weights = torch.softmax(self.temperature * negative.detach(), 1)
        return (softplus(-positive).mean() + (weights * softplus(negative)).sum(1).mean()) / 2


class MarginLoss(torch.nn.Module):
    """The mean over negatives of what their scores, plus a margin, exceed the true entity's by."""

    def __init__(self, margin: float = 1.0):
        super().__init__()
        check_number("loss.margin", margin, 0)
        self.margin = margin

    def forward(self, positive: Tensor, negative: Tensor) -> Tensor:
        """positive (n,), negative (n, N) -> ()."""
        return (self.margin + negative - positive[:, None]).clamp_min(0).mean()


class LinkPrediction(Task):
    """See hetmpi/tasks/task.py, Task. Entities and relations have a table each, inverse relations a third.

    The samples of a chunk of the stream share their negatives, which are drawn from (seed, number of the chunk),
    uniformly over all entities, and stand in for heads and for tails. So they do not depend on the number of ranks.

    A model is constructed with dim; models/link.py, LinkModel, describes it. loss(positive (n,), negative (n, N)) ->
    ()."""

    has_dense_layers, lower_is_better = False, ("mr",)
    sample_bytes = 48

    def __init__(
        self,
        source: TripleSource,
        loss: torch.nn.Module,
        negatives: int = 256,
        chunk: int = 64,
        reciprocal: bool = False,
    ):
        """negatives: number per chunk. chunk: samples that share them. reciprocal: a head is asked for as the tail of
        an inverse relation, which has a row of its own (Lacroix et al., ICML 2018)."""
        if not hasattr(source, "num_entities"):
            raise UserError(
                f"task=link needs triples, {source.name} has none: choose data=triples or data=kg_synthetic"
            )
        check_integer("task.negatives", negatives, 1, MOST_NEGATIVES)
        check_integer("task.chunk", chunk, 1)
        if not isinstance(reciprocal, bool):
            raise UserError(f"task.reciprocal must be true or false, got {one_line(str(reciprocal))}")
        self.source, self.criterion, self.negatives, self.chunk = source, loss, negatives, chunk
        self.of_relations = (RELATION, INVERSE) if reciprocal else (RELATION,)  # tables

    def model_arguments(self, dim: int) -> dict[str, int]:
        return {"dim": dim}

    def tables(self, model: torch.nn.Module) -> dict[str, TableSpec]:
        source, std = self.source, getattr(model, "relation_std", None)
        return {
            ENTITY: TableSpec(source.num_entities, row_dim_of(model)),
            **{name: TableSpec(source.num_relations, model.relation_dim, init_std=std) for name in self.of_relations},
        }

    def most_keys(self, num_samples: int) -> dict[str, int]:
        num_chunks = -(-num_samples // self.chunk) + 1
        return {ENTITY: 2 * num_samples + num_chunks * self.negatives, **dict.fromkeys(self.of_relations, num_samples)}

    def batches(self, device: torch.device) -> Callable[[TripleSamples], LinkBatch]:
        return self._batch

    def _batch(self, samples: TripleSamples) -> LinkBatch:
        triples, start, stop = samples.triples, samples.start, samples.start + len(samples.triples)
        firsts = range(start // self.chunk, -(-stop // self.chunk))
        drawn = [self._drawn(number) for number in firsts]
        entities, places = _C.unique(np.concatenate([triples[:, 0], triples[:, 2], *drawn]))
        relations, of_relations = _C.unique(np.ascontiguousarray(triples[:, 1]))
        heads, tails, *negatives = torch.from_numpy(places).split([len(triples)] * 2 + [self.negatives] * len(drawn))
        chunks = [
            Chunk(max(0, number * self.chunk - start), min(len(triples), (number + 1) * self.chunk - start), found)
            for number, found in zip(firsts, negatives)
        ]
        keys = {ENTITY: torch.from_numpy(entities), **dict.fromkeys(self.of_relations, torch.from_numpy(relations))}
        return LinkBatch(keys, heads, torch.from_numpy(of_relations), tails, chunks)

    def _drawn(self, number: int) -> np.ndarray:
        """The negatives of a chunk of the stream, (N,) int64."""
        random = np.random.default_rng((self.source.seed, NEGATIVES, number))
        return random.integers(self.source.num_entities, size=self.negatives)

    def keys(self, batch: LinkBatch) -> dict[str, Tensor]:
        return batch.keys

    def loss(self, forward: Callable, rows: dict[str, Tensor], batch: LinkBatch) -> Tensor:
        positive, negative = forward(rows, batch)
        with doing(f"the loss {type(self.criterion).__name__}"):
            return self.criterion(positive, negative)

    def evaluate(self, evaluation: Evaluation, step: int) -> list[np.ndarray] | None:
        """The ranks of heads and tails of the held-out triples, (n, 2). Collective."""
        evaluation.tables.flush()
        triples = self.source.parts["valid"][: evaluation.num_samples]
        if not len(triples):
            return [] if evaluation.world.rank == 0 else None
        why = f"after step {step} for all ranks to evaluate"
        ranks = ranks_of(evaluation, triples, self.source.known(TUNING), why)
        return [ranks] if evaluation.world.rank == 0 else None

    def figures(self, columns: list[np.ndarray]) -> dict[str, float | None]:
        """mrr, mr, hits_at_1, hits_at_3, hits_at_10, over heads and tails."""
        ranks = columns[0] if columns else np.empty((0, 2))
        if not ranks.size:
            return dict.fromkeys(("mrr", "mr", *(f"hits_at_{k}" for k in HITS)))
        hits = {f"hits_at_{k}": float((ranks <= k).mean()) for k in HITS}
        return {"mrr": float((1 / ranks).mean()), "mr": float(ranks.mean()), **hits}

    def without_figures(self, columns: list[np.ndarray]) -> str | None:
        return None if columns else "no MRR: there are no held-out triples"

    def final_figures(self, evaluation: Evaluation) -> dict[str, float | None]:
        """The metrics of the test triples, as test_mrr, and of those whose entities were all trained, as
        test_mrr_seen."""
        triples = self.source.parts["test"]
        if not len(triples):
            return {}
        why = "for all ranks to evaluate the test triples"
        ranks = ranks_of(evaluation, triples, self.source.known(ALL), why)
        is_seen = self.source.is_seen[triples[:, [0, 2]]].all(1)
        found = {f"test_{name}": value for name, value in self.figures([ranks]).items()}
        found["test_unseen"] = int((~is_seen).sum())
        if not is_seen.all():
            found["test_mrr_seen"] = self.figures([ranks[is_seen]])["mrr"]
        return found if evaluation.world.rank == 0 else {}

    def not_finite(self, batch: LinkBatch) -> str | None:
        return None
