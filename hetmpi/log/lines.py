"""The lines of a .jsonl file of a run folder as columns, without MPI or torch: of 100,000 lines in a second or two."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from hetmpi.bounded_file import LARGEST_NUMBER

BLOCK_BYTES = 4 << 20


class Lines:
    """Lines in the order of the file, of values that run_files.checked() accepts.

    columns  key -> (n,) float64, NaN in a line without a number for it
    lags     sums of the histograms of lags, by bin
    last     the last line, {} if there is none"""

    def __init__(self, columns: dict[str, np.ndarray], lags: np.ndarray, last: dict):
        self.columns, self.lags, self.last = columns, lags, last

    @staticmethod
    def of(lines: list[dict]) -> Lines:
        """Of lines that are parsed."""
        keys = dict.fromkeys(key for line in lines for key in line)
        columns = {key: np.array([number_of(line.get(key)) for line in lines], float) for key in keys}
        lags = [line["lags"] for line in lines if line.get("lags")]
        width = max(map(len, lags), default=0)
        padded = [bins + [0] * (width - len(bins)) for bins in lags]
        return Lines(columns, np.sum(padded, 0, float) if padded else np.empty(0), lines[-1] if lines else {})

    def __len__(self) -> int:
        return len(self.columns.get("step", ()))

    def table(self, keys: tuple[str, ...]) -> np.ndarray:
        """Values of keys (n, number of keys) float64, without the lines that lack a number for one of them."""
        if not all(key in self.columns for key in keys):
            return np.empty((0, len(keys)))
        values = np.stack([self.columns[key] for key in keys], axis=1)
        return values[~np.isnan(values).any(axis=1)]

    def slowest_ranks(self) -> Counter:
        """How often each rank was the slowest."""
        return Counter(self.table(("slowest_rank",))[:, 0].astype(int).tolist())


def number_of(value) -> float:
    """A value of JSON, NaN for one that is no number."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else np.nan


def read_columns(data: bytes, counts: tuple[str, ...], numbers: set[str], most_bins: int) -> Lines | None:
    """The columns of whole lines; None if a value is not of the type that the run log writes, so that the lines need
    another look. counts: keys of integers from 0 on. numbers: keys of numbers. most_bins: of a histogram."""
    num = data.count(b"\n")
    if data.count(b"{") != num:  # a nested object, or a line without values
        return None
    try:
        table = pj.read_json(pa.BufferReader(data), pj.ReadOptions(block_size=BLOCK_BYTES))
    except pa.ArrowException:
        return None
    if len(table) != num or "step" not in table.column_names or table["step"].null_count:
        return None
    columns, lags = {}, np.empty(0)
    for key, column in zip(table.column_names, table.columns):
        kind = column.type
        if key == "lags" and pa.types.is_list(kind):
            lags = bins_of(column, most_bins)
        elif pa.types.is_integer(kind) or (pa.types.is_floating(kind) and key not in counts):
            columns[key] = column_of(column, least=0 if key in counts else -LARGEST_NUMBER)
        elif not pa.types.is_null(kind) and (
            key in counts or key in numbers or key == "lags" or pa.types.is_nested(kind)
        ):
            return None
    if lags is None or any(values is None for values in columns.values()):
        return None
    return Lines(columns, lags, {})


def column_of(column: pa.ChunkedArray, least: float) -> np.ndarray | None:
    """(n,) float64, NaN for null; None if a number is out of range."""
    values = column.cast(pa.float64(), safe=False).to_numpy()
    given = values[~np.asarray(column.is_null())]
    return values if ((given >= least) & (given <= LARGEST_NUMBER)).all() else None


def bins_of(column: pa.ChunkedArray, most_bins: int) -> np.ndarray | None:
    """Sums of lists of counts by their place; None if they are no counts, or too many."""
    column = column.combine_chunks()
    sizes, flat = column.value_lengths().fill_null(0).to_numpy(), column.flatten()
    if pa.types.is_null(flat.type):
        return np.empty(0)
    if not pa.types.is_integer(flat.type) or flat.null_count or sizes.max(initial=0) > most_bins:
        return None
    counts, ends = flat.to_numpy(), np.cumsum(sizes)
    if counts.min(initial=0) < 0:
        return None
    places = np.arange(len(counts)) - np.repeat(ends - sizes, sizes)
    return np.bincount(places, counts, minlength=0)
