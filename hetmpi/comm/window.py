"""RmaWindow: memory of every rank that other ranks access one-sidedly; it contains the shards and inboxes.

Two MPI windows cover the same bytes: a shared-memory window per node, which ranks of the node access by loads and
stores, and, if the job has several nodes, a window over all ranks for MPI_Get and MPI_Put. All rows wanted from one
rank are described by one datatype and fetched by one call: a call per row is 10 to 100 times slower over a network
(docs/design.md).

Only the thread that created the window may call it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetmpi import _C
from hetmpi.comm.memory import refuse_if_short, size_text
from hetmpi.comm.mpi import MPI
from hetmpi.comm.world import World
from hetmpi.errors import UserError
from hetmpi.in_flight import InFlight, finish

ALIGN = 64
NO_OPERAND = np.zeros(1, np.uint64)  # MPI_NO_OP ignores its value


@dataclass(frozen=True)
class Layout:
    """Offsets of the parts of one rank's memory in bytes: rows, optimizer state, its mean squares, clocks, inbox.

    preview_dim   numbers of state in a cache line, 0 or 1: the mean square of each row's state (cpp/owner/
                  row_optimizer.h)
    origins       the ranks with a ring here, or, for ranks whose gradients arrive as one, the first of them; ascending
    ring_bytes    of each ring"""

    num_rows: int
    dim: int
    state_dim: int
    preview_dim: int
    origins: tuple[int, ...]
    ring_bytes: int

    @property
    def weight(self) -> int:
        return 0

    @property
    def state(self) -> int:
        return aligned(self.num_rows * self.dim * 4)

    @property
    def mean_square(self) -> int:
        return self.state + aligned(self.num_rows * self.state_dim * 4)

    @property
    def clock(self) -> int:
        return self.mean_square + aligned(self.num_rows * self.preview_dim * 4)

    @property
    def rings(self) -> int:
        return self.clock + aligned(self.num_rows * 4)

    @property
    def nbytes(self) -> int:
        return self.rings + len(self.origins) * self.ring_bytes

    def ring(self, origin: int) -> int:
        """The number of an origin's ring."""
        return self.origins.index(origin)


class ShardMemory:
    """One rank's memory as arrays, for ranks that can address it."""

    def __init__(self, memory: np.ndarray, layout: Layout):
        def part(begin: int, shape: tuple, dtype) -> np.ndarray:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return memory[begin : begin + nbytes].view(dtype).reshape(shape)

        self.weight = part(layout.weight, (layout.num_rows, layout.dim), np.float32)
        self.state = part(layout.state, (layout.num_rows, layout.state_dim), np.float32)
        self.mean_square = part(layout.mean_square, (layout.num_rows, layout.preview_dim), np.float32)
        self.clock = part(layout.clock, (layout.num_rows,), np.int32)
        self.rings = part(layout.rings, (len(layout.origins), layout.ring_bytes), np.uint8)


