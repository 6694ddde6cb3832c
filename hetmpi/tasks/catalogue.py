"""The catalogue: the distinct items of the training rows and of their histories, from which candidates are drawn and
the best are found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetmpi.data.batch import Samples, concatenate
from hetmpi.data.features import Feature
from hetmpi.data.pairs import Side
from hetmpi.errors import UserError
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

BLOCK = 1 << 16  # training rows read at a time
NOWHERE = np.iinfo(np.int64).max
NO_PLACE = -1


@dataclass
class Catalogue:
    """n items, in the order of their keys.

    keys     (n,) int64, ascending, of the column that identifies an item
    counts   (n,) int64, training rows with the item; 0 for an item of histories alone
    samples  the columns of items (n), each as in the first training row that has the item
    num_varying  items whose further columns differ between training rows that were read in one block"""

    keys: np.ndarray
    counts: np.ndarray
    samples: Samples
    num_varying: int

    def __len__(self) -> int:
        return len(self.keys)

    def places(self, keys: np.ndarray) -> np.ndarray:
        """keys (m,) int64 -> places (m,) int64, NO_PLACE for those of no item."""
        found = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[found] == keys, found, NO_PLACE)


class Counting:
    """Counts of the items in rows that are read in order, and the first row of each."""

    def __init__(self, side: Side, bags: Sequence[int] = ()):
        """bags: places in Samples.bags of histories of items."""
        self.side, self.bags, self.first_key, num_keys = side, bags, side.features[0].first, side.features[0].rows
        # Of each item: whether it stands in a history, and whether its further columns differ between rows.
        self.in_history, self.varies = np.zeros((2, num_keys), np.int8)
        self.counts, self.firsts = np.zeros(num_keys, np.int64), np.full(num_keys, NOWHERE)
        self.numbers: list[np.ndarray] = []  # of items, from first_key, in the order of self.samples
        self.samples: list[Samples] = []

    def add(self, samples: Samples, start: int):
        """samples: of all columns, rows start, start + 1, ..., which come after those that were added before."""
        own = self.side.take(samples)
        for place in self.bags:
            self.in_history[samples.bags[place].values - self.first_key] = 1
        numbers, rows, inverse, counts = np.unique(
            own.ids[:, 0] - self.first_key, return_index=True, return_inverse=True, return_counts=True
        )
        for columns in further_columns(own):
            self.varies[numbers[inverse[(columns != columns[rows[inverse]]).any(1)]]] = 1
        is_new = self.firsts[numbers] == NOWHERE
        self.counts[numbers] += counts
        self.firsts[numbers[is_new]] = start + rows[is_new]
        self.numbers.append(numbers[is_new])
        self.samples.append(own[rows[is_new]])


def further_columns(items: Samples) -> Iterator[np.ndarray]:
    """Arrays (n, k) that differ where items (n) differ in the columns besides the one that identifies them. A column of
    several values is represented by their number and sum."""
    yield items.ids[:, 1:]
    yield items.dense
    for bag in items.bags:
        sums = np.concatenate([[0], np.cumsum(bag.values)])[bag.offsets]
        yield np.stack([np.diff(bag.offsets), np.diff(sums)], 1)


def histories_of(features: Sequence[Feature], side: Side) -> list[int]:
    """Places among the features of several values of those that share the rows of items; none where items have further
    columns, whose values an item of a history lacks."""
    item, several = side.features[0], [feature for feature in features if feature.pool is not None]
    if len(side.features) > 1 or side.numbers:
        return []
    return [i for i, feature in enumerate(several) if (feature.table, feature.first) == (item.table, item.first)]


def catalogue_of(
    world: World, source, side: Side, none: Sequence[int] = (), histories: Sequence[int] = ()
) -> Catalogue:
    """The catalogue of a source, of which each rank reads a share of the training rows. side: columns of items, the
    first of which identifies one. none: its keys that are no item's. histories: as histories_of. Collective. Raises
    UserError on every rank if no training row has an item."""
    feature, num = side.features[0], source.num_train
    counting = Counting(side, histories)
    begin, end = (num * rank // world.size for rank in (world.rank, world.rank + 1))
    for start in range(begin, end, BLOCK):
        counting.add(source.train(start, min(start + BLOCK, end)), start)
    for found in (counting.counts, counting.in_history, counting.varies):
        found[np.asarray(none, np.int64) - feature.first] = 0
    world.meet("for all ranks to read the items of the training rows")
    counts, firsts = np.empty_like(counting.counts), np.empty_like(counting.firsts)
    world.comm.Allreduce(counting.counts, counts, MPI.SUM)
    world.comm.Allreduce(counting.firsts, firsts, MPI.MIN)
    if not counts.any():
        raise UserError(f"data={source.name}: no training row has an item in column {feature.name}")
    numbers, samples = first_ones(counting, (counts > 0) & (counting.firsts == firsts), source)
    parts = world.comm.allgather((numbers, samples))
    numbers, samples = np.concatenate([part[0] for part in parts]), concatenate([part[1] for part in parts])
    in_history = np.empty_like(counting.in_history)
    world.comm.Allreduce(counting.in_history, in_history, MPI.MAX)
    further = np.flatnonzero((in_history > 0) & (counts == 0))
    if len(further):
        numbers, samples = np.concatenate([numbers, further]), concatenate([samples, bare(further + feature.first)])
    varies = np.empty_like(counting.varies)
    world.comm.Allreduce(counting.varies, varies, MPI.MAX)
    order = np.argsort(numbers)
    return Catalogue(numbers[order] + feature.first, counts[numbers[order]], samples[order], int(varies.sum()))


def bare(keys: np.ndarray) -> Samples:
    """Items (n,) that have no column but the one that identifies them."""
    num = len(keys)
    return Samples(keys[:, None], np.empty((num, 0), np.float32), np.zeros(num, np.float32))


def first_ones(counting: Counting, is_own: np.ndarray, source) -> tuple[np.ndarray, Samples]:
    """The items whose first row this rank has read, by number, and their columns. is_own: (num_keys,) bool."""
    nothing = counting.side.take(source.train(0, 0))
    numbers = np.concatenate([np.empty(0, np.int64), *counting.numbers])
    samples = concatenate([nothing, *counting.samples])
    return numbers[is_own[numbers]], samples[is_own[numbers]]
