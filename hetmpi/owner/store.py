"""The rows that each rank owns: the protocol of their store, and its kind in memory that the ranks of a node share. The
kind on disk is in row_files.py, that on a GPU in gpu_rows.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Protocol

import numpy as np

from hetmpi import _C
from hetmpi.world.world import World

INIT_CHUNK_ROWS = 1 << 16  # that a thread initialises at a time
INBOX_BYTES = 8 << 20  # of a rank and table, for gradients in transit
ALIGN = 64
LEAST_HUGE = 16 * _C.HUGE_PAGE_BYTES  # a memory of fewer bytes has small pages


class RowStore(Protocol):
    """An owner's rows. weight (n, dim) float32, state (n, state_dim) float32, clock (n,) int32, for inspection: row i
    belongs to the i-th key of the rank (EmbeddingTable.keys). mark: the last argument of forget_changes(), None after
    others have assigned rows. is_full: there is no more disk for new rows but that of a few steps."""

    weight: np.ndarray
    state: np.ndarray
    clock: np.ndarray
    state_dim: int
    mark: object | None
    file: _C.RowFile | None
    is_full: bool

    def __len__(self) -> int: ...

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """For the C++ core: weight, state, clock and touched (n,) uint8, which it sets to 1 for each row that it
        updates. Weight and state have no rows where `file` has them."""

    def assign(self, rows: np.ndarray | slice, weight=None, state=None, clock=None) -> None:
        """Replaces the given arrays of these rows. Other ranks see them after EmbeddingTable.resume_at."""

    def snapshot(self, array: str, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        """The values of an array (weight, state or clock) of these rows: copied to `out`, which is returned, otherwise
        for a slice a view."""

    def freeze(self) -> None:
        """From here on copied() is of the rows as they are now. REQUIRES: no writes now."""

    def thaw(self) -> None:
        """Ends freeze()."""

    def copy_of(self, array: str, num: int) -> np.ndarray | None:
        """Memory for a copy of the first `num` rows of an array (n, ...), which copied() needs; None if it needs
        none."""

    def copied(self, array: str, rows: np.ndarray | slice, out: np.ndarray | None) -> np.ndarray:
        """The rows of an array as they were at freeze(), whatever is written meanwhile: in `out`, or read in parts.
        Without `out` and copy_of(), those of the array itself, which must not be written before thaw()."""

    def empty(self, array: str, num: int) -> np.ndarray:
        """An array for `num` rows of an array (n, ...), uninitialised."""

    def changed(self) -> np.ndarray:
        """The rows that have changed since forget_changes(), ascending: (m,) int64."""

    def forget_changes(self, mark: object) -> None:
        """Notes changes anew, since `mark`."""


@dataclass(frozen=True)
class Layout:
    """The arrays of one rank's memory: rows, optimizer state, its mean squares, clocks, the number of steps
    applied, inbox.

    preview_dim   numbers of state in a cache line, 0 or 1: the mean square of each row's state (cpp/owner/
                  row_optimizer.h)
    origins       those with a ring here, ascending: ranks, and for ranks as servers the number of ranks plus theirs
    ring_bytes    of each ring
    store         where rows and their state are: memory, this one, or pinned, the same for a GPU (gpu_rows.py); file
                  (row_files.py), and here what is known of it; gpu, with the clocks"""

    num_rows: int
    dim: int
    state_dim: int
    preview_dim: int
    origins: tuple[int, ...]
    ring_bytes: int
    store: str = "memory"

    @property
    def places(self) -> dict[str, tuple[int, tuple[int, ...], type]]:
        """Offset in bytes, shape and dtype of each array, in their order."""
        num, begin, found = self.num_rows, 0, {}
        num_here = num if self.store in ("memory", "pinned") else 0
        num_in_file, num_clocks = num * (self.store == "file"), num * (self.store != "gpu")
        for name, shape, dtype in (
            ("weight", (num_here, self.dim), np.float32),
            ("state", (num_here, self.state_dim), np.float32),
            ("mean_square", (num_clocks, self.preview_dim), np.float32),
            ("clock", (num_clocks,), np.int32),
            ("applied", (ALIGN // 8,), np.int64),
            ("row_marks", (num_in_file,), np.uint8),
            ("page_marks", (self.file_bytes // _C.FILE_PAGE_BYTES,), np.uint8),
            ("file_counts", (_C.NUM_FILE_COUNTS if self.store == "file" else 0,), np.int64),
            ("rings", (len(self.origins), self.ring_bytes), np.uint8),
        ):
            found[name] = begin, shape, dtype
            begin += aligned(math.prod(shape) * np.dtype(dtype).itemsize)
        return found

    @property
    def file_bytes(self) -> int:
        """Of the file, when all rows have been updated; 0 without one."""
        return _C.row_file_bytes(self.num_rows, self.dim, self.state_dim) if self.store == "file" else 0

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
    applied       (8,) int64, of which the first counts the steps that the owner has applied, at s = 0
    rings         (origins, ring_bytes) uint8: the inbox
    device_rows   the rows where the model computes (cpp/client/device_rows.h), None if it reads them here"""

    is_full, device_rows = False, None

    def __init__(self, memory: np.ndarray, layout: Layout, directory: _C.Directory):
        """memory: (n,) uint8, uninitialised."""

        def part(name: str) -> np.ndarray:
            begin, shape, dtype = layout.places[name]
            return np.ndarray(shape, dtype, memory, begin)

        self.directory, self.state_dim, self.mark, self.file = directory, layout.state_dim, None, None
        self.in_memory = {name: part(name) for name in ("weight", "state", "mean_square", "clock")}
        self.mean_square = self.in_memory["mean_square"]
        self.applied, self.rings, self.touched = part("applied"), part("rings"), None
        self.row_marks, self.page_marks, self.file_counts = map(part, ("row_marks", "page_marks", "file_counts"))
        self.dim = layout.dim

    def __len__(self) -> int:
        return len(self.in_memory["clock"])

    @property
    def clock(self) -> np.ndarray:
        return self.snapshot("clock", slice(None))

    @property
    def weight(self) -> np.ndarray:
        return self.snapshot("weight", slice(None))

    @property
    def state(self) -> np.ndarray:
        return self.snapshot("state", slice(None))

    def initialise(self, rule: _C.RowOptimizer, keys_of, num: int, seed: int, std: float, threads: int):
        """Initialises the first `num` rows from a normal distribution with standard deviation `std`, depending only on
        (seed, key); the others are assigned before they are used. keys_of(begin, end): keys of rows [begin, end),
        int64; thread-safe. threads: that make them. To be called by the owner, before its other methods."""
        clock = self.in_memory["clock"]
        self._rule, self.touched = rule, np.zeros(len(clock), np.uint8)
        for zeroed in (self.mean_square[:num], clock[:num]):
            zeroed[:] = 0
        for zeroed in (self.applied, self.rings[:, : _C.RING_HEADER_BYTES]):
            zeroed[:] = 0
        self._initialise_rows(keys_of, num, seed, std, threads)

    def _initialise_rows(self, keys_of, num: int, seed: int, std: float, threads: int):
        def initialise(begin: int):
            end = min(begin + INIT_CHUNK_ROWS, num)
            self.state[begin:end] = 0
            _C.init_rows(self.weight[begin:end], keys_of(begin, end), seed, std)

        in_chunks(initialise, num, threads)

    def assign(self, rows: np.ndarray | slice, weight=None, state=None, clock=None):
        for array, values in ((self.weight, weight), (self.state, state), (self.clock, clock)):
            if values is not None:
                array[rows] = values
        if state is not None:
            self._set_mean_squares(rows, np.ascontiguousarray(self.state[rows]))
        self.touched[rows] = 1

    def _set_mean_squares(self, rows: np.ndarray | slice, states: np.ndarray):
        means = np.empty((len(states), self.mean_square.shape[1]), np.float32)
        self._rule.mean_squares(states, means)
        self.mean_square[rows] = means

    def snapshot(self, array: str, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        values = self.in_memory[array]
        if out is None:
            return values[rows]
        if isinstance(rows, slice):
            np.copyto(out, values[rows])
        else:
            np.take(values, rows, axis=0, out=out, mode="clip")  # "raise" would make one more copy
        return out

    def freeze(self):
        """Nothing: copied() copies at once."""

    thaw = freeze

    def empty(self, array: str, num: int) -> np.ndarray:
        widths = {"weight": (self.dim,), "state": (self.state_dim,), "clock": ()}
        return np.empty((num, *widths[array]), np.int32 if array == "clock" else np.float32)

    def copy_of(self, array: str, num: int) -> np.ndarray | None:
        return self.empty(array, num)

    def copied(self, array: str, rows: np.ndarray | slice, out: np.ndarray | None) -> np.ndarray:
        if out is None and not isinstance(rows, slice):
            whole = self.in_memory[array]
            return InParts(lambda part: whole[rows[part]], whole.dtype, (len(rows), *whole.shape[1:]))
        return self.snapshot(array, rows, out)

    def changed(self) -> np.ndarray:
        return np.flatnonzero(self.touched)

    def forget_changes(self, mark: object):
        self.touched[:] = 0
        self.mark = mark

    @property
    def in_core(self) -> _C.ShardArrays:
        """The same memory, for the core."""
        rows = self.in_memory["weight"], self.in_memory["state"], self.mean_square, self.in_memory["clock"]
        return _C.ShardArrays(*rows, self.applied, self.rings, self.directory, self.file, self.touched)


def in_chunks(work: Callable[[int], None], num: int, threads: int):
    """Calls work(begin) for the rows of each chunk, in threads."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(0, num, INIT_CHUNK_ROWS)))  # raises what a thread raised


class InParts:
    """An array that is read in parts alone: part_of(slice) -> those rows."""

    def __init__(self, part_of: Callable[[slice], np.ndarray], dtype, shape: tuple[int, ...]):
        self._part_of, self.dtype, self.shape = part_of, np.dtype(dtype), shape

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        return self._part_of(part)


def aligned(nbytes: int, unit: int = ALIGN) -> int:
    """`nbytes` rounded up to a multiple of `unit`, by default a cache line."""
    return (nbytes + unit - 1) // unit * unit


def ring_bytes(inbox_bytes: int, num_rings: int, record: _C.RecordFormat) -> int:
    """Bytes of each ring of an inbox of about `inbox_bytes`, header included."""
    capacity = max(inbox_bytes // num_rings - _C.RING_HEADER_BYTES, _C.min_ring_capacity(record))
    return _C.RING_HEADER_BYTES + aligned(capacity)


def layouts_of(
    world: World,
    partition,
    rule: _C.RowOptimizer,
    dim: int,
    is_exact: bool,
    inbox_bytes: int = INBOX_BYTES,
    store: str = "memory",
) -> tuple[_C.RecordFormat, list[Layout]]:
    """The form of a push, and the memory of each rank for a table's rows and for gradients in transit."""
    record, preview_dim = _C.RecordFormat(dim, False), 0
    if not is_exact:
        record, preview_dim = _C.push_format(rule), rule.preview_dim
    inbox_bytes, layouts = inbox_bytes if world.size > 1 else 0, []
    for node in world.nodes:
        origins = range(world.size)
        if not is_exact:  # the ranks of the node; as servers they also write what other nodes push
            origins = [*node, *(world.size + rank for rank in node if not world.is_one_node)]
        inbox = tuple(origins), ring_bytes(inbox_bytes, len(origins), record)
        form = dim, rule.state_dim, preview_dim, *inbox, store
        layouts += [(rank, Layout(partition.num_local_rows(rank), *form)) for rank in node]
    return record, [layout for _, layout in sorted(layouts, key=lambda pair: pair[0])]


def table_seed(seed: int, name: str) -> int:
    """Seed of the table called `name`: tables of one run start from different rows."""
    text = f"{seed}/{name}".encode()
    return int.from_bytes(text, "little") % 0xFFFFFFFFFFFFFFC5  # the largest prime below 2^64
