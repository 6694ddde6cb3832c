"""The settings of the cache of other ranks' rows (cpp/client/lines.h)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hetmpi import _C
from hetmpi.errors import UserError, check_choice
from hetmpi.gpu import gpu_of
from hetmpi.table.gpu_cache import open_gpu_cache
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.world.memory import refuse_if_short, size_text
from hetmpi.world.world import World

POLICIES = ("lru", "lfu", "lfuopt")
ADMIT = ("auto", "all", "remote", "offnode")
ROW_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # of one number


@dataclass(frozen=True)
class CacheSettings:
    """Size, eviction policy and precision of a rank's cache. At staleness 0 there is none: a capacity is refused
    there, and the rest has no effect.

    capacity_rows, or capacity_fraction of the table's rows: lines of each rank; 0, or neither, is no cache. policy:
    lru, lfu or lfuopt (cpp/cache/cache_decisions.h). admit: `offnode` caches rows of other nodes, `remote` those of
    other ranks, `all` also this rank's; `auto` is offnode on CPUs, where rows of the same node are read from shared
    memory, and all on a GPU, whose memory holds no shard. dtype: float32, float16 or bfloat16, of the cached rows;
    updates of 16-bit rows use stochastic rounding, pending gradients are float32."""

    capacity_rows: int | None = None
    capacity_fraction: float | None = None
    policy: str = "lfu"
    admit: str = "auto"
    dtype: str = "float32"

    def __post_init__(self):
        check_choice("table.cache.policy", self.policy, POLICIES)
        check_choice("table.cache.admit", self.admit, ADMIT)
        check_choice("table.cache.dtype", self.dtype, ROW_BYTES)
        if self.capacity_rows is not None and self.capacity_fraction is not None:
            raise UserError(
                "give table.cache.capacity_rows or table.cache.capacity_fraction and set the other one to null, got "
                f"{self.capacity_rows} and {self.capacity_fraction}"
            )
        if self.capacity_rows is not None and not 0 <= self.capacity_rows < 1 << 31:
            raise UserError(f"table.cache.capacity_rows must lie in [0, 2**31), got {self.capacity_rows}")
        if self.capacity_fraction is not None and not 0 <= self.capacity_fraction <= 1:
            raise UserError(f"table.cache.capacity_fraction must lie in [0, 1], got {self.capacity_fraction}")

    def check_at(self, staleness: Staleness):
        """Raises UserError for lines at staleness 0."""
        if staleness.is_exact and (self.capacity_rows or self.capacity_fraction):
            size = "capacity_fraction" if self.capacity_rows is None else "capacity_rows"
            raise UserError(
                f"table.cache.{size} must be 0 at table.staleness=0, where every step changes the rows that it reads, "
                f"so no copy could be used again, got {getattr(self, size)}: leave it out, or give a staleness of at "
                "least 1"
            )

    def admitted(self, world: World, device: torch.device) -> np.ndarray:
        """Mask of the ranks whose rows are cached on `device`: (size,) bool."""
        if self.admit == "all" or (self.admit == "auto" and gpu_of(device) is not None):
            return np.ones(world.size, bool)
        if self.admit == "remote":
            return np.arange(world.size) != world.rank
        return world.is_remote

    def rows(self, num_rows: int, world: World, device: torch.device) -> int:
        """Lines of this rank's cache for a table of `num_rows`."""
        if not self.admitted(world, device).any():
            return 0
        wanted = self.capacity_rows if self.capacity_fraction is None else round(self.capacity_fraction * num_rows)
        return min(wanted or 0, num_rows + _C.WAYS)  # one set may be full while others are not

    def memory_bytes(self, capacity_rows: int, rule: _C.RowOptimizer, dim: int) -> int:
        """Memory of a cache of so many lines."""
        line = ROW_BYTES[self.dtype] * dim + 4 * rule.sum_dim + _C.LINE_OVERHEAD_BYTES
        return capacity_rows * line

    def open(self, world: World, num_rows: int, dim: int, optimizer: RowOptimizer, device: torch.device) -> _C.Lines:
        """Creates this rank's cache. Collective. Raises UserError on every rank if a node or a GPU lacks memory for its
        ranks' caches."""
        rule, capacity_rows = optimizer.core(dim), self.rows(num_rows, world, device)
        if gpu_of(device) is not None:
            return open_gpu_cache(world, device, capacity_rows, rule, dim, self.policy, self.dtype)

        def message(need, place, free):
            return (
                f"a cache of {capacity_rows:,} rows of dim {dim} on each rank needs {size_text(need)} for the "
                f"{world.node.size} rank(s) on {world.host}, {size_text(free)} are free in {place}: lower "
                "table.cache.capacity_rows or table.cache.capacity_fraction"
            )

        refuse_if_short(world, self.memory_bytes(capacity_rows, rule, dim), False, message)
        return _C.HostLines(capacity_rows, rule, self.policy, self.dtype)
