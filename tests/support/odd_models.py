"""Models that violate usual assumptions of trainers: model._target_=odd_models.UsesALayerOnRankZero"""

import torch

from hetmpi.layers import look_up
from hetmpi.world.mpi import MPI


class UsesALayerOnRankZero(torch.nn.Module):
    """Logistic regression with a layer that only rank 0 uses."""

    def __init__(self, num_fields, num_dense, dim):
        super().__init__()
        self.row_dim, width = dim, num_fields * dim + num_dense
        self.out, self.extra = torch.nn.Linear(width, 1), torch.nn.Linear(width, 1)

    def forward(self, rows, batch):
        features = torch.cat([look_up(rows, batch.index).flatten(1), batch.dense], 1)
        return (self.out(features) + (self.extra(features) if MPI.COMM_WORLD.rank == 0 else 0)).squeeze(1)


class UsesNoDenseLayerOnRankOne(UsesALayerOnRankZero):
    """The same with a frozen layer and an unused one; no gradient at all on rank 1."""

    def __init__(self, num_fields, num_dense, dim):
        super().__init__(num_fields, num_dense, dim)
        self.frozen, self.unused = torch.nn.Linear(3, 3).requires_grad_(False), torch.nn.Linear(3, 3)

    def forward(self, rows, batch):
        return look_up(rows, batch.index).sum((1, 2)) if MPI.COMM_WORLD.rank == 1 else super().forward(rows, batch)


class TellsItsMask(UsesALayerOnRankZero):
    """The same with dropout; prints the part that it drops of 32 numbers in each step of a training."""

    def __init__(self, num_fields, num_dense, dim):
        super().__init__(num_fields, num_dense, dim)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, rows, batch):
        kept = self.dropout(torch.ones(32))
        if self.training:
            mask = "".join("01"[value == 0] for value in kept.tolist())
            print(f"rank {MPI.COMM_WORLD.rank} drops {mask}\n", end="", flush=True)
        return super().forward(rows, batch) + 0 * kept.sum()


class Poison(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grads):
        return torch.full_like(grads, float("inf"))


class BadGradients(torch.nn.Module):
    """Logistic regression; the gradients of its `what`, rows or dense, are infinite in call number `at` on rank 1."""

    def __init__(self, num_fields, num_dense, dim, what, at):
        super().__init__()
        self.row_dim, self.what, self.at, self.calls = dim, what, at, 0
        self.out = torch.nn.Linear(num_fields * dim + num_dense, 1)

    def forward(self, rows, batch):
        is_bad = torch.is_grad_enabled() and self.calls == self.at and MPI.COMM_WORLD.rank == 1
        self.calls += torch.is_grad_enabled()
        rows = Poison.apply(rows) if is_bad and self.what == "rows" else rows
        weight = Poison.apply(self.out.weight) if is_bad and self.what == "dense" else self.out.weight
        features = torch.cat([look_up(rows, batch.index).flatten(1), batch.dense], 1)
        return torch.nn.functional.linear(features, weight, self.out.bias).squeeze(1)


class FailsAt(torch.nn.Module):
    """Raises in the given method, on rank 0."""

    def __init__(self, num_fields, num_dense, dim, at, **_):
        super().__init__()
        self.row_dim, self.out = dim, torch.nn.Linear(1, 1)
        if at == "making" and MPI.COMM_WORLD.rank == 0:
            raise ValueError("mine")

    def forward(self, rows, batch):
        if MPI.COMM_WORLD.rank == 0:
            raise OSError("mine")
        return self.out(rows[batch.index[:, 0], :1]).squeeze(1)


class HasNoParameters(torch.nn.Module):
    def __init__(self, num_fields, num_dense, dim, **_):
        super().__init__()
        self.row_dim = dim
