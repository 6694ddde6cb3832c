"""DistMult (Yang et al., "Embedding Entities and Relations for Learning and Inference in Knowledge Bases", ICLR
2015)."""

from hetmpi.models.link import ProductModel


class DistMult(ProductModel):
    """The score of (h, r, t) is the sum of h * r * t.

    Args: dropout, relation_dropout: as in LinkModel.
    """

    def __init__(self, dim: int, dropout: float = 0.0, relation_dropout: float = 0.0):
        super().__init__(dim, dim, dropout, relation_dropout)

    def query(self, side, known, relations):
        return known * relations
