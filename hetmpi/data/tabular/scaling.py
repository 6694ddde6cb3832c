"""The transform `auto` of numbers: standardized by the training rows, after a logarithm where they are skewed.

Decided once, from moments that are counted when the data are prepared; a saved encoder keeps the decision."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

SKEWED = 1.0  # absolute skewness above which a logarithm is tried; 2 for an exponential distribution
FARTHEST = 1e6  # deviations from the mean, so that no number is infinite in float32
LESS_SKEWED = 0.8  # the logarithm is used if it multiplies the skewness by less than this


class Moments(NamedTuple):
    """Number, mean, and sums of squared and cubed differences from the mean, of a set of numbers."""

    num: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    cubes: float = 0.0

    @staticmethod
    def of(values: np.ndarray) -> Moments:
        """values (n,), n > 0."""
        mean = values.mean(dtype=np.float64)
        gaps = values - mean
        squares = np.square(gaps, dtype=np.float64)
        return Moments(float(len(values)), float(mean), float(squares.sum()), float((squares * gaps).sum()))

    @property
    def skewness(self) -> float:
        return self.cubes / self.num / (self.squares / self.num) ** 1.5 if self.squares else 0.0

    @property
    def deviation(self) -> float:
        return math.sqrt(self.squares / self.num) if self.num else 0.0


def join(a: Iterable[float], b: Iterable[float]) -> Moments:
    """The moments of two sets of numbers together (Pébay, "Formulas for robust, one-pass parallel computation of
    covariances and arbitrary-order statistical moments", 2008)."""
    (num, mean, squares, cubes), (other_num, other_mean, other_squares, other_cubes) = a, b
    total, gap = num + other_num, other_mean - mean
    if not total:
        return Moments()
    mixed = gap * gap * num * other_num / total
    return Moments(
        total,
        mean + gap * other_num / total,
        squares + other_squares + mixed,
        cubes
        + other_cubes
        + mixed * gap * (num - other_num) / total
        + 3.0 * gap * (num * other_squares - other_num * squares) / total,
    )


def log_of(values: np.ndarray) -> np.ndarray:
    """log(1 + x) of values (n,) as float64, with the sign of x, so that it is defined everywhere."""
    values = values.astype(np.float64)
    return np.copysign(np.log1p(np.abs(values)), values)


def standardized(values: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """(values - mean) / deviation, at most FARTHEST from 0. values (n,) float64 -> (n,) float32."""
    return np.clip((values - mean) / deviation, -FARTHEST, FARTHEST).astype(np.float32)


class Scaling(NamedTuple):
    """(x - mean) / deviation, of log_of(x) where is_log. A deviation of 0: all training rows have one value or none."""

    is_log: bool
    mean: float
    deviation: float

    @staticmethod
    def of(values: np.ndarray) -> Scaling:
        """By values (n,), of which those that are not finite count as missing."""
        present = values[np.isfinite(values)]
        if not len(present):
            return Scaling(False, 0.0, 0.0)
        return Scaling.chosen(Moments.of(present), Moments.of(log_of(present)))

    @staticmethod
    def chosen(plain: Moments, log: Moments) -> Scaling:
        """By the moments of the training rows' numbers, and of their logarithms."""
        if not plain.squares:  # exact, as sums of equal float32 values are in float64
            return Scaling(False, plain.mean, 0.0)
        skewness = abs(plain.skewness)
        is_log = skewness > SKEWED and abs(log.skewness) < LESS_SKEWED * skewness
        moments = log if is_log else plain
        return Scaling(is_log, moments.mean, moments.deviation)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """values (n,) float32, NaN where missing -> (n,) float32."""
        if not self.deviation:
            return np.zeros(len(values), np.float32)
        values = log_of(values) if self.is_log else values.astype(np.float64)
        return standardized(values, self.mean, self.deviation)

    def __str__(self) -> str:
        if not self.deviation:
            return "one value or none in the training rows: always 0"
        x, end = ("log(1 + x)", ", as it is skewed") if self.is_log else ("x", "")
        sign = "+" if self.mean < 0 else "-"
        return f"({x} {sign} {abs(self.mean):.4g}) / {self.deviation:.4g}{end}"
