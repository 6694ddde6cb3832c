"""Vocabularies: the distinct training values of an id column with their counts, from its prepared files.

They are counted when a rule needs them first, as hashed columns do not. Memory is bounded by
RUN_VALUES and the number of distinct values."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import xxhash

from hetmpi.data.checked import CheckedParquet, load_array, save_array
from hetmpi.data.files import DataError
from hetmpi.data.tabular.prepare import NO_SPACE, REPORT_S

RUN_VALUES = 1 << 22  # sorted at once
BATCH_COLUMNS = 512  # whose values are read at once


def path_of(folder: str, manifest: dict, columns: list[int]) -> str:
    """The file of the counts over the prepared columns, which share rows."""
    identity = repr((manifest["units"], columns)).encode()
    return os.path.join(folder, f"counts-{xxhash.xxh3_64_hexdigest(identity)}.npy")


def count(
    folder: str, manifest: dict, wanted: list[tuple[list[int], int]], report: Callable[[str], None] = print
) -> None:
    """Writes the counts of each vocabulary, unless its file exists. wanted: its columns, and the value of a
    missing one, which is left out. report: prints a line where it takes long. Raises DataError for a folder that is
    full or not writable."""
    lacking = [one for one in wanted if not os.path.exists(path_of(folder, manifest, one[0]))]
    done, last = 0, time.monotonic()
    for batch in batches(lacking, manifest["distinct"]):
        try:
            count_batch(folder, manifest, batch)
        except OSError as error:
            full = ": no space left" if error.errno in NO_SPACE else f": {error.strerror or error}"
            raise DataError(f"data.cache={folder}{full} while counting distinct values; it must be writable") from error
        done += len(batch)
        if time.monotonic() - last > REPORT_S:
            report(f"counting distinct values: {done:,} of {len(lacking):,} columns")
            last = time.monotonic()


def batches(wanted: list[tuple[list[int], int]], distinct: list[int]) -> Iterator[list[tuple[list[int], int]]]:
    """Vocabularies that are counted together: of RUN_VALUES distinct values and BATCH_COLUMNS columns, or one."""
    batch, num_values, num_columns = [], 0, 0
    for columns, none in wanted:
        values = sum(distinct[i] for i in columns)
        if batch and (num_values + values > RUN_VALUES or num_columns + len(columns) > BATCH_COLUMNS):
            yield batch
            batch, num_values, num_columns = [], 0, 0
        batch.append((columns, none))
        num_values, num_columns = num_values + values, num_columns + len(columns)
    if batch:
        yield batch


def count_batch(folder: str, manifest: dict, batch: list[tuple[list[int], int]]) -> None:
    merging = [Merged() for _ in batch]
    for run in read_values(folder, list(manifest["train"]), [columns for columns, _ in batch]):
        for one, values in zip(merging, run):
            one.add(values)
    for (columns, none), one in zip(batch, merging):
        counted = np.stack(one.whole())
        save_array(path_of(folder, manifest, columns), counted[:, counted[0] != none])


def load(folder: str, manifest: dict, columns: list[int], min_count: int) -> np.ndarray:
    """The values (n,) int64 seen at least min_count times, sorted."""
    values, counts = load_array(path_of(folder, manifest, columns), is_mapped=True)
    return values if min_count == 1 else np.ascontiguousarray(values[counts >= min_count])


def read_values(folder: str, files: list[str], vocabularies: list[list[int]]) -> Iterator[list[np.ndarray]]:
    """The values (n,) int64 of each vocabulary's columns in the training files, in runs of about RUN_VALUES in all."""
    names = [f"c{i}" for columns in vocabularies for i in columns]
    waiting, num = [[] for _ in vocabularies], 0
    for path in files:
        file = CheckedParquet(os.path.join(folder, path))
        for group in range(file.metadata.num_row_groups):
            table = file.read(group, names)
            for columns, parts in zip(vocabularies, waiting):
                for array in (table.column(f"c{i}").combine_chunks() for i in columns):
                    parts.append((array.flatten() if array.type.num_fields else array).to_numpy())
                    num += len(parts[-1])
            if num >= RUN_VALUES:
                yield [np.concatenate(parts) for parts in waiting]
                waiting, num = [[] for _ in vocabularies], 0
    if num:
        yield [np.concatenate(parts) for parts in waiting]


class Merged:
    """Sorted distinct values of runs, and their counts."""

    def __init__(self):
        self._parts = [(np.empty(0, np.int64), np.empty(0, np.int64))]

    def add(self, run: np.ndarray) -> None:
        """run: (n,) int64"""
        parts = self._parts
        parts.append(np.unique(run, return_counts=True))
        while len(parts) > 1 and len(parts[-1][0]) >= len(parts[-2][0]) // 2:  # so that each value moves rarely
            parts.append(join(parts.pop(), parts.pop()))

    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """Values (n,) int64 and counts (n,) int64."""
        while len(self._parts) > 1:
            self._parts.append(join(self._parts.pop(), self._parts.pop()))
        return self._parts[0]


def join(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    values, counts = (np.concatenate(pair) for pair in zip(a, b))
    order = np.argsort(values, kind="stable")
    values, counts = values[order], counts[order]
    first = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])[: len(values)])
    return values[first], np.add.reduceat(counts, first) if len(first) else counts
