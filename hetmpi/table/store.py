"""ShardStore: the rows that one rank owns, in memory that the ranks of its node share. Only the store writes them, and
in C++ the push applier and the inbox of the same rank."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hetmpi import _C
from hetmpi.comm.node_memory import ShardMemory

INIT_CHUNK_ROWS = 1 << 20


class RowStore(Protocol):
    """An owner's rows. weight (n, dim) float32, state (n, state_dim) float32, clock (n,) int32: row i belongs to the
    i-th key of the rank (EmbeddingTable.keys). mean_square (n, preview_dim) float32: the state of
    cache lines, at s >= 1. touched (n,) uint8: set to 1 for each row that changes; its user resets it to 0."""

    weight: np.ndarray
    state: np.ndarray
    mean_square: np.ndarray
    clock: np.ndarray
    touched: np.ndarray

    def assign(self, rows: np.ndarray | slice, weight=None, state=None, clock=None) -> None:
        """Replaces the given arrays of these rows."""


class ShardStore:
    """See RowStore."""

    def __init__(self, memory: ShardMemory, rule: _C.RowOptimizer, keys_of):
        """memory: of this rank, uninitialised. keys_of(begin, end): keys of rows [begin, end), int64."""
        self.weight, self.state, self.clock, self.rings = memory.weight, memory.state, memory.clock, memory.rings
        self.mean_square, self._rule = memory.mean_square, rule
        self.touched, self._keys_of = np.zeros(len(self.weight), np.uint8), keys_of
        self.directory, self._applied = memory.directory, memory.applied

    def __len__(self) -> int:
        return len(self.weight)

    def initialise(self, seed: int, std: float):
        """Initialises every row from a normal distribution with standard deviation `std`, depending only on (seed,
        key)."""
        self.state[:] = self.mean_square[:] = 0
        self.clock[:] = 0
        self._applied[:] = 0
        self.rings[:, : _C.RING_HEADER_BYTES] = 0
        for begin in range(0, len(self), INIT_CHUNK_ROWS):
            weight = self.weight[begin : begin + INIT_CHUNK_ROWS]
            _C.init_rows(weight, self._keys_of(begin, begin + len(weight)), seed, std)

    def assign(self, rows: np.ndarray | slice, weight=None, state=None, clock=None):
        """Replaces the given arrays of these rows and marks the rows as touched. Other ranks see them after
        EmbeddingTable.resume_at."""
        for array, values in ((self.weight, weight), (self.state, state), (self.clock, clock)):
            if values is not None:
                array[rows] = values
        if state is not None:
            states = np.ascontiguousarray(self.state[rows])
            means = np.empty((len(states), self.mean_square.shape[1]), np.float32)
            self._rule.mean_squares(states, means)
            self.mean_square[rows] = means
        self.touched[rows] = 1

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays as arguments of the C++ core."""
        return self.weight, self.state, self.clock, self.touched
