"""Pairs: generated pairs of queries and items, with histories, features of several values, two widths of rows and
numbers. data._target_=pairs.Pairs"""

import numpy as np

from hetmpi.data.batch import Bag, Samples
from hetmpi.data.features import FeatureRequest, arrange

ITEMS, TRAINED, VIEWED, MOST_VALUES = 44, 36, 40, 5  # of histories; the last items are in held-out rows alone
WANTED = [
    FeatureRequest("user", 50),
    FeatureRequest("kind", 8, dim=4),
    FeatureRequest("tags", 20, pool="mean", dim=4),
    FeatureRequest("item", ITEMS),
    FeatureRequest("viewed", 0, pool="none", share="item"),
]


class Pairs:
    """Sample i depends on (seed, i) alone, and repeats after an epoch. Histories may be empty."""

    name, dense_names, num_train, num_valid = "pairs", ["age", "price"], 500, 70

    def __init__(self, seed=0, **_):
        self.seed = seed
        self.features, self.tables = arrange(WANTED)

    def prepare(self, rank, size, barrier):
        barrier()

    def train(self, start, stop):
        samples = self._samples([position % self.num_train for position in range(start, stop)], TRAINED)
        samples.start = start
        return samples

    def valid(self, start, stop):
        return self._samples(range(10**6 + start, 10**6 + stop), ITEMS)

    def _samples(self, positions, num_items):
        drawn = [np.random.default_rng((self.seed, position)) for position in positions]
        singles = [feature for feature in self.features if feature.pool is None]
        numbers = {"item": lambda rng: int(num_items * rng.random() ** 2)}
        ids = [[f.first + numbers.get(f.name, lambda rng: rng.integers(f.rows))(rng) for f in singles] for rng in drawn]
        several = [feature for feature in self.features if feature.pool is not None]
        bags = tuple(self._bag(feature, drawn) for feature in several)
        dense = np.array([rng.normal(size=2) for rng in drawn], np.float32).reshape(-1, 2)
        ids = np.array(ids, np.int64).reshape(-1, len(singles))
        return Samples(ids, dense, np.zeros(len(drawn), np.float32), bags=bags)

    def _bag(self, feature, drawn):
        sizes = [int(rng.integers(MOST_VALUES + 1)) for rng in drawn]
        num = VIEWED if feature.name == "viewed" else feature.rows
        values = [feature.first + rng.integers(num, size=size) for rng, size in zip(drawn, sizes)]
        values = np.concatenate([np.empty(0, np.int64), *values])
        return Bag(values, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
