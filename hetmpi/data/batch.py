"""Samples of a data set, and batches for model and table.

B samples, F features of one value and G of several values per sample, U unique keys of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hetmpi import _C
from hetmpi.data.features import TABLE, Feature
from hetmpi.errors import UserError
from hetmpi.gpu import gpu_of, order_of

OPTIONAL = "teacher", "group", "weight"  # of samples
NO_GROUP = -1  # of a sample that is in no group


@dataclass
class Bag:
    """The values of a feature with several values per sample: sample b has values[offsets[b] : offsets[b + 1]]."""

    values: np.ndarray  # (n,) int64 keys
    offsets: np.ndarray  # (B + 1,) int64, from 0 to n
    weights: np.ndarray | None = None  # (n,) float32, factors of the values' rows; None: all 1

    def __getitem__(self, rows: slice | np.ndarray) -> Bag:
        """The values of the samples at `rows`."""
        starts, sizes = self.offsets[:-1][rows], np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
        return Bag(self.values[places], offsets, None if self.weights is None else self.weights[places])


@dataclass
class Samples:
    """Raw samples."""

    ids: np.ndarray  # (B, F) int64 keys, 0 <= key < num_rows of the feature's table
    dense: np.ndarray  # (B, num_dense) float32
    label: np.ndarray  # (B,) float32; for click-through 0 or 1; (B, K) of K labels, NaN for one that is missing
    teacher: np.ndarray | None = None  # (B,) float32, true probability of label 1, if known
    bags: tuple[Bag, ...] = ()  # (G,)
    start: int | None = None  # position of the first in the training stream, if known
    group: np.ndarray | None = None  # (B,) int64, equal for samples of which a metric is computed together, or NO_GROUP
    weight: np.ndarray | None = None  # (B,) float32 of at least 0, in loss and metrics; None: all 1

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, rows: slice | np.ndarray) -> Samples:
        """The samples at `rows`."""
        found = {name: getattr(self, name)[rows] for name in OPTIONAL if getattr(self, name) is not None}
        bags = tuple(bag[rows] for bag in self.bags)
        return Samples(self.ids[rows], self.dense[rows], self.label[rows], bags=bags, **found)


def concatenate(parts: Sequence[Samples]) -> Samples:
    """The samples of all parts, at least one, in order. What is optional if all have it."""
    ids, dense, label = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "dense", "label"))
    bags = tuple(map(concatenate_bags, zip(*(part.bags for part in parts))))
    optional = [name for name in OPTIONAL if all(getattr(part, name) is not None for part in parts)]
    found = {name: np.concatenate([getattr(part, name) for part in parts]) for name in optional}
    return Samples(ids, dense, label, bags=bags, **found)


def concatenate_bags(parts: Sequence[Bag]) -> Bag:
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    weights = None if parts[0].weights is None else np.concatenate([part.weights for part in parts])
    return Bag(np.concatenate([part.values for part in parts]), np.concatenate([[0], np.cumsum(sizes)]), weights)


@dataclass
class Batch:
    """Samples with their keys made unique, as torch tensors. Indices are places in the rows of all tables, joined in
    the order of `keys`: with one table its U rows."""

    keys: dict[str, Tensor]  # table -> (U,) int64, unique, in order of first appearance
    index: Tensor  # (B, F) int64 of the features of one value
    dense: Tensor  # (B, num_dense) float32
    label: Tensor  # (B,) float32, (B, K) of K labels
    teacher: Tensor | None = None  # (B,) float32
    bags: tuple[tuple[Tensor, Tensor], ...] = ()  # (G,) of index (n,) int64 and offsets (B + 1,) int64
    # As a model reads the features (hetmpi/layers.py, FeatureRows): place in `index` of each of those of one value and
    # of the pooled ones; of each that is not pooled index (B, L) int64 and which positions have a value, (B, L) bool.
    fields: Mapping[str, int] = field(default_factory=dict)
    sequences: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    group: np.ndarray | None = None  # as that of Samples
    weight: Tensor | None = None  # (B,) float32
    bag_weights: tuple[Tensor | None, ...] = ()  # (G,) of (n,) float32, factors of the values' rows; (): all 1
    # Of tables without a fixed vocabulary, whose keys are ids at first: how often each occurs, (U,) int64.
    counts: dict[str, np.ndarray] = field(default_factory=dict)

    def translated(self, keys: dict[str, np.ndarray]) -> Batch:
        """With keys (U,) int64, which may repeat, in place of the ids of tables without a fixed vocabulary."""
        found, places, num_rows = {}, [], 0
        for name, before in self.keys.items():
            found[name], place = before, np.arange(len(before))
            if name in keys:
                unique, place = _C.unique(keys[name])
                found[name] = torch.from_numpy(unique)
            places.append(place + num_rows)
            num_rows += len(found[name])
        places = torch.from_numpy(np.concatenate(places))
        bags = tuple((places[index], offsets) for index, offsets in self.bags)
        return replace(self, keys=found, index=places[self.index], bags=bags, counts={})

    def __getitem__(self, rows: slice) -> Batch:
        """The samples at `rows`, with all keys."""
        bags, bag_weights = [], []
        for (index, offsets), weights in zip(self.bags, self.bag_weights or [None] * len(self.bags)):
            offsets = offsets[rows.start : rows.stop + 1]
            own = slice(offsets[0], offsets[-1])
            bags.append((index[own], offsets - offsets[0]))
            bag_weights.append(None if weights is None else weights[own])
        optional = {name: getattr(self, name) for name in ("teacher", "group", "weight")}
        found = {name: one[rows] for name, one in optional.items() if one is not None}
        return replace(
            self,
            index=self.index[rows],
            dense=self.dense[rows],
            label=self.label[rows],
            bags=tuple(bags),
            bag_weights=tuple(bag_weights),
            **found,
        )

    def on(self, device: torch.device) -> Batch:
        """The batch with the tensors that a model reads on `device`, for use in its current stream. A batch is made on
        the CPU, so for that it is itself."""
        if gpu_of(device) is None:
            return self
        index, dense, label, *bags = (
            to_device(part, device) for part in (self.index, self.dense, self.label, *sum(self.bags, ()))
        )
        order = order_of(self.index)
        if order is not None:
            to_device(order, device)  # it stays with the index
        weight = None if self.weight is None else to_device(self.weight, device)
        bags = tuple(zip(bags[::2], bags[1::2]))
        bag_weights = tuple(one if one is None else to_device(one, device) for one in self.bag_weights)
        return replace(self, index=index, dense=dense, label=label, bags=bags, weight=weight, bag_weights=bag_weights)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a GPU, for use in torch's stream."""
    return gpu_of(device).used_by_torch(tensor, device)


