"""Links of a knowledge graph: the missing entity of a triple, by scores against entities drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from hetmpi.gpu import gpu_of
from hetmpi.table.spec import TableSpec
from hetmpi.table.table import EmbeddingTable
from hetmpi.tasks.ctr import row_dim_of
from hetmpi.tasks.evaluation import Evaluation
from hetmpi.tasks.losses import CANDIDATES, check_loss
from hetmpi.tasks.ranking import ranks_of
from hetmpi.tasks.task import Task

TRAIN, TUNING, ALL = ("train",), ("train", "valid"), ("train", "valid", "test")  # parts whose triples are known
HITS = (1, 3, 10)
MOST_NEGATIVES = 1 << 20
NEGATIVES, RANKED_AMONG = 3, 4  # streams of random numbers
KINDS = ("1_to_1", "1_to_n", "n_to_1", "n_to_n")  # heads to tails
MOST_RELATIONS = 1000  # whose metrics are written
LONGEST_NAME = 1 << 12  # of these; Freebase has names of over 100 characters that differ in their ends
MANY = 1.5  # several: at least so many (Bordes et al., 2013)


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
    """Samples [begin, end) of a batch, with negatives (N,) int64, places in the rows of entities. known: for heads and
    for tails (2, n) int64, the samples, counted from begin, and the negatives that answer them in training triples;
    None if these count."""

    begin: int
    end: int
    negatives: Tensor
    known: tuple[Tensor, Tensor] | None = None


@dataclass
class LinkBatch:
    """Triples with their keys made unique. heads, relations, tails: (B,) int64, places in the rows of their table.
    weights: (B,) float32; None: all 1."""

    keys: dict[str, Tensor]
    heads: Tensor
    relations: Tensor
    tails: Tensor
    chunks: list[Chunk]
    weights: Tensor | None = None

    def on(self, device: torch.device) -> LinkBatch:
        if gpu_of(device) is None:
            return self

        sent = partial(to_device, device=device)
        heads, relations, tails = map(sent, (self.heads, self.relations, self.tails))
        chunks = [
            replace(chunk, negatives=sent(chunk.negatives), known=chunk.known and tuple(map(sent, chunk.known)))
            for chunk in self.chunks
        ]
        weights = None if self.weights is None else sent(self.weights)
        return replace(self, heads=heads, relations=relations, tails=tails, chunks=chunks, weights=weights)


def mean_of(losses: Tensor, weights: Tensor | None) -> Tensor:
    """losses (n,), weights (n,) of mean 1 or None -> ()."""
    return losses.mean() if weights is None else (losses * weights).mean()


class SoftmaxLoss(torch.nn.Module):
    """Cross entropy of the true entity among it and the negatives."""

    takes = CANDIDATES

    def forward(self, positive: Tensor, negative: Tensor, weights: Tensor | None = None) -> Tensor:
        """positive (n,), negative (n, N), weights of the triples (n,) -> ()."""
        return mean_of(torch.logaddexp(positive, negative.logsumexp(1)) - positive, weights)


class LogisticLoss(torch.nn.Module):
    """Binary cross entropy of the true entity and of the negatives, half each; negatives count by a softmax of their
    scores times `temperature`, in which no gradient flows (Sun et al., ICLR 2019, equation 5); 0 for equal weights."""

    takes = CANDIDATES

    def __init__(self, temperature: float = 1.0):
        super().__init__()
        check_number("loss.temperature", temperature, 0)
        self.temperature = temperature

    def forward(self, positive: Tensor, negative: Tensor, weights: Tensor | None = None) -> Tensor:
        """positive (n,), negative (n, N), weights of the triples (n,) -> ()."""
        softplus = torch.nn.functional.softplus
        shares = torch.softmax(self.temperature * negative.detach(), 1)
        return (mean_of(softplus(-positive), weights) + mean_of((shares * softplus(negative)).sum(1), weights)) / 2


class MarginLoss(torch.nn.Module):
    """The mean over negatives of what their scores, plus a margin, exceed the true entity's by."""

    takes = CANDIDATES

    def __init__(self, margin: float = 1.0):
        super().__init__()
        check_number("loss.margin", margin, 0)
        self.margin = margin

    def forward(self, positive: Tensor, negative: Tensor, weights: Tensor | None = None) -> Tensor:
        """positive (n,), negative (n, N), weights of the triples (n,) -> ()."""
        return mean_of((self.margin + negative - positive[:, None]).clamp_min(0).mean(1), weights)


