"""A hot workload for `bench staleness`: few rows, each in many samples, and labels that need pairs of fields.

Small tables of hot rows are the hardest for a cache: every rank uses most rows in most steps, and rows change much. A
linear model of the fields cannot learn the labels, and an MLP on the embeddings can.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hetmpi.data.batch import Samples
from hetmpi.data.synthetic import TRAIN, VALID, Zipf, scattering_stride, uniform, words
from hetmpi.layers import look_up
from hetmpi.models.ctr import MLP

FIELD_ROWS = (2000, 1500, 700, 500, 300, 200, 100, 50, 20, 12)  # 5,382 rows, ten fields
ZIPF = 0.7
NUM_TRAIN = 200_000  # samples of an epoch, which later epochs repeat in another order
PAIRS = ((0, 1), (2, 3), (4, 5))  # fields whose products make a part of the label
LINEAR, GAIN = 0.6, 8.0  # weight of the fields alone, standard deviation of the logit
MEAN = 1.0  # of the numbers that are multiplied: with 0, training stays on plateaus for hundreds of steps
CALIBRATION_SAMPLES = 1 << 14


class Hot:
    """Implements hetmpi/data/source.py, Source. logit = GAIN * (sum of z_a . z_b over PAIRS + a weight per id),
    normalised; z are two normal numbers per id."""

    name, num_dense = "hot", 1
    num_fields, field_rows, num_rows = len(FIELD_ROWS), list(FIELD_ROWS), sum(FIELD_ROWS)

    def __init__(self, seed: int, num_valid: int):
        self.seed, self.num_train, self.num_valid = seed, NUM_TRAIN, num_valid
        self._rows = np.array(FIELD_ROWS)
        self._first = np.cumsum(self._rows) - self._rows
        self._stride = np.array([scattering_stride(n) for n in FIELD_ROWS])
        self._law = Zipf(self._rows, ZIPF)
        draw = np.random.default_rng(seed)
        self._z = MEAN + draw.standard_normal((self.num_rows, 2))
        self._weight = LINEAR * draw.standard_normal(self.num_rows)
        effects = self._effects(self._features(VALID, np.arange(CALIBRATION_SAMPLES))[0])
        self._mean, self._gain = effects.mean(), GAIN / effects.std()

    def prepare(self, rank: int, size: int, barrier) -> None:
        """No effect: nothing needs preparation."""

    def train(self, start: int, stop: int) -> Samples:
        epoch, place = np.divmod(np.arange(start, stop), self.num_train)
        return self._samples(TRAIN, (place * scattering_stride(self.num_train) + epoch * 7919) % self.num_train)

    def valid(self, start: int, stop: int) -> Samples:
        return self._samples(VALID, np.arange(start, stop))

    def _samples(self, stream: int, positions: np.ndarray) -> Samples:
        keys, chance = self._features(stream, positions)
        probability = 1 / (1 + np.exp(-self._gain * (self._effects(keys) - self._mean)))
        dense, label = np.zeros((len(keys), 1), np.float32), (chance < probability).astype(np.float32)
        return Samples(keys, dense, label, probability.astype(np.float32))

    def _features(self, stream: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """positions (B,) -> keys (B, F) int64, chance (B,)."""
        numbers = uniform(words(self.seed, stream, positions, self.num_fields + 1))
        return self._law.ranks(numbers[:, :-1]) * self._stride % self._rows + self._first, numbers[:, -1]

    def _effects(self, keys: np.ndarray) -> np.ndarray:
        z = self._z[keys]
        return sum((z[:, a] * z[:, b]).sum(1) for a, b in PAIRS) + self._weight[keys].sum(1)


class Deep(torch.nn.Module):
    """An MLP of three layers on the concatenated embeddings. has_norm: with batch normalisation over all ranks."""

    def __init__(self, num_fields: int, dim: int, has_norm: bool):
        super().__init__()
        self.layers = MLP([num_fields * dim, 128, 64, 1], bias=True, relu_at_end=False, batch_norm=has_norm)

    def forward(self, rows: Tensor, batch) -> Tensor:
        return self.layers(look_up(rows, batch.index).flatten(1)).squeeze(1)
