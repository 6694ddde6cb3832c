"""SyntheticTriples: planted factors. Entities have random vectors; a relation is a translation, or a diagonal form of
them. The tail of a triple is the entity nearest to head + relation, or with the largest product, among all entities;
`noise` of the tails are drawn anew, uniformly.

A model that knows the factors ranks the tails of the triples without noise first. So its mean reciprocal rank over
tails is at least 1 - noise: best_mrr, of questions for tails alone."""

from __future__ import annotations

import numpy as np

from hetmpi.data.triples.reading import Triples
from hetmpi.data.triples.source import TripleData
from hetmpi.errors import UserError, check_integer, check_number

KINDS = ("bilinear", "translation")
CHUNK, MOST_SCORES = 1024, 1 << 26  # triples whose tails are found at a time, as far as 256 MB of scores allow


class SyntheticTriples(TripleData):
    """See TripleData.

    best_mrr  of tails, of a model that knows the factors: at least this much"""

    name = "kg_synthetic"

    def __init__(
        self, seed: int, entities: int = 2000, relations: int = 10, triples: int = 40_000, factors: int = 8,
        kind: str = "bilinear", noise: float = 0.1, held_out: float = 0.05,
    ):  # fmt: skip
        """triples: of all parts. kind: bilinear or translation. held_out: share of the triples of valid, and of
        test."""
        super().__init__(seed)
        check_integer("data.entities", entities, 2, 1 << 24)
        check_integer("data.relations", relations, 1, 1 << 20)
        check_integer("data.triples", triples, 3, 1 << 32)
        check_integer("data.factors", factors, 1, 1 << 10)
        check_number("data.noise", noise, 0, 1)
        check_number("data.held_out", held_out, 0, 0.4)
        if kind not in KINDS:
            raise UserError(f"data.kind must be {' or '.join(KINDS)}, got {kind}")
        self.sizes = entities, relations, triples, factors
        self.kind, self.noise, self.held_out = kind, noise, held_out
        self.best_mrr = 1 - noise

    def read(self) -> Triples:
        num_entities, num_relations, num, factors = self.sizes
        random = np.random.default_rng((self.seed, num_entities))
        entities = random.standard_normal((num_entities, factors)).astype(np.float32)
        relations = random.standard_normal((num_relations, factors)).astype(np.float32)
        heads, kinds = random.integers(num_entities, size=num), random.integers(num_relations, size=num)
        tails = np.empty(num, np.int64)
        chunk = max(1, min(CHUNK, MOST_SCORES // num_entities))
        for begin in range(0, num, chunk):
            chosen = slice(begin, begin + chunk)
            tails[chosen] = self._tails(entities, entities[heads[chosen]], relations[kinds[chosen]])
        is_noise = random.random(num) < self.noise
        tails[is_noise] = random.integers(num_entities, size=int(is_noise.sum()))
        triples = np.stack([heads, kinds, tails], axis=1)
        cut = int(self.held_out * num)
        parts = {"valid": triples[:cut], "test": triples[cut : 2 * cut], "train": triples[2 * cut :]}
        names = [f"e{number}" for number in range(num_entities)], [f"r{number}" for number in range(num_relations)]
        return Triples(parts, *names)

    def remarks(self) -> list[str]:
        """No line about repeated triples: they are planted."""
        return []

    def _tails(self, entities: np.ndarray, heads: np.ndarray, relations: np.ndarray) -> np.ndarray:
        if self.kind == "bilinear":
            return (heads * relations @ entities.T).argmax(1)
        aims = heads + relations
        return (2 * aims @ entities.T - np.square(entities).sum(1)).argmax(1)
