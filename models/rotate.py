"""RotatE (Sun et al., "RotatE: Knowledge Graph Embedding by Relational Rotation in Complex Space", ICLR 2019)."""

import torch

from hetmpi.layers import distances, sum_of_moduli
from hetmpi.models.link import HEAD, LinkModel, even, halves


class RotatE(LinkModel):
    """The score of (h, r, t) is gamma minus the sum of the moduli of h * r - t, where r is a rotation. A row of an
    entity consists of real parts, then imaginary parts, half of `dim` each; one of a relation of `dim` / 2 angles.

    Args:
        gamma: added to all scores; it matters to loss=logistic only.
        dropout, relation_dropout: as in LinkModel.
    """

    relation_std = torch.pi / 3**0.5  # as angles that are uniform over a turn

    def __init__(self, dim: int, gamma: float = 6.0, dropout: float = 0.0, relation_dropout: float = 0.0):
        super().__init__(dim, even(dim, type(self).__name__), dropout, relation_dropout)
        self.gamma = gamma

    def query(self, side, known, relations):
        (a, b), c, d = halves(known), relations.cos(), relations.sin()
        if side == HEAD:  # |h r - t| = |h - t / r|
            d = -d
        return torch.cat([a * c - b * d, a * d + b * c], 1)

    def pairs(self, queries, entities):
        return self.gamma - sum_of_moduli(queries - entities)

    def scores(self, queries, entities):
        return self.gamma - distances("moduli", queries, entities)
