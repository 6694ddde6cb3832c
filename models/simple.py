"""SimplE (Kazemi and Poole, "SimplE Embedding for Link Prediction in Knowledge Graphs", NeurIPS 2018)."""

import torch

from hetmpi.models.link import HEAD, ProductModel, even, halves


class SimplE(ProductModel):
    """The score of (h, r, t) is half of a(h) * r * b(t) + a(t) * r' * b(h), summed, where a row of an entity consists
    of a and b, and one of a relation of r and its inverse r', half of `dim` each.

    Args: dropout, relation_dropout: as in LinkModel.
    """

    def __init__(self, dim: int, dropout: float = 0.0, relation_dropout: float = 0.0):
        even(dim, type(self).__name__)
        super().__init__(dim, dim, dropout, relation_dropout)

    def query(self, side, known, relations):
        (a, b), (forth, back) = halves(known), halves(relations)
        if side == HEAD:
            forth, back = back, forth
        return torch.cat([back * b, forth * a], 1) / 2
