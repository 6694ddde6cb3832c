"""TableSpec: the table that a model needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_ROWS = (1 << 40) - 1  # of a table without a fixed vocabulary
NEVER, LFU, LRU = "never", "lfu", "lru"  # evict: which ids make room for new ones
EVICT = (LFU, LRU, NEVER)


@dataclass(frozen=True)
class OpenRows:
    """Rows of a table without a fixed vocabulary (hetmpi/table/vocabulary.py).

    max_rows      ids that have a row at the same time
    min_count     times an id must be seen before it gets one
    expire_steps  an id that has not been seen for so many steps loses its row, None: never
    evict         whose row an id gets where all are taken: LFU, of one seen less often; LRU, of the one seen longest
                  ago; NEVER: of none, which ends the training"""

    max_rows: int
    min_count: int = 1
    expire_steps: int | None = None
    evict: str = LFU

    @property
    def num_rows(self) -> int:
        """Rows of the table: key 0 is shared by all ids without a row of their own."""
        return self.max_rows + 1


@dataclass(frozen=True)
class TableSpec:
    """Shape of a table that a model needs.

    num_rows, dim  of the table
    optim, cache   settings of this table that replace those of `optim` and `table.cache`
    init_std       standard deviation of its initial rows, None for table.init_std
    open           of a table without a fixed vocabulary"""

    num_rows: int
    dim: int
    optim: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    init_std: float | None = None
    open: OpenRows | None = None
