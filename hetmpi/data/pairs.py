"""Pairs of a query and an item: the columns of each, and the batch that model and table see.

B pairs, Q queries, n items, of which the first are those of the pairs, then those drawn, then those of histories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hetmpi import _C
from hetmpi.data.batch import Bag, Batch, Samples, bag_weights_of, to_device
from hetmpi.data.features import Feature, pools_of
from hetmpi.gpu import gpu_of


@dataclass(frozen=True)
class Side:
    """The columns of a source that describe queries, or items.

    features  those of one value first
    columns   places of these in Samples.ids
    bags      places of the others in Samples.bags
    numbers   places in Samples.dense"""

    features: tuple[Feature, ...]
    columns: tuple[int, ...]
    bags: tuple[int, ...]
    numbers: tuple[int, ...]

    @staticmethod
    def of(names: Sequence[str], features: Sequence[Feature], dense_names: Sequence[str]) -> Side:
        """The columns with these names, in their order."""
        singles = [feature for feature in features if feature.pool is None]
        several = [feature for feature in features if feature.pool is not None]
        columns, bags, numbers = (
            tuple(known.index(name) for name in names if name in known)
            for known in ([one.name for one in singles], [one.name for one in several], dense_names)
        )
        return Side((*(singles[i] for i in columns), *(several[i] for i in bags)), columns, bags, numbers)

    @property
    def layout(self) -> tuple[list[str | None], list[str]]:
        """pools and names, as for hetmpi.layers.FeatureRows."""
        return pools_of(self.features), [feature.name for feature in self.features]

    def take(self, samples: Samples) -> Samples:
        """These columns of samples."""
        bags = tuple(samples.bags[i] for i in self.bags)
        ids, dense = samples.ids[:, list(self.columns)], samples.dense[:, list(self.numbers)]
        return Samples(ids, dense, samples.label, bags=bags)


@dataclass
class PairBatch:
    """keys: table -> (U,) int64. queries, items: batches whose indices are places in the rows of all tables, joined in
    the order of `keys`; None where there are none. A model gives vectors of `queries` of shape (B, W), or (B, L, W).

    at       (Q,) int64 in B, or in B times L, of the vectors that are queries
    target   (Q,) int64 place among the items of the one that each asks for; in evaluation empty
    places   (n,) int64 in the catalogue, of items
    num_own, num_drawn  items of the pairs, and items that were drawn"""

    keys: dict[str, Tensor]
    queries: Batch | None
    items: Batch | None
    at: Tensor
    target: Tensor
    places: Tensor
    num_own: int = 0
    num_drawn: int = 0

    def on(self, device: torch.device) -> PairBatch:
        if gpu_of(device) is None:
            return self
        sides = {name: part and part.on(device) for name, part in (("queries", self.queries), ("items", self.items))}
        at, target, places = map(partial(to_device, device=device), (self.at, self.target, self.places))
        return replace(self, **sides, at=at, target=target, places=places)


def batches_of(parts: Sequence[tuple[Side, Samples]], tables: Sequence[str]) -> tuple[dict[str, Tensor], list[Batch]]:
    """A batch of each part, with keys that are unique over all of them. tables: names, in the order in which their rows
    are joined."""
    index = [np.empty(samples.ids.shape, np.int64) for _, samples in parts]
    bags = [[np.empty(0, np.int64)] * len(samples.bags) for _, samples in parts]
    keys, num_rows = {}, 0
    for name in tables:
        slots = [slot for number, (side, _) in enumerate(parts) for slot in slots_of(number, side, name)]
        values = [parts[i][1].bags[place].values if is_bag else parts[i][1].ids[:, place] for i, is_bag, place in slots]
        found, places = _C.unique(np.concatenate([np.empty(0, np.int64), *values]))
        ends = np.cumsum([len(one) for one in values])
        for (i, is_bag, place), of_slot in zip(slots, np.split(places + num_rows, ends[:-1]) if slots else ()):
            if is_bag:
                bags[i][place] = of_slot
            else:
                index[i][:, place] = of_slot
        keys[name] = torch.from_numpy(found)
        num_rows += len(found)
    return keys, [batch_of(samples, *one) for (_, samples), *one in zip(parts, index, bags)]


def slots_of(number: int, side: Side, table: str) -> list[tuple[int, bool, int]]:
    """Where part `number` has keys of a table: the part, whether in its bags, and the column."""
    num_singles = len(side.columns)
    return [
        (number, place >= num_singles, place - num_singles if place >= num_singles else place)
        for place, feature in enumerate(side.features)
        if feature.table == table
    ]


def batch_of(samples: Samples, index: np.ndarray, bags: list[np.ndarray]) -> Batch:
    offsets = [torch.from_numpy(bag.offsets) for bag in samples.bags]
    dense, label = torch.from_numpy(samples.dense), torch.from_numpy(samples.label)
    pairs = tuple(zip(map(torch.from_numpy, bags), offsets))
    return Batch({}, torch.from_numpy(index), dense, label, bags=pairs, bag_weights=bag_weights_of(samples))


def last_values(bag: Bag, most: int) -> Bag:
    """The last values of each sample, at most so many."""
    sizes = np.diff(bag.offsets)
    if not len(sizes) or sizes.max() <= most:
        return bag
    kept = np.minimum(sizes, most)
    offsets = np.concatenate([[0], np.cumsum(kept)])
    places = np.arange(offsets[-1]) + np.repeat(bag.offsets[1:] - offsets[1:], kept)
    return Bag(bag.values[places], offsets)


def query_places(
    sizes: np.ndarray, is_pair: np.ndarray, is_item: np.ndarray, has_history: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Which vectors are queries, (Q,) int64 in B times L + 1 of them, or in B without a history: those that ask for the
    item of a pair, at the end of its history, then those that ask for a value of a history; and the former alone.
    sizes (B,) int64: of histories. is_pair (B,), is_item (sum of sizes,) bool: whether there is such an item."""
    if not has_history:
        return np.flatnonzero(is_pair), np.flatnonzero(is_pair)
    begins = np.arange(len(sizes)) * (sizes.max(initial=0) + 1)
    ends = (begins + sizes)[is_pair]
    positions = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.concatenate([ends, (np.repeat(begins, sizes) + positions)[is_item]]), ends
