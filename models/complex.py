"""ComplEx (Trouillon et al., "Complex Embeddings for Simple Link Prediction", ICML 2016)."""

import torch

from hetmpi.models.link import HEAD, ProductModel, even, halves


class ComplEx(ProductModel):
    """The score of (h, r, t) is the real part of the sum of h * r * conjugate(t). A row consists of the real parts,
    then the imaginary parts, half of `dim` each.

    Args: dropout, relation_dropout: as in LinkModel.
    """

    def __init__(self, dim: int, dropout: float = 0.0, relation_dropout: float = 0.0):
        even(dim, type(self).__name__)
        super().__init__(dim, dim, dropout, relation_dropout)

    def query(self, side, known, relations):
        (a, b), (c, d) = halves(known), halves(relations)
        if side == HEAD:  # t times the conjugate of r
            d = -d
        return torch.cat([a * c - b * d, a * d + b * c], 1)
