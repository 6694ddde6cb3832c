"""The columns of queries and of items that a model of task=retrieval names, found in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hetmpi.data.batch import Bag, Samples
from hetmpi.data.features import SEQUENCE, Feature, FeatureTable
from hetmpi.data.pairs import PairBatch, Side, batches_of, last_values, query_places
from hetmpi.errors import UserError, one_line
from hetmpi.layers import PairRows
from hetmpi.tasks.ctr import row_dim_of

NEEDED = ("query", "item", "history", "queries", "items")  # attributes of a model
NONE = torch.empty(0, dtype=torch.int64)


def names_of(features: Sequence[Feature], dense_names: Sequence[str]) -> dict[str, list[str]]:
    """The names that a model is constructed with."""
    fields = [feature.name for feature in features if feature.pool != SEQUENCE]
    sequences = [feature.name for feature in features if feature.pool == SEQUENCE]
    return {"fields": fields, "numbers": list(dense_names), "sequences": sequences}


class PairColumns:
    """The columns that a model reads.

    queries, items  those of each side
    item            the first of items, which identifies one
    tables          of their rows, by name
    history         name of the sequence of items among the columns of queries; None
    max_len         its last values that the model reads"""

    def __init__(
        self, model: torch.nn.Module, features: Sequence[Feature], tables: Mapping[str, FeatureTable],
        dense_names: Sequence[str],
    ):  # fmt: skip
        """Raises UserError for a model of another task, and for columns that are not there or of a wrong kind."""
        check_columns(model, {feature.name: feature for feature in features}, dense_names)
        self.queries, self.items = (Side.of(names, features, dense_names) for names in (model.query, model.item))
        self.item, self.history = self.items.features[0], model.history
        self.max_len = 0 if self.history is None else model.max_len
        used = {feature.table for side in (self.queries, self.items) for feature in side.features}
        self.tables = {name: table for name, table in tables.items() if name in used}

    def complete(self, model: torch.nn.Module) -> PairRows:
        """The model behind the tables."""
        row_dim = row_dim_of(model)
        dims = {name: table.dim or row_dim for name, table in self.tables.items()}
        return PairRows(model, dims, self.queries.layout, self.items.layout)

    def queries_of(self, samples: Samples) -> Samples:
        """The columns of queries, with the last values of the history that the model reads."""
        found = self.queries.take(samples)
        if self.history is None:
            return found
        bags = list(found.bags)
        bags[self._place_of_history] = last_values(bags[self._place_of_history], self.max_len)
        return replace(found, bags=tuple(bags))

    def history_of(self, queries: Samples) -> Bag:
        """The history of queries_of() samples; without one no values."""
        if self.history is None:
            return Bag(np.empty(0, np.int64), np.zeros(len(queries) + 1, np.int64))
        return queries.bags[self._place_of_history]

    @property
    def _place_of_history(self) -> int:
        return [feature.name for feature in self.queries.features[len(self.queries.columns) :]].index(self.history)

    def query_batch(self, samples: Samples) -> PairBatch:
        """The queries of samples, each after its whole history."""
        queries = self.queries_of(samples)
        keys, [batch] = batches_of([(self.queries, queries)], list(self.tables))
        sizes = np.diff(self.history_of(queries).offsets)
        at, _ = query_places(sizes, np.ones(len(sizes), bool), np.zeros(sizes.sum(), bool), self.history is not None)
        return PairBatch(keys, batch, None, torch.from_numpy(at), NONE, NONE)

    def item_batch(self, items: Samples) -> PairBatch:
        """items: samples with the columns of items alone."""
        keys, [batch] = batches_of([(self.items, items)], list(self.tables))
        return PairBatch(keys, None, batch, NONE, NONE, NONE)

    def vectors(self, forward, rows: Mapping[str, Tensor], batch: PairBatch) -> tuple[Tensor | None, Tensor | None]:
        """Of the queries (Q, W) and of the items (n, W), None where the batch has none. forward: as of a model behind
        complete(). Raises UserError for other shapes."""
        queries, items = forward(rows, batch)
        check_vectors(queries, items, batch, self.history is not None)
        return None if queries is None else queries.flatten(0, -2)[batch.at], items


def check_columns(model: torch.nn.Module, known: Mapping[str, Feature], dense_names: Sequence[str]):
    """Raises UserError as PairColumns. known: features by name."""
    kind = type(model).__name__
    if not all(hasattr(model, name) for name in NEEDED):
        raise UserError(f"task=retrieval needs a model of queries and items, as model=two_tower, got {kind}")
    for name in (*model.query, *model.item):
        if name not in known and name not in dense_names:
            there = one_line(", ".join([*known, *dense_names]), 300)
            raise UserError(f"{kind}: no column is named {one_line(name)}, the data have {there}")
    for key, names in (("query", model.query), ("item", model.item)):
        if len(set(names)) < len(names):
            raise UserError(f"{kind}: model.{key} must name each column once, got {one_line(', '.join(names))}")
    item = known.get(model.item[0]) if model.item else None
    if item is None or item.pool is not None:
        raise UserError(f"{kind}: the first name of model.item must be a categorical column of one value")
    history = known.get(model.history)
    if history is not None and (history.table, history.first) != (item.table, item.first):
        raise UserError(f"{kind}: {model.history} must have share: {item.name} in data.columns, whose values it has")


def check_vectors(queries: Tensor | None, items: Tensor | None, batch: PairBatch, has_history: bool):
    """Raises UserError for vectors of other shapes than a model of these queries and items must give."""
    for name, vectors, part, axes in (
        ("queries", queries, batch.queries, 3 if has_history else 2),
        ("items", items, batch.items, 2),
    ):
        num = None if part is None else len(part.index)
        if part is not None and not (torch.is_tensor(vectors) and vectors.dim() == axes and len(vectors) == num):
            shape = tuple(vectors.shape) if torch.is_tensor(vectors) else type(vectors).__name__
            wanted = f"({num}, W)" if axes == 2 else f"({num}, L + 1, W)"
            raise UserError(f"the model's {name}() must return vectors of shape {wanted}, got {shape}")
    if queries is not None and items is not None and queries.shape[-1] != items.shape[-1]:
        raise UserError(
            f"the model's queries have {queries.shape[-1]} numbers, its items {items.shape[-1]}: both need as many"
        )
