"""DLRM (Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019)."""

import torch
from torch import Tensor

from hetmpi.models.ctr import MLP, CTRModel, concat


class DLRM(CTRModel):
    """An MLP maps the dense features to one more embedding; a second MLP reads it and all pairwise dot products.

    Args: bottom, top: widths of the hidden layers of the two MLPs, whose outputs are of width `dim` and 1.
    """

    def __init__(self, num_fields: int, num_dense: int, dim: int, bottom: list[int], top: list[int]):
        super().__init__(num_fields, num_dense, dim, row_dim=dim)
        num_vectors = num_fields + 1
        pairs = torch.tril_indices(num_vectors, num_vectors, offset=-1)  # (2, pairs)
        self.register_buffer("pairs", pairs[0] * num_vectors + pairs[1], persistent=False)  # (pairs,) int64
        self.bottom = MLP([num_dense, *bottom, dim], bias=True)
        self.top = MLP([dim + len(self.pairs), *top, 1], bias=True, relu_at_end=False)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32; arguments as in CTRModel."""
        embeddings = self.look_up(rows, batch)  # (B, F, dim)
        dense = self.bottom(batch.dense)  # (B, dim)
        vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)  # (B, F + 1, dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)  # (B, (F + 1)^2)
        return self.top(concat(dense, dots.index_select(1, self.pairs))).squeeze(1)
