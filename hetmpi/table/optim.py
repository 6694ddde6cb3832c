"""Row optimizers, which owners apply in C++."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetmpi import _C
from hetmpi.errors import LARGEST, UserError, check_choice, check_number
from hetmpi.schedule import Schedule

ROW_RULES = {  # rule -> default learning rate
    "sgd": 0.1, "adagrad": 0.02, "rowwise_adagrad": 0.02, "adam": 0.001, "momentum": 0.01, "ftrl": 0.02,
}  # fmt: skip
DEFAULT_MOMENTUM, LARGEST_MOMENTUM = 0.9, 0.9999
LARGEST_BETA = 1 - 2**-24  # the largest below 1 in 32 bits
OF_RULES = ("momentum", "l1", "l2")  # arguments of one rule alone


@dataclass(frozen=True)
class RowOptimizer:
    """Update rule that an owner applies to each row: that of torch.optim, or FTRL-Proximal (McMahan et al. 2013),
    restricted to the row (cpp/owner/row_optimizer.h).

    rule: sgd, adagrad, rowwise_adagrad, adam, momentum or ftrl. eps None is the rule's default: 1e-8 for adam, 1e-10
    for the others; for ftrl it is beta. momentum: of the rule momentum, SGD's in torch; None is 0.9. l1, l2: of
    ftrl. Raises UserError for values of another rule, and for numbers out of range."""

    rule: str = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float | None = None
    schedule: Schedule = field(default_factory=Schedule)
    momentum: float | None = None
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self):
        check_choice("optim.rows", self.rule, ROW_RULES)
        for name in ("lr", "weight_decay", "beta1", "beta2"):
            most = LARGEST_BETA if name.startswith("beta") else LARGEST
            check_number(f"RowOptimizer: {name}", getattr(self, name), 0, most)
        if self.eps is not None:
            check_number("RowOptimizer: eps", self.eps, 0)
        for name, rule, unset in (("momentum", "momentum", None), ("l1", "ftrl", 0), ("l2", "ftrl", 0)):
            value = getattr(self, name)
            if value != unset:
                check_number(f"optim.rows_{name}", value, 0, LARGEST_MOMENTUM if name == "momentum" else LARGEST)
                if self.rule != rule:
                    raise UserError(f"optim.rows_{name}={value} needs optim.rows={rule}, which is {self.rule}")

    def core(self, dim: int) -> _C.RowOptimizer:
        """The C++ rule for rows of `dim` numbers."""
        eps = self.eps if self.eps is not None else (1e-8 if self.rule == "adam" else 1e-10)
        beta1 = self.beta1
        if self.rule == "momentum":
            beta1 = DEFAULT_MOMENTUM if self.momentum is None else self.momentum
        return _C.RowOptimizer(self.rule, dim, self.weight_decay, beta1, self.beta2, eps, self.l1, self.l2)
