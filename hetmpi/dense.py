"""DenseOptimizer: the torch optimizer of the dense layers, with gradients averaged over all ranks."""

from __future__ import annotations

import contextlib
import itertools

import torch

from hetmpi import _C
from hetmpi.errors import NotFinite, check_choice
from hetmpi.gpu import gpu_of
from hetmpi.no_dynamo import update_of
from hetmpi.schedule import Schedule

DENSE_RULES = {"sgd": 0.1, "adagrad": 0.003, "adam": 0.005}  # rule -> default learning rate


class DenseOptimizer:
    """The torch optimizer of the dense layers. `hvd`, horovod.torch, MpiReductions or TorchReductions, averages their
    gradients over all ranks; the schedule is shared with the rows.

        loss.backward()
        dense.begin()                   # starts the allreduce, by the same call on all ranks
        table.write(keys, grads)
        dense.step(step)                # waits for it, then updates the parameters

    A parameter without a gradient on this rank contributes zeros. One without a gradient on every rank is not updated,
    as in torch."""

    def __init__(
        self, hvd, model: torch.nn.Module, rule: str, lr: float, weight_decay: float, schedule: Schedule,
        device: torch.device = torch.device("cpu"), clip_norm: float | None = None,
    ):  # fmt: skip
        """Broadcasts rank 0's parameters and moves the model to `device`. clip_norm: maximum of the L2 norm of all
        averaged gradients together, as in torch.nn.utils.clip_grad_norm_; None for no limit. Collective."""
        check_choice("optim.dense", rule, DENSE_RULES)
        kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[rule]
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        model.to(device)
        self._update = update_of(kind)
        self.optimizer = kind([{"params": list(model.parameters())}], lr=lr, weight_decay=weight_decay)  # may be none
        on_gpu = device.type != "cpu" and hvd.nccl_built() and has_own_gpu(hvd, device)
        self._gradients = AveragedGradients(hvd, model, device if on_gpu else torch.device("cpu"))
        self.lr, self.schedule, self.clip_norm = lr, schedule, clip_norm
        self._parameters = list(model.parameters())

    def __repr__(self) -> str:
        num, group = sum(each.numel() for each in self._parameters), self.optimizer.param_groups[0]
        rule = f"{type(self.optimizer).__name__}, lr={self.lr}, weight_decay={group['weight_decay']}"
        return f"DenseOptimizer({num:,} parameters, {rule}, {self.schedule}, clip_norm={self.clip_norm})"

    def state_dict(self) -> dict:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict):
        """Loads the state of the rule; its hyperparameters do not change."""
        kept = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state)
        for group, weight_decay in zip(self.optimizer.param_groups, kept):
            group["weight_decay"] = weight_decay

    @contextlib.contextmanager
    def held(self):
        """A context of backward passes that others of the same step follow: they do not start the allreduce."""
        self._gradients.is_held = True
        try:
            yield
        finally:
            self._gradients.is_held = False

    def begin(self):
        """Starts the allreduce of the gradients, unless backward() has started it, which it does after computing all of
        them. To be called between backward() and EmbeddingTable.write: a rank that waits for the allreduce only does
        not apply the pushes of others. Collective.

        Raises NotFinite for a gradient on the CPU that is NaN or infinite (in backward() if that starts the allreduce),
        RuntimeError in backward() if the allreduce has already begun."""
        self._gradients.begin()

    def step(self, step: int):
        """Waits for the allreduce of the gradients, limits their norm, then updates the parameters. step: counted from
        0. Raises as begin()."""
        self._gradients.finish()
        if self.clip_norm is not None:  # the averages have the same bits on all ranks, and so do the scaled ones
            torch.nn.utils.clip_grad_norm_(self._parameters, self.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self.schedule.factor(step)
        with torch.no_grad():
            self._update(self.optimizer)
        for parameter in self._parameters:  # as zero_grad(), without what it does for torch's profiler
            parameter.grad = None


def has_own_gpu(hvd, device: torch.device) -> bool:
    """Whether no two ranks share a GPU, which NCCL does not support. Collective."""
    gpus = hvd.allgather_object(gpu_of(device).name(device))
    return len(set(gpus)) == len(gpus)


class AveragedGradients:
    """Averages a model's gradients over all ranks: one allreduce per dtype, of one buffer, with an order of additions
    that does not depend on timing.

    The buffer ends with a number per parameter, 1 if it has a gradient on this rank. After the allreduce it shows
    whether the parameter has a gradient on any rank."""

    NAMES = itertools.count()  # of the instances of this process: all ranks create them in the same order

    def __init__(self, hvd, model: torch.nn.Module, device: torch.device):
        """device: of the buffers' allreduce: the parameters' GPU, for NCCL, or the CPU, for MPI."""
        self._hvd, name = hvd, f"dense {next(self.NAMES)}"
        by_dtype: dict[torch.dtype, dict[str, torch.nn.Parameter]] = {}
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, {})[key] = parameter
        # Of a model of rows alone one zero is summed: at s >= 1 nothing else keeps the ranks in the same step.
        by_dtype = by_dtype or {torch.float32: {}}
        self._buffers = [Buffer(parameters, device, f"{name} {dtype}") for dtype, parameters in by_dtype.items()]
        self._parameters = {key: parameter for buffer in self._buffers for key, parameter in buffer.parameters.items()}
        self._ready: set[torch.nn.Parameter] = set()  # with a gradient since the last step
        self._handles: list | None = None  # of the allreduces in progress
        self.is_held = False  # more backward passes follow
        # backward() does not start the sums where a copy would wait for the GPU, nor where sums are not matched by
        # name: a rank that lacks a gradient starts them later, in begin(), perhaps after those of another model.
        is_copied = any(buffer.is_copied for buffer in self._buffers)
        self._starts_in_backward = not is_copied and getattr(hvd, "matches_names", True)  # horovod.torch lacks it
        if hvd.size() > 1:
            for parameter in self._parameters.values():
                parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.nn.Parameter):
        if self._handles is not None:
            raise RuntimeError(
                "DenseOptimizer: backward() ran again after the allreduce of the gradients had begun: add the losses "
                "up and call backward() once, then step()"
            )
        if self.is_held:
            return
        self._ready.add(parameter)
        if self._starts_in_backward and len(self._ready) == len(self._parameters):
            self.begin()

    def begin(self):
        """Starts averaging the gradients. Collective. Raises NotFinite for a gradient that is not finite."""
        if self._handles is None and self._hvd.size() > 1:
            self._handles = [
                self._hvd.allreduce_async_(buffer.filled(), op=self._hvd.Average, name=buffer.name)
                for buffer in self._buffers
            ]

    def finish(self):
        """Waits for the averages and stores them as the parameters' gradients. Collective. Raises as begin()."""
        self.begin()
        if self._handles is None:  # one rank
            check_finite(self._parameters)
        for buffer, handle in zip(self._buffers, self._handles or []):
            self._hvd.synchronize(handle)
            buffer.give_back()
        self._handles = None
        self._ready.clear()


