"""RmaWindow: memory of every rank that other ranks access one-sidedly; it contains the shards and inboxes.

Two MPI windows cover the same bytes: a shared-memory window per node, which ranks of the node access by loads and
stores, and, if the job has several nodes, a window over all ranks for one-sided calls. In the latter each rank exposes
the memory of its whole node: so a rank calls one rank of each other node, its server (rails.py), for all owners there.
All rows wanted from a node are described by one datatype and fetched by one call: a call per row is 10 to 100 times
slower over a network (docs/design.md).

Only the thread that created the window may call it.
"""

from __future__ import annotations

from dataclasses import dataclass
from mmap import PAGESIZE

import numpy as np

from hetmpi import _C
from hetmpi.comm.memory import refuse_if_short, size_text
from hetmpi.comm.mpi import MPI
from hetmpi.comm.rails import Rails
from hetmpi.comm.world import World
from hetmpi.errors import UserError
from hetmpi.in_flight import InFlight, finish

ALIGN = 64


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
        """Whole pages: the ranks of a node have theirs one after the other."""
        return aligned(self.rings + len(self.origins) * self.ring_bytes, PAGESIZE)

    def ring(self, origin: int) -> int:
        """The number of an origin's ring."""
        return self.origins.index(origin)


class ShardMemory:
    """One rank's memory as arrays, for ranks that can address it. directory: which row of them a key has."""

    def __init__(self, memory: np.ndarray, layout: Layout, directory: _C.Directory):
        def part(begin: int, shape: tuple, dtype) -> np.ndarray:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return memory[begin : begin + nbytes].view(dtype).reshape(shape)

        self.directory = directory
        self.weight = part(layout.weight, (layout.num_rows, layout.dim), np.float32)
        self.state = part(layout.state, (layout.num_rows, layout.state_dim), np.float32)
        self.mean_square = part(layout.mean_square, (layout.num_rows, layout.preview_dim), np.float32)
        self.clock = part(layout.clock, (layout.num_rows,), np.int32)
        self.rings = part(layout.rings, (len(layout.origins), layout.ring_bytes), np.uint8)


