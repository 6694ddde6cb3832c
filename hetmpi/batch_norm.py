"""BatchNorm: batch normalisation over the samples of all ranks (Ioffe and Szegedy, "Batch Normalization: Accelerating
Deep Network Training by Reducing Internal Covariate Shift", ICML 2015). horovod.torch.SyncBatchNorm runs on GPUs only.
"""

from __future__ import annotations

import itertools
import sys

import torch
from torch import Tensor


class BatchNorm(torch.nn.BatchNorm1d):
    """torch.nn.BatchNorm1d on the joined batch of all ranks: (B, C) to (B, C). B may differ between ranks.

    In training on several ranks, forward and backward are collective: every rank calls them equally often, in the same
    order. The running statistics have the same bits on all ranks. In evaluation, on one rank, and where neither Horovod
    nor MpiReductions has started, it is torch's own, without communication."""

    NAMES = itertools.count()  # of the layers of this process: all ranks create them in the same order
    reductions = None  # in place of a Horovod that has started (hetmpi/reductions.py)

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1):
        """momentum: weight of a new batch in the running statistics."""
        super().__init__(num_features, eps, momentum)
        self.name = f"batch norm {next(self.NAMES)}"

    def forward(self, features: Tensor) -> Tensor:
        """Without samples on any rank, returns `features`, and the statistics stay. Raises ValueError if all ranks
        together have one sample in training."""
        hvd = self._hvd()
        if not self.training or hvd is None or not hvd.is_initialized() or hvd.size() == 1:
            return super().forward(features) if len(features) else features
        self._check_input_dim(features)
        num, mean, variance = moments(features.detach(), self._summed)
        if num == 0:
            return features
        if num < 2:
            raise ValueError(f"BatchNorm: training needs at least 2 samples over all ranks, got {num}")
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
            self.running_var.lerp_((variance * num / (num - 1)).to(self.running_var), self.momentum)
            self.num_batches_tracked += 1
        mean, scale = mean.to(features), (variance + self.eps).rsqrt().to(features)
        return Normalized.apply(features, self.weight, self.bias, mean, scale, num, self._summed)

    def _hvd(self):
        """What sums over the ranks; None where nothing has started: evaluation needs no Horovod."""
        return self.reductions or sys.modules.get("horovod.torch")

    def _summed(self, numbers: Tensor, direction: str) -> Tensor:
        """The sums (n,) of `numbers` (n,) float64 over all ranks. Collective."""
        hvd = self._hvd()
        name = f"{self.name} {direction}"
        return hvd.allreduce(numbers.cpu(), op=hvd.Sum, name=name).to(numbers.device)


def moments(features: Tensor, summed) -> tuple[int, Tensor, Tensor]:
    """Number of samples, mean (C,) and variance (C,) float64 of the features (B, C) of all ranks. summed(numbers,
    direction): their sums over all ranks. Collective."""
    num, width = features.shape
    sums = features.new_zeros(2 * width + 1, dtype=torch.float64)
    if num > 0:
        # float64: the difference of two sums below keeps enough digits where the mean is large
        variance, mean = (part.double() for part in torch.var_mean(features, 0, correction=0))
        sums = torch.cat([num * mean, num * (variance + mean.square()), sums.new_full((1,), num)])
    total, squares, count = summed(sums, "forward").split([width, width, 1])
    num = int(count)
    mean = total / max(num, 1)
    return num, mean, (squares / max(num, 1) - mean.square()).clamp_(min=0)


class Normalized(torch.autograd.Function):
    """(features - mean) * scale * weight + bias, where mean and scale depend on the features of all ranks."""

    @staticmethod
    def forward(ctx, features, weight, bias, mean, scale, num, summed):
        """features (B, C); the other tensors (C,); num: samples over all ranks; summed: as for moments()."""
        ctx.save_for_backward(features, weight, mean, scale)
        ctx.num, ctx.summed = num, summed
        return torch.addcmul(bias, features - mean, scale * weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grads):
        """Gradients of the sum of all ranks' losses. Those of weight and bias are of this rank's samples: the optimizer
        averages them as all others."""
        features, weight, mean, scale = ctx.saved_tensors
        normalized = (features - mean) * scale
        of_bias, of_weight = grads.sum(0), (grads * normalized).sum(0)
        sums = ctx.summed(torch.cat([of_bias, of_weight]).double(), "backward") / ctx.num
        mean_grad, mean_product = sums.to(grads).chunk(2)
        of_features = (grads - mean_grad - normalized * mean_product) * (scale * weight)
        return of_features, of_weight, of_bias, None, None, None, None
