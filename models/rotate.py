"""RotatE (Sun et al., "RotatE: Knowledge Graph Embedding by Relational Rotation in Complex Space", ICLR 2019)."""

import torch

from hetmpi.models.link import HEAD, LinkModel, even, halves

BLOCK_NUMBERS = 1 << 18  # of a block of differences: it stays in a core's cache


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
        return self.gamma - torch.hypot(*halves(queries - entities)).sum(1)

    def scores(self, queries, entities):
        return self.gamma - SumOfModuli.apply(queries, entities)


def blocks_of(queries, entities) -> range:
    """First queries of blocks whose differences with all entities fit."""
    return range(0, len(queries), max(1, BLOCK_NUMBERS // max(1, entities.numel() // 2)))


class SumOfModuli(torch.autograd.Function):
    """queries (B, 2k), entities (N, 2k) -> the sums of |q - e| over k complex numbers, (B, N), in blocks: all
    differences at once would take B N 2k numbers of memory."""

    @staticmethod
    def forward(ctx, queries, entities):
        ctx.save_for_backward(queries, entities)
        sums = queries.new_empty(len(queries), len(entities))
        (a, b), (c, d), blocks = halves(queries), halves(entities), blocks_of(queries, entities)
        for begin in blocks:
            part = slice(begin, begin + blocks.step)
            real, imaginary = a[part, None] - c, b[part, None] - d  # (block, N, k)
            torch.sum(real.square_().addcmul_(imaginary, imaginary).sqrt_(), 2, out=sums[part])
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grads):
        queries, entities = ctx.saved_tensors
        of_queries, of_entities = torch.empty_like(queries), torch.zeros_like(entities)
        blocks = blocks_of(queries, entities)
        for begin in blocks:
            part = slice(begin, begin + blocks.step)
            pairs = zip(halves(queries[part]), halves(entities))
            real, imaginary = (q[:, None] - e for q, e in pairs)
            moduli = torch.hypot(real, imaginary)
            shares = torch.where(moduli > 0, grads[part, :, None] / moduli, 0)
            moved = torch.cat([real.mul_(shares), imaginary.mul_(shares)], 2)
            of_queries[part] = moved.sum(1)
            of_entities -= moved.sum(0)
        return of_queries, of_entities
