"""TransE (Bordes et al., "Translating Embeddings for Modeling Multi-relational Data", NIPS 2013)."""

import torch

from hetmpi.layers import distances
from hetmpi.models.link import HEAD, LinkModel


class TransE(LinkModel):
    """The score of (h, r, t) is gamma minus the distance of h + r and t.

    Args:
        norm: 1 for the sum of absolute differences, 2 for the Euclidean distance.
        gamma: added to all scores; it matters to loss=logistic only.
        dropout, relation_dropout: as in LinkModel.
    """

    def __init__(
        self, dim: int, norm: int = 1, gamma: float = 0.0, dropout: float = 0.0, relation_dropout: float = 0.0
    ):
        super().__init__(dim, dim, dropout, relation_dropout)
        if norm not in (1, 2):
            raise ValueError(f"TransE: norm must be 1 or 2, got {norm}")
        self.norm, self.gamma = norm, gamma

    def query(self, side, known, relations):
        return known - relations if side == HEAD else known + relations

    def pairs(self, queries, entities):
        return self.gamma - torch.linalg.vector_norm(queries - entities, ord=self.norm, dim=1)

    def scores(self, queries, entities):
        return self.gamma - distances("absolute" if self.norm == 1 else "euclidean", queries, entities)