class SamplesError(UserError, TypeError):
    """Samples whose arrays have a wrong dtype or shape."""


def check_samples(samples: Samples, num_bags: int = 0):
    """Raises SamplesError if an array has another dtype or shape than Samples documents, or if there are not `num_bags`
    bags."""
    ids, num = samples.ids, len(samples.ids)
    if ids.dtype != np.int64 or ids.ndim != 2:
        raise SamplesError(f"Samples: ids must be int64 of shape (B, F), got {ids.dtype} {ids.shape}")
    for name, array, axes, shape in (
        ("dense", samples.dense, (2,), f"({num}, num_dense)"),
        ("label", samples.label, (1, 2), f"({num},), or ({num}, K) of K labels"),
    ):
        if array.dtype != np.float32 or array.ndim not in axes or len(array) != num:
            raise SamplesError(f"Samples: {name} must be float32 of shape {shape}, got {array.dtype} {array.shape}")
    weight = samples.weight
    if weight is not None and (weight.dtype != np.float32 or weight.shape != (num,)):
        raise SamplesError(f"Samples: weight must be float32 of shape ({num},), got {weight.dtype} {weight.shape}")
    if len(samples.bags) != num_bags:
        raise SamplesError(f"Samples: expected {num_bags} bags, one per feature with pool, got {len(samples.bags)}")
    for values, offsets, weights in ((bag.values, bag.offsets, bag.weights) for bag in samples.bags):
        if values.dtype != np.int64 or values.ndim != 1:
            raise SamplesError(f"Bag: values must be int64 of shape (n,), got {values.dtype} {values.shape}")
        if offsets.dtype != np.int64 or offsets.shape != (num + 1,):
            raise SamplesError(f"Bag: offsets must be int64 of shape ({num + 1},), got {offsets.dtype} {offsets.shape}")
        if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
            raise SamplesError(f"Bag: offsets must rise from 0 to {len(values)}, the number of values")
        if weights is not None and (weights.dtype != np.float32 or weights.shape != values.shape):
            kind = f"{weights.dtype} {weights.shape}"
            raise SamplesError(f"Bag: weights must be float32 of shape {values.shape}, got {kind}")