def check_finite(parameters: dict[str, torch.nn.Parameter]):
    """Raises NotFinite if a gradient on the CPU is NaN or infinite. Gradients on a GPU are not checked: that would wait
    for the GPU."""
    for name, parameter in parameters.items():
        grad = parameter.grad
        if (
            grad is not None
            and grad.dtype == torch.float32
            and grad.is_cpu
            and not _C.all_finite(grad.contiguous().numpy())
        ):
            raise NotFinite(f"the gradient of the dense parameter {name} is not finite")


class Buffer:
    """The gradients of parameters of one dtype in contiguous memory."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], device: torch.device, name: str):
        first = next(iter(parameters.values()), torch.zeros(1))
        self.parameters, self.name = parameters, name
        self._sizes = [parameter.numel() for parameter in parameters.values()]
        self._place, self.is_copied = first.device, first.is_cuda and device.type == "cpu"
        self._num_flags = max(1, len(parameters))
        self._sums = torch.zeros(
            sum(self._sizes) + self._num_flags, dtype=first.dtype, device=device, pin_memory=self.is_copied
        )
        self._is_missing: list[bool] = []  # parameters without a gradient on this rank
        self._has_grad: torch.Tensor | None = None  # the opposite, in numbers

    def filled(self) -> torch.Tensor:
        """The buffer filled with the parameters' gradients, zero for missing ones. Raises NotFinite for a gradient that
        is not finite, which the average would spread to all ranks."""
        if not self.parameters:
            return self._sums
        check_finite(self.parameters)
        grads = [parameter.grad for parameter in self.parameters.values()]
        is_missing = [grad is None for grad in grads]
        if is_missing != self._is_missing:  # to send them to a GPU makes the host wait
            has_grad = [not missing for missing in is_missing]
            self._has_grad = torch.tensor(has_grad, dtype=self._sums.dtype, device=self._place)
            self._is_missing = is_missing
        parts = [
            torch.zeros(size, dtype=self._sums.dtype, device=self._place)
            if grad is None
            else grad.to_dense().reshape(-1)
            for grad, size in zip(grads, self._sizes)
        ]
        if self.is_copied:
            self._sums.copy_(torch.cat([*parts, self._has_grad]))
        else:
            torch.cat([*parts, self._has_grad], out=self._sums)
        return self._sums

    def give_back(self):
        """Stores the buffer's content as the parameters' gradients."""
        *parts, has_grad = self._sums.to(self._place).split([*self._sizes, self._num_flags])
        is_unused = (has_grad == 0).tolist() if any(self._is_missing) else [False] * len(parts)
        for parameter, part, unused in zip(self.parameters.values(), parts, is_unused):
            parameter.grad = None if unused else part.view_as(parameter)