class RmaWindow:
    """The memory of all ranks: `on_node[rank]` as arrays for ranks of this node, get / put / flush for other nodes."""

    def __init__(self, world: World, layouts: list[Layout], remote: str = "needed"):
        """layouts: one per rank, the same list on every rank. remote: `needed` if get and put must work; `wanted` if
        they are optional, for an MPI without windows over several nodes; `unused`. Collective. Raises UserError if
        memory is short."""
        self.world, self.layouts = world, layouts
        check_memory(world, layouts)
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})  # each shard on its owner's NUMA node
        self._shared = MPI.Win.Allocate_shared(layouts[world.rank].nbytes, 1, info=info, comm=world.node)
        info.Free()
        self.on_node = {rank: self._arrays_of(i, layouts[rank]) for i, rank in enumerate(world.node_ranks)}
        self.local = self.on_node[world.rank]
        self._job = None
        if remote != "unused" and not world.is_one_node:
            self._job = self._open_job(remote == "needed")
        self._shared.Lock_all(MPI.MODE_NOCHECK)
        mine = layouts[world.rank]
        self.items = {  # array -> (datatype of a row, datatype of a number)
            "weight": (MPI.FLOAT.Create_contiguous(mine.dim).Commit(), MPI.FLOAT),
            "mean_square": (MPI.FLOAT.Create_contiguous(1).Commit(), MPI.FLOAT),
            "clock": (MPI.INT32_T.Create_contiguous(1).Commit(), MPI.INT32_T),
        }
        self._buffers: dict[tuple, np.ndarray] = {}
        self._is_posted = False  # whether operations were posted since the last flush

    @property
    def reaches_remote(self) -> bool:
        """Whether get and put reach other nodes."""
        return self._job is not None

    def _open_job(self, is_needed: bool) -> MPI.Win | None:
        """The window over all ranks; None if this MPI cannot create it and it is optional."""
        try:
            window = MPI.Win.Create(self._shared.tomemory(), 1, comm=self.world.comm)
        except MPI.Exception:  # Open MPI 4.1 over TCP; on all ranks alike
            if is_needed:
                raise
            return None
        window.Lock_all(MPI.MODE_NOCHECK)
        check_unified(window)
        return window

    def _arrays_of(self, node_rank: int, layout: Layout) -> ShardMemory:
        memory, _ = self._shared.Shared_query(node_rank)
        return ShardMemory(np.frombuffer(memory, np.uint8), layout)

    def local_ring(self, owner: int, origin: int) -> np.ndarray:
        """The memory of an origin's ring at an owner on this node."""
        return self.on_node[owner].rings[self.layouts[owner].ring(origin)]

    def buffer(self, use: str, owner: int, num: int, width: int, dtype) -> np.ndarray:
        """Receive buffer (num, width) for data of `owner`. Calls with the same `use` share the memory, which grows on
        demand."""
        kept = self._buffers.get((use, owner))
        if kept is None or len(kept) < num:
            kept = self._buffers[use, owner] = np.empty((num + num // 4 + 64, width), dtype)
        return kept[:num]

    def get(self, array: str, owner: int, rows: np.ndarray, out: np.ndarray):
        """Posts the fetch of `rows` (m,) int64 of `owner`'s array: weight, mean_square or clock. out (m, width of the
        array) of the array's dtype is valid after flush()."""
        item, number = self.items[array]
        offsets = (rows * item.size).tolist()  # 64-bit byte offsets; mpi4py reads a list twice as fast as an array
        datatype = item.Create_hindexed_block(1, offsets).Commit()
        self._job.Get([out, out.size, number], owner, (getattr(self.layouts[owner], array), 1, datatype))
        datatype.Free()  # MPI keeps it until the get is complete
        self._is_posted = True

    def put(self, rank: int, begin: int, data: np.ndarray):
        """Posts the copy of data (n,) uint8 to byte `begin` of `rank`'s memory; complete after flush()."""
        self._job.Put([data, data.size, MPI.BYTE], rank, (begin, data.size, MPI.BYTE))
        self._is_posted = True

    def store_counter(self, rank: int, begin: int, value: np.ndarray):
        """Posts the atomic store of value (1,) uint64 at byte `begin` of `rank`'s memory; complete after flush()."""
        self._job.Accumulate([value, 1, MPI.UINT64_T], rank, (begin, 1, MPI.UINT64_T), op=MPI.REPLACE)
        self._is_posted = True

    def load_counters(self, places: list[tuple[int, int]]) -> np.ndarray:
        """Posts an atomic read of the uint64 at byte `begin` of `rank`'s memory for each (rank, begin). Returns (n,)
        uint64, valid after flush()."""
        values = np.zeros(len(places), np.uint64)
        for i, (rank, begin) in enumerate(places):
            out = [values[i : i + 1], 1, MPI.UINT64_T]
            self._job.Fetch_and_op([NO_OPERAND, 1, MPI.UINT64_T], out, rank, begin, op=MPI.NO_OP)
            self._is_posted = True
        return values

    def flush(self):
        """Waits until all posted operations are complete at origin and target."""
        if self._is_posted:
            self._job.Flush_all()
            self._is_posted = False

    def sync(self):
        """Memory barrier, to be called before and after a message between ranks of a node: the receiver then sees the
        stores that the sender made before."""
        self._shared.Sync()

    def fence(self, what: str = "for all ranks to come as far"):
        """Barrier over all ranks. Stores made before it are visible to all ranks after it. what: reason for messages,
        as for Patience. Collective."""
        finish(self.fencing(what))

    def fencing(self, what: str) -> InFlight[None]:
        """As fence()."""
        self.flush()  # others may wait for posted operations
        self._shared.Sync()
        if self._job is not None:
            self._job.Sync()
        yield from self.world.meeting(what)
        self._shared.Sync()

    def free(self):
        """Frees the memory. Collective."""
        for item, _ in self.items.values():
            item.Free()
        self.on_node, self.local, self._buffers = {}, None, {}
        if self._job is not None:
            self._job.Unlock_all()
            self._job.Free()
        self._shared.Unlock_all()
        self._shared.Free()


def check_unified(window: MPI.Win):
    """Raises UserError if this MPI keeps separate private and public copies of window memory."""
    if window.Get_attr(MPI.WIN_MODEL) != MPI.WIN_UNIFIED:
        raise UserError(
            "this MPI keeps separate copies of window memory (not MPI_WIN_UNIFIED): use another MPI library"
        )


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a cache line."""
    return (nbytes + ALIGN - 1) // ALIGN * ALIGN


def ring_bytes(inbox_bytes: int, num_rings: int, record: _C.RecordFormat) -> int:
    """Bytes of each ring of an inbox of about `inbox_bytes`, header included."""
    capacity = max(inbox_bytes // num_rings - _C.RING_HEADER_BYTES, _C.min_ring_capacity(record))
    return _C.RING_HEADER_BYTES + aligned(capacity)


def check_memory(world: World, layouts: list[Layout]):
    """Raises UserError on every rank if some node lacks memory for its ranks. Collective."""
    nbytes, is_shared = layouts[world.rank].nbytes, world.node.size > 1
    refuse_if_short(world, nbytes, is_shared, lambda *found: memory_message(layouts, *found, world))


def memory_message(layouts: list[Layout], need: int, place: str, free: int, world: World) -> str:
    """The error message: memory needed, memory free, and remedies."""
    num_rows, mine = sum(layout.num_rows for layout in layouts), layouts[world.rank]
    inboxes = world.node.size * len(mine.origins) * mine.ring_bytes
    cure = "use more nodes, a smaller table.dim, fewer rows or a smaller table.inbox_mb"
    if place == "/dev/shm":
        cure += ", or enlarge /dev/shm (mount -o remount,size=90% /dev/shm, docker --shm-size)"
    return (
        f"{num_rows:,} rows of dim {mine.dim} with {mine.state_dim} floats of optimizer state need {size_text(need)} "
        f"for the {world.node.size} rank(s) on {world.host}, {size_text(inboxes)} of it for inboxes; "
        f"{size_text(free)} are free in {place}: {cure}"
    )
