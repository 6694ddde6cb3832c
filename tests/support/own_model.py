"""The file of a model of one's own, as MODEL.format(name=CLASS)."""

MODEL = """
import torch
from hetmpi.layers import look_up

class {name}(torch.nn.Module):
    def __init__(self, num_fields, num_dense, dim):
        super().__init__()
        self.row_dim = dim
        self.out = torch.nn.Linear(num_fields * dim + num_dense, 1)

    def forward(self, rows, batch):
        return self.out(torch.cat([look_up(rows, batch.index).flatten(1), batch.dense], 1)).squeeze(1)
"""
