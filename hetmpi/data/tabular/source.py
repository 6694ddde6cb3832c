"""Tabular: CSV or Parquet, prepared once (prepare.py), then read from prepared files in a seeded order."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from hetmpi.data.batch import Samples, concatenate
from hetmpi.data.checked import CheckedParquet, Damaged, load_array, read_json
from hetmpi.data.distinct import estimate
from hetmpi.data.features import TABLE
from hetmpi.data.files import DataError, absolute
from hetmpi.data.source import check_slice
from hetmpi.data.tabular import vocabulary
from hetmpi.data.tabular.convert import no_value
from hetmpi.data.tabular.coverage import MOST, unseen_of, unseen_text
from hetmpi.data.tabular.encoder import FIRST_KEY, HASHED, IDS, INTEGERS, VOCABULARY, Encoder, IdEncoder
from hetmpi.data.tabular.files import PARQUET, TEXT, Unit, list_files, list_units
from hetmpi.data.tabular.held_out import check_held_out
from hetmpi.data.tabular.last import last_span, last_values, span_of
from hetmpi.data.tabular.layout import Layout, look
from hetmpi.data.tabular.prepare import (
    UNIT_BYTES,
    PrepareJob,
    enough_memory,
    finish,
    place_of,
    prepare,
    read_manifest,
    reading_prepared,
    rows_of,
)
from hetmpi.data.tabular.reading import CLICK, LABEL_KINDS, BadRows, Reading, stored_columns
from hetmpi.data.tabular.rules import AUTO, ID, INTEGER, NUMBER, OPEN, Column, near, plain, read_rules, resolve
from hetmpi.data.tabular.scaling import Moments, Scaling
from hetmpi.data.tabular.text import count_values, head_of
from hetmpi.errors import LARGEST, UserError, check_integer, check_number, one_line, printable

NUM_LOCKS = 16
READER_BYTES = 32 << 20
LEAST_ROWS_PER_VALUE = 1e-9
MOST_VALUES = 10_000_000  # distinct values of a vocabulary
SAMPLE_GROUPS = 4  # of held-out rows, in which unseen values are counted
MOST_OWN = 0.5  # distinct values per row, beyond which an id has a remark
MISSING = ("NA", "NaN", "nan", "null", "NULL", "None", "\\N")


class Tabular:
    """Rows of CSV or Parquet files, with features by the rules of data.columns (docs/columns.md).

    Epoch e visits the row groups in an order drawn from (seed, e), and the rows within each group likewise, in addition
    to the shuffling by prepare(). So only the groups that a slice touches are read; the last cached_groups of them are
    cached.

    Call `prepare` first: it sets features, tables, num_features, num_dense, dense_names, num_train, num_valid and
    encoder; and for one table and features of one value num_fields, num_rows and field_rows.
    """

    name = "tabular"

    def __init__(
        self,
        path: str,
        seed: int,
        label: str | None = None,
        valid: float | str | Mapping = 0.1,
        columns: Sequence[Mapping] | None = None,
        names: Sequence[str] | None = None,
        label_kind: str = CLICK,
        positive: Sequence[str] | None = None,
        missing: Sequence[str] = MISSING,
        delimiter: str | None = None,
        quote: str | None = '"',
        max_bad_rows: int = 0,
        cache: str | None = None,
        rows_per_value: float = 2.0,
        max_field_rows: int | None = None,
        cached_groups: int = 32,
    ):
        """path: a file, a glob, a folder, or a folder that prepare() has written. valid: a share, a path, or the last
        values of a column, as {column: day, last: 1}, or its last span of time, as {column: time, last: 7d}. columns:
        see docs/columns.md. names: of the columns of text without a header. positive: label texts that count as 1;
        others count as 0. missing: texts that mean a missing value, besides the empty one. delimiter: None to find it.
        cache: folder for prepared data, default prepared/. rows_per_value: rows of a hashed column per distinct value,
        at most max_field_rows. Raises UserError for invalid values."""
        check_integer("data.seed", seed, -LARGEST)
        check_integer("data.max_bad_rows", max_bad_rows, 0)
        check_number("data.rows_per_value", rows_per_value, LEAST_ROWS_PER_VALUE)
        check_integer("data.cached_groups", cached_groups, 1)
        if max_field_rows is not None:
            check_integer("data.max_field_rows", max_field_rows, 1)
        check_text("path", path, "a path")
        check_text("cache", cache, "a path", is_optional=True)
        check_text("label", label, "the name of a column", is_optional=True)
        check_character("delimiter", delimiter)
        check_character("quote", quote)
        if label_kind not in LABEL_KINDS:
            raise UserError(f"data.label_kind must be {' or '.join(LABEL_KINDS)}, got {label_kind}")
        if positive is not None and label_kind == NUMBER:
            raise UserError("data.positive is for labels of clicks, data.label_kind is number")
        self.path, self.max_bad_rows, self.cached_groups = path, max_bad_rows, cached_groups
        self.seed = seed & 0xFFFFFFFFFFFFFFFF  # numpy rejects negative seeds
        self.label, self.label_kind, self.valid_rule = label, label_kind, check_valid(plain(valid))
        self.positive, self.missing = texts_of("positive", positive), all_missing(missing)
        self.names, self.delimiter, self.quote = texts_of("names", names), delimiter, quote
        if self.names and len(set(self.names)) < len(self.names):
            raise UserError(f"data.names: names must differ, got {', '.join(self.names)}")
        self.rules = read_rules(columns)
        self.cache = cache
        self.rows_per_value, self.max_field_rows = rows_per_value, max_field_rows
        self.folder = absolute(path) if is_prepared(path) else None

    def prepare(self, rank: int, size: int, barrier: Callable[[], None], report: Callable[[str], None] = print) -> None:
        """Prepares missing units, rank `rank` of `size` its share, and opens the data. Collective.

        barrier: waits for all ranks. report: prints lines of text, called on rank 0. Raises DataError, on the rank that
        detects it, for a source that is missing, empty or has too many bad rows, and for a full disk."""
        with enough_memory(self.path):
            self._prepare(rank, size, barrier, report if rank == 0 else lambda line: None)

    def _prepare(self, rank: int, size: int, barrier, report) -> None:
        if self.folder is None:
            job, last = self._job(report)
            if last is not None:
                find = last_span if isinstance(last[1], str) else last_values
                job.reading = find(job, *last, rank, size, barrier)
            prepare(job, rank, size)
            barrier()
            if rank == 0:
                with reading_prepared(job.folder):
                    finish(job)
            barrier()
            self.folder = job.folder
        with reading_prepared(self.folder):
            self._open(rank, size, barrier, report)

    def train(self, start: int, stop: int) -> Samples:
        """Positions [start, stop) of the endless training stream, epoch after epoch."""
        check_slice(start, stop, None)
        parts = []
        while start < stop:
            epoch, first = divmod(start, self.num_train)
            last = min(first + stop - start, self.num_train)
            parts += self._train.read(self._order(epoch), first, last, functools.partial(self._permutation, epoch))
            start += last - first
        return concatenate(parts or [self._nothing()])

    def valid(self, start: int, stop: int) -> Samples:
        """Held-out positions [start, stop), in the order of the prepared files."""
        check_slice(start, stop, self.num_valid)
        whole = self._valid.read(self._valid_order, start, stop, lambda group: np.arange(self._valid.rows[group]))
        return concatenate(whole or [self._nothing()])

    def _nothing(self) -> Samples:
        return self.encoder.samples(self.encoder.reading.schema().empty_table())

    def _job(self, report) -> tuple[PrepareJob, tuple[str, int | str] | None]:
        """The preparation; and the column whose last values are held out, and their number or span of time."""
        train, valid, share, last = list_files(self.path), [], 0.0, None
        if isinstance(self.valid_rule, str):
            valid = list_files(self.valid_rule, "data.valid")
            train = [path for path in train if path not in valid]
            if not train:
                raise DataError(f"data.valid={self.valid_rule} holds out all files of data.path={self.path}")
        elif isinstance(self.valid_rule, dict):
            last = self.valid_rule["column"], self.valid_rule["last"]
        else:
            share = float(self.valid_rule)
        units = list_units(train, valid, UNIT_BYTES)
        if not units:
            raise DataError(f"data.path={self.path} is empty")
        layout = self._layout(units[0].path, last)
        columns = resolve(self.rules, layout.types, self.label, last and last[0])
        stored = stored_columns(columns)
        reading = Reading(
            layout.form, self.names, layout.delimiter, self.quote, self.missing, self.label, self.label_kind,
            self.positive, stored, share,
        )  # fmt: skip
        folder = self._folder(reading, last)
        return PrepareJob(self.path, units, reading, folder, layout.types, self.rules, self.max_bad_rows, report), last

    def _layout(self, path: str, last: tuple[str, int | str] | None) -> Layout:
        """The layout of the first file. Raises DataError if the label or the column of data.valid is missing."""
        layout = look(path, self.names, self.delimiter, self.quote, self.missing)
        for key, name in (("data.label", self.label), ("data.valid: column", last and last[0])):
            if name is not None and name not in layout.types:
                divided = "" if layout.form == PARQUET else f", divided by {layout.delimiter!r}"
                header = "" if self.names or layout.form == PARQUET else header_doubt(list(layout.types))
                known = near(name, list(layout.types))
                raise DataError(f"{key}={name}: {path} has no such column{divided}: {known}{header}")
        if self.label is None:
            raise DataError(f"give data.label=COLUMN: {path} has the columns {one_line(', '.join(layout.types), 500)}")
        return layout

    def _folder(self, reading: Reading, last) -> str:
        """The folder of the prepared data: other files and rules have others."""
        paths = [absolute(self.path), absolute(self.valid_rule) if isinstance(self.valid_rule, str) else last]
        digest = xxhash.xxh3_64_hexdigest(repr((paths, reading)).encode())[:8]
        name = re.sub(r"[^\w.-]", "_", os.path.basename(absolute(self.path)))[:60]
        return absolute(os.path.join(self.cache or "prepared", f"{name}-{digest}"))

    def _open(self, rank: int, size: int, barrier, report) -> None:
        manifest = read_json(self.folder, "manifest.json")
        reading = Reading.from_json(manifest["reading"])
        self.label_kind = reading.label_kind
        columns = resolve(self.rules, manifest["types"], reading.label, reading.split and reading.split[0])
        if stored_columns(columns) != reading.columns or self.label not in (None, reading.label):
            raise DataError(
                f"data.path={self.path} was prepared with other columns or another label: give the raw files, which "
                "are prepared again"
            )
        if not any(column.kind == ID or column.is_buckets for column in columns):
            raise DataError(
                f"data.path={self.path}: no column is an id, at least one is needed: give a column kind: id, or edges "
                "(transform: [1, 10, 100]) that divide a number into buckets"
            )
        if rank == 0:
            check_held_out(self.folder, manifest, reading)
        modes = IdEncodings(self, manifest, columns)
        groups = modes.vocabularies()[rank::size]
        wanted = [(group, no_value(reading.columns[group[0]].seed)) for group in groups]
        vocabulary.count(self.folder, manifest, wanted, report)
        barrier()
        moments = [one[:3] for one in manifest["moments"]]
        self.encoder = Encoder(reading, columns, modes.coders(), moments, scalings(columns, manifest))
        self._describe()
        self._train, self._valid = (
            Split(self.folder, manifest[split], manifest["group_rows"], self.encoder, self.cached_groups)
            for split in ("train", "valid")
        )
        self.num_train, self.num_valid = self._train.num_samples, self._valid.num_samples
        self._valid_order = self._valid.order(np.arange(self._valid.num_groups))
        self._order = functools.lru_cache(2)(self._draw_order)
        self._permutation = functools.lru_cache(self.cached_groups)(self._draw_permutation)
        if rank == 0:
            self._report(manifest, modes, report)

    def _describe(self):
        """Sets the attributes of a source."""
        encoder = self.encoder
        self.features, self.tables = encoder.features, encoder.tables
        self.num_features, self.dense_names = len(self.features), encoder.dense_names
        self.num_dense = len(self.dense_names)
        if list(self.tables) == [TABLE] and all(feature.pool is None for feature in self.features):
            self.num_fields = self.num_features
            self.num_rows, self.field_rows = self.tables[TABLE].num_rows, list(self.tables[TABLE].field_rows)

    def _report(self, manifest: dict, modes: IdEncodings, report) -> None:
        """Prints a line per column."""
        rows_of = {feature.name: feature.rows for feature in self.features}
        notes = {**self._notes(), **modes.notes, **no_value_notes(self.encoder.columns, manifest)}
        lines = [("column", "kind", "rows", "distinct", "missing", "bytes x dim", "")]
        for i, column in enumerate(self.encoder.columns):
            rows = rows_of.get(column.name)
            own, missing = rows is not None and column.share is None, manifest["missing"][i]
            lines.append((
                printable(column.name),
                kind_text(column),
                "" if rows is None else f"{rows:,}",
                f"{manifest['distinct'][i] - (missing > 0 and not column.pool):,}" if column.kind == ID else "",
                f"{missing:,}",
                f"{4 * rows:,}" if own else "",
                notes.get(column.name, ""),
            ))  # fmt: skip
        widths = [max(len(line[j]) for line in lines) for j in range(6)]
        for line in lines:
            cells = [
                cell.ljust(width) if j < 2 else cell.rjust(width) for j, (cell, width) in enumerate(zip(line, widths))
            ]
            report("  ".join([*cells, line[6]]).rstrip())

    def _notes(self) -> dict[str, str]:
        """Column -> how its numbers are scaled, or that most held-out values were not seen in training, by a sample."""
        notes = {name: str(scaling) for name, scaling in self.encoder.scalings.items()}
        min_count = {column.name: column.min_count for column in self.encoder.columns}
        groups = np.linspace(0, self._valid.num_groups - 1, min(SAMPLE_GROUPS, self._valid.num_groups)).astype(int)
        samples = concatenate([self._valid.group(int(group)) for group in groups])
        for name, (unseen, num) in unseen_of(self.encoder, samples).items():
            if unseen > MOST * num:
                notes[name] = unseen_text(unseen, num, min_count[name], "held-out values")
        return notes

    def _draw_order(self, epoch: int) -> Order:
        return self._train.order(np.random.default_rng((self.seed, epoch)).permutation(self._train.num_groups))

    def _draw_permutation(self, epoch: int, group: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch, group)).permutation(self._train.rows[group])


def kind_text(column: Column) -> str:
    kind = f"id, {column.pool} of several" if column.pool else "number in buckets" if column.is_buckets else column.kind
    return f"{kind}, rows of {printable(column.share)}" if column.share else kind


def no_value_notes(columns: list[Column], manifest: dict) -> dict[str, str]:
    """Of columns that are missing in all rows."""
    num_rows = sum(rows for split in ("train", "valid") for rows in manifest[split].values())
    missing = zip(columns, manifest["missing"])
    return {column.name: "no row has a value: kind: drop" for column, num in missing if num == num_rows}


def scalings(columns: list[Column], manifest: dict) -> dict[str, Scaling]:
    """Of the numbers with the transform auto."""
    return {
        column.name: Scaling.chosen(Moments(*manifest["moments"][i]), Moments(*manifest["log_moments"][i]))
        for i, column in enumerate(columns)
        if column.transform == AUTO
    }


class IdEncodings:
    """How the id columns of prepared data become keys. notes: column -> remark for its line at the start."""

    def __init__(self, source: Tabular, manifest: dict, columns: list[Column]):
        self._source, self._manifest, self._columns = source, manifest, columns
        self._registers = load_array(os.path.join(source.folder, "registers.npy"))
        self._num_rows = sum(rows for split in ("train", "valid") for rows in manifest[split].values())
        self.notes: dict[str, str] = {}
        self._modes = {
            column.name: self._mode(column) for column in columns if column.kind == ID and column.share is None
        }

    def vocabularies(self) -> list[list[int]]:
        """The prepared columns of each vocabulary."""
        return [self._sharing(name) for name, mode in self._modes.items() if mode == VOCABULARY]

    def coders(self) -> dict[str, IdEncoder]:
        return {column.name: self._coder(column) for column in self._columns if column.name in self._modes}

    def _sharing(self, name: str) -> list[int]:
        """Numbers of the columns that use the rows of column `name`."""
        return [i for i, column in enumerate(self._columns) if name in (column.share, column.name)]

    def _distinct(self, column: Column) -> int:
        return estimate(functools.reduce(np.maximum, self._registers[self._sharing(column.name)]))

    def _mode(self, column: Column) -> str:
        if column.type == INTEGER and not any(rule.matches(column.name) for rule in self._source.rules):
            self.notes[column.name] = "looks like a number, taken as id"
        if not column.pool and self._distinct(column) > MOST_OWN * self._num_rows:
            self.notes[column.name] = "most rows have a value of their own, which teaches nothing: kind: drop"
        if column.is_integer:
            return INTEGERS
        if column.rows == OPEN:
            return IDS
        if column.rows != AUTO or column.hash:
            return HASHED
        distinct = self._distinct(column)
        if distinct <= MOST_VALUES:
            return VOCABULARY
        if column.hash is False or column.min_count > 1:
            raise DataError(
                f"column {one_line(column.name)} has about {distinct:,} distinct values, a vocabulary has at most "
                f"{MOST_VALUES:,}: give data.columns rows: N or hash: true, without min_count"
            )
        self.notes[column.name] = f"hashed, as it has more than {MOST_VALUES:,} distinct values"
        return HASHED

    def _coder(self, column: Column) -> IdEncoder:
        mode = self._modes[column.name]
        if mode == INTEGERS:
            self._check_integers(column)
            return IdEncoder(INTEGERS, column.rows + 1)
        if mode == VOCABULARY:
            group = self._sharing(column.name)
            values = vocabulary.load(self._source.folder, self._manifest, group, column.min_count)
            return IdEncoder(VOCABULARY, len(values) + FIRST_KEY, column.number, values)
        if mode == IDS:
            return IdEncoder(IDS, column.open.num_rows, column.number)
        return IdEncoder(HASHED, column.rows if column.rows != AUTO else self._hashed_rows(column))

    def _hashed_rows(self, column: Column) -> int:
        rows, most = max(1, round(self._distinct(column) * self._source.rows_per_value)), self._source.max_field_rows
        return rows if most is None else min(rows, most)

    def _check_integers(self, column: Column):
        """Raises DataError for an integer without a row."""
        for i in self._sharing(column.name):
            largest, unit, number = self._manifest["largest"][i]
            if largest >= column.rows:
                place = place_of(self._source.folder, self._manifest, unit, number)
                raise DataError(
                    f"data.path: {place}, column {one_line(self._columns[i].name)}: {largest} has no row, data.columns "
                    f"has rows: {column.rows}, for integers from 0 to {column.rows - 1}"
                )


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


class Reader:
    """Reads the rows of files in order, without preparing them: unit by unit, in blocks of Reading.schema() for
    Encoder.samples, with kept columns. path: a file, a glob or a folder; text without a header has the columns of the
    files that `reading` is from, with or without the label.

    bad  rows that were dropped so far"""

    def __init__(
        self,
        path: str,
        reading: Reading,
        kept: tuple[str, ...] = (),
        max_bad_rows: int = 0,
        delimiter: str | None = None,
    ):
        """kept: columns to pass on. delimiter: of text, where it is not that of `reading`. Raises DataError for files
        that cannot be read."""
        check_character("delimiter", delimiter)
        if os.path.isfile(os.path.join(absolute(path), "manifest.json")):
            raise DataError(f"data.path={path} is a folder of prepared data: give the raw files")
        self.path, self.max_bad_rows, self.bad = path, max_bad_rows, BadRows()
        self.units: list[Unit] = list_units(list_files(path), [], READER_BYTES)
        reading = replace(reading, delimiter=delimiter or reading.delimiter)
        self.reading = reading.to_predict(kept)
        if reading.names and self.units and self.units[0].form == TEXT:
            head = head_of(self.units[0].path).split(b"\n", 1)[0]
            if count_values(head, reading.delimiter, reading.quote) == len(reading.names) - 1:
                names = tuple(name for name in reading.names if name != reading.label)
                self.reading = replace(self.reading, names=names)

    def blocks(self, unit: Unit) -> Iterator[pa.Table]:
        """The good rows of a unit. Raises DataError."""
        for rows in rows_of(unit, self.reading):
            self.bad += rows.bad
            self.bad.check(self.path, self.max_bad_rows)
            yield rows.table


def is_prepared(path: str) -> bool:
    """Whether a folder holds prepared data. Raises DataError for data of an earlier version, or a damaged manifest."""
    if not os.path.isfile(os.path.join(absolute(path), "manifest.json")):
        return False
    try:
        manifest = read_manifest(absolute(path))
    except (OSError, Damaged) as error:
        raise DataError(
            f"data.path={path}: its manifest.json is damaged, or another program's: give the raw files, which are "
            "prepared again; those in this folder by a glob, as in data.path='folder/*.csv'"
        ) from error
    if manifest is None:
        raise DataError(
            f"data.path={path} was prepared by another version: give the raw files, which are prepared again"
        )
    return True


def header_doubt(names: list[str]) -> str:
    """A remark on names of which one is a number."""
    if not any(name.replace(".", "", 1).lstrip("-").isdigit() for name in names):
        return ""
    return "; did the first line hold values? Then give data.names=[...]"


def check_text(key: str, value, what: str, is_optional: bool = False):
    if not (isinstance(value, str) and value) and not (is_optional and value is None):
        raise UserError(f"data.{key} must be {what}, got {value}")


def check_character(key: str, value):
    if value is not None and not (
        isinstance(value, str) and len(value) == 1 and value.isascii() and value not in "\r\n"
    ):
        raise UserError(f"data.{key} must be one character, got {value!r}")


def texts_of(key: str, values) -> tuple[str, ...] | None:
    """A list of texts as a tuple. Raises UserError for anything else; numbers count as their text."""
    values = plain(values)
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(v, (str, int, float)) for v in values):
        raise UserError(f"data.{key} must be a list of texts, got {values}")
    texts = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)  # as Arrow writes them
    return tuple(text.strip() for text in texts)


def all_missing(missing: Sequence[str] | None = MISSING) -> tuple[str, ...]:
    """The texts of data.missing and the empty one. Raises UserError."""
    return tuple(dict.fromkeys(("", *(texts_of("missing", missing) or ()))))


def check_valid(valid):
    """data.valid. Raises UserError unless it is a share, a path, or {column: NAME, last: N or a span of time}."""
    if isinstance(valid, dict):
        if set(valid) != {"column", "last"}:
            raise UserError(
                f"data.valid must have the keys column and last, as in {{column: day, last: 1}}, got {valid}"
            )
        check_text("valid: column", valid["column"], "the name of a column")
        if not isinstance(valid["last"], str):
            check_integer("data.valid: last", valid["last"], 1)
        elif not span_of(valid["last"]):
            raise UserError(
                "data.valid: last must be a number of distinct values, or a span of time of seconds, minutes, hours, "
                f"days or weeks as 90s, 30m, 12h, 7d, 2w, got {valid['last']}"
            )
    elif not isinstance(valid, str):
        check_number("data.valid (a share, a path, or {column: NAME, last: N})", valid, 0, 1)
        if not 0 < valid < 1:
            raise UserError(f"data.valid must be a share between 0 and 1, got {valid}")
    return valid
