"""The learning-rate schedule of rows and dense layers."""

from __future__ import annotations

from hetmpi import _C
from hetmpi.errors import check_choice

SCHEDULES = ("constant", "linear", "cosine", "plateau")


class Schedule(_C.Schedule):
    """Learning-rate factor over steps: a linear warm-up over `warmup_steps`, then constant, or a decay to `floor` at
    `total_steps`, linear or as half a cosine, or `decay` to the power of `drops`, which the caller raises when a metric
    stays on a plateau. factor(step), from 0: of the base learning rate.

    kind: constant, linear, cosine or plateau"""

    def __init__(
        self, kind: str = "constant", warmup_steps: int = 0, total_steps: int = 0, floor: float = 0.0,
        decay: float = 0.5, drops: int = 0,
    ):  # fmt: skip
        check_choice("optim.schedule", kind, SCHEDULES)
        super().__init__(SCHEDULES.index(kind), warmup_steps, total_steps, floor, decay, drops)
        self._kind = kind

    @property
    def kind(self) -> str:
        return self._kind

    def __repr__(self) -> str:
        names = "kind", "warmup_steps", "total_steps", "floor", "decay", "drops"
        return f"Schedule({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
