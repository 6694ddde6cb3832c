"""Vocabulary: one rank's part of the ids of a table without a fixed vocabulary (vocabularies.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.open_rows import FIRST_KEY, ID, KEY, NO_ENTRIES, NO_IDS, SHARED_KEY, OpenRows
from hetmpi.owner.store import table_seed
from hetmpi.table.id_exchange import Exchange
from hetmpi.table.table import EmbeddingTable


@dataclass
class Numbers:
    """Of a table's ids, the same on all ranks: those with a row, and those that have lost theirs."""

    admitted: int = 0
    evicted: int = 0
    expired: int = 0


class Vocabulary:
    """One rank's part of the ids of a table.

    label       of the table, for messages
    directory   ids whose directory is this rank
    known       ids of other directories, as far as this rank has read them
    free        keys without an id below next_key, ascending"""

    def __init__(
        self, table: EmbeddingTable, rows: OpenRows, seed: int, init_std: float, every_steps: int, label: str = ""
    ):
        """seed, init_std: of the table. every_steps: of maintenance. label: for messages, by default the table's
        name."""
        self.label = label or f"the table {table.name}"
        self.table, self.rows, self.seed, self.init_std = table, rows, table_seed(seed, table.name), init_std
        table.vocabulary = self
        self.directory, self.known, self.numbers = _C.IdMap(every_steps), _C.IdMap(every_steps), Numbers()
        self.free, self.next_key = np.empty(0, np.int64), FIRST_KEY

    @property
    def num_free(self) -> int:
        return len(self.free) + self.rows.num_rows - self.next_key

    def state(self) -> np.ndarray | None:
        """All ids: entries (n, 4) int64 in the order of ids, on rank 0, None on other ranks. Collective."""
        self.send_counts()
        parts = self.table.world.comm.gather(self.directory.entries())
        if parts is None:
            return None
        entries = np.concatenate(parts)
        return entries[np.argsort(entries[:, ID])]

    def send_counts(self):
        """Sends the directories what this rank has counted of the ids it knows. Collective."""
        if self.table.world.size == 1:
            return
        [received] = Exchange(self.table.world, {"": self.known.take_counts()}).received().values()
        self.directory.add_counts(received)

    def load(self, entries: np.ndarray):
        """Continues with a state(), the same on all ranks."""
        world = self.table.world
        is_own = _C.directories(np.ascontiguousarray(entries[:, ID]), world.size) == world.rank
        self.directory.assign(np.ascontiguousarray(entries[is_own]))
        self.known.assign(NO_ENTRIES)
        keys = np.sort(entries[entries[:, KEY] >= 0, KEY])
        self.next_key = int(keys[-1]) + 1 if len(keys) else FIRST_KEY
        self.free = np.setdiff1d(np.arange(FIRST_KEY, self.next_key), keys, assume_unique=True)
        self.numbers.admitted = len(keys)

    def start_with(self, ids: np.ndarray, count: np.ndarray, weight: np.ndarray, shared: np.ndarray):
        """Gives ids (n,) int64, ascending, rows weight (n, dim) float32 and counts (n,) int64, and their shared row
        (1, dim), or (0, dim) for none: the same on all ranks. REQUIRES: no ids yet. Raises UserError if they are too
        many."""
        if len(ids) > self.num_free:
            raise UserError(f"{len(ids):,} ids have rows, the table takes max_rows: {self.rows.max_rows:,}")
        keys = self.take(len(ids))
        self.load(np.stack([ids, keys, count, np.zeros_like(ids)], 1))
        keys = np.concatenate([np.full(len(shared), SHARED_KEY), keys])
        own, order = self._own(keys)
        self._assign(own, np.concatenate([shared, weight])[order])

    def find(self, ids: np.ndarray, counts: np.ndarray | None, step: int) -> tuple[np.ndarray, np.ndarray]:
        """What this rank knows of a batch's ids (U,): keys (U,), WAITING for others, and of those whose directory it is
        the ids that become ready. counts (U,): of the batch, None for not counting."""
        world = self.table.world
        if world.size == 1:
            return self.answer(ids, counts, step)
        is_own, keys = _C.directories(ids, world.size) == world.rank, np.empty(len(ids), np.int64)
        of_own, of_others = (None if counts is None else counts[part] for part in (is_own, ~is_own))
        keys[is_own], ready = self.answer(ids[is_own], of_own, step)
        keys[~is_own] = self.known.look_up(ids[~is_own], of_others, step)
        return keys, ready

    def answer(self, ids: np.ndarray, counts: np.ndarray | None, step: int) -> tuple[np.ndarray, np.ndarray]:
        """As find(), of ids whose directory this rank is."""
        keys = self.directory.look_up(ids, counts, step)
        if counts is None:
            return keys, NO_IDS
        waits = keys < 0
        return keys, self.directory.see(ids[waits], counts[waits], step, self.rows.min_count)

    def take(self, num: int) -> np.ndarray:
        """The next free keys, ascending: (num,) int64."""
        reused = self.free[:num]
        fresh = np.arange(self.next_key, self.next_key + num - len(reused))
        self.free, self.next_key = self.free[num:], self.next_key + len(fresh)
        self.table.num_used = self.next_key
        self.numbers.admitted += num
        return np.concatenate([reused, fresh])

    def release(self, keys: np.ndarray):
        """Makes the keys of ids that lose their rows free, on all ranks: keys (n,) int64, ascending."""
        free = np.sort(np.concatenate([self.free, keys]))
        below = np.flatnonzero(free != np.arange(self.next_key - len(free), self.next_key))
        self.free = free[: below[-1] + 1 if len(below) else 0]  # those at the end are as if they had never been given
        self.next_key -= len(free) - len(self.free)
        self.table.num_used = self.next_key
        self.numbers.admitted -= len(keys)
        known = self.known.entries()
        self.known.assign(np.ascontiguousarray(known[~np.isin(known[:, KEY], keys)]))
        self.table.cache.forget(keys)

    def write_first_values(self, ids: np.ndarray, keys: np.ndarray):
        """Writes those rows of ids (n,) and their keys (n,) that this rank owns."""
        own, order = self._own(keys)
        weight = np.empty((len(own), self.table.dim), np.float32)
        _C.init_rows(weight, np.ascontiguousarray(ids[order]), self.seed, self.init_std)
        self._assign(own, weight)

    def _own(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The keys whose rows this rank owns, and their places among keys (n,)."""
        return self.table.partition.route(keys).of(self.table.world.rank)

    def _assign(self, own: np.ndarray, weight: np.ndarray):
        """Begins the rows of own keys (n,) with weight (n, dim)."""
        shard = self.table.shard
        rows, zeros = shard.directory.rows_of(own), np.zeros((len(own), shard.state_dim), np.float32)
        shard.assign(rows, weight=weight, state=zeros, clock=0)
