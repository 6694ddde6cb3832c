"""The rows that each rank owns: the protocol of their store, and its kind in memory that the ranks of a node share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Protocol

import numpy as np

from hetmpi import _C
from hetmpi.world.world import World

INIT_CHUNK_ROWS = 1 << 20
INBOX_BYTES = 8 << 20  # of a rank and table, for gradients in transit
ALIGN = 64
LEAST_HUGE = 16 * _C.HUGE_PAGE_BYTES  # a memory of fewer bytes has small pages


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


@dataclass(frozen=True)
class Layout:
    """The arrays of one rank's memory: rows, optimizer state, its mean squares, clocks, marks, the number of steps
    applied, inbox.

    preview_dim   numbers of state in a cache line, 0 or 1: the mean square of each row's state (cpp/owner/
                  row_optimizer.h)
    num_marks     of a row, 0 or _C.NUM_MARKS: the steps in which it is read (cpp/wire/round.h)
    origins       those with a ring here, ascending: ranks, and for ranks as servers the number of ranks plus theirs
    ring_bytes    of each ring"""

    num_rows: int
    dim: int
    state_dim: int
    preview_dim: int
    num_marks: int
    origins: tuple[int, ...]
    ring_bytes: int

    @property
    def places(self) -> dict[str, tuple[int, tuple[int, ...], type]]:
        """Offset in bytes, shape and dtype of each array, in their order."""
        num, begin, found = self.num_rows, 0, {}
        for name, shape, dtype in (
            ("weight", (num, self.dim), np.float32),
            ("state", (num, self.state_dim), np.float32),
            ("mean_square", (num, self.preview_dim), np.float32),
            ("clock", (num,), np.int32),
            ("marks", (self.num_marks, num), np.uint8),
            ("applied", (ALIGN // 8,), np.int64),
            ("rings", (len(self.origins), self.ring_bytes), np.uint8),
        ):
            found[name] = begin, shape, dtype
            begin += aligned(math.prod(shape) * np.dtype(dtype).itemsize)
        return found

    @property
    def inbox_begin(self) -> int:
        """Offset of the rings, behind the rows and what belongs to them."""
        return self.places["rings"][0]

    @property
    def nbytes(self) -> int:
        """Whole pages: the ranks of a node have theirs one after the other, large ones in huge pages."""
        size = self.inbox_begin + len(self.origins) * self.ring_bytes
        return aligned(size, _C.HUGE_PAGE_BYTES if size >= LEAST_HUGE else PAGESIZE)

    def ring(self, origin: int) -> int:
        """The number of an origin's ring."""
        return self.origins.index(origin)


class Shard:
    """A rank's rows and inbox in memory that the ranks of its node share: arrays for all of them, and for their owner a
    RowStore. Only the owner writes the rows: the store and, in C++, the push applier and the step reducer.

    directory     which row of them a key has
    mean_square   (n, preview_dim) float32: the state of cache lines, at s >= 1
    marks         (num_marks, n) uint8, at s = 0 where there are other nodes
    applied       (8,) int64, of which the first counts the steps that the owner has applied, at s = 0
    rings         (origins, ring_bytes) uint8: the inbox"""

    def __init__(self, memory: np.ndarray, layout: Layout, directory: _C.Directory):
        """memory: (n,) uint8, uninitialised."""

        def part(name: str) -> np.ndarray:
            begin, shape, dtype = layout.places[name]
            return np.ndarray(shape, dtype, memory, begin)

        self.directory, self.state_dim, self.mark = directory, layout.state_dim, None
        self.weight, self.state, self.mean_square = part("weight"), part("state"), part("mean_square")
        self.clock, self.applied, self.rings = part("clock"), part("applied"), part("rings")
        self.marks = part("marks")

    def __len__(self) -> int:
        return len(self.weight)

    def initialise(self, rule: _C.RowOptimizer, keys_of, num: int, seed: int, std: float):
        """Initialises the first `num` rows from a normal distribution with standard deviation `std`, depending only on
        (seed, key); the others are assigned before they are used. keys_of(begin, end): keys of rows [begin, end),
        int64. To be called by the owner, before its other methods."""
        self._rule, self.touched = rule, np.zeros(len(self), np.uint8)
        for zeroed in (self.state[:num], self.mean_square[:num], self.clock[:num]):
            zeroed[:] = 0
        for zeroed in (self.applied, self.marks[:, :num], self.rings[:, : _C.RING_HEADER_BYTES]):
            zeroed[:] = 0
        for begin in range(0, num, INIT_CHUNK_ROWS):
            weight = self.weight[begin : min(begin + INIT_CHUNK_ROWS, num)]
            _C.init_rows(weight, keys_of(begin, begin + len(weight)), seed, std)

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


def aligned(nbytes: int, unit: int = ALIGN) -> int:
    """`nbytes` rounded up to a multiple of `unit`, by default a cache line."""
    return (nbytes + unit - 1) // unit * unit


def ring_bytes(inbox_bytes: int, num_rings: int, record: _C.RecordFormat) -> int:
    """Bytes of each ring of an inbox of about `inbox_bytes`, header included."""
    capacity = max(inbox_bytes // num_rings - _C.RING_HEADER_BYTES, _C.min_ring_capacity(record))
    return _C.RING_HEADER_BYTES + aligned(capacity)


def layouts_of(
    world: World, partition, rule: _C.RowOptimizer, dim: int, is_synchronous: bool, inbox_bytes: int = INBOX_BYTES
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
        num_marks = _C.NUM_MARKS if is_synchronous and not world.is_one_node else 0
        inbox = tuple(origins), ring_bytes(inbox_bytes, len(origins), record)
        form = dim, rule.state_dim, preview_dim, num_marks, *inbox
        layouts += [(rank, Layout(partition.num_local_rows(rank), *form)) for rank in node]
    return record, [layout for _, layout in sorted(layouts, key=lambda pair: pair[0])]


def table_seed(seed: int, name: str) -> int:
    """Seed of the table called `name`: tables of one run start from different rows."""
    text = f"{seed}/{name}".encode()
    return int.from_bytes(text, "little") % 0xFFFFFFFFFFFFFFC5  # the largest prime below 2^64
