"""TableSpec: the table that a model needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetmpi.open_rows import OpenRows


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
