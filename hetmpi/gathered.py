"""Vectors of all ranks as one tensor, with gradients: in-batch negatives are the items of the batches of all ranks."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from hetmpi.batch_norm import BatchNorm

DIGIT = 1 << 20  # integers travel as two numbers below it, which are exact in 32 bits


def of_ranks(numbers: list[int]) -> Tensor:
    """The integers (n,) of each rank, on all ranks: (size, n) int64; of this one where nothing sums (reducing).
    Collective."""
    mine, hvd = torch.tensor([numbers], dtype=torch.float64), reducing()
    if hvd is None:
        return mine.long()
    whole = mine.new_zeros(hvd.size(), len(numbers))
    whole[hvd.rank()] = mine
    return summed(whole, "sizes").long()


def gathered(vectors: Tensor, labels: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors (n, W) float32 of each rank, below those of the ranks before it, and their labels (n,) int64 >= 0:
    (N, W) and (N,). sizes: n of each rank, (size,) int64. The gradient of a vector is the sum of those of all ranks.
    Collective, forward and backward.

    Horovod and MpiReductions share the allreduce alone: each rank sums its vectors in zeros, which moves twice the
    bytes of an allgather, and as many in backward."""
    if reducing() is None:
        return vectors, labels
    ends = sizes.cumsum(0).tolist()
    begin = ends[reducing().rank()] - len(vectors)
    whole, digits = Gathered.apply(vectors, labels, begin, ends[-1])
    high, low = digits.long().unbind(1)
    return whole, high * DIGIT + low


def reducing():
    """What sums over the ranks (hetmpi/reductions.py); None on one rank, and where nothing has started."""
    hvd = BatchNorm.reductions or sys.modules.get("horovod.torch")
    return hvd if hvd is not None and hvd.is_initialized() and hvd.size() > 1 else None


def summed(numbers: Tensor, name: str) -> Tensor:
    """The sums of `numbers` over all ranks. Collective."""
    hvd = reducing()
    return hvd.allreduce(numbers.cpu(), op=hvd.Sum, name=f"gathered {name}").to(numbers.device)


class Gathered(torch.autograd.Function):
    """The vectors of all ranks, and the two digits of their labels (N, 2) float32."""

    @staticmethod
    def forward(ctx, vectors, labels, begin, total):
        ctx.own, width = slice(begin, begin + len(vectors)), vectors.shape[1]
        whole = vectors.new_zeros(total, width + 2)
        whole[ctx.own, :width] = vectors
        whole[ctx.own, width] = (labels // DIGIT).to(vectors)
        whole[ctx.own, width + 1] = (labels % DIGIT).to(vectors)
        found, digits = summed(whole, "forward").split([width, 2], dim=1)
        ctx.mark_non_differentiable(digits)
        return found.contiguous(), digits.contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grads, _):
        return summed(grads.contiguous(), "backward")[ctx.own], None, None, None
