"""Split: the training or the held-out rows of prepared data, read by row groups in any order."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hetmpi.data.batch import Samples
from hetmpi.data.checked import CheckedParquet
from hetmpi.data.tabular.encoder import Encoder
from hetmpi.data.tabular.prepare import reading_prepared

NUM_LOCKS = 16


class Split:
    """The row groups of a list of prepared files, numbered consecutively. Caches the decoded groups read last.
    Thread-safe.

    rows  (num_groups,) int64, number of rows of each group
    """

    def __init__(self, folder: str, files: dict[str, int], group_rows: int, encoder: Encoder, cached_groups: int):
        """files: path in `folder` -> rows, in groups of group_rows; the last group of a file may be smaller."""
        self._folder, self._paths = folder, [os.path.join(folder, name) for name in files]
        sizes = [np.diff([*range(0, rows, group_rows), rows]) for rows in files.values()]
        self.rows = np.concatenate(sizes)
        self.num_groups, self.num_samples = len(self.rows), int(self.rows.sum())
        # (num_files,) number of groups up to a file's end
        self._file_ends = np.cumsum([len(groups) for groups in sizes])
        self._encoder = encoder
        self._locks = [threading.Lock() for _ in range(NUM_LOCKS)]
        self._file = functools.lru_cache(cached_groups)(CheckedParquet)
        self._cached = functools.lru_cache(cached_groups)(self._decode)

    def forget(self) -> None:
        """Drops the cached groups, after a change of what the encoder gives."""
        self._cached.cache_clear()

    def read(self, order: Order, start: int, stop: int, rows_of: Callable[[int], np.ndarray]) -> list[Samples]:
        """The samples at positions [start, stop) of a stream of groups in `order`; rows_of(g) permutes the rows of
        g."""
        parts = []
        place = int(np.searchsorted(order.ends, start, side="right"))
        while start < stop:
            group, end = int(order.groups[place]), int(order.ends[place])
            begin, last = end - self.rows[group], min(stop, end)
            parts.append(self.group(group)[rows_of(group)[start - begin : last - begin]])
            start, place = last, place + 1
        return parts

    def order(self, groups: np.ndarray) -> Order:
        """The stream of groups (num_groups,) int64, a permutation of all groups."""
        return Order(groups, np.cumsum(self.rows[groups]))

    def group(self, group: int) -> Samples:
        """All samples of a group. Threads that need the same group share one decoding."""
        with self._locks[group % NUM_LOCKS]:
            return self._cached(group)

    def _decode(self, group: int) -> Samples:
        file = int(np.searchsorted(self._file_ends, group, side="right"))
        with reading_prepared(self._folder):
            parquet = self._file(self._paths[file])
            number = group - int(self._file_ends[file]) + parquet.metadata.num_row_groups
            return self._encoder.samples(parquet.read(number))


class Order(NamedTuple):
    """An order of row groups, and the position in the stream at which each one ends."""

    groups: np.ndarray  # (num_groups,) int64
    ends: np.ndarray  # (num_groups,) int64
