"""What becomes of a column without a rule: an id, a number, or nothing; judged by a sample of its values and the label.

An integer is a number if its order tells about the label: the rows of neighbouring values tell at least ENOUGH of what
other rows of the same value tell. A column whose values hardly recur teaches nothing, nor does a time that goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.data.tabular.convert import hashes, moments_of, no_value, numbers, trimmed
from hetmpi.data.tabular.rules import DROP, FLOAT, ID, INTEGER, LIST, MAP, NESTED, NUMBER, vector_size
from hetmpi.data.tabular.sampling import FileSample, texts_of
from hetmpi.data.tabular.times import DAY_SECONDS, moments, unit_of

LEAST_VALUES = 200  # of which a column is judged
FEW = 32  # distinct integers, or times, stay ids
RECURS = 1.5  # further rows of a value, on average, below which a column is dropped
FREQUENT = 0.01  # share of the rows of a value that does not count for this, as one that stands for a missing one
ENOUGH = 0.6  # of what the values tell that their order must tell
LEAST_TOLD = (
    10.0  # rows' worth of variance that the order must tell; without an order below 10 of 1,000 columns have it
)
SHARE = 0.02  # of the rows: those of a value count at most as so many, and as many on each side are neighbours
DAY_US = DAY_SECONDS * 10**6
OWN = "most rows have a value of their own: kind: id keeps it"
TIME = "a time: valid: {column, last} can hold out the last; kind: id keeps it"
PRIOR = 10.0  # rows of the mean label in the mean of each value


class Choice(NamedTuple):
    """kind: ID, NUMBER or DROP. why: for the column's line."""

    kind: str
    why: str = ""


def choose(
    types: Mapping[str, str],
    samples: Sequence[FileSample],
    label: np.ndarray | None,
    missing_of: Callable[[str], tuple[str, ...]],
) -> dict[str, Choice]:
    """The choice for each column. label: (n,) float64 of the sampled rows, NaN where there is none; None if there is no
    label, without which all integers are ids."""
    num_rows = sum(sample.num_rows for sample in samples)
    return {
        name: choice_of(kind, texts_of(samples, name).chunks, missing_of(name), label, num_rows)
        for name, kind in types.items()
    }


def choice_of(
    kind: str, pieces: list[pa.Array], missing: tuple[str, ...], label: np.ndarray | None, num_rows: float
) -> Choice:
    """The choice for a column of this type, with these values in the pieces of a sample of num_rows rows."""
    if kind == NESTED:
        return Choice(DROP, "nested values cannot be used")
    if vector_size(kind) is not None:
        return Choice(NUMBER)
    if kind in (LIST, MAP) or not sum(map(len, pieces)):
        return Choice(NUMBER if kind == FLOAT else ID)
    texts = pa.concat_arrays(pieces)
    codes = hashes(texts, 0, missing)
    present = codes != no_value(0)
    if not present.any():
        return Choice(DROP, "no row has a value: kind: id keeps it")
    if kind == FLOAT:
        return Choice(NUMBER)
    places = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    encoded = pa.array(codes[present]).dictionary_encode()
    recurs = recurring(encoded.indices.to_numpy().astype(np.int64), places[present], num_rows * present.mean())
    values = exact(texts.filter(pa.array(present))) if kind == INTEGER else None
    num_distinct = len(encoded.dictionary)
    times = times_in(texts.filter(pa.array(present)), values)
    if num_distinct > FEW and times is not None and (times % DAY_US).any():
        return Choice(DROP, TIME)
    if values is not None and is_running(values):
        return Choice(DROP, "a running number: kind: id keeps it")
    is_judged = values is not None and num_distinct > FEW and label is not None and len(label) == len(texts)
    if is_judged and has_order(values, label[present]):
        return Choice(NUMBER, "integers whose order tells: kind: id gives each a row")
    if recurs is not None and recurs < RECURS:
        return Choice(DROP, OWN if times is None else TIME)
    return Choice(ID, "integers taken as ids: kind: number for quantities" if values is not None else "")


def exact(texts: pa.Array) -> np.ndarray:
    """Integers as texts -> (n,) float64, NaN for others."""
    try:
        return trimmed(texts, ())[0].cast(pa.string()).cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:  # one is a text, in a column whose files differ
        return numbers(texts, ())[0].astype(np.float64)


