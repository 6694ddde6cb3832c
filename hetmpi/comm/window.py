"""RmaWindow: memory of every rank that the others reach one-sidedly; shards and inboxes live in it.

Two MPI windows lie over the same bytes: one shared on the node, through which ranks of a node use each other's memory
by plain loads and stores, and, when the job has several nodes, one over all ranks for MPI_Get and MPI_Put. All rows
wanted from one rank are described by one datatype and fetched by one call: a call per row is 10 to 100 times slower
over a network (docs/design.md).

Only the thread that made the window may call it.
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
NOTHING = np.zeros(1, np.uint64)  # what a read that changes nothing sends


@dataclass(frozen=True)
class Layout:
    """Where the parts of one rank's memory begin, in bytes: rows, their optimizer state, their clocks, its inbox."""

    num_rows: int
    dim: int
    state_dim: int
    num_rings: int
    ring_bytes: int

    @property
    def weight(self) -> int:
        return 0

    @property
    def state(self) -> int:
        return aligned(self.num_rows * self.dim * 4)

    @property
    def clock(self) -> int:
        return self.state + aligned(self.num_rows * self.state_dim * 4)

    @property
    def rings(self) -> int:
        return self.clock + aligned(self.num_rows * 4)

    @property
    def nbytes(self) -> int:
        return self.rings + self.num_rings * self.ring_bytes


class ShardMemory:
    """One rank's memory as arrays, for the ranks that can address it."""

    def __init__(self, memory: np.ndarray, layout: Layout):
        def part(begin: int, shape: tuple, dtype) -> np.ndarray:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return memory[begin : begin + nbytes].view(dtype).reshape(shape)

        self.weight = part(layout.weight, (layout.num_rows, layout.dim), np.float32)
        self.state = part(layout.state, (layout.num_rows, layout.state_dim), np.float32)
        self.clock = part(layout.clock, (layout.num_rows,), np.int32)
        self.rings = part(layout.rings, (layout.num_rings, layout.ring_bytes), np.uint8)