def to_batch(samples: Samples) -> Batch:
    """The batch of samples with features of one value in one table. Raises SamplesError as check_samples."""
    check_samples(samples)
    ids = samples.ids
    keys, index = _C.unique(np.ascontiguousarray(ids).reshape(-1))
    return batch_of(samples, {TABLE: torch.from_numpy(keys)}, torch.from_numpy(index).view(ids.shape))


def batch_of(samples: Samples, keys: dict[str, Tensor], index: Tensor, bags=(), counts=None) -> Batch:
    teacher = None if samples.teacher is None else torch.from_numpy(samples.teacher)
    dense, label = torch.from_numpy(samples.dense), torch.from_numpy(samples.label)
    weight = None if samples.weight is None else torch.from_numpy(samples.weight)
    bag_weights = bag_weights_of(samples)
    return Batch(keys, index, dense, label, teacher, bags, counts=counts or {}, weight=weight, bag_weights=bag_weights)


def bag_weights_of(samples: Samples) -> tuple[Tensor | None, ...]:
    """Batch.bag_weights."""
    if all(bag.weights is None for bag in samples.bags):
        return ()
    return tuple(None if bag.weights is None else torch.from_numpy(bag.weights) for bag in samples.bags)


class FeatureBatches:
    """Makes batches of samples with these features. Thread-safe."""

    def __init__(self, features: Sequence[Feature], tables: Sequence[str], open_tables: Sequence[str] = ()):
        """tables: names, in the order in which their rows are joined. open_tables: those without a fixed
        vocabulary."""
        self._open_tables = set(open_tables)
        singles = [feature for feature in features if feature.pool is None]
        bags = [feature for feature in features if feature.pool is not None]
        self._num_bags = len(bags)
        self._columns = [[i for i, feature in enumerate(singles) if feature.table == name] for name in tables]
        self._bags = {name: [i for i, feature in enumerate(bags) if feature.table == name] for name in tables}

    def __call__(self, samples: Samples) -> Batch:
        """The batch of `samples`. Raises SamplesError as check_samples."""
        check_samples(samples, self._num_bags)
        ids, bags = np.ascontiguousarray(samples.ids), [np.empty(0, np.int64)] * self._num_bags
        index, keys, counts = np.empty(ids.shape, np.int64), {}, {}
        values = [[samples.bags[i].values for i in own] for own in self._bags.values()]
        found = _C.unique_of_tables(ids, self._columns, values, index)
        for (name, own), (of_table, num, places) in zip(self._bags.items(), found):
            for i, of_bag in zip(own, places):
                bags[i] = of_bag
            if name in self._open_tables:
                counts[name] = num
            keys[name] = torch.from_numpy(of_table)
        offsets = (torch.from_numpy(bag.offsets) for bag in samples.bags)
        bags = tuple(zip(map(torch.from_numpy, bags), offsets))
        return batch_of(samples, keys, torch.from_numpy(index), bags, counts)
