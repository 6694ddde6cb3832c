"""Row optimizers, which owners apply in C++."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetmpi import _C
from hetmpi.errors import check_choice
from hetmpi.schedule import Schedule

ROW_RULES = {"sgd": 0.1, "adagrad": 0.02, "rowwise_adagrad": 0.02, "adam": 0.001}  # rule -> default learning rate


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
