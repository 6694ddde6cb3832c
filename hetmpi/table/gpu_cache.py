"""Lines in a GPU's memory (cpp/cuda/gpu_lines.h)."""

from __future__ import annotations

import numpy as np
import torch

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.gpu import gpu_of
from hetmpi.world.world import World


def open_gpu_cache(
    world: World, device: torch.device, capacity_rows: int, rule: _C.RowOptimizer, dim: int, policy: str, dtype: str
) -> _C.GpuLines:
    """Creates a cache on `device`, without an index on the current GPU. Collective. Raises UserError on every rank if a
    GPU lacks memory for the caches of its ranks."""
    error = cache = None
    try:
        cache = _C.GpuLines(capacity_rows, rule, policy, dtype, gpu_of(device)(device))
    except RuntimeError as problem:
        cure = (
            ": lower table.cache.capacity_rows or table.cache.capacity_fraction"
            if "out of memory" in str(problem)
            else ""
        )
        error = UserError(
            f"a cache of {capacity_rows:,} rows of dim {dim} in {dtype} cannot be made on {device} of {world.host}: "
            f"{problem}{cure}"
        )
    world.agree(error)
    return cache


class SharedClocks:
    """The clocks of the owners on this node, which the kernels of this rank's lines read in place. Where the host's
    memory cannot be pinned, or holds clocks of rows that are not in use yet, the host reads them for the kernels."""

    def __init__(self, lines: _C.GpuLines, partition: _C.Partition, clocks: list[np.ndarray]):
        """clocks: (number of its rows,) int32 of each rank of the table, in the memory of its node."""
        self._gpu, self._pinned = lines.gpu, []
        try:
            for of_rank in filter(len, clocks):
                self._gpu.pin(of_rank)
                self._pinned.append(of_rank)
        except RuntimeError:
            self.close()
        else:
            lines.read_clocks_of(partition, [of_rank.ctypes.data for of_rank in clocks])

    def close(self):
        """To be called before the memory is freed. The lines read no clock any more."""
        while self._pinned:
            self._gpu.unpin(self._pinned.pop())