class LinkPrediction(Task):
    """See hetmpi/tasks/task.py, Task. Entities and relations have a table each, inverse relations a third.

    The samples of a chunk of the stream share their negatives, which are drawn from (seed, number of the chunk),
    uniformly over all entities, and stand in for heads and for tails. So they do not depend on the number of ranks.

    A model is constructed with dim; models/link.py, LinkModel, describes it. loss(positive (n,), negative (n, N)) ->
    (), of weighted triples loss(positive, negative, weights (n,))."""

    has_dense_layers, lower_is_better = False, ("mr", "sampled_mr")
    sample_bytes = 48

    def __init__(
        self,
        source: TripleSource,
        loss: torch.nn.Module,
        negatives: int = 256,
        chunk: int = 64,
        reciprocal: bool = False,
        degree_share: float = 0.0,
        penalty: float = 0.0,
        penalty_norm: int = 3,
        local_negatives: bool = False,
        filtered: bool = False,
        relation_std: float | None = None,
        ranked_among: int | None = None,
    ):
        """negatives: number per chunk. chunk: samples that share them. reciprocal: a head is asked for as the tail of
        an inverse relation, which has a row of its own (Lacroix et al., ICML 2018). degree_share: share of the
        negatives that are drawn by their number of training triples. penalty: factor of the sums of the numbers'
        powers penalty_norm (1, 2 or 3) of the rows of a triple, which are added to its loss: so frequent rows are
        limited more often. local_negatives: the other negatives are drawn from the entities of the rank's own shard,
        whose rows need no network; the training then depends on the number of ranks. filtered: whether negatives that
        make a training triple are left out. relation_std: standard deviation of the initial rows of relations; None:
        that of the model, or of all tables. ranked_among: evaluations during training rank the true entity among so
        many entities, drawn once, uniformly; None: among all."""
        if not hasattr(source, "num_entities"):
            raise UserError(
                f"task=link needs triples, {source.name} has none: choose data=triples or data=kg_synthetic"
            )
        check_loss(loss, CANDIDATES, "task=link")
        check_integer("task.negatives", negatives, 1, MOST_NEGATIVES)
        check_integer("task.chunk", chunk, 1)
        if relation_std is not None:
            check_number("task.relation_std", relation_std, 0)
        if ranked_among is not None:
            check_integer("task.ranked_among", ranked_among, 1, source.num_entities)
        flags = {"reciprocal": reciprocal, "local_negatives": local_negatives, "filtered": filtered}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise UserError(f"task.{name} must be true or false, got {one_line(value)}")
        check_number("task.degree_share", degree_share, 0, 1)
        check_number("task.penalty", penalty, 0)
        check_integer("task.penalty_norm", penalty_norm, 1, 3)
        self.source, self.criterion, self.negatives, self.chunk = source, loss, negatives, chunk
        self.filtered, self.relation_std, self.ranked_among = filtered, relation_std, ranked_among
        if ranked_among is not None:
            self.measured = f"among {ranked_among:,} entities of seed {source.seed}"
        self.local_negatives, self._own = local_negatives, None  # (n,) int64: the entities of this rank's shard
        self.degree_share, self.penalty, self.penalty_norm = degree_share, penalty, penalty_norm
        self.of_relations = (RELATION, INVERSE) if reciprocal else (RELATION,)  # tables

    def model_arguments(self, dim: int) -> dict[str, int]:
        return {"dim": dim}

    def tables(self, model: torch.nn.Module) -> dict[str, TableSpec]:
        source, std = self.source, self.relation_std
        std = getattr(model, "relation_std", None) if std is None else std
        return {
            ENTITY: TableSpec(source.num_entities, row_dim_of(model)),
            **{name: TableSpec(source.num_relations, model.relation_dim, init_std=std) for name in self.of_relations},
        }

    def most_keys(self, num_samples: int) -> dict[str, int]:
        num_chunks = -(-num_samples // self.chunk) + 1
        return {ENTITY: 2 * num_samples + num_chunks * self.negatives, **dict.fromkeys(self.of_relations, num_samples)}

    def opened(self, tables: Mapping[str, EmbeddingTable]):
        if self.local_negatives:
            self._own = tables[ENTITY].keys().numpy()
            if not len(self._own):
                raise UserError("task.local_negatives: a rank has no entities: use fewer ranks")

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
        if self.filtered:
            for chunk, entities_of in zip(chunks, drawn):
                chunk.known = self._known_among(triples[chunk.begin : chunk.end], entities_of)
        keys = {ENTITY: torch.from_numpy(entities), **dict.fromkeys(self.of_relations, torch.from_numpy(relations))}
        weights = None if samples.weights is None else torch.from_numpy(samples.weights)
        return LinkBatch(keys, heads, torch.from_numpy(of_relations), tails, chunks, weights)

    def _known_among(self, triples: np.ndarray, drawn: np.ndarray) -> tuple[Tensor, Tensor]:
        """Chunk.known for triples (n, 3) and negatives (N,) that may repeat."""
        order, found = np.argsort(drawn, kind="stable"), []
        for side in (0, 1):
            questions, answers = self.source.known(TRAIN).of(side, triples[:, 2 - 2 * side], triples[:, 1])
            begins, ends = (np.searchsorted(drawn, answers, how, sorter=order) for how in ("left", "right"))
            sizes = ends - begins
            places = np.arange(sizes.sum()) + np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
            found.append(torch.from_numpy(np.stack([np.repeat(questions, sizes), order[places]])))
        return tuple(found)

    def _drawn(self, number: int) -> np.ndarray:
        """The negatives of a chunk of the stream, (N,) int64."""
        random = np.random.default_rng((self.source.seed, NEGATIVES, number))
        num_by_degree, train = round(self.degree_share * self.negatives), self.source.parts["train"]
        num_entities = self.source.num_entities if self._own is None else len(self._own)
        uniform = random.integers(num_entities, size=self.negatives - num_by_degree)
        uniform = uniform if self._own is None else self._own[uniform]
        if num_by_degree == 0:
            return uniform
        triples, sides = np.divmod(random.integers(2 * len(train), size=num_by_degree), 2)
        return np.concatenate([uniform, train[triples, 2 * sides]])

    def keys(self, batch: LinkBatch) -> dict[str, Tensor]:
        return batch.keys

    def split(self, batch: LinkBatch, num: int) -> list[tuple[LinkBatch, float]]:
        """Between chunks, whose samples share negatives."""
        chunks, size = batch.chunks, len(batch.heads)
        ends = [len(chunks) * i // num for i in range(num + 1)]
        return [self._part(batch, chunks[i:j], size) for i, j in zip(ends, ends[1:]) if j > i] or [(batch, 1.0)]

    def _part(self, batch: LinkBatch, chunks: list[Chunk], size: int) -> tuple[LinkBatch, float]:
        begin, end = chunks[0].begin, chunks[-1].end
        moved = [replace(chunk, begin=chunk.begin - begin, end=chunk.end - begin) for chunk in chunks]
        names = ("heads", "relations", "tails", "weights")
        parts = {name: getattr(batch, name)[begin:end] for name in names if getattr(batch, name) is not None}
        return replace(batch, chunks=moved, **parts), (end - begin) / size

    def loss(self, forward: Callable, rows: dict[str, Tensor], batch: LinkBatch) -> Tensor:
        positive, negative = forward(rows, batch)
        weights = () if batch.weights is None else (batch.weights.repeat(2),)
        with doing(f"the loss {type(self.criterion).__name__}"):
            loss = self.criterion(positive, negative, *weights)
        return loss + self.penalty * self._size(rows, batch) if self.penalty > 0 else loss

    def _size(self, rows: dict[str, Tensor], batch: LinkBatch) -> Tensor:
        """The mean over the triples of the sums of |x|^penalty_norm of the numbers of their rows, ()."""
        entities = rows[ENTITY].abs().pow(self.penalty_norm).sum(1)
        total = entities[batch.heads].mean() + entities[batch.tails].mean()
        for table in self.of_relations:
            total = total + rows[table].abs().pow(self.penalty_norm).sum(1)[batch.relations].mean()
        return total

    def evaluate(self, evaluation: Evaluation, step: int) -> list[np.ndarray] | None:
        """The ranks of heads and tails of the held-out triples, (n, 2). Collective."""
        evaluation.tables.flush()
        triples = evaluation.draw(0, evaluation.num_samples).triples
        if not len(triples):
            return [] if evaluation.world.rank == 0 else None
        why = f"after step {step} for all ranks to evaluate"
        ranks = ranks_of(evaluation, triples, self.source.known(TUNING), why, self._some_entities())
        return [ranks] if evaluation.world.rank == 0 else None

    def _some_entities(self) -> np.ndarray | None:
        """(ranked_among,) int64, None for all."""
        if self.ranked_among is None:
            return None
        random = np.random.default_rng((self.source.seed, RANKED_AMONG))
        return random.choice(self.source.num_entities, self.ranked_among, replace=False)

    def figures(self, columns: list[np.ndarray]) -> dict[str, float | None]:
        """mrr, mr, hits_at_1, hits_at_3, hits_at_10, over heads and tails, mrr_heads and mrr_tails; sampled_mrr, ...,
        where ranks are among some entities."""
        ranks = columns[0] if columns else np.empty((0, 2))
        found = figures_of(ranks) | mrr_by_side(ranks)
        return found if self.ranked_among is None else {f"sampled_{name}": value for name, value in found.items()}

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
        found = {f"test_{name}": value for name, value in (figures_of(ranks) | mrr_by_side(ranks)).items()}
        found["test_unseen"] = int((~is_seen).sum())
        if not is_seen.all():
            found["test_mrr_seen"] = figures_of(ranks[is_seen])["mrr"]
        kinds = relation_kinds(self.source.parts["train"], self.source.num_relations)[triples[:, 1]]
        for number in np.unique(kinds).tolist():
            if number < len(KINDS):
                found[f"test_mrr_{KINDS[number]}"] = figures_of(ranks[kinds == number])["mrr"]
        found["test_mrr_of_relations"] = self._of_relations(triples[:, 1], ranks)
        return found if evaluation.world.rank == 0 else {}

    def _of_relations(self, relations: np.ndarray, ranks: np.ndarray) -> dict[str, float]:
        """The MRR (mean reciprocal rank) of the triples of each relation, by its name, the most frequent first. ranks
        (n, 2)."""
        counts = np.bincount(relations, minlength=self.source.num_relations)
        sums = np.bincount(relations, (1 / ranks).mean(1), self.source.num_relations)
        names = getattr(self.source, "relations", [str(number) for number in range(len(counts))])
        order = [number for number in np.argsort(-counts, kind="stable").tolist() if counts[number]][:MOST_RELATIONS]
        return {one_line(names[number], LONGEST_NAME): float(sums[number] / counts[number]) for number in order}

    def predict_settings(self, is_of_files: bool) -> str | None:
        return "data.path=QUESTIONS out=OUT.parquet" if is_of_files else None

    def not_finite(self, batch: LinkBatch) -> str | None:
        return None


def figures_of(ranks: np.ndarray) -> dict[str, float | None]:
    """mrr, mr, hits_at_1, hits_at_3, hits_at_10 of ranks (n, 2); None without ranks."""
    if not ranks.size:
        return dict.fromkeys(("mrr", "mr", *(f"hits_at_{k}" for k in HITS)))
    hits = {f"hits_at_{k}": float((ranks <= k).mean()) for k in HITS}
    return {"mrr": float((1 / ranks).mean()), "mr": float(ranks.mean()), **hits}


def mrr_by_side(ranks: np.ndarray) -> dict[str, float | None]:
    """The MRR of heads and of tails, of ranks (n, 2); None without ranks."""
    means = (1 / ranks).mean(0).tolist() if len(ranks) else [None, None]
    return dict(zip(("mrr_heads", "mrr_tails"), means))


def relation_kinds(triples: np.ndarray, num_relations: int) -> np.ndarray:
    """Index of KINDS for each relation, by its mean numbers of heads per tail and of tails per head in triples (n, 3);
    len(KINDS) for one without a triple: (num_relations,) int64."""
    counts = [
        np.bincount(np.unique(triples[:, columns], axis=0)[:, 0], minlength=num_relations)
        for columns in ([1, 0, 2], [1, 0], [1, 2])
    ]
    num, heads, tails = counts[0], np.maximum(1, counts[1]), np.maximum(1, counts[2])
    return np.where(num == 0, len(KINDS), 2 * (num >= MANY * tails) + (num >= MANY * heads))