class RmaWindow:
    """The memory of all ranks: `on_node[rank]` as arrays for ranks of this node; get, put and flush for other nodes,
    where memory is addressed by node, in bytes from the begin of its first rank's part.

    rails                   the servers, which are the targets of all calls
    num_messages, num_bytes operations posted so far, and the bytes they move"""

    def __init__(self, world: World, layouts: list[Layout], partition: _C.Partition, remote: str = "needed"):
        """layouts: one per rank, the same list on every rank. partition: of the table's keys. remote: `needed` if get
        and put must work; `wanted` if they are optional, for an MPI without windows over several nodes; `unused`.
        Collective. Raises UserError if memory is short."""
        self.world, self.layouts, self.partition, self.rails = world, layouts, partition, Rails(world)
        check_memory(world, layouts)
        self._begins = begins_of(world.nodes, layouts)
        self._shared = MPI.Win.Allocate_shared(layouts[world.rank].nbytes, 1, comm=world.node)
        self.on_node = {
            rank: ShardMemory(self._part(place), layouts[rank], _C.Arithmetic(partition, rank))
            for place, rank in enumerate(world.node_ranks)
        }
        self.local = self.on_node[world.rank]
        self._job = None
        if remote != "unused" and not world.is_one_node:
            try:
                self._job = self._open_job(remote == "needed")
            except Exception:  # on all ranks alike
                self.on_node, self.local = {}, None
                self._shared.Free()
                raise
        self._shared.Lock_all(MPI.MODE_NOCHECK)
        mine = layouts[world.rank]
        self.items = {  # array -> (datatype of a row, datatype of a number)
            "weight": (MPI.FLOAT.Create_contiguous(mine.dim).Commit(), MPI.FLOAT),
            "mean_square": (MPI.FLOAT.Create_contiguous(1).Commit(), MPI.FLOAT),
            "clock": (MPI.INT32_T.Create_contiguous(1).Commit(), MPI.INT32_T),
        }
        self._counters: list[MPI.Datatype] = []
        self._buffers: dict[tuple, np.ndarray] = {}
        self._is_posted = False  # whether operations were posted since the last flush
        self.num_messages = self.num_bytes = 0

    @property
    def reaches_remote(self) -> bool:
        """Whether get and put reach other nodes."""
        return self._job is not None

    def _open_job(self, is_needed: bool) -> MPI.Win | None:
        """The window over all ranks; None if this MPI cannot create it and it is optional."""
        if not self._is_one_piece():
            if is_needed:
                raise UserError(
                    "this MPI does not allocate the shared memory of a node's ranks one after the other "
                    "(MPI_Win_allocate_shared), as table.exchange=windows needs: use another MPI library, or "
                    "table.exchange=messages"
                )
            return None
        # Each page is first touched by its owner, which places it near the owner's cores: a network adapter that pins
        # memory, for any rank of the node, would touch it too.
        self._part(self.world.node.rank)[::PAGESIZE] = 0
        self.world.meet_on_node("for the ranks of its node to touch their memory")
        begins, last = self._begins, self.world.node_ranks[-1]
        memory = MPI.memory.fromaddress(self._part(0).ctypes.data, begins[last] + self.layouts[last].nbytes)
        try:
            window = MPI.Win.Create(memory, 1, comm=self.world.comm)
        except MPI.Exception:  # Open MPI 4.1 over TCP; on all ranks alike
            if is_needed:
                raise
            return None
        window.Lock_all(MPI.MODE_NOCHECK)
        check_unified(window)
        return window

    def _is_one_piece(self) -> bool:
        """Whether the parts of each node's ranks are where they are expected in its memory. Collective."""
        first, begins = self._part(0).ctypes.data, self._begins
        ranks = enumerate(self.world.node_ranks)
        found = all(self._part(place).ctypes.data - first == begins[rank] for place, rank in ranks)
        return self.world.comm.allreduce(found, MPI.LAND)

    def _part(self, node_rank: int) -> np.ndarray:
        """The memory of a rank of this node: (n,) uint8."""
        memory, _ = self._shared.Shared_query(node_rank)
        return np.frombuffer(memory, np.uint8)

    def begin_of(self, owner: int, array: str) -> int:
        """Where the owner's array begins in the memory of its node, in bytes."""
        return self._begins[owner] + getattr(self.layouts[owner], array)

    def ring_begin(self, owner: int, origin: int) -> int:
        """Where an origin's ring at an owner begins in the memory of the owner's node, in bytes."""
        layout = self.layouts[owner]
        return self.begin_of(owner, "rings") + layout.ring(origin) * layout.ring_bytes

    def local_ring(self, owner: int, origin: int) -> np.ndarray:
        """The memory of an origin's ring at an owner on this node."""
        return self.on_node[owner].rings[self.layouts[owner].ring(origin)]

    def buffer(self, use: str, node: int, num: int, width: int, dtype) -> np.ndarray:
        """Receive buffer (num, width) for data of a node. Calls with the same `use` share the memory, which grows on
        demand."""
        kept = self._buffers.get((use, node))
        if kept is None or len(kept) < num:
            kept = self._buffers[use, node] = np.empty((num + num // 4 + 64, width), dtype)
        return kept[:num]

    def get(self, array: str, server: int, begins: np.ndarray, out: np.ndarray):
        """Posts the fetch of rows of an array (weight, mean_square or clock), which begin at these bytes (m,) int64 of
        the memory of the server's node. out (m, width of the array) of the array's dtype is valid after flush()."""
        item, number = self.items[array]
        # mpi4py reads a list twice as fast as an array
        datatype = item.Create_hindexed_block(1, begins.tolist()).Commit()
        self._job.Get([out, out.size, number], server, (0, 1, datatype))
        datatype.Free()  # MPI keeps it until the get is complete
        self._count(out.nbytes)

    def put(self, server: int, memory: np.ndarray, sources: list[int], begins: list[int], sizes: list[int]):
        """Posts the copy of blocks of `sizes` bytes, from bytes `sources` of memory (n,) uint8 to bytes `begins` of the
        memory of the server's node; complete after flush()."""
        if len(sizes) == 1:  # without a datatype a network adapter needs no help of its target
            (source,), (begin,), (size,) = sources, begins, sizes
            self._job.Put([memory[source : source + size], size, MPI.BYTE], server, (begin, size, MPI.BYTE))
        else:
            origin, target = (MPI.BYTE.Create_hindexed(sizes, places).Commit() for places in (sources, begins))
            self._job.Put([memory, 1, origin], server, (0, 1, target))
            origin.Free()
            target.Free()
        self._count(sum(sizes))

    def counters(self, begins: list[int]) -> MPI.Datatype:
        """The uint64 at these bytes, for store_counters and load_counters; freed with the window."""
        self._counters.append(MPI.UINT64_T.Create_hindexed_block(1, begins).Commit())
        return self._counters[-1]

    def store_counters(self, server: int, counters: MPI.Datatype, values: np.ndarray):
        """Posts the atomic store of each of values (n,) uint64 to n counters in the memory of the server's node;
        complete after flush()."""
        self._job.Accumulate([values, len(values), MPI.UINT64_T], server, (0, 1, counters), op=MPI.REPLACE)
        self._count(values.nbytes)

    def load_counters(self, server: int, counters: MPI.Datatype, out: np.ndarray):
        """Posts an atomic read of each of n counters in the memory of the server's node. out (n,) uint64 is valid after
        flush()."""
        number = MPI.UINT64_T
        self._job.Get_accumulate([out, 0, number], [out, len(out), number], server, (0, 1, counters), op=MPI.NO_OP)
        self._count(out.nbytes)

    def _count(self, nbytes: int):
        """Counts an operation posted."""
        self._is_posted = True
        self.num_messages += 1
        self.num_bytes += nbytes

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
        for datatype in (*(item for item, _ in self.items.values()), *self._counters):
            datatype.Free()
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


def begins_of(nodes: list[list[int]], layouts: list[Layout]) -> list[int]:
    """Where each rank's part begins in the memory of its node, in bytes: the parts are in the order of the ranks."""
    begins = [0] * len(layouts)
    for node in nodes:
        for before, rank in zip(node, node[1:]):
            begins[rank] = begins[before] + layouts[before].nbytes
    return begins


def aligned(nbytes: int, unit: int = ALIGN) -> int:
    """`nbytes` rounded up to a multiple of `unit`, by default a cache line."""
    return (nbytes + unit - 1) // unit * unit


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
