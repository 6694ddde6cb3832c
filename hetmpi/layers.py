"""Layers between the rows of a table and a network."""

from __future__ import annotations

import torch

from hetmpi import _C


def look_up(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The row of each occurrence: rows (U, dim), index (...) int64 into them -> (..., dim).

    The gradient of a row is the sum over its occurrences, added in an order that does not depend on timing: bitwise
    reproducible. Equal to rows.index_select(0, index.flatten()), whose backward takes longer on the CPU
    (docs/results.md), but supports first derivatives only. Raises ValueError for another shape or dtype, on the CPU
    IndexError for an index beyond the rows."""
    if rows.dim() != 2 or index.dtype != torch.int64:
        raise ValueError(
            f"look_up: rows must be of shape (U, dim) and index int64, got {tuple(rows.shape)} and {index.dtype}"
        )
    flat = index.reshape(-1).contiguous()
    found = LookUp.apply(rows, flat) if torch.is_grad_enabled() else rows.index_select(0, flat)
    return found.view(*index.shape, rows.shape[1])


class LookUp(torch.autograd.Function):
    """rows.index_select(0, index) for index (n,)."""

    @staticmethod
    def forward(ctx, rows, index):
        ctx.save_for_backward(index)
        ctx.shape = rows.shape
        return rows.index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grads):
        (index,) = ctx.saved_tensors
        if grads.is_cpu and grads.dtype == torch.float32:
            sums = grads.new_zeros(ctx.shape)
            _C.scatter_add(grads.contiguous().numpy(), index.numpy(), sums.numpy())
            return sums, None
        no_padding = -1  # embedding's backward sorts; index_add_ on a GPU adds in any order
        return torch.ops.aten.embedding_dense_backward(grads, index, ctx.shape[0], no_padding, False), None