class RmaWindow:
    """The memory of all ranks: `on_node[rank]` as arrays for ranks of this node, get / put / flush for the others."""

    def __init__(self, world: World, layouts: list[Layout], remote: str = "needed"):
        """layouts: one per rank, the same list on every rank. remote: whether get and put are needed; `wanted`, if this
        MPI can make a window over several nodes; or `unused`. Collective. Raises UserError if memory is short."""
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
        self.items = {  # array -> (one row of it, its numbers)
            "weight": (MPI.FLOAT.Create_contiguous(mine.dim).Commit(), MPI.FLOAT),
            "state": (MPI.FLOAT.Create_contiguous(max(1, mine.state_dim)).Commit(), MPI.FLOAT),
            "clock": (MPI.INT32_T.Create_contiguous(1).Commit(), MPI.INT32_T),
        }
        self._buffers: dict[tuple, np.ndarray] = {}
        self._is_posted = False  # whether anything was posted since the last flush

    @property
    def reaches_remote(self) -> bool:
        """Whether get and put reach other nodes."""
        return self._job is not None

    def _open_job(self, is_needed: bool) -> MPI.Win | None:
        """The window over all ranks; None where this MPI cannot make it and it is not needed."""
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

    def buffer(self, use: str, owner: int, num: int, width: int, dtype) -> np.ndarray:
        """(num, width) of memory to receive from `owner`, the same each time for one `use`, grown when it must be."""
        kept = self._buffers.get((use, owner))
        if kept is None or len(kept) < num:
            kept = self._buffers[use, owner] = np.empty((num + num // 4 + 64, width), dtype)
        return kept[:num]

    def get(self, array: str, owner: int, rows: np.ndarray, out: np.ndarray):
        """Posts the fetch of `rows` (m,) int64 of `owner`'s array: weight, state or clock. out (m, width of the array),
        of its dtype, holds them after flush()."""
        item, number = self.items[array]
        offsets = (rows * item.size).tolist()  # bytes in 64 bits: no limit on rows; a list is read twice as fast
        datatype = item.Create_hindexed_block(1, offsets).Commit()
        self._job.Get([out, out.size, number], owner, (getattr(self.layouts[owner], array), 1, datatype))
        datatype.Free()  # MPI keeps it until the get is complete
        self._is_posted = True

    def put(self, rank: int, begin: int, data: np.ndarray):
        """Posts the copy of data (n,) uint8 to byte `begin` of `rank`'s memory; there after flush()."""
        self._job.Put([data, data.size, MPI.BYTE], rank, (begin, data.size, MPI.BYTE))
        self._is_posted = True

    def store_counter(self, rank: int, begin: int, value: np.ndarray):
        """Posts the atomic store of value (1,) uint64 at byte `begin` of `rank`'s memory; there after flush()."""
        self._job.Accumulate([value, 1, MPI.UINT64_T], rank, (begin, 1, MPI.UINT64_T), op=MPI.REPLACE)
        self._is_posted = True

    def load_counters(self, places: list[tuple[int, int]]) -> np.ndarray:
        """Posts the atomic read of the uint64 at byte `begin` of `rank`'s memory for each (rank, begin): (n,) uint64,
        there after flush()."""
        values = np.zeros(len(places), np.uint64)
        for i, (rank, begin) in enumerate(places):
            out = [values[i : i + 1], 1, MPI.UINT64_T]
            self._job.Fetch_and_op([NOTHING, 1, MPI.UINT64_T], out, rank, begin, op=MPI.NO_OP)
            self._is_posted = True
        return values

    def flush(self):
        """Waits until every posted get and put is complete at both ends."""
        if self._is_posted:
            self._job.Flush_all()
            self._is_posted = False

    def sync(self):
        """Before and after a message between ranks of a node: what one wrote in its memory before, the other sees
        after."""
        self._shared.Sync()

    def fence(self, what: str = "for all ranks to come as far"):
        """Waits for all ranks; what each wrote in its memory before is seen by all after. what: said if that takes
        long, as for Patience. Collective."""
        finish(self.fencing(what))

    def fencing(self, what: str) -> InFlight[None]:
        """As fence()."""
        self.flush()  # others may wait for what is posted
        self._shared.Sync()
        if self._job is not None:
            self._job.Sync()
        yield from self.world.meeting(what)
        self._shared.Sync()

    def free(self):
        """Gives the memory back. Collective."""
        for item, _ in self.items.values():
            item.Free()
        self.on_node, self.local, self._buffers = {}, None, {}
        if self._job is not None:
            self._job.Unlock_all()
            self._job.Free()
        self._shared.Unlock_all()
        self._shared.Free()


def check_unified(window: MPI.Win):
    """Raises UserError if loads and stores and MPI calls may see different copies of the window's memory."""
    if window.Get_attr(MPI.WIN_MODEL) != MPI.WIN_UNIFIED:
        raise UserError(
            "this MPI keeps separate copies of window memory (not MPI_WIN_UNIFIED): use another MPI library"
        )


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a cache line."""
    return (nbytes + ALIGN - 1) // ALIGN * ALIGN


def ring_bytes(inbox_bytes: int, size: int, record: _C.RecordFormat) -> int:
    """Bytes of each of the `size` rings, header included, that share an inbox of about `inbox_bytes`."""
    capacity = max(inbox_bytes // size - _C.RING_HEADER_BYTES, _C.min_ring_capacity(record))
    return _C.RING_HEADER_BYTES + aligned(capacity)


def check_memory(world: World, layouts: list[Layout]):
    """Raises UserError on every rank if some node lacks memory for the ranks on it. Collective."""
    refuse_if_short(
        world, layouts[world.rank].nbytes, world.node.size > 1,
        lambda need, place, free: memory_message(layouts, need, place, free, world),
    )  # fmt: skip


def memory_message(layouts: list[Layout], need: int, place: str, free: int, world: World) -> str:
    """What is missing, where, and what to do about it."""
    num_rows, mine = sum(layout.num_rows for layout in layouts), layouts[world.rank]
    inboxes = world.node.size * mine.num_rings * mine.ring_bytes
    cure = "use more nodes, a smaller table.dim, fewer rows or a smaller table.inbox_mb"
    if place == "/dev/shm":
        cure += ", or enlarge /dev/shm (mount -o remount,size=90% /dev/shm, docker --shm-size)"
    return (
        f"{num_rows:,} rows of dim {mine.dim} with {mine.state_dim} floats of optimizer state need {size_text(need)} "
        "for "
        f"the {world.node.size} rank(s) on {world.host}, {size_text(inboxes)} of it for inboxes; {size_text(free)} are "
        f"free in {place}: {cure}"
    )
