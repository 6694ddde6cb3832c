"""Synthetic: an endless stream of the shape of Criteo's, with labels drawn from a planted teacher, so that the best AUC
is known.

Sample i is a pure function of (seed, i): every random number is a hash of (seed, stream, i, column), after splitmix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Nothing is stored, not even the
teacher's weights, so memory does not depend on the scale, and any rank can generate any sample.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetmpi.data.batch import Samples
from hetmpi.data.source import check_slice
from hetmpi.errors import LARGEST, check_integer, check_number

# Distinct values of the 26 fields of Criteo Kaggle (HET, section 5.1; HET.md).
KAGGLE_FIELD_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652),
    *(2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
NUM_DENSE = 13
LEAST_SCALE, MOST_SCALE = 1e-9, 1e6  # up to 3.4e13 rows
MOST_ZIPF = 100.0  # beyond it, practically all ids of a field are equal
TRAIN, VALID, TEACHER = 0, 1, 2  # streams of random numbers


class Synthetic:
    """Samples of the shape of Criteo's: 13 dense features, 26 fields of Kaggle's sizes times `scale`, ids with a Zipf
    distribution.

    A bijection scatters the ids of a field, ordered by frequency, over the field's rows, so that frequent ids are not
    adjacent in any partition. Dense features are log(count + 1) of heavy-tailed counts.
    """

    name = "synthetic"
    is_valid_random = True
    num_fields, num_dense = len(KAGGLE_FIELD_ROWS), NUM_DENSE

    def __init__(
        self,
        seed: int,
        scale: float = 0.01,
        zipf: float = 1.05,
        num_train: int = 500_000,
        num_valid: int = 100_000,
    ):
        """scale: rows of each field relative to Kaggle's, where 1 is 33.8 M rows in total; a field keeps at least 4
        rows, or all if it has fewer. zipf: exponent of the distribution of ids, 0 for uniform. num_train: nominal
        samples of an epoch. Raises UserError for invalid values."""
        check_integer("data.seed", seed, -LARGEST - 1)
        check_number("data.scale", scale, LEAST_SCALE, MOST_SCALE)
        check_number("data.zipf", zipf, 0, MOST_ZIPF)
        check_integer("data.num_train", num_train, 1)
        check_integer("data.num_valid", num_valid, 1)
        self.seed, self.num_train, self.num_valid = seed, num_train, num_valid
        self.field_rows = [max(round(rows * scale), min(rows, 4)) for rows in KAGGLE_FIELD_ROWS]
        self.num_rows = sum(self.field_rows)
        rows = np.array(self.field_rows)
        self._rows, self._first = rows, np.cumsum(rows) - rows
        self._stride = np.array([scattering_stride(n) for n in self.field_rows])
        self._law = Zipf(rows, zipf)
        self._teacher = Teacher(seed, self._features(VALID, np.arange(CALIBRATION_SAMPLES)))

    def prepare(self, rank: int, size: int, barrier: Callable[[], None]) -> None:
        """No effect: nothing needs preparation."""

    def train(self, start: int, stop: int) -> Samples:
        """Positions [start, stop) of the endless training stream."""
        check_slice(start, stop, None)
        return self._samples(TRAIN, start, stop)

    def valid(self, start: int, stop: int) -> Samples:
        """Held-out positions [start, stop) of a stream of their own."""
        check_slice(start, stop, self.num_valid)
        return self._samples(VALID, start, stop)

    def _samples(self, stream: int, start: int, stop: int) -> Samples:
        ranks, keys, dense, chance = self._features(stream, np.arange(start, stop))
        probability = self._teacher.probability(ranks, keys, dense)
        label = (chance < probability).astype(np.float32)
        return Samples(keys, dense, label, probability.astype(np.float32))

    def _features(self, stream: int, positions: np.ndarray):
        """positions (B,) -> ranks (B, F), keys (B, F) int64, dense (B, num_dense) float32, chance (B,) in (0, 1)."""
        numbers = uniform(words(self.seed, stream, positions, self.num_fields + self.num_dense + 1))
        ranks = self._law.ranks(numbers[:, : self.num_fields])
        keys = ranks * self._stride % self._rows + self._first
        dense = np.log(np.floor(numbers[:, self.num_fields : -1] ** -DENSE_TAIL)).astype(np.float32)
        return ranks, keys, dense, numbers[:, -1]


# Counts follow P(count + 1 >= x) = x ** (-1 / tail): from columns that are nearly always 0 to widely spread ones.
DENSE_TAIL = np.linspace(0.25, 1.25, NUM_DENSE)


class Zipf:
    """The distribution P(k) ~ (k + 1) ** -exponent of the ranks k in [0, rows) of each field, sampled by inversion.

    This is rejection-inversion (Hörmann and Derflinger, "Rejection-inversion to generate variates from monotone
    discrete distributions", ACM TOMACS 6(3), 1996) without the rejection: rank 0 is exact, and the weight of each other
    rank is the integral of x ** -exponent over [k + 1/2, k + 3/2], which is 2.3 % too large at k = 1 for exponent 1.05,
    1 % at k = 2, less beyond. The weights sum to one exactly.
    """

    def __init__(self, rows: np.ndarray, exponent: float):
        """rows (F,) int64."""
        self._power = 1.0 - exponent
        self._last = rows - 1
        self._low = self._integral(1.5) - 1.0
        self._span = self._integral(rows + 0.5) - self._low

    def ranks(self, numbers: np.ndarray) -> np.ndarray:
        """numbers (B, F) uniform in (0, 1) -> ranks (B, F) int64."""
        area = self._low + numbers * self._span
        x = np.exp(area if self._power == 0 else np.log1p(self._power * area) / self._power)
        return np.clip((x - 0.5).astype(np.int64), 0, self._last)

    def chances(self, field: int) -> np.ndarray:
        """P(k) for all k of one field: (rows,) float64."""
        low, span = self._low, self._span[field]
        ends = self._integral(np.arange(int(self._last[field]) + 1) + 1.5)
        return np.diff(np.concatenate([[low], ends])) / span

    def _integral(self, x):
        return np.log(x) if self._power == 0 else np.expm1(self._power * np.log(x)) / self._power


class Teacher:
    """P(label = 1) = sigmoid(bias + gain * (first-order + second-order + dense effect)).

    First order: a weight per id. Second order: the inner products of all pairs of the sample's id vectors, as in a
    factorisation machine. Both are taken from one hash of (seed, key). Effects decrease with an id's rank, so that most
    of the variance is due to ids that occur often enough to be learned. Each effect is normalised on a fixed sample to
    mean 0 and to its share of the variance, for any scale and zipf.
    """

    def __init__(self, seed: int, calibration):
        """calibration: features, as from Synthetic._features, on which the effects are normalised."""
        self._base = base_of(seed, TEACHER)
        self._mean, self._factor = 0.0, 1.0
        effects = self._effects(*calibration[:3])
        self._mean = effects.mean(axis=0)
        self._factor = np.sqrt(EFFECT_SHARES) / effects.std(axis=0)

    def probability(self, ranks: np.ndarray, keys: np.ndarray, dense: np.ndarray) -> np.ndarray:
        """ranks, keys (B, F) int64, dense (B, num_dense) float32 -> (B,) float64."""
        effects = (self._effects(ranks, keys, dense) - self._mean) * self._factor
        logit = BIAS + GAIN * (effects[:, 0] + effects[:, 1] + effects[:, 2])
        return 1.0 / (1.0 + np.exp(-logit))

    def _effects(self, ranks, keys, dense) -> np.ndarray:
        """(B, 3) float64: first-order, second-order and dense effect."""
        hashes = mix(keys.astype(np.uint64) * GOLDEN + self._base)
        weights = hashes.view(np.uint16).reshape(*keys.shape, 4) / 65535.0 - 0.5  # (B, F, 4)
        weights *= (1.0 / np.sqrt(1.0 + ranks / FADING_RANK))[:, :, None]
        vectors = weights[:, :, 1:]
        pairs = np.square(vectors.sum(axis=1)) - np.square(vectors).sum(axis=1)  # (B, 3)
        signs = np.resize([1.0, -1.0], dense.shape[1])
        return np.stack([weights[:, :, 0].sum(axis=1), pairs.sum(axis=1), (dense * signs).sum(axis=1)], axis=1)


# Chosen by experiment: about 25 % positives, teacher AUC about 0.80.
BIAS, GAIN = -1.46, 1.38
EFFECT_SHARES = (0.65, 0.10, 0.25)  # of the logit's variance: first-order, second-order, dense
FADING_RANK = 100
CALIBRATION_SAMPLES = 1 << 14

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def words(seed: int, stream: int, positions: np.ndarray, columns: int) -> np.ndarray:
    """Random words for positions (B,) int64: (B, columns) uint64, each a hash of (seed, stream, position, column)."""
    of_sample = mix(positions.astype(np.uint64) * GOLDEN + base_of(seed, stream))
    return mix(of_sample[:, None] + np.arange(1, columns + 1, dtype=np.uint64) * GOLDEN)


def base_of(seed: int, stream: int) -> np.ndarray:
    """First number of a stream: (1,) uint64; an array, since numpy warns about overflow of scalars."""
    return mix(mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)) + GOLDEN * np.array([stream + 1], np.uint64))


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, uint64 to uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(words: np.ndarray) -> np.ndarray:
    """uint64 words -> float64 in the open interval (0, 1)."""
    return ((words >> np.uint64(11)) + 0.5) * 2.0**-53


def scattering_stride(rows: int) -> int:
    """A step that visits every residue of `rows` and lands far apart: near its golden section and coprime to it."""
    stride = max(1, round(rows * 0.6180339887498949))
    while np.gcd(stride, rows) != 1:
        stride += 1
    return stride
