"""A knowledge graph's batches for `bench traffic`: entities whose degrees follow Zipf's law, and shared negatives."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from hetmpi.data.synthetic import TRAIN, Zipf, scattering_stride, uniform, words

ENTITIES = 5_000_000  # times scale
NEGATIVES = 2  # stream of random numbers


class Links:
    """The entities of a rank's batch: heads, tails, and negatives that the batch shares, drawn uniformly from all
    entities or, with `local`, from those that the rank owns (partition round_robin)."""

    def __init__(self, seed: int, scale: float, zipf: float, negatives: int, local: bool, rank: int, size: int):
        self.num_rows, self.seed, self.negatives = round(scale * ENTITIES), seed, negatives
        self._law, self._stride = Zipf(np.array([self.num_rows]), zipf), scattering_stride(self.num_rows)
        self._own = (rank, size) if local else (0, 1)

    def train(self, start: int, stop: int):
        ends = uniform(words(self.seed, TRAIN, np.arange(2 * start, 2 * stop), 1))
        positive = self._law.ranks(ends)[:, 0] * self._stride % self.num_rows
        first, step = self._own
        drawn = np.random.default_rng((self.seed, NEGATIVES, start)).integers(
            (self.num_rows - first) // step, size=self.negatives
        )
        return SimpleNamespace(ids=np.concatenate([positive, drawn * step + first]))
