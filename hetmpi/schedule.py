"""The learning-rate schedule of rows and dense layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetmpi.errors import check_choice

SCHEDULES = ("constant", "linear", "cosine", "plateau")


@dataclass
class Schedule:
    """Learning-rate factor over steps: a linear warm-up over `warmup_steps`, then constant, or a decay to `floor` at
    `total_steps`, linear or as half a cosine, or `decay` to the power of `drops`, which the caller raises when a metric
    stays on a plateau. kind: constant, linear, cosine or plateau."""

    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    floor: float = 0.0
    decay: float = 0.5
    drops: int = 0

    def __post_init__(self):
        check_choice("optim.schedule", self.kind, SCHEDULES)

    def factor(self, step: int) -> float:
        """Factor of the base learning rate at `step`, counted from 0."""
        return self.factors(step, 1)[0]

    def factors(self, first: int, num: int) -> list[float]:
        """Those of `num` steps from `first` on; a single call, as each table asks for some in each step."""
        factors = []
        for step in range(first, first + num):
            if step < self.warmup_steps:
                factors.append((step + 1) / self.warmup_steps)
            elif self.kind in ("constant", "plateau"):
                factors.append(self.decay**self.drops)
            else:
                done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
                fall = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
                factors.append(self.floor + (1.0 - self.floor) * fall)
        return factors
