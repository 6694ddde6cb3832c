"""ShardStore: the rows that one rank owns, in memory that the ranks of its node share. It alone writes them, and in C++
the push applier and the inbox that it is given to."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hetmpi import _C
from hetmpi.comm.window import ShardMemory

INIT_CHUNK_ROWS = 1 << 20


class RowStore(Protocol):
    """An owner's rows. weight (n, dim) float32, state (n, state_dim) float32, clock (n,) int32: row i of the i-th key
    of the rank (EmbeddingTable.keys). touched (n,) uint8: 1 for each row changed since somebody set it to 0."""

    weight: np.ndarray
    state: np.ndarray
    clock: np.ndarray
    touched: np.ndarray

    def assign(self, rows: np.ndarray | slice, weight=None, state=None, clock=None) -> None:
        """Replaces those arrays of these rows that are given."""


class ShardStore:
    """See RowStore."""

    def __init__(self, memory: ShardMemory, keys_of):
        """memory: this rank's, of any contents. keys_of(begin, end): keys of rows [begin, end), int64."""
        self.weight, self.state, self.clock, self.rings = memory.weight, memory.state, memory.clock, memory.rings
        self.touched, self._keys_of = np.zeros(len(self.weight), np.uint8), keys_of

    def __len__(self) -> int:
        return len(self.weight)

    def initialise(self, seed: int, std: float):
        """Gives every row its first value, normal with deviation `std`, which depends on (seed, key) alone."""
        self.state[:] = 0
        self.clock[:] = 0
        self.rings[:, : _C.RING_HEADER_BYTES] = 0
        for begin in range(0, len(self), INIT_CHUNK_ROWS):
            weight = self.weight[begin : begin + INIT_CHUNK_ROWS]
            _C.init_rows(weight, self._keys_of(begin, begin + len(weight)), seed, std)

    def assign(self, rows: np.ndarray | slice, weight=None, state=None, clock=None):
        """Replaces those arrays of these rows that are given, and marks the rows as touched. EmbeddingTable.resume_at
        then lets other ranks see them."""
        for array, values in ((self.weight, weight), (self.state, state), (self.clock, clock)):
            if values is not None:
                array[rows] = values
        self.touched[rows] = 1

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """As the C++ core takes them."""
        return self.weight, self.state, self.clock, self.touched
