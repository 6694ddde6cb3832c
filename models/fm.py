"""Factorization machine of degree 2 (Rendle, "Factorization Machines", ICDM 2010)."""

import torch
from torch import Tensor, nn

from hetmpi.models.ctr import CTRModel, FirstOrder
from hetmpi.models.deepfm import second_order


class FM(CTRModel):
    """A bias, a weight per feature, and the dot products of the vectors of all pairs of features, times their values
    (equation 1). An id has the value 1; a dense feature has a value, a weight and a vector of its own.

    A table row consists of the vector in its first `dim` columns and the weight of its id in the last one, so `row_dim`
    is `dim + 1`.
    """

    def __init__(self, num_fields: int, num_dense: int, dim: int):
        super().__init__(num_fields, num_dense, dim, row_dim=dim + 1)
        self.linear = FirstOrder(num_dense)
        # As small as the rows at their start.
        self.vectors = nn.Parameter(0.01 * torch.randn(num_dense, dim)) if num_dense > 0 else None

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32; arguments as in CTRModel."""
        rows_of_sample = self.look_up(rows, batch)  # (B, F, dim + 1)
        vectors = rows_of_sample[..., :-1]  # (B, F, dim)
        if self.vectors is not None:
            vectors = torch.cat([vectors, batch.dense.unsqueeze(2) * self.vectors], dim=1)  # (B, F + num_dense, dim)
        return self.linear(rows_of_sample[..., -1], batch.dense) + second_order(vectors)
