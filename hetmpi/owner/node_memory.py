"""NodeMemory: memory of every rank that the ranks of its node share: its rows and its inbox (store.py). The rows may be
in files (row_files.py), or in a GPU's memory (gpu_rows.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from mmap import PAGESIZE

import numpy as np
import torch

from hetmpi import _C
from hetmpi.owner.gpu_rows import GpuShard, GpuStore, PinnedShard
from hetmpi.owner.row_files import FileStore, open_files
from hetmpi.owner.store import LEAST_HUGE, Layout, Shard
from hetmpi.world.at_exit import at_exit, free_window, nothing
from hetmpi.world.memory import refuse_if_short, size_text
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World


class NodeMemory:
    """The shards of the ranks of this node, `on_node[rank]`; `local` is this rank's. is_sparse: whether memory is
    taken as rows are assigned. reads_ahead: whether want() gains, as rows are on disk. disk_waits: of this process's
    main thread, when they were counted last."""

    disk_waits, reads_ahead = 0, False

    def __init__(
        self, world: World, layouts: list[Layout], partition: _C.Partition, is_sparse: bool = False,
        store: FileStore | GpuStore | None = None,
    ):  # fmt: skip
        """layouts: one per rank, the same list on every rank. partition: of the table's keys. store: of the rows,
        None for this memory; open_rows() must follow. Collective. Raises UserError if memory is short."""
        self.world, self.layouts, self.is_sparse = world, layouts, is_sparse
        self._files = store if isinstance(store, FileStore) else None
        self._partition, self._keeper, self._stop = partition, None, nothing
        self._counted = 0, 0  # pages read and written
        check_memory(world, layouts)
        if self._files is not None:
            check_pages(world, self._files.pages(layouts[world.rank]) * PAGESIZE)
        self._shared = world.share_memory(layouts[world.rank].nbytes)
        self.on_node = {
            rank: (Shard if store is None else store.shard)(
                self._part(place), layouts[rank], _C.Directory(partition, rank)
            )
            for place, rank in enumerate(world.node_ranks)
        }
        self.local = self.on_node[world.rank]
        self._shared.Lock_all(MPI.MODE_NOCHECK)
        self._free = at_exit(world, partial(free_window, self._shared))

    def open_rows(self, seed: int, std: float, device: torch.device, name: str):
        """Opens the files of the rows, if they are in files, or takes memory of `device`. seed, std: of their first
        values, as Shard.initialise. name: of the table. Collective. Raises UserError on every rank if there is too
        little room."""
        if isinstance(self.local, GpuShard):
            self.local.open_memory(self.layouts[self.world.rank], self._partition, device, name)
        elif isinstance(self.local, PinnedShard):
            self.local.open_memory(self._partition, device)
            self._stop = at_exit(self.world, nothing, self.local.close_memory)
        if self._files is None:
            return
        pages = self._files.pages(self.layouts[self.world.rank])
        for rank, descriptors in open_files(self.world, self._files, self.layouts).items():
            shard = self.on_node[rank]
            shard.open_file(descriptors, self._partition, rank, seed, std, pages, self.world.node.size)
        self._stop = at_exit(self.world, nothing, self._close_files)

    def start_reading(self):
        """Starts to read and drop pages, if rows are in files. REQUIRES: all shards of the node are initialised."""
        if self._files is None:
            return
        self._keeper = _C.PageKeeper([shard.file for shard in self.on_node.values()])
        self.reads_ahead = True

    def _close_files(self):
        if self._keeper is not None:
            self._keeper.stop()
        for shard in self.on_node.values():
            shard.close_file()

    def want(self, route: _C.Route):
        """Begins to read those rows of a route's keys from disk that this node owns. REQUIRES: reads_ahead."""
        for rank, shard in self.on_node.items():
            keys, _ = route.of(rank)
            if len(keys):
                shard.file.want(shard.directory.rows_of(keys))

    def count_pages(self, counters: _C.Counters):
        """Adds to the counters of pages and disk_steps those since the last call, once per step by the main thread.
        REQUIRES: reads_ahead."""
        file, before, waits = self.local.file, self._counted, _C.disk_waits()
        self._counted = file.pages_read, file.pages_written
        counters.pages_read += file.pages_read - before[0]
        counters.pages_written += file.pages_written - before[1]
        counters.disk_steps += waits > NodeMemory.disk_waits  # of all tables: the first one counts
        NodeMemory.disk_waits = waits

    def _part(self, node_rank: int) -> np.ndarray:
        """The memory of a rank of this node: (n,) uint8."""
        shared, _ = self._shared.Shared_query(node_rank)
        memory = np.frombuffer(shared, np.uint8)
        is_large = memory.nbytes >= LEAST_HUGE
        populates = node_rank == self.world.node.rank and not self.is_sparse
        return _C.aligned_view(memory, populates) if is_large else memory

    def local_ring(self, owner: int, origin: int) -> np.ndarray:
        """The memory of an origin's ring at an owner on this node."""
        return self.on_node[owner].rings[self.layouts[owner].ring(origin)]

    def fence(self, what: str = "for all ranks to come as far"):
        """Barrier over all ranks. Stores made before it are visible to all ranks after it. what: reason for messages,
        as for StallWarning. Collective."""
        fence_all([self], what)

    def sync(self):
        """Makes the stores of this rank visible, and those of others to it."""
        self._shared.Sync()

    def free(self):
        """Frees the memory. Collective."""
        self._stop()
        self.on_node, self.local, self._keeper = {}, None, None
        self._free()


def fence_all(memories: Sequence[NodeMemory], what: str):
    """NodeMemory.fence of several tables' memories, with one barrier. Collective."""
    for memory in memories:
        memory.sync()
    memories[0].world.meet(what)
    for memory in memories:
        memory.sync()


def check_pages(world: World, nbytes: int):
    """Raises UserError on every rank if some node lacks memory for pages of files, nbytes of this rank. Collective."""

    def message(need: int, place: str, free: int) -> str:
        return (
            f"table.store_memory_gb: the {world.node.size} rank(s) on {world.host} need {size_text(need)} for rows, "
            f"{size_text(free)} are free in {place}: lower it"
        )

    refuse_if_short(world, nbytes, False, message)


def check_memory(world: World, layouts: list[Layout]):
    """Raises UserError on every rank if some node lacks memory for its ranks. Collective."""
    nbytes, is_shared = layouts[world.rank].nbytes, world.node.size > 1
    refuse_if_short(world, nbytes, is_shared, lambda *found: memory_message(layouts, *found, world))


def memory_message(layouts: list[Layout], need: int, place: str, free: int, world: World) -> str:
    """The error message: memory needed, memory free, and remedies."""
    num_rows, mine = sum(layout.num_rows for layout in layouts), layouts[world.rank]
    inboxes = world.node.size * len(mine.origins) * mine.ring_bytes
    cure = "use more nodes, a smaller table.dim, fewer rows, or table.store=file"
    if place == "/dev/shm":
        cure += ", or enlarge /dev/shm (mount -o remount,size=90% /dev/shm, docker --shm-size)"
    return (
        f"{num_rows:,} rows of dim {mine.dim} with {mine.state_dim} floats of optimizer state need {size_text(need)} "
        f"for the {world.node.size} rank(s) on {world.host}, {size_text(inboxes)} of it for inboxes; "
        f"{size_text(free)} are free in {place}: {cure}"
    )
