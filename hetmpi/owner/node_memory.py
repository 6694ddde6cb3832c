"""NodeMemory: memory of every rank that the ranks of its node share: its shard, and the rings of its inbox."""

from __future__ import annotations

from dataclasses import dataclass
from mmap import PAGESIZE

import numpy as np

from hetmpi import _C
from hetmpi.in_flight import InFlight, finish
from hetmpi.world.memory import refuse_if_short, size_text
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

ALIGN = 64


@dataclass(frozen=True)
class Layout:
    """Offsets of the parts of one rank's memory in bytes: rows, optimizer state, its mean squares, clocks, the number
    of steps applied, inbox.

    preview_dim   numbers of state in a cache line, 0 or 1: the mean square of each row's state (cpp/owner/
                  row_optimizer.h)
    origins       those with a ring here, ascending: ranks, and for ranks as servers the number of ranks plus theirs
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
    def applied(self) -> int:
        return self.clock + aligned(self.num_rows * 4)

    @property
    def rings(self) -> int:
        return self.applied + ALIGN

    @property
    def nbytes(self) -> int:
        """Whole pages: the ranks of a node have theirs one after the other."""
        return aligned(self.rings + len(self.origins) * self.ring_bytes, PAGESIZE)

    def ring(self, origin: int) -> int:
        """The number of an origin's ring."""
        return self.origins.index(origin)


class ShardMemory:
    """One rank's memory as arrays, for ranks that can address it.

    directory   which row of them a key has
    applied     (8,) int64, of which the first counts the steps that the owner has applied, at s = 0"""

    def __init__(self, memory: np.ndarray, layout: Layout, directory: _C.Directory):
        def part(begin: int, shape: tuple, dtype) -> np.ndarray:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return memory[begin : begin + nbytes].view(dtype).reshape(shape)

        self.directory = directory
        self.weight = part(layout.weight, (layout.num_rows, layout.dim), np.float32)
        self.state = part(layout.state, (layout.num_rows, layout.state_dim), np.float32)
        self.mean_square = part(layout.mean_square, (layout.num_rows, layout.preview_dim), np.float32)
        self.clock = part(layout.clock, (layout.num_rows,), np.int32)
        self.applied = part(layout.applied, (ALIGN // 8,), np.int64)
        self.rings = part(layout.rings, (len(layout.origins), layout.ring_bytes), np.uint8)


class NodeMemory:
    """The memory of the ranks of this node: `on_node[rank]` as arrays, `local` this rank's."""

    def __init__(self, world: World, layouts: list[Layout], partition: _C.Partition):
        """layouts: one per rank, the same list on every rank. partition: of the table's keys. Collective. Raises
        UserError if memory is short."""
        self.world, self.layouts = world, layouts
        check_memory(world, layouts)
        self._shared = MPI.Win.Allocate_shared(layouts[world.rank].nbytes, 1, comm=world.node)
        self.on_node = {
            rank: ShardMemory(self._part(place), layouts[rank], _C.Arithmetic(partition, rank))
            for place, rank in enumerate(world.node_ranks)
        }
        self.local = self.on_node[world.rank]
        self._shared.Lock_all(MPI.MODE_NOCHECK)

    def _part(self, node_rank: int) -> np.ndarray:
        """The memory of a rank of this node: (n,) uint8."""
        memory, _ = self._shared.Shared_query(node_rank)
        return np.frombuffer(memory, np.uint8)

    def local_ring(self, owner: int, origin: int) -> np.ndarray:
        """The memory of an origin's ring at an owner on this node."""
        return self.on_node[owner].rings[self.layouts[owner].ring(origin)]

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
        self._shared.Sync()
        yield from self.world.meeting(what)
        self._shared.Sync()

    def free(self):
        """Frees the memory. Collective."""
        self.on_node, self.local = {}, None
        self._shared.Unlock_all()
        self._shared.Free()


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
