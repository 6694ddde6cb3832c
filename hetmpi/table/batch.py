"""Batch: one batch of keys through announce, read and write at s >= 1. Pull: the rows of one batch, or of several whose
rows are requested together, on their way from the owners."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import numpy as np
import torch

from hetmpi import _C
from hetmpi._C import Keys

MOST_AHEAD = 4  # batches announced and not read yet
NO_ROWS = np.empty((0, 0), np.float32)

Empty = Callable[[int, type], np.ndarray]  # of (n, dtype): memory that the cache reads and writes


def check_room(num_ahead: int):
    """Raises RuntimeError if so many announced batches are the maximum."""
    if num_ahead == MOST_AHEAD:
        raise RuntimeError(
            f"EmbeddingTable.prefetch: {MOST_AHEAD} batches, the maximum, are announced and not read yet: read one "
            "before the next call"
        )


class Phase(Enum):
    """Progress of a pull or, from READ on, of a batch; the value is its description in messages."""

    NEW = "not requested"
    REQUESTED = "requested"
    SERVED = "requested, and other ranks' requests of the same round are answered"
    READ = "read"
    WRITTEN = "written"


class CacheLines:
    """Keys with their cache lines.

    keys     a batch, or the distinct keys of several
    slots    cache line of each key, (num,) int64, -1 for none
    clocks   owner's clock at the time of the read, (num,) int32
    phase    how far they are"""

    def __init__(self, keys: Keys, slots: np.ndarray, clocks: np.ndarray):
        self.keys, self.num, self.slots, self.clocks = keys, len(keys.array), slots, clocks
        self.reset()

    @classmethod
    def of(cls, keys: Keys, empty: Empty):
        """CacheLines of keys that were not looked up."""
        return cls(keys, empty(len(keys.array), np.int64), empty(len(keys.array), np.int32))

    def reset(self):
        """REQUIRES: no transfer is in progress."""
        self.slots[:], self.clocks[:] = -1, 0
        self.phase = Phase.NEW

    def enter(self, phase: Phase, *before: Phase):
        """Changes to `phase` from one of the phases `before`. Raises RuntimeError in any other phase."""
        if self.phase not in before:
            expected = " or ".join(f"{other.name} ({other.value})" for other in before)
            raise RuntimeError(
                f"{type(self).__name__}: {phase.name.lower()} takes keys that are {expected}, these are "
                f"{self.phase.name} ({self.phase.value})"
            )
        self.phase = phase


class Batch(CacheLines):
    """A batch of keys. In phase READ, slots and clocks are those of the read, and no other read or write has followed.

    pull         brings its rows; None until they are requested, and in a write without a read
    places       of its keys among those of the pull, (num,) int64; None if they are its only ones
    first_new    keys of the pull from this place on are in none of the batches read before"""

    def reset(self):
        super().reset()
        self.pull: Pull | None = None
        self.places: np.ndarray | None = None
        self.first_new = 0


class Pull(CacheLines):
    """The rows of one or several batches. From phase READ on, all lines of the batches are there.

    near           the route of the keys that are read on this node when the replies are: of a single batch all, of
                   several those that may be cached. The others are read with their batch. is_decided: mask of all but
                   these
    request        to other nodes, in phases REQUESTED and SERVED
    rows, states   in phase READ: (num, dim) and (num, preview_dim) float32, those of keys without a line
    is_uncached    of several batches: mask (num,) bool of the keys of other nodes that have got no line; None before
    num_previewed  messages that were held, and are previewed on these rows"""

    def reset(self):
        super().reset()
        self.near, self.is_decided = self.keys.local_route, self.keys.is_remote
        self.request: _C.Request | None = None
        self.rows = self.states = NO_ROWS
        self.is_uncached: np.ndarray | None = None
        self.num_previewed = 0

    @classmethod
    def of_one(cls, batch: Batch) -> Pull:
        """The pull of a new batch, which shares its lines."""
        batch.enter(Phase.NEW, Phase.NEW)
        batch.pull = cls(batch.keys, batch.slots, batch.clocks)
        return batch.pull

    @classmethod
    def of_several(
        cls, batches: list[Batch], keys_of: Callable[[torch.Tensor, np.ndarray], Keys], empty: Empty
    ) -> Pull:
        """The pull of new batches, in the order of their reads. keys_of: as TableContext.keys_of."""
        array, places = _C.unique(np.concatenate([batch.keys.array for batch in batches]))
        keys = keys_of(torch.from_numpy(array), array)
        pull, begin, first_new = cls.of(keys, empty), 0, 0
        pull.near, pull.is_decided = keys.local_route.where(keys.is_admitted), keys.is_remote | ~keys.is_admitted
        for batch in batches:
            batch.enter(Phase.NEW, Phase.NEW)
            end = begin + batch.num
            batch.pull, batch.places, batch.first_new = pull, places[begin:end], first_new
            begin, first_new = end, max(first_new, int(batch.places.max(initial=-1)) + 1)
        return pull

    def free(self):
        """Frees the rows."""
        self.rows = self.states = NO_ROWS
