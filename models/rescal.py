"""RESCAL (Nickel et al., "A Three-Way Model for Collective Learning on Multi-Relational Data", ICML 2011)."""

import torch

from hetmpi.models.link import HEAD, ProductModel


class Rescal(ProductModel):
    """The score of (h, r, t) is h R t, where the row of a relation consists of the `dim` rows of the matrix R.

    Args: dropout, relation_dropout: as in LinkModel.
    """

    def __init__(self, dim: int, dropout: float = 0.0, relation_dropout: float = 0.0):
        super().__init__(dim, dim * dim, dropout, relation_dropout)

    def query(self, side, known, relations):
        matrices = relations.view(-1, self.row_dim, self.row_dim)
        return torch.einsum("brt,bt->br" if side == HEAD else "brt,br->bt", matrices, known)
