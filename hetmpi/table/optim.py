"""Row optimizers, which owners apply in C++."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetmpi import _C
from hetmpi.errors import check_choice, check_number
from hetmpi.schedule import Schedule

ROW_RULES = {  # rule -> default learning rate
    "sgd": 0.1, "adagrad": 0.02, "rowwise_adagrad": 0.02, "adam": 0.001, "momentum": 0.01, "ftrl": 0.02,
}  # fmt: skip
LARGEST_MOMENTUM = 0.9999


@dataclass(frozen=True)
class RowOptimizer:
    """Update rule that an owner applies to each row: that of torch.optim, or FTRL-Proximal (McMahan et al. 2013),
    restricted to the row (cpp/owner/row_optimizer.h).

    rule: sgd, adagrad, rowwise_adagrad, adam, momentum or ftrl. eps None is the rule's default: 1e-8 for adam, 1e-10
    for the others; for ftrl it is beta. momentum: of the rule momentum, SGD's in torch. l1, l2: of ftrl."""

    rule: str = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float | None = None
    schedule: Schedule = field(default_factory=Schedule)
    momentum: float = 0.9
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self):
        check_choice("optim.rows", self.rule, ROW_RULES)
        check_number("optim.rows_momentum", self.momentum, 0, LARGEST_MOMENTUM)
        check_number("optim.rows_l1", self.l1, 0)
        check_number("optim.rows_l2", self.l2, 0)

    def core(self, dim: int) -> _C.RowOptimizer:
        """The C++ rule for rows of `dim` numbers."""
        eps = self.eps if self.eps is not None else (1e-8 if self.rule == "adam" else 1e-10)
        beta1 = self.momentum if self.rule == "momentum" else self.beta1
        return _C.RowOptimizer(self.rule, dim, self.weight_decay, beta1, self.beta2, eps, self.l1, self.l2)

    def lr_at(self, step: int) -> float:
        """Learning rate at `step`, counted from 0."""
        return self.lr * self.schedule.factor(step)
