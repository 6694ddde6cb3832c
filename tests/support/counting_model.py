"""A model whose rows are counters: with optim.rows=sgd, optim.rows_lr equal to the number of ranks and
table.init_std=0, a row is minus the number of samples with its key. For checks that no sample is lost or repeated:
model._target_=counting_model.Counting"""

import numpy as np
import torch

from hetmpi.data.synthetic import Synthetic

CHUNK = 100_000


class Ones(torch.autograd.Function):
    """Zeros (B,), whose gradient of each row is the number of its look-ups, for any loss."""

    @staticmethod
    def forward(ctx, rows, index):
        ctx.save_for_backward(index)
        ctx.shape = rows.shape
        return rows.new_zeros(len(index))

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        counts = torch.bincount(index.flatten(), minlength=ctx.shape[0]).to(grad.dtype)
        return counts[:, None].expand(ctx.shape).contiguous(), None


class Counting(torch.nn.Module):
    def __init__(self, num_fields, num_dense, dim, **_):
        super().__init__()
        self.row_dim = dim
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, rows, batch):
        return Ones.apply(rows, batch.index) + self.bias


def settings(ranks: int) -> list[str]:
    """Settings of a run on `ranks` ranks."""
    return ["model._target_=counting_model.Counting", "optim.rows=sgd", f"optim.rows_lr={ranks}", "table.init_std=0"]


def assert_counted(weight: np.ndarray, samples: int, scale: float):
    """Checks that weight (num_rows, dim) holds exactly the counts of the stream's first samples."""
    data = Synthetic(0, scale=scale)
    expected = np.zeros(data.num_rows, np.int64)
    for begin in range(0, samples, CHUNK):
        ids = data.train(begin, min(begin + CHUNK, samples)).ids
        expected += np.bincount(ids.reshape(-1), minlength=data.num_rows)
    assert np.abs(weight + expected[:, None]).max() < 0.01, np.abs(weight + expected[:, None]).max()
