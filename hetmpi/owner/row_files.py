"""Rows on disk: the files of the shards of a node, and the shard whose rows are in one (cpp/owner/row_file.h)."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path

import numpy as np

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.owner.store import InParts, Layout, Shard
from hetmpi.world.world import World

BALLAST_BYTES = 64 << 20  # of disk, freed when there is no more: new rows of the steps until all ranks have stopped
STORES = "memory", "file", "gpu", "pinned"
LEAST_PAGES = 16
NO_FOLDER = "name a folder on a disk of every node that can be written"  # cure
STEPS_AHEAD = 4  # until all ranks have stopped
NUMBERS = itertools.count()  # of the files that this process has opened


@dataclass(frozen=True)
class FileStore:
    """Where a table's rows are, if not in memory: in files in `folder`, a folder on a disk of each node. memory_bytes:
    memory of each rank for their pages, and for what is known of rows and pages."""

    folder: str
    memory_bytes: int
    name = "file"

    @property
    def shard(self) -> type[FileShard]:
        return FileShard

    def pages(self, layout: Layout) -> int:
        """Pages of a rank's file that stay in memory, as many as the memory allows beside what is known of rows."""
        return LEAST_PAGES + max(0, self.memory_bytes - least_bytes(layout)) // _C.FILE_PAGE_BYTES

    def check(self, layout: Layout):
        """Raises UserError if the memory is too little."""
        if self.memory_bytes < least_bytes(layout):
            raise UserError(
                f"table.store_memory_gb: a table of {layout.num_rows:,} rows on each rank needs at least "
                f"{least_bytes(layout) / 1e9:.3g}, most of it for clocks and marks, it gets "
                f"{self.memory_bytes / 1e9:.3g}"
            )


def least_bytes(layout: Layout) -> int:
    """Memory of a rank for a table whose rows are on disk: clocks and marks, notes of changed and of frozen rows, and a
    few pages."""
    return layout.inbox_begin + 2 * layout.num_rows + LEAST_PAGES * _C.FILE_PAGE_BYTES


def open_files(world: World, store: FileStore, layouts: list[Layout]) -> dict[int, tuple[int, int, int]]:
    """A file for the rows of each rank of this node, by rank: descriptors of the file, of one for frozen rows and of
    the ballast, the last two -1 for other ranks'. They have no name when this returns: nothing is left behind.
    Collective. Raises UserError on every rank if they cannot be created."""
    layout, error, names = layouts[world.rank], None, []
    mine = [-1, -1, -1]
    try:
        store.check(layout)
        check_folder(store.folder)
        for place, nbytes in enumerate((layout.file_bytes, 0, 0)):
            name = Path(store.folder).absolute() / f".hetmpi-{world.host}-{os.getpid()}-{next(NUMBERS)}.rows"
            mine[place] = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            names.append(name)
            os.ftruncate(mine[place], nbytes)
        try:
            os.posix_fallocate(mine[2], 0, min(BALLAST_BYTES, layout.file_bytes))
        except OSError as problem:
            raise UserError(store_text(store.folder, problem, "free some space there")) from problem
    except OSError as problem:
        error = UserError(store_text(store.folder, problem, NO_FOLDER))
    except UserError as problem:
        error = problem
    opened = {world.rank: tuple(mine)}
    paths = world.node.allgather(None if error else str(names[0]))
    try:
        for rank, path in zip(world.node_ranks, paths):
            if rank != world.rank and path is not None and error is None:
                opened[rank] = os.open(path, os.O_RDONLY | os.O_CLOEXEC), -1, -1
    except OSError as problem:
        error = UserError(store_text(store.folder, problem, "all ranks of a node must see the same folder"))
    world.node.Barrier()  # all have opened them
    for name in names:
        os.unlink(name)
    try:
        world.agree(error)
    except UserError:
        for descriptor in itertools.chain(*opened.values()):
            if descriptor >= 0:
                os.close(descriptor)
        raise
    return opened


