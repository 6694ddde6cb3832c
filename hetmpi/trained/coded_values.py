"""Values of an id column as they stand in files, without missing ones, and their codes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from hetmpi.data.tabular.convert import NO_INTEGER, flat_values, hashes, integers, no_value, typed
from hetmpi.data.tabular.dialect import is_utf8
from hetmpi.data.tabular.reading import HASH, StoredColumn


def are_utf8(values: pa.Array) -> np.ndarray:
    """Which values can be written as text (n,) bool."""
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        return np.array([text is None or is_utf8(text) for text in values.to_pylist()], bool)
    return np.ones(len(values), bool)


def coded(values: pa.Array, column: StoredColumn, missing: tuple[str, ...]) -> tuple[pa.Array, np.ndarray, int]:
    """The values of a column, those of lists one after the other, without missing ones and texts that are not UTF-8;
    their hashes or integers (n,) int64; the number of such texts."""
    if column.is_list:
        values = flat_values(values, column)
    values = typed(values, pa.string())
    is_bad = ~are_utf8(values)
    codes = hashes(values, column.seed, missing) if column.as_ == HASH else integers(values, missing)[0]
    none = no_value(column.seed) if column.as_ == HASH else NO_INTEGER
    is_wanted = (codes != none) & ~is_bad
    return values.filter(pa.array(is_wanted)), codes[is_wanted], int(is_bad.sum())
