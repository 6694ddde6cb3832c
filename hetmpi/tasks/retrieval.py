"""Retrieval: of all items those that a query asks for, from rows that are pairs of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetmpi import _C
from hetmpi.data.batch import Samples, check_samples, concatenate
from hetmpi.data.features import Feature, FeatureTable
from hetmpi.data.pairs import PairBatch, batches_of, query_places
from hetmpi.data.source import Source
from hetmpi.data.tabular.reading import NO_LABEL
from hetmpi.errors import UserError, check_integer, doing
from hetmpi.gathered import gathered, of_ranks
from hetmpi.table.spec import TableSpec
from hetmpi.table.table import EmbeddingTable
from hetmpi.tasks.catalogue import NO_PLACE, Catalogue, catalogue_of, histories_of
from hetmpi.tasks.ctr import row_dim_of
from hetmpi.tasks.evaluation import Evaluation
from hetmpi.tasks.item_ranks import ranks_of
from hetmpi.tasks.losses import CANDIDATES, check_loss
from hetmpi.tasks.pair_columns import PairColumns, names_of
from hetmpi.tasks.task import Task

MOST_NEGATIVES = 1 << 20
NEGATIVES = 5  # stream of random numbers
NEVER = -1e30  # logit of a candidate that is the query's own item
RECALLS, NDCG = (10, 100), 10


class PairSource(Source, Protocol):
    """Requirements of this task on a source. Samples are hetmpi.data.batch.Samples, each a pair of a query and an item;
    with task.negatives those of train() have their `start`.

    seed
    features     those of one value first, in the order of Samples.ids, then those of several, in that of Samples.bags
    tables       their tables by name (hetmpi/data/features.py, arrange)
    dense_names  of the numbers"""

    seed: int
    features: list[Feature]
    tables: dict[str, FeatureTable]
    dense_names: list[str]


class Retrieval(Task):
    """See hetmpi/tasks/task.py, Task. The catalogue has the distinct items of the training rows and,
    where items have no further columns, of the histories that share their rows.

    The loss of a query compares its item with candidates: the items of the batches of all ranks, and `negatives` more
    for each batch, drawn uniformly from the catalogue by their positions in the stream. A logit is the product of the
    vectors of query and item less the logarithm of the expected number of this item among the candidates, however it
    came there. Where all candidates are of batches, this is the log-q correction of Yi et al. (RecSys 2019). Candidates
    that are the query's own item are masked.

    A model is constructed with dim and the names of the columns: fields, of one row per sample; numbers; sequences,
    with pool: none. It has, besides `row_dim`,
    query, item   names of the columns of both; the first of `item` identifies one
    history       name of a sequence of items, each of which is asked for as well, after those before it; or None
    max_len       the last values of `history` that it reads
    queries(rows, batch)  vectors (B, W); with a history (B, L + 1, W), those after 0 to L of its values
    items(rows, batch)    vectors (n, W)
    where rows (U, row_dim) and a hetmpi.data.batch.Batch have the columns of queries, or of items."""

    lower_is_better = ("unseen",)

    def __init__(self, source: PairSource, loss: torch.nn.Module, negatives: int = 0, chunk: int = 64):
        """loss(positive (Q,), negative (Q, M)) -> (), the mean. negatives: drawn for each `chunk` of the stream, the
        batch of a rank."""
        if not hasattr(source, "features"):
            raise UserError(f"task=retrieval needs columns of queries and items, {source.name} has none: data=tabular")
        if getattr(source, "stream", None) is not None or source.num_train is None:
            raise UserError("task=retrieval needs data whose items are known at the start, and not a stream")
        if getattr(source, "label_kind", NO_LABEL) != NO_LABEL:
            raise UserError(
                f"task=retrieval takes each row as a pair of a query and its item, without a label: give "
                f"data.label_kind={NO_LABEL} in place of data.label, with the rows that are such pairs"
            )
        if getattr(source, "sample_weight", None) is not None:
            raise UserError("task=retrieval takes all pairs alike: leave out data.sample_weight")
        check_loss(loss, CANDIDATES, "task=retrieval")
        check_integer("task.negatives", negatives, 0, MOST_NEGATIVES)
        check_integer("task.chunk", chunk, 1)
        self.source, self.criterion, self.negatives, self.chunk = source, loss, negatives, chunk
        self._seed = int(np.random.default_rng((getattr(source, "seed", 0), NEGATIVES)).integers(1 << 62))
        self.dense_names = list(getattr(source, "dense_names", []))
        self.columns: PairColumns | None = None  # known with the model
        self.catalogue: Catalogue | None = None
        self.sample_bytes = 32 * len(source.features) + 4 * len(self.dense_names)

    # The model and its columns.

    def model_arguments(self, dim: int) -> dict:
        return {"dim": dim, **names_of(self.source.features, self.dense_names)}

    def complete(self, model: torch.nn.Module) -> torch.nn.Module:
        self._read_columns(model)
        return self.columns.complete(model)

    def tables(self, model: torch.nn.Module) -> dict[str, TableSpec]:
        self._read_columns(getattr(model, "model", model))
        row_dim = row_dim_of(model)
        return {
            name: TableSpec(table.num_rows, table.dim or row_dim, table.optim, table.cache)
            for name, table in self.columns.tables.items()
        }

    def _read_columns(self, model: torch.nn.Module):
        """Finds the columns that the model names. Raises UserError for those that it cannot use."""
        self.columns = PairColumns(model, self.source.features, self.source.tables, self.dense_names)
        if any(table.open for table in self.columns.tables.values()):
            raise UserError("task=retrieval needs columns with a vocabulary: rows: open cannot be used with it")
        encoder = getattr(self.source, "encoder", None)
        self.none = [] if encoder is None else encoder.keys_of_none(self.columns.item.name)
        self.missing = self.none[:1]  # the first one

    def most_keys(self, num_samples: int) -> dict[str, int]:
        columns, num_drawn = self.columns, num_samples * self.negatives // self.chunk + 1
        sides = [(num_samples, columns.queries), (num_samples + num_drawn, columns.items)]
        of_history = {columns.item.table: num_samples * columns.max_len}
        return {
            name: of_history.get(name, 0)
            + sum(num * sum(feature.table == name for feature in side.features) for num, side in sides)
            for name in columns.tables
        }

    # Batches.

    def opened(self, tables: Mapping[str, EmbeddingTable]):
        world = next(iter(tables.values())).world
        histories = histories_of(self.source.features, self.columns.items)
        self.catalogue = catalogue_of(world, self.source, self.columns.items, self.none, histories)
        counts = np.maximum(self.catalogue.counts, 1)  # an item of histories alone is asked for as a rare one
        self._shares = torch.from_numpy((counts / self.catalogue.counts.sum()).astype(np.float32))
        if world.rank == 0:
            num, total = len(self.catalogue), self.source.num_train
            without = total - int(self.catalogue.counts.sum())
            left_out = f"; {without:,} rows have no item, and are left out" if without else ""
            alone = int((self.catalogue.counts == 0).sum())
            in_histories = f", {alone:,} of them in histories alone" if alone else ""
            print(f"hetmpi: {num:,} items in {total:,} training rows{in_histories}{left_out}", flush=True)
            if self.catalogue.num_varying:
                print(
                    f"hetmpi: further columns of model.item differ between the rows of {self.catalogue.num_varying:,} "
                    "items at least: evaluation takes those of one row; columns that vary belong to model.query",
                    flush=True,
                )

    def batches(self, device: torch.device) -> Callable[[Samples], PairBatch]:
        return self._batch

    def _batch(self, samples: Samples) -> PairBatch:
        check_samples(samples, len([one for one in self.source.features if one.pool is not None]))
        columns, catalogue = self.columns, self.catalogue
        queries, own, drawn = columns.queries_of(samples), columns.items.take(samples), self.drawn(samples)
        history = columns.history_of(queries)
        places, of_history = catalogue.places(own.ids[:, 0]), catalogue.places(history.values)
        is_pair, is_item = places != NO_PLACE, of_history != NO_PLACE
        further = np.concatenate([drawn, of_history[is_item]])
        items = concatenate([own[is_pair], catalogue.samples[further]])
        keys, sides = batches_of([(columns.queries, queries), (columns.items, items)], list(columns.tables))
        at, ends = query_places(np.diff(history.offsets), is_pair, is_item, columns.history is not None)
        target = np.concatenate([np.arange(len(ends)), len(ends) + len(drawn) + np.arange(len(at) - len(ends))])
        places = np.concatenate([places[is_pair], further])
        return PairBatch(keys, *sides, *map(torch.from_numpy, (at, target, places)), len(ends), len(drawn))

    def drawn(self, samples: Samples) -> np.ndarray:
        """The items drawn for samples, places in the catalogue: those draws of the stream that are theirs."""
        if self.negatives == 0 or len(samples) == 0:
            return np.empty(0, np.int64)
        if samples.start is None:
            raise UserError(f"task.negatives needs samples with their `start`, {self.source.name} does not give it")
        first, last = (
            position * self.negatives // self.chunk for position in (samples.start, samples.start + len(samples))
        )
        return _C.hash_integers(np.arange(first, last), self._seed) % len(self.catalogue)

    def keys(self, batch: PairBatch) -> dict[str, Tensor]:
        return batch.keys

    # The loss.

    def loss(self, forward: Callable, rows: dict[str, Tensor], batch: PairBatch) -> Tensor:
        """This rank's part of the mean over the queries of all ranks, times their number: the trainer averages over
        ranks. A rank without queries takes part."""
        queries, items = self.columns.vectors(forward, rows, batch)
        num = batch.num_own + batch.num_drawn
        sizes = of_ranks([batch.num_own, num, len(queries)])  # (size, 3)
        candidates, places = gathered(items[:num], batch.places[:num], sizes[:, 1])  # (M, W), (M,)
        own = batch.places[batch.target]
        all_own, all_items, all_queries = sizes.sum(0).tolist()
        positive = (queries * items[batch.target]).sum(1) - self._expected(own, all_own, all_items).log()  # (Q,)
        negative = queries @ candidates.T - self._expected(places, all_own, all_items).log()  # (Q, M)
        if len(queries) == 0:
            return 0.0 * (queries.sum() + items.sum() + negative.sum() + candidates.sum())
        negative = negative.masked_fill(places == own[:, None], NEVER)
        with doing(f"the loss {type(self.criterion).__name__}"):
            loss = self.criterion(positive, negative)
        return loss * (len(queries) * len(sizes) / all_queries)

    def _expected(self, places: Tensor, num_own: int, num_items: int) -> Tensor:
        """The expected number of these items of the catalogue (n,) among num_items, of which num_own are of pairs and
        the others drawn: (n,) float32."""
        self._shares = self._shares.to(places.device)
        return self._shares[places] * max(1, num_own) + (num_items - num_own) / len(self.catalogue)

    # Evaluation.

    def evaluate(self, evaluation: Evaluation, step: int) -> list[np.ndarray] | None:
        """The ranks of the items of held-out rows among all of the catalogue, (n,) float64; infinity for an item that
        it lacks. Collective."""
        evaluation.tables.flush()
        if evaluation.num_samples == 0:
            return [] if evaluation.world.rank == 0 else None
        ranks = ranks_of(self, evaluation, f"after step {step} for all ranks to evaluate")
        return [ranks] if evaluation.world.rank == 0 else None

    def figures(self, columns: list[np.ndarray]) -> dict[str, float | None]:
        """recall_at_10 (as HR@10: a row has one item), recall_at_100, ndcg_at_10, mrr; unseen: held-out rows whose item
        no training row or history has, which count as not found."""
        ranks = columns[0] if columns else np.empty(0)
        if not len(ranks):
            return dict.fromkeys((*(f"recall_at_{k}" for k in RECALLS), f"ndcg_at_{NDCG}", "mrr", "unseen"))
        gains = (ranks <= NDCG) / np.log2(1 + ranks)
        recalls = {f"recall_at_{k}": float((ranks <= k).mean()) for k in RECALLS}
        of_ranks = {f"ndcg_at_{NDCG}": float(gains.mean()), "mrr": float((1 / ranks).mean())}
        return {**recalls, **of_ranks, "unseen": int(np.isinf(ranks).sum())}

    def without_figures(self, columns: list[np.ndarray]) -> str | None:
        return None if columns and len(columns[0]) else "no recall: there are no held-out rows with an item"

    def predict_settings(self, is_of_files: bool) -> str | None:
        return "data.path=FILES items=ITEMS.parquet out=OUT.parquet" if is_of_files else None

    def not_finite(self, batch: PairBatch) -> str | None:
        columns = self.columns
        for side, part, names in (("queries", batch.queries, columns.queries), ("items", batch.items, columns.items)):
            wrong = torch.nonzero(~torch.isfinite(part.dense))
            if len(wrong):
                row, column = wrong[0].tolist()
                name = self.dense_names[names.numbers[column]]
                return f"the data give {name} = {part.dense[row, column].item()} among the {side} of a batch"
        return None
