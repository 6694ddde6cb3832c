"""DiskPlan: what a run with rows on disk (table.store=file) needs of the disk, for a dry run."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.owner.row_files import BALLAST_BYTES, FileStore, check_folder
from hetmpi.owner.store import Layout
from hetmpi.world.memory import size_text
from hetmpi.world.world import World

SPAN = 4096  # pages looked at together


class Pages:
    """The pages of one rank's file in memory, dropped as cpp/owner/row_file.h drops them. wanted, hits: so far."""

    def __init__(self, layout: Layout, budget: int):
        self._row_bytes, self._budget = 4 * (layout.dim + layout.state_dim), budget
        num = layout.file_bytes // _C.FILE_PAGE_BYTES
        self._is_resident, self._is_used, self._hand = np.zeros(num, bool), np.zeros(num, bool), 0
        self._num_resident = self.wanted = self.hits = 0

    def use(self, rows: np.ndarray):
        """Rows (n,) int64 that are read and updated in a step."""
        first, last = (rows * self._row_bytes, (rows + 1) * self._row_bytes - 1)
        pages = np.unique(np.concatenate([first, last]) // _C.FILE_PAGE_BYTES)
        hits = np.count_nonzero(self._is_resident[pages])
        self.wanted, self.hits = self.wanted + len(pages), self.hits + hits
        self._num_resident += len(pages) - hits
        self._is_resident[pages] = self._is_used[pages] = True
        while self._num_resident > self._budget:
            self._drop()

    def _drop(self):
        """Drops pages of the next span that were not used since the hand passed it last, as far as needed."""
        span = slice(self._hand, self._hand + SPAN)
        unused = np.flatnonzero(self._is_resident[span] & ~self._is_used[span])
        unused = unused[: self._num_resident - self._budget] + self._hand
        self._is_used[span] = False
        self._is_resident[unused] = False
        self._num_resident -= len(unused)
        self._hand = span.stop if span.stop < len(self._is_used) else 0


class DiskPlan:
    """The pages of this rank's rows of all tables."""

    def __init__(self, world: World, folder: str, tables: Mapping[str, tuple[_C.Partition, Layout, FileStore]]):
        self._world, self._folder, self._num_steps = world, folder, 0
        self._of = {
            name: (_C.Directory(partition, world.rank), partition, Pages(layout, store.pages(layout)))
            for name, (partition, layout, store) in tables.items()
        }
        sizes = [layout.file_bytes for _, layout, _ in tables.values()]
        self._bytes = sum(size + min(size, BALLAST_BYTES) for size in sizes)
        error = None
        try:
            check_folder(folder)
        except UserError as problem:
            error = problem
        world.agree(error)

    def step(self, keys: Mapping[str, np.ndarray]):
        """A step that reads these keys of each table, (U,) int64. Collective."""
        self._num_steps += 1
        for of_rank in self._world.comm.allgather({name: keys[name] for name in self._of}):
            for name, found in of_rank.items():
                directory, partition, pages = self._of[name]
                owners, _ = partition.locate(found)
                pages.use(directory.rows_of(np.ascontiguousarray(found[owners == self._world.rank])))

    def lines(self) -> list[str]:
        """For rank 0's output, empty elsewhere. Collective."""
        world = self._world
        wanted, hits = (sum(getattr(pages, name) for *_, pages in self._of.values()) for name in ("wanted", "hits"))
        wanted, hits = world.comm.allreduce(wanted), world.comm.allreduce(hits)
        node_bytes = world.node.allreduce(self._bytes)
        status = os.statvfs(self._folder)
        needs = world.comm.gather((world.host, node_bytes, status.f_bavail * status.f_frsize))
        if needs is None:
            return []
        found = []
        for host, need, free in dict((need[0], need) for need in needs).values():
            fits = "fits" if need <= free else "DOES NOT FIT once all rows have been updated"
            found.append(f"{host}: at most {size_text(need)} of {size_text(free)} free in {self._folder}: {fits}")
        per_step = wanted / max(1, self._num_steps)
        share = hits / max(1, wanted)
        return [*found, f"pages of 4 KB per step: {per_step:,.0f}, expected hits in memory {100 * share:.1f} %"]
