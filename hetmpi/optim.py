"""Optimizers of both sides: row optimizers, which owners apply in C++, and the dense one under Horovod.

Both follow one Schedule, so a warm-up warms rows and network alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from hetmpi import _C

ROW_RULES = {"sgd": 0.1, "adagrad": 0.02, "rowwise_adagrad": 0.02, "adam": 0.001}  # rule -> default learning rate
DENSE_RULES = {"sgd": 0.1, "adagrad": 0.003, "adam": 0.005}
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """Learning-rate factor over steps: a linear rise over `warmup_steps`, then constant, or falling to `floor` at
    `total_steps` along a line or half a cosine. kind: constant, linear or cosine."""

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
    """What an owner does with a row's gradient: torch.optim's rule on the touched row alone (cpp/row_optimizer.h).

    rule: sgd, adagrad, rowwise_adagrad or adam. eps None means the rule's usual one: 1e-8 for adam, 1e-10 for the Adagrads."""

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


class DenseOptimizer:
    """The dense layers' optimizer: torch's, its gradients averaged over all ranks by Horovod, on the shared schedule."""

    def __init__(
        self, hvd, model: torch.nn.Module, rule: str, lr: float, weight_decay: float, schedule: Schedule,
        device: torch.device = torch.device("cpu"),
    ):  # fmt: skip
        """Broadcasts rank 0's parameters and moves the model to `device`. Collective."""
        check_choice("optim.dense", rule, DENSE_RULES)
        kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[rule]
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        model.to(device)
        optimizer = kind(model.parameters(), lr=lr, weight_decay=weight_decay)
        if device.type == "cpu" or (hvd.nccl_built() and has_own_gpu(hvd, device)):
            # One group: all gradients are summed in one allreduce, whose order of addition does not depend on timing.
            self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), groups=1)
        else:
            self.optimizer = ThroughHost(hvd, optimizer)
        self.lr, self.schedule = lr, schedule

    def state_dict(self) -> dict:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict):
        """Takes what the rule has gathered; its settings stay."""
        kept = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state)
        for group, weight_decay in zip(self.optimizer.param_groups, kept):
            group["weight_decay"] = weight_decay

    def begin(self):
        """Starts the allreduce of the gradients, where backward() has not. Between it and EmbeddingTable.write: a rank that waited for
        the allreduce alone could not take in what others write."""
        if isinstance(self.optimizer, ThroughHost):
            self.optimizer.begin()

    def step(self, step: int):
        """Waits for the allreduce of the gradients, then updates the parameters of `step`, counted from 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self.schedule.factor(step)
        self.optimizer.step()
        self.optimizer.zero_grad()


def has_own_gpu(hvd, device: torch.device) -> bool:
    """Whether no two ranks share a GPU, which NCCL refuses. Collective."""
    gpus = hvd.allgather_object(str(torch.cuda.get_device_properties(device).uuid))
    return len(set(gpus)) == len(gpus)


class ThroughHost:
    """An optimizer of parameters on a GPU, whose gradients are averaged over all ranks in the host's memory, by one allreduce: for a
    Horovod without NCCL, and for ranks that share a GPU."""

    def __init__(self, hvd, optimizer: torch.optim.Optimizer):
        self._hvd, self._optimizer, self.param_groups = hvd, optimizer, optimizer.param_groups
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        on_gpu = any(parameter.is_cuda for parameter in self._parameters)
        self._sums = torch.empty(sum(parameter.numel() for parameter in self._parameters), pin_memory=on_gpu)
        self._handle: int | None = None

    def begin(self):
        """Starts to average the gradients, once they are there. Collective."""
        if self._hvd.size() == 1 or not len(self._sums):
            return
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self._sums.copy_(torch.cat([parameter.grad.reshape(-1) for parameter in self._parameters]))
        self._handle = self._hvd.allreduce_async_(self._sums, op=self._hvd.Average, name="dense")

    def step(self):
        """Waits for the averages, then updates the parameters. Collective."""
        if self._handle is None:
            self.begin()
        if self._handle is not None:
            self._hvd.synchronize(self._handle)
            self._handle = None
            parts = self._sums.to(self._parameters[0].device).split([parameter.numel() for parameter in self._parameters])
            for parameter, part in zip(self._parameters, parts):
                parameter.grad.copy_(part.view_as(parameter))
        self._optimizer.step()

    def zero_grad(self):
        self._optimizer.zero_grad()

    def state_dict(self) -> dict:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict):
        self._optimizer.load_state_dict(state)
        self.param_groups = self._optimizer.param_groups


def check_choice(name: str, value: str, choices):
    """Raises ValueError if `value` is none of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value}")
