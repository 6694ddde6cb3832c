"""DLRM (Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019)."""

import torch
from torch import Tensor

from hetmpi.models.ctr import MLP, CTRModel, concat


class DLRM(CTRModel):
    """An MLP maps the dense features to one more embedding; a second MLP reads it and all pairwise dot products.
    Without dense features there is no such embedding, and no first MLP.

    Args: bottom, top: widths of the hidden layers of the two MLPs, whose outputs are of width `dim` and 1; dropout,
    batch_norm: as in MLP.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, bottom: list[int], top: list[int], dropout: float = 0.0,
        batch_norm: bool = False, num_classes: int | None = None,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, dim, num_classes)
        num_vectors, extra = num_fields + (num_dense > 0), {"dropout": dropout, "batch_norm": batch_norm}
        if num_vectors < 2:
            raise ValueError("DLRM: needs two features or more to multiply, got one field and num_dense=0")
        pairs = torch.tril_indices(num_vectors, num_vectors, offset=-1)  # (2, pairs)
        self.register_buffer("pairs", pairs[0] * num_vectors + pairs[1], persistent=False)  # (pairs,) int64
        self.bottom = MLP([num_dense, *bottom, dim], bias=True, **extra) if num_dense > 0 else None
        width = len(self.pairs) + (dim if num_dense > 0 else 0)
        self.top = MLP([width, *top, self.num_outputs], bias=True, relu_at_end=False, **extra)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32, or (B, num_classes); arguments as in CTRModel."""
        vectors = embeddings = self.look_up(rows, batch)  # (B, F, dim)
        dense = []
        if self.bottom is not None:
            dense = [self.bottom(batch.dense)]  # (B, dim)
            vectors = torch.cat([dense[0].unsqueeze(1), embeddings], dim=1)  # (B, F + 1, dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)  # (B, F^2), with dense features (F + 1)^2
        return self.logits(self.top(concat(*dense, dots.index_select(1, self.pairs))))