def recurring(groups: np.ndarray, places: np.ndarray, num_rows: float) -> float | None:
    """How many further rows of all have the value of a row, on average, without frequent values: those of its piece,
    and as many of the others as pairs of rows in different pieces suggest. groups (n,) int64: the number of each row's
    value, from 0 on; places (n,) int64: its piece. None if there are too few rows."""
    is_rare = np.bincount(groups)[groups] <= max(2, FREQUENT * len(groups))
    groups, places, total = groups[is_rare], places[is_rare], int(is_rare.sum())
    if total < LEAST_VALUES:
        return None
    counts_here = pc.value_counts(pa.array(groups * (places.max() + 1) + places)).field("counts").to_numpy()
    sizes = np.bincount(places).astype(float)
    within = float((counts_here * (counts_here - 1.0)).sum())
    all_equal = float((np.bincount(groups).astype(float) ** 2).sum())
    across, possible = all_equal - float((counts_here**2.0).sum()), total**2.0 - float((sizes**2).sum())
    others = max(0.0, num_rows * is_rare.mean() - total / len(np.unique(places)))
    return within / total + (others * across / possible if possible else 0.0)


def times_in(texts: pa.Array, values: np.ndarray | None) -> np.ndarray | None:
    """Microseconds since 1970 (n,) int64 of distinct times, None if some value is no time. values: of integers, (n,)
    float64."""
    if values is not None:
        unit = unit_of(values.min(), values.max())
        return None if unit is None else moments(np.unique(values), unit)[0]
    found = moments_of(trimmed(pc.unique(texts), ())[0])
    return None if found.null_count else found.cast(pa.int64()).to_numpy()


def is_running(values: np.ndarray) -> bool:
    """Whether integers rise from row to row, each of its own."""
    num_own = len(np.unique(values))
    return num_own >= max(LEAST_VALUES, 0.99 * len(values)) and float((np.diff(values) > 0).mean()) > 0.99


def has_order(values: np.ndarray, label: np.ndarray) -> bool:
    """Whether rows of neighbouring values tell the label about as well as other rows of the same value. values, label:
    (n,) float64."""
    known = ~(np.isnan(values) | np.isnan(label))
    if known.sum() < LEAST_VALUES or np.ptp(label[known]) == 0:
        return False
    label = label[known]
    _, group, sizes = np.unique(values[known], return_inverse=True, return_counts=True)
    sums, num = np.bincount(group, label), len(label)
    weights = np.minimum(1.0, SHARE * num / sizes)  # of a row of each value
    total, mean = (weights * sizes).sum(), (weights * sums).sum() / (weights * sizes).sum()

    def told(guesses: np.ndarray) -> float:
        """The share of the label's variance that a guess for each row explains."""
        of_row = weights[group]
        return 1 - (of_row * (label - guesses) ** 2).sum() / (of_row * (label - mean) ** 2).sum()

    by_value = told((sums[group] - label + PRIOR * mean) / (sizes[group] - 1 + PRIOR))
    sizes, sums = sizes * weights, sums * weights
    sizes_to, sums_to = (np.concatenate([[0], np.cumsum(one)]) for one in (sizes, sums))
    begin = np.searchsorted(sizes_to, sizes_to[:-1] - SHARE * total, side="right") - 1
    end = np.searchsorted(sizes_to, sizes_to[1:] + SHARE * total)
    begin, end = np.maximum(begin, 0), np.minimum(end, len(sizes))
    near_sizes, near_sums = sizes_to[end] - sizes_to[begin] - sizes, sums_to[end] - sums_to[begin] - sums
    by_order = told(((near_sums + PRIOR * mean) / (near_sizes + PRIOR))[group])
    return by_order * total >= LEAST_TOLD and by_order >= ENOUGH * by_value


def label_of(pieces: list[pa.Array], missing: tuple[str, ...], positive: Sequence[str] | None) -> np.ndarray | None:
    """The label of sampled rows (n,) float64, NaN for none: whether it is one of `positive`, its number, or of texts
    whether it is the most frequent one. None without rows."""
    if not sum(map(len, pieces)):
        return None
    texts = pa.concat_arrays(pieces)
    codes = hashes(texts, 0, missing)
    if positive is not None:
        found = np.isin(codes, hashes(pa.array([text.encode() for text in positive], pa.binary()), 0, ())).astype(float)
    else:
        found = numbers(texts, missing)[0].astype(np.float64)
        known = codes[codes != no_value(0)]
        if len(known) and np.isnan(found).mean() > 0.5:
            values, counts = np.unique(known, return_counts=True)
            found = (codes == values[counts.argmax()]).astype(float)
    return np.where(codes == no_value(0), np.nan, found)
