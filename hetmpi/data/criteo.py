"""Criteo: raw Criteo text, prepared once (prepare.py), then read from Parquet in a seeded order."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from hetmpi.data.batch import Samples, concatenate
from hetmpi.data.prepare import MAX_BAD_ROWS, default_cache, find_manifest, finish, prepare
from hetmpi.data.raw import DENSE_NAMES, FIELD_NAMES, NUM_DENSE, NUM_FIELDS, absolute
from hetmpi.data.source import check_slice
from hetmpi.errors import LARGEST, UserError, check_integer, check_number

NUM_LOCKS = 16
LEAST_ROWS_PER_VALUE = 1e-9
NO_SAMPLES = Samples(np.empty((0, NUM_FIELDS), np.int64), np.empty((0, NUM_DENSE), np.float32), np.empty(0, np.float32))


class Criteo:
    """The Criteo display-advertising data, Kaggle's or the Terabyte logs: 13 dense features, 26 fields.

    The id of a value is its hash modulo the field's number of rows. Epoch e visits the row groups in an order drawn
    from (seed, e), and the rows within each group likewise, in addition to the shuffling by prepare(). So only the
    groups that a slice touches are read; the last cached_groups of them are cached, 2.2 MB each.

    Call `prepare` first: it sets num_rows, field_rows, num_train and num_valid.
    """

    name = "criteo"
    num_fields, num_dense = NUM_FIELDS, NUM_DENSE

    def __init__(
        self,
        path: str,
        seed: int,
        cache: str | None = None,
        max_bad_rows: int = MAX_BAD_ROWS,
        rows_per_value: float = 2.0,
        max_field_rows: int | None = None,
        field_rows: list[int] | None = None,
        cached_groups: int = 32,
    ):
        """path: a file, a glob, a folder of files (plain or .gz), or a folder that prepare.py has written. cache:
        folder of the prepared data, default prepared/<name>-<hash of path>. rows_per_value: rows of a field per
        distinct value, at most max_field_rows per field; or field_rows gives all 26 numbers. Raises UserError for
        invalid values."""
        check_integer("data.seed", seed, -LARGEST)
        check_integer("data.max_bad_rows", max_bad_rows, 0)
        check_number("data.rows_per_value", rows_per_value, LEAST_ROWS_PER_VALUE)
        check_integer("data.cached_groups", cached_groups, 1)
        if max_field_rows is not None:
            check_integer("data.max_field_rows", max_field_rows, 1)
        for name, value in (("path", path), ("cache", cache)):
            if not isinstance(value, str) and (name, value) != ("cache", None):
                raise UserError(f"data.{name} must be a path, got {value}")
        if field_rows is not None:
            if isinstance(field_rows, str) or not isinstance(field_rows, Sequence) or len(field_rows) != NUM_FIELDS:
                raise UserError(f"data.field_rows must be a list of {NUM_FIELDS} integers, got {field_rows}")
            for rows in field_rows:
                check_integer("each of data.field_rows", rows, 1)
        self.path, self.max_bad_rows, self.cached_groups = path, max_bad_rows, cached_groups
        self.seed = seed & 0xFFFFFFFFFFFFFFFF  # numpy rejects negative seeds
        self.is_prepared = find_manifest(absolute(path)) is not None
        self.cache = absolute(path if self.is_prepared else cache or default_cache(path))
        self._rows_per_value, self._max_field_rows, self._given_rows = rows_per_value, max_field_rows, field_rows

    def prepare(self, rank: int, size: int, barrier: Callable[[], None], report: Callable[[str], None] = print) -> None:
        """Prepares missing units, rank `rank` of `size` its share, and opens the data. Collective.

        barrier: waits for all ranks. report: prints lines of text, called on rank 0. Raises DataError, on the rank that
        detects it, for a source that is missing, empty or has too many bad rows, and for a full disk."""
        report = report if rank == 0 else lambda line: None
        if not self.is_prepared:
            prepare(self.path, self.cache, rank, size, self.max_bad_rows, report=report)
            barrier()
            if rank == 0:
                finish(self.path, self.cache, self.max_bad_rows, report=report)
            barrier()
        self._open(find_manifest(self.cache))

    def train(self, start: int, stop: int) -> Samples:
        """Positions [start, stop) of the endless training stream, epoch after epoch."""
        check_slice(start, stop, None)
        parts = []
        while start < stop:
            epoch, first = divmod(start, self.num_train)
            last = min(first + stop - start, self.num_train)
            parts += self._train.read(self._order(epoch), first, last, functools.partial(self._permutation, epoch))
            start += last - first
        return concatenate(parts or [NO_SAMPLES])

    def valid(self, start: int, stop: int) -> Samples:
        """Held-out positions [start, stop), in the order of the prepared files."""
        check_slice(start, stop, self.num_valid)
        parts = self._valid.read(self._valid_order, start, stop, lambda group: np.arange(self._valid.rows[group]))
        return concatenate(parts or [NO_SAMPLES])

    def _open(self, manifest: dict) -> None:
        self.field_rows = list(self._given_rows or map(self._rows_for, manifest["distinct"]))
        self.num_rows = sum(self.field_rows)
        self._train, self._valid = (
            Split(self.cache, manifest[split], manifest["group_rows"], self.field_rows, self.cached_groups)
            for split in ("train", "valid")
        )
        self.num_train, self.num_valid = self._train.num_samples, self._valid.num_samples
        self._valid_order = self._valid.order(np.arange(self._valid.num_groups))
        self._order = functools.lru_cache(2)(self._draw_order)
        self._permutation = functools.lru_cache(self.cached_groups)(self._draw_permutation)

    def _rows_for(self, num_distinct: int) -> int:
        rows = max(1, round(num_distinct * self._rows_per_value))
        return rows if self._max_field_rows is None else min(rows, self._max_field_rows)

    def _draw_order(self, epoch: int) -> Order:
        return self._train.order(np.random.default_rng((self.seed, epoch)).permutation(self._train.num_groups))

    def _draw_permutation(self, epoch: int, group: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch, group)).permutation(self._train.rows[group])


class Split:
    """The row groups of a list of prepared files, numbered consecutively. Caches the decoded groups read last.
    Thread-safe.

    rows  (num_groups,) int64, number of rows of each group
    """

    def __init__(self, folder: str, files: dict[str, int], group_rows: int, field_rows: list[int], cached_groups: int):
        """files: path in `folder` -> rows, in groups of group_rows; the last group of a file may be smaller."""
        self._paths = [os.path.join(folder, name) for name in files]
        sizes = [np.diff([*range(0, rows, group_rows), rows]) for rows in files.values()]
        self.rows = np.concatenate(sizes)
        self.num_groups, self.num_samples = len(self.rows), int(self.rows.sum())
        # (num_files,) number of groups up to a file's end
        self._file_ends = np.cumsum([len(groups) for groups in sizes])
        self._field_rows = np.array(field_rows)
        self._field_first = np.cumsum(field_rows) - field_rows
        self._locks = [threading.Lock() for _ in range(NUM_LOCKS)]
        self._metadata = functools.lru_cache(cached_groups)(pq.read_metadata)
        self._cached = functools.lru_cache(cached_groups)(self._decode)

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
        parquet = pq.ParquetFile(self._paths[file], metadata=self._metadata(self._paths[file]))
        table = parquet.read_row_group(group - int(self._file_ends[file]) + parquet.num_row_groups, use_threads=False)
        ids = np.stack([table[name].to_numpy() for name in FIELD_NAMES], axis=1)
        dense = np.stack([table[name].to_numpy() for name in DENSE_NAMES], axis=1)
        return Samples(ids % self._field_rows + self._field_first, dense, table["label"].to_numpy())


class Order(NamedTuple):
    """An order of row groups, and the position in the stream at which each one ends."""

    groups: np.ndarray  # (num_groups,) int64
    ends: np.ndarray  # (num_groups,) int64