def check_folder(folder: str):
    """Raises UserError unless it is there, and pages of files in it can leave memory."""
    if PAGESIZE != _C.FILE_PAGE_BYTES:
        raise UserError(f"table.store=file needs a kernel with pages of 4 KB, this one has {PAGESIZE:,} bytes")
    try:
        kind = file_system(os.stat(folder).st_dev)
    except OSError as problem:
        raise UserError(store_text(folder, problem, NO_FOLDER)) from problem
    if kind in ("tmpfs", "ramfs"):
        raise UserError(f"table.store_dir={folder} is in memory ({kind}): name a folder on a disk")


def file_system(device: int) -> str | None:
    """The kind of the file system of st_dev, such as ext4; None if the system does not say."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            if line.split()[2] == number:
                return line.partition(" - ")[2].split()[0]
    return None


def store_text(folder: str, problem: OSError, cure: str) -> str:
    return f"table.store_dir={folder}: {problem.strerror}: {cure}"


class FileShard(Shard):
    """A shard whose weights and states are in a file. To be opened by open_file(), on every rank of the node."""

    def open_file(
        self, descriptors: tuple[int, int, int], partition: _C.Partition, rank: int, seed: int, std: float, pages: int,
        num_sharing: int,
    ):  # fmt: skip
        """rank: the owner. seed, std: of the first rows, as for initialise(). pages: that stay in memory. num_sharing:
        ranks whose files are on this disk."""
        is_own = descriptors[1] >= 0
        self._disk, self._num_sharing, self._looked_at = os.dup(descriptors[0]) if is_own else None, num_sharing, None
        self.file = _C.RowFile(
            *descriptors, len(self), self.dim, self.state_dim, self.row_marks, self.page_marks, self.file_counts,
            partition, rank, seed, std, pages,
        )  # fmt: skip

    def _initialise_rows(self, keys_of, num: int, seed: int, std: float, threads: int):
        for zeroed in (self.row_marks, self.page_marks, self.file_counts):  # all rows are absent
            zeroed[:] = 0

    def assign(self, rows: np.ndarray | slice, weight=None, state=None, clock=None):
        places = self._places(rows)
        for is_state, values in ((False, weight), (True, state)):
            if values is not None:
                width = self.state_dim if is_state else self.dim
                values = np.broadcast_to(np.asarray(values, np.float32), (len(places), width))
                self.file.assign(places, is_state, np.ascontiguousarray(values))
        if clock is not None:
            self.clock[rows] = clock
        if state is not None:
            self._set_mean_squares(rows, self.snapshot("state", places))
        self.touched[rows] = 1

    def snapshot(self, array: str, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        if array == "clock":
            return super().snapshot(array, rows, out)
        return self._copy(array, self._places(rows), False, out)

    def _copy(self, array: str, places: np.ndarray, is_frozen: bool, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            out = self.empty(array, len(places))
        self.file.copy(places, array == "state", is_frozen, out)
        return out

    def _places(self, rows: np.ndarray | slice) -> np.ndarray:
        return np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else np.ascontiguousarray(rows, np.int64)

    def freeze(self):
        self.file.freeze()

    def thaw(self):
        self.file.thaw()

    def copied(self, array: str, rows: np.ndarray | slice, out: np.ndarray | None) -> np.ndarray | InParts:
        if array == "clock":
            return super().copied(array, rows, out)
        every = range(*rows.indices(len(self))) if isinstance(rows, slice) else rows

        def part_of(part: slice) -> np.ndarray:
            return self._copy(array, np.array(every[part], np.int64), True)

        return InParts(part_of, np.float32, (len(every), self.empty(array, 0).shape[1]))

    def copy_of(self, array: str, num: int) -> np.ndarray | None:
        return super().copy_of(array, num) if array == "clock" else None

    @property
    def is_full(self) -> bool:
        """The ballast is in use, or a few steps like the one since the last look would take it."""
        before, self._looked_at = self._looked_at, self.file.pages_allocated
        if self.file.is_full or before is None or self._looked_at == before:
            return self.file.is_full
        new = self._looked_at - before
        status = os.fstatvfs(self._disk)
        return status.f_bavail * status.f_frsize < STEPS_AHEAD * self._num_sharing * new * _C.FILE_PAGE_BYTES

    def close_file(self):
        """Gives back memory and disk."""
        self.file.close()
        if self._disk is not None:
            os.close(self._disk)
            self._disk = None
