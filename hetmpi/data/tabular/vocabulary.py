"""Vocabularies: the distinct training values of an id column with their counts, from its prepared files.

They are counted when a rule needs them first, column by column, as hashed columns do not. Memory is bounded by
RUN_VALUES and the number of distinct values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import xxhash

from hetmpi.data.checked import CheckedParquet, load_array, save_array
from hetmpi.data.tabular.files import DataError
from hetmpi.data.tabular.prepare import NO_SPACE

RUN_VALUES = 1 << 22  # sorted at once


def path_of(folder: str, manifest: dict, columns: list[int]) -> str:
    """The file of the counts over the prepared columns, which share rows."""
    identity = repr((manifest["units"], columns)).encode()
    return os.path.join(folder, f"counts-{xxhash.xxh3_64_hexdigest(identity)}.npy")


def count(folder: str, manifest: dict, columns: list[int], none: int) -> None:
    """Writes the counts of all values but `none`, unless the file exists. Raises DataError for a folder that is full or
    not writable."""
    final = path_of(folder, manifest, columns)
    if os.path.exists(final):
        return
    try:
        counted = np.stack(merged(read_values(folder, list(manifest["train"]), columns)))
        save_array(final, counted[:, counted[0] != none])
    except OSError as error:
        full = ": no space left" if error.errno in NO_SPACE else f": {error.strerror or error}"
        raise DataError(f"data.cache={folder}{full} while counting distinct values; it must be writable") from error


def load(folder: str, manifest: dict, columns: list[int], min_count: int) -> np.ndarray:
    """The values (n,) int64 seen at least min_count times, sorted."""
    values, counts = load_array(path_of(folder, manifest, columns), is_mapped=True)
    return values if min_count == 1 else np.ascontiguousarray(values[counts >= min_count])


def read_values(folder: str, files: list[str], columns: list[int]) -> Iterator[np.ndarray]:
    """The values (n,) int64 of the columns in the training files, in runs of about RUN_VALUES."""
    names = [f"c{i}" for i in columns]
    waiting, num = [], 0
    for path in files:
        file = CheckedParquet(os.path.join(folder, path))
        for group in range(file.metadata.num_row_groups):
            for array in map(pa.ChunkedArray.combine_chunks, file.read(group, names).columns):
                values = array.flatten() if array.type.num_fields else array
                waiting.append(values.to_numpy())
                num += len(waiting[-1])
            if num >= RUN_VALUES:
                yield np.concatenate(waiting)
                waiting, num = [], 0
    if waiting:
        yield np.concatenate(waiting)


def merged(runs: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted distinct values (n,) int64 of all runs, and their counts (n,) int64."""
    parts = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for run in runs:
        parts.append(np.unique(run, return_counts=True))
        while len(parts) > 1 and len(parts[-1][0]) >= len(parts[-2][0]) // 2:  # so that each value moves rarely
            parts.append(join(parts.pop(), parts.pop()))
    while len(parts) > 1:
        parts.append(join(parts.pop(), parts.pop()))
    return parts[0]


def join(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    values, counts = (np.concatenate(pair) for pair in zip(a, b))
    order = np.argsort(values, kind="stable")
    values, counts = values[order], counts[order]
    first = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])[: len(values)])
    return values[first], np.add.reduceat(counts, first) if len(first) else counts
