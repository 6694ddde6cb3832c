"""Partitions: which rank owns a key, and where in its shard. Pure arithmetic over numpy arrays.

Every partition is a bijection between keys [0, num_rows) and pairs (owner, row), so shards have no holes.
"""

from __future__ import annotations

import numpy as np

FEISTEL_ROUNDS = 4


class RoundRobin:
    """Key k lives on rank k mod size, at row k div size: neighbouring keys spread over all ranks."""

    def __init__(self, num_rows: int, size: int):
        self.num_rows, self.size = num_rows, size

    def num_local_rows(self, rank: int) -> int:
        """Rows of `rank`'s shard."""
        return (self.num_rows - rank + self.size - 1) // self.size

    def locate(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """keys (n,) int64 -> owner (n,) int64, row (n,) int64."""
        return keys % self.size, keys // self.size

    def keys_of(self, rank: int, begin: int, end: int) -> np.ndarray:
        """Keys of rows [begin, end) of `rank`'s shard: (end - begin,) int64."""
        return np.arange(begin, end, dtype=np.int64) * self.size + rank


class Range:
    """Rank r owns the contiguous keys [r * num_rows div size, (r + 1) * num_rows div size)."""

    def __init__(self, num_rows: int, size: int):
        self.num_rows, self.size = num_rows, size
        self.first = np.array([r * num_rows // size for r in range(size + 1)], dtype=np.int64)

    def num_local_rows(self, rank: int) -> int:
        """Rows of `rank`'s shard."""
        return int(self.first[rank + 1] - self.first[rank])

    def locate(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """keys (n,) int64 -> owner (n,) int64, row (n,) int64."""
        owner = np.searchsorted(self.first, keys, side="right") - 1
        return owner, keys - self.first[owner]

    def keys_of(self, rank: int, begin: int, end: int) -> np.ndarray:
        """Keys of rows [begin, end) of `rank`'s shard: (end - begin,) int64."""
        return self.first[rank] + np.arange(begin, end, dtype=np.int64)


class Hash:
    """Round robin over scrambled keys, for key spaces whose popular keys share a remainder.

    The scrambling is a permutation of [0, num_rows): a four-round Feistel network over the next even number of bits,
    walked until it lands inside (Black and Rogaway, CT-RSA 2002, "cycle walking")."""

    def __init__(self, num_rows: int, size: int):
        self.num_rows, self.size = num_rows, size
        self.half_bits = max(1, (max(num_rows - 1, 1).bit_length() + 1) // 2)
        self.round_robin = RoundRobin(num_rows, size)

    def num_local_rows(self, rank: int) -> int:
        """Rows of `rank`'s shard."""
        return self.round_robin.num_local_rows(rank)

    def locate(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """keys (n,) int64 -> owner (n,) int64, row (n,) int64."""
        return self.round_robin.locate(self._walk(keys, range(FEISTEL_ROUNDS)))

    def keys_of(self, rank: int, begin: int, end: int) -> np.ndarray:
        """Keys of rows [begin, end) of `rank`'s shard: (end - begin,) int64."""
        return self._walk(self.round_robin.keys_of(rank, begin, end), reversed(range(FEISTEL_ROUNDS)))

    def _walk(self, keys: np.ndarray, rounds) -> np.ndarray:
        rounds = list(rounds)
        inverse = rounds[0] > rounds[-1]
        values = self._feistel(keys.astype(np.uint64), rounds, inverse)
        outside = np.flatnonzero(values >= self.num_rows)
        while outside.size:
            values[outside] = self._feistel(values[outside], rounds, inverse)
            outside = outside[values[outside] >= self.num_rows]
        return values.astype(np.int64)

    def _feistel(self, values: np.ndarray, rounds: list[int], inverse: bool) -> np.ndarray:
        half, mask = np.uint64(self.half_bits), np.uint64((1 << self.half_bits) - 1)
        left, right = values >> half, values & mask
        for r in rounds:
            if inverse:
                left, right = right ^ (round_hash(left, r) & mask), left
            else:
                left, right = right, left ^ (round_hash(right, r) & mask)
        return (left << half) | right


def round_hash(values: np.ndarray, round_number: int) -> np.ndarray:
    """The round function of Hash: splitmix64's finaliser, (n,) uint64 -> (n,) uint64."""
    x = values + np.uint64((round_number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


PARTITIONS = {"round_robin": RoundRobin, "range": Range, "hash": Hash}


def starts(counts: np.ndarray) -> np.ndarray:
    """Where each of several stretches of these lengths (n,) begins, and the last one ends: (n + 1,) int64."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def make_partition(name: str, num_rows: int, size: int):
    """The partition called `name`. Raises ValueError for an unknown name or an empty table."""
    if name not in PARTITIONS:
        raise ValueError(f"table.partition must be one of {', '.join(PARTITIONS)}, got {name}")
    if num_rows < 1:
        raise ValueError(f"num_rows must be at least 1, got {num_rows}")
    return PARTITIONS[name](num_rows, size)


class Route:
    """A batch of keys sorted by owner: what to ask of whom, and where the answers go.

    order (n,) int64   position in the batch of the i-th routed key
    rows  (n,) int64   its row in its owner's shard
    first (size + 1,)  owner r's keys are routed keys [first[r], first[r + 1])
    """

    def __init__(self, order: np.ndarray, rows: np.ndarray, first: np.ndarray):
        self.order, self.rows, self.first = order, rows, first

    @classmethod
    def of_keys(cls, partition, keys: np.ndarray) -> Route:
        """The route of keys (n,) int64."""
        owner, row = partition.locate(keys)
        small = np.uint16 if partition.size <= 1 << 16 else np.int64  # numpy sorts 16-bit integers by radix
        order = np.argsort(owner.astype(small), kind="stable")
        return cls(order, row[order], starts(np.bincount(owner, minlength=partition.size)))

    def where(self, chosen: np.ndarray) -> Route:
        """The part of the keys that is chosen (n,) bool, at their positions in the whole batch."""
        if chosen.all():
            return self
        kept = chosen[self.order]
        before = starts(kept)  # kept keys among the routed ones before each
        return Route(self.order[kept], self.rows[kept], before[self.first])

    def held_by(self, ranks: np.ndarray) -> np.ndarray:
        """Which of the keys of a whole batch belong to these ranks (size,) bool: (n,) bool."""
        held = np.empty(len(self.order), bool)
        held[self.order] = np.repeat(ranks, np.diff(self.first))
        return held

    def of(self, owner: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, order) of the keys that `owner` holds."""
        part = slice(self.first[owner], self.first[owner + 1])
        return self.rows[part], self.order[part]

    def num_elsewhere(self, rank: int) -> int:
        """How many of the keys other ranks than `rank` hold."""
        return int(len(self.rows) - (self.first[rank + 1] - self.first[rank]))

    def owners(self) -> np.ndarray:
        """Ranks that hold at least one of the keys, ascending."""
        return np.flatnonzero(np.diff(self.first))
