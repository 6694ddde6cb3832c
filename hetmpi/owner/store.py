"""ShardStore: the rows that one rank owns, in memory that the ranks of its node share. Only the store writes them, and
in C++ the push applier and the inbox of the same rank."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hetmpi import _C
from hetmpi.owner.node_memory import Layout, ShardMemory, ring_bytes
from hetmpi.world.world import World

INIT_CHUNK_ROWS = 1 << 20


class RowStore(Protocol):
    """An owner's rows. weight (n, dim) float32, state (n, state_dim) float32, clock (n,) int32, for inspection: row i
    belongs to the i-th key of the rank (EmbeddingTable.keys). mark: the last argument of forget_changes(), None after
    others have assigned rows."""

    weight: np.ndarray
    state: np.ndarray
    clock: np.ndarray
    state_dim: int
    mark: object | None

    def __len__(self) -> int: ...

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """weight, state, clock and touched (n,) uint8, which the C++ core sets to 1 for each row that it updates."""

    def assign(self, rows: np.ndarray | slice, weight=None, state=None, clock=None) -> None:
        """Replaces the given arrays of these rows. Other ranks see them after EmbeddingTable.resume_at."""

    def snapshot(self, array: str, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """The values of an array (weight, state or clock) of these rows: copied to `out`, which is returned, otherwise
        for a slice a view."""

    def changed(self) -> np.ndarray:
        """The rows that have changed since forget_changes(), ascending: (m,) int64."""

    def forget_changes(self, mark: object) -> None:
        """Notes changes anew, since `mark`."""


class ShardStore:
    """A RowStore in memory that the ranks of a node share."""

    def __init__(self, memory: ShardMemory, rule: _C.RowOptimizer, keys_of):
        """memory: of this rank, uninitialised. keys_of(begin, end): keys of rows [begin, end), int64."""
        self.weight, self.state, self.clock, self.rings = memory.weight, memory.state, memory.clock, memory.rings
        self.mean_square, self._rule, self.state_dim = memory.mean_square, rule, memory.state.shape[1]
        self.touched, self._keys_of, self.mark = np.zeros(len(self.weight), np.uint8), keys_of, None
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
        for array, values in ((self.weight, weight), (self.state, state), (self.clock, clock)):
            if values is not None:
                array[rows] = values
        if state is not None:
            states = np.ascontiguousarray(self.state[rows])
            means = np.empty((len(states), self.mean_square.shape[1]), np.float32)
            self._rule.mean_squares(states, means)
            self.mean_square[rows] = means
        self.touched[rows] = 1

    def snapshot(self, array: str, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        values = {"weight": self.weight, "state": self.state, "clock": self.clock}[array]
        if out is None:
            return values[rows]
        if isinstance(rows, slice):
            np.copyto(out, values[rows])
        else:
            np.take(values, rows, axis=0, out=out, mode="clip")  # "raise" would make one more copy
        return out

    def changed(self) -> np.ndarray:
        return np.flatnonzero(self.touched)

    def forget_changes(self, mark: object):
        self.touched[:] = 0
        self.mark = mark

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.weight, self.state, self.clock, self.touched


def layouts_of(
    world: World, partition, rule: _C.RowOptimizer, dim: int, is_synchronous: bool, inbox_bytes: int
) -> tuple[_C.RecordFormat, list[Layout]]:
    """The form of a push, and the memory of each rank for a table's rows and for gradients in transit."""
    record, preview_dim = _C.RecordFormat(dim, False), 0
    if not is_synchronous:
        record, preview_dim = _C.push_format(rule), rule.preview_dim
    inbox_bytes, layouts = inbox_bytes if world.size > 1 else 0, []
    for node in world.nodes:
        origins = range(world.size)
        if not is_synchronous:  # the ranks of the node; as servers they also write what other nodes push
            origins = [*node, *(world.size + rank for rank in node if not world.is_one_node)]
        form = dim, rule.state_dim, preview_dim, tuple(origins), ring_bytes(inbox_bytes, len(origins), record)
        layouts += [(rank, Layout(partition.num_local_rows(rank), *form)) for rank in node]
    return record, [layout for _, layout in sorted(layouts, key=lambda pair: pair[0])]
