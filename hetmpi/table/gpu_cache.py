"""Lines in a GPU's memory (cpp/cuda/gpu_lines.h)."""

from __future__ import annotations

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
