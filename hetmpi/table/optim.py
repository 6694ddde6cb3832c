"""Row optimizers, which owners apply in C++, and the learning-rate schedule of rows and dense layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hetmpi import _C
from hetmpi.errors import one_line

ROW_RULES = {"sgd": 0.1, "adagrad": 0.02, "rowwise_adagrad": 0.02, "adam": 0.001}  # rule -> default learning rate
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """Learning-rate factor over steps: a linear warm-up over `warmup_steps`, then constant, or a decay to `floor` at
    `total_steps`, linear or as half a cosine. kind: constant, linear or cosine."""

    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    floor: float = 0.0

    def __post_init__(self):
        check_choice("optim.schedule", self.kind, SCHEDULES)

    def factor(self, step: int) -> float:
        """Factor of the base learning rate at `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        fall = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.floor + (1.0 - self.floor) * fall


@dataclass(frozen=True)
class RowOptimizer:
    """Update rule that an owner applies to each row: that of torch.optim, restricted to the row
    (cpp/owner/row_optimizer.h).

    rule: sgd, adagrad, rowwise_adagrad or adam. eps None is the rule's default: 1e-8 for adam, 1e-10 for both Adagrad
    rules."""

    rule: str = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float | None = None
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self):
        check_choice("optim.rows", self.rule, ROW_RULES)

    def core(self, dim: int) -> _C.RowOptimizer:
        """The C++ rule for rows of `dim` numbers."""
        eps = self.eps if self.eps is not None else (1e-8 if self.rule == "adam" else 1e-10)
        return _C.RowOptimizer(self.rule, dim, self.weight_decay, self.beta1, self.beta2, eps)

    def lr_at(self, step: int) -> float:
        """Learning rate at `step`, counted from 0."""
        return self.lr * self.schedule.factor(step)


def check_choice(name: str, value: str, choices):
    """Raises ValueError if `value` is none of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {one_line(str(value), 100)}")
