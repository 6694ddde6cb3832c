"""Partitions map a key to its owner (cpp/owner/partition.h), whose directory has its row (cpp/owner/directory.h). A
Route maps the keys of a batch to their owners."""

from __future__ import annotations

import numpy as np

from hetmpi import _C

PARTITIONS = ("round_robin", "range", "hash")


def make_partition(name: str, num_rows: int, size: int) -> _C.Partition:
    """The partition called `name`. Raises ValueError for an unknown name or an empty table."""
    return _C.Partition(name, num_rows, size)


class Route:
    """The keys of a batch sorted by owner, with the position of each key in the batch.

    order (n,) int64   position in the batch of the i-th routed key
    keys  (n,) int64   that key
    first (size + 1,)  routed keys [first[r], first[r + 1]) belong to rank r
    """

    def __init__(self, order: np.ndarray, keys: np.ndarray, first: np.ndarray):
        self.order, self.keys, self.first = order, keys, first

    @classmethod
    def of_keys(cls, partition: _C.Partition, keys: np.ndarray) -> Route:
        """The route of keys (n,) int64."""
        return cls(*partition.route(keys))

    @classmethod
    def empty(cls, size: int) -> Route:
        """The route of no keys to `size` ranks."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.zeros(size + 1, np.int64))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """order, keys and first."""
        return self.order, self.keys, self.first

    @property
    def counts(self) -> np.ndarray:
        """Keys of each rank, (size,) int64."""
        return self.first[1:] - self.first[:-1]

    def where(self, chosen: np.ndarray) -> Route:
        """The route of the keys selected by chosen (n,) bool; positions remain those in the whole batch."""
        part = _C.part_of_route(self.order, self.keys, self.first, chosen)
        return self if part is None else Route(*part)

    def held_by(self, ranks: np.ndarray) -> np.ndarray:
        """Mask of the keys that the selected ranks (size,) bool own: (n,) bool, for the route of a whole batch."""
        if ranks.all() or not ranks.any():
            return np.full(len(self.order), ranks.all())
        held = np.empty(len(self.order), bool)
        held[self.order] = np.repeat(ranks, self.counts)
        return held

    def of(self, owner: int) -> tuple[np.ndarray, np.ndarray]:
        """(keys, order) of the keys that `owner` owns."""
        part = slice(self.first[owner], self.first[owner + 1])
        return self.keys[part], self.order[part]

    def num_elsewhere(self, rank: int) -> int:
        """Number of keys that ranks other than `rank` own."""
        return int(len(self.keys) - (self.first[rank + 1] - self.first[rank]))

    @property
    def owners(self) -> list[int]:
        """Ranks that own at least one of the keys, ascending."""
        return self.counts.nonzero()[0].tolist()
