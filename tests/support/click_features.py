"""Clicks: a generated click-through source with two features of several values, three widths of rows and two row
optimizers. data._target_=click_features.Clicks"""

from dataclasses import replace

import numpy as np

from hetmpi.data.batch import Bag, Samples
from hetmpi.data.features import FeatureRequest, arrange

CLICKED = FeatureRequest("clicked", 0, pool="sum", share="item")
WANTED = [
    FeatureRequest("tags", 40, pool="mean", dim=4, optim={"rows": "sgd", "rows_lr": 0.5}),
    FeatureRequest("user", 100),
    CLICKED,
    FeatureRequest("item", 60, dim=12),
    FeatureRequest("city", 20, dim=4, optim={"rows": "sgd", "rows_lr": 0.5}),
    FeatureRequest("hour", 24),
]
MOST_VALUES = 4


class Clicks:
    """Sample i depends on (seed, i) alone. A fifth of the bags is empty; values repeat within bags."""

    name, num_dense, num_train, num_valid = "clicks", 3, 2000, 300

    def __init__(self, seed=0, **_):
        self.seed = seed
        self.features, self.tables = arrange(WANTED)

    def prepare(self, rank, size, barrier):
        barrier()

    def train(self, start, stop):
        drawn = [np.random.default_rng((self.seed, position)) for position in range(start, stop)]
        singles = [feature for feature in self.features if feature.pool is None]
        ids = np.array([[f.first + rng.integers(f.rows) for f in singles] for rng in drawn], np.int64)
        ids = ids.reshape(-1, len(singles))
        bags = tuple(self._bag(feature, drawn) for feature in self.features if feature.pool is not None)
        dense = np.array([rng.random(self.num_dense) for rng in drawn], np.float32)
        label = (np.array([rng.random() for rng in drawn]) < (ids[:, 0] % 2) * 0.5 + 0.2).astype(np.float32)
        return Samples(ids, dense.reshape(-1, self.num_dense), label, bags=bags)

    def valid(self, start, stop):
        return self.train(10**6 + start, 10**6 + stop)

    def _bag(self, feature, drawn):
        sizes = [int(rng.integers(MOST_VALUES + 1)) for rng in drawn]
        values = [feature.first + rng.integers(feature.rows // 2, size=size) for rng, size in zip(drawn, sizes)]
        values = np.concatenate([np.empty(0, np.int64), *values])
        return Bag(values, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


class Histories(Clicks):
    """Two histories of equal lengths, of items and of their cities, beside features of one value and a pooled one.
    data._target_=click_features.Histories"""

    name = "histories"

    def __init__(self, seed=0, **_):
        super().__init__(seed)
        own = [one for one in WANTED if one.name != "clicked"]
        histories = [FeatureRequest("cities", 0, pool="none", share="city"), replace(CLICKED, pool="none")]
        self.features, self.tables = arrange([*own, *histories])

    def train(self, start, stop):
        samples = super().train(start, stop)
        names = [feature.name for feature in self.features if feature.pool is not None]
        bags = dict(zip(names, samples.bags))
        values, [city] = bags["clicked"].values, [one for one in self.features if one.name == "city"]
        bags["cities"] = Bag(city.first + values % city.rows, bags["clicked"].offsets)
        return replace(samples, bags=tuple(bags[name] for name in names))


class OneLabel(Clicks):
    """Features of one value in one table. data._target_=click_features.OneLabel"""

    name = "one label"

    def __init__(self, seed=0, **_):
        self.seed = seed
        self.features, self.tables = arrange([FeatureRequest("user", 100), FeatureRequest("item", 60)])


class Labels(OneLabel):
    """Two labels, each missing in some samples. data._target_=click_features.Labels"""

    name, labels = "labels", ("click", "buy")

    def __init__(self, seed=0, label_weights=None, **_):
        super().__init__(seed)
        self.label_weights = label_weights

    def train(self, start, stop):
        samples = super().train(start, stop)
        bought = samples.label * (samples.ids[:, 1] % 3 == 0)
        label = np.stack([samples.label, bought], 1).astype(np.float32)
        label[samples.ids[:, 0] % 7 == 0, 0] = np.nan
        label[samples.dense[:, 0] < 0.3, 1] = np.nan
        return replace(samples, label=label)
