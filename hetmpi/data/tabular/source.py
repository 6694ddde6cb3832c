"""Tabular: CSV or Parquet, prepared once (prepare.py), then read from prepared files in a seeded order."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import xxhash

from hetmpi.data.batch import Samples, concatenate
from hetmpi.data.checked import Damaged, read_json
from hetmpi.data.features import SEQUENCE, TABLE
from hetmpi.data.files import DataError, absolute, all_files
from hetmpi.data.source import check_slice
from hetmpi.data.tabular import classes, vocabulary
from hetmpi.data.tabular.choices import Choice
from hetmpi.data.tabular.convert import KEPT, no_value
from hetmpi.data.tabular.coverage import MOST, unseen_of, unseen_text
from hetmpi.data.tabular.dialect import COMMA, Dialect
from hetmpi.data.tabular.encoder import Encoder
from hetmpi.data.tabular.encodings import IdEncodings
from hetmpi.data.tabular.files import PARQUET, TEXT, Unit, list_files, list_units
from hetmpi.data.tabular.folders import keys_below, top_of
from hetmpi.data.tabular.grown import Growth, check_rules
from hetmpi.data.tabular.held_out import check_held_out
from hetmpi.data.tabular.kept import TextKind, kind_of, typed_as
from hetmpi.data.tabular.last import UNIT_LIST, LastRule, last_rows, span_of
from hetmpi.data.tabular.layout import Layout, look
from hetmpi.data.tabular.prepare import (
    UNIT_BYTES,
    VERSION,
    PrepareJob,
    enough_memory,
    list_folder,
    prepare_together,
    read_manifest,
    reading_prepared,
    rows_of,
)
from hetmpi.data.tabular.reading import (
    CLASSES,
    CLICK,
    LABEL_KINDS,
    MISSING,
    NO_LABEL,
    BadRows,
    Reading,
    all_missing,
    stored_columns,
)
from hetmpi.data.tabular.rules import (
    DROP,
    ID,
    Column,
    missing_by,
    near,
    plain,
    read_rules,
    resolve,
    texts_of,
    vector_size,
)
from hetmpi.data.tabular.split import Order, Split
from hetmpi.data.tabular.stream import DEFAULT_VALID, Stream, check_follow
from hetmpi.data.tabular.text import count_values, encoding_doubt, head_of
from hetmpi.data.tabular.times import UNITS
from hetmpi.errors import LARGEST, UserError, check_integer, check_number, one_line, printable

READER_BYTES = 32 << 20
LEAST_ROWS_PER_VALUE = 1e-9
SAMPLE_GROUPS = 4  # of held-out rows, in which unseen values are counted


class Tabular:
    """Rows of CSV or Parquet files, with features by the rules of data.columns (docs/columns.md).

    Epoch e visits the row groups in an order drawn from (seed, e), and the rows within each group likewise, in addition
    to the shuffling by prepare(), after which each group is a random sample of all rows. So only the groups that a
    slice touches are read; the last cached_groups of them are cached. With shuffle=False each epoch has the rows in the
    order of the files.

    Call `prepare` first: it sets features, tables, num_features, num_dense, dense_names, num_train, num_valid and
    encoder; and for one table and features of one value num_fields, num_rows and field_rows.

    times     path -> time of change in nanoseconds, where it is not that of this rank's file
    contents  name -> hash of what was read, the same on every rank
    """

    name = "tabular"
    order = VERSION  # of the samples, for checkpoints: other versions shuffle otherwise

    def __init__(
        self,
        path: str,
        seed: int,
        label: str | Sequence[str] | None = None,
        valid: float | str | Mapping = DEFAULT_VALID,
        columns: Sequence[Mapping] | None = None,
        names: Sequence[str] | None = None,
        label_kind: str = CLICK,
        label_weights: Sequence[float] | None = None,
        sample_weight: str | None = None,
        positive: Sequence[str] | None = None,
        missing: Sequence[str] = MISSING,
        delimiter: str | None = None,
        quote: str | None = '"',
        encoding: str | None = None,
        decimal: str | None = None,
        max_bad_rows: int = 0,
        cache: str | None = None,
        rows_per_value: float = 2.0,
        max_field_rows: int | None = None,
        cached_groups: int = 32,
        follow: bool | None = None,
        shuffle: bool = True,
    ):
        """path: a file, a glob, a folder, or a folder that prepare() has written. label: a column, or several.
        label_weights: of several, in the loss. sample_weight: a column of weights, in loss and metrics. valid: a share,
        a path, or the last values of a column, as {column: day, last: 1}, or its last span of time, as {column: time,
        last: 7d}, with unit: s for numbers (times.py). columns: see docs/columns.md. names: of the columns of text
        without a header. positive: label texts that count as 1; others count as 0. missing: texts that mean a missing
        value, besides the empty one. delimiter, quote, encoding, decimal: of text (dialect.py). cache: folder for
        prepared data, default prepared/. rows_per_value: rows of a hashed column per distinct value, at most
        max_field_rows. follow: the files of the folder `path` are a stream (stream.py): `stream` has its state.
        shuffle: False for rows in the order of the files. Raises UserError for invalid values."""
        check_integer("data.seed", seed, -LARGEST)
        check_integer("data.max_bad_rows", max_bad_rows, 0)
        check_number("data.rows_per_value", rows_per_value, LEAST_ROWS_PER_VALUE)
        check_integer("data.cached_groups", cached_groups, 1)
        if shuffle not in (True, False):
            raise UserError(f"data.shuffle must be true or false, got {one_line(shuffle, 100)}")
        if max_field_rows is not None:
            check_integer("data.max_field_rows", max_field_rows, 1)
        check_text("path", path, "a path")
        check_text("cache", cache, "a path", is_optional=True)
        self.dialect = Dialect(delimiter, quote, encoding, decimal)
        self.dialect.check()
        if label_kind not in LABEL_KINDS:
            raise UserError(f"data.label_kind must be one of {', '.join(LABEL_KINDS)}, got {label_kind}")
        if positive is not None and label_kind != CLICK:
            raise UserError(f"data.positive is for labels of clicks, data.label_kind is {label_kind}")
        if label_kind == CLASSES and (len(labels_of(label)) > 1 or follow):
            raise UserError(
                f"data.label_kind={CLASSES} needs one label, and files that are all there at the start: with several "
                "labels, or data.follow=true, the label must be of another kind"
            )
        if label is not None and label_kind == NO_LABEL:
            raise UserError(f"data.label={one_line(label)}: data.label_kind=none is for rows without one")
        self.path, self.max_bad_rows, self.cached_groups = path, max_bad_rows, cached_groups
        self.seed = seed & 0xFFFFFFFFFFFFFFFF  # numpy rejects negative seeds
        self.labels, self.label_kind, self.valid_rule = labels_of(label), label_kind, check_valid(plain(valid))
        check_text("sample_weight", sample_weight, "the name of a column", is_optional=True)
        if sample_weight in self.labels:
            raise UserError(f"data.sample_weight={one_line(sample_weight)}: it is a label")
        self.label_weights, self.sample_weight = weights_of(label_weights), sample_weight
        self.check_weights()
        self.positive, self.missing = texts_of("data.positive", positive), all_missing(missing)
        self.names = texts_of("data.names", names)
        if self.names and len(set(self.names)) < len(self.names):
            raise UserError(f"data.names: names must differ, got {', '.join(self.names)}")
        self.rules = read_rules(columns)
        self.cache, self.shuffle, self.is_valid_random = cache, shuffle, shuffle
        self.rows_per_value, self.max_field_rows = rows_per_value, max_field_rows
        self.folder = absolute(path) if is_prepared(path) else None
        self.times: Mapping[str, int] = {}
        self.contents: dict[str, str] = {}
        self._cure: str | None = None  # of held-out rows that are few
        self._before: Encoder | None = None  # of the run that this one begins with
        self._conflicts: Mapping[str, str] = {}
        self._choices: Mapping[str, Sequence[str]] = {}
        self._dropped: list[str] = []  # columns that are not used
        self.needed: Collection[str] = ()  # columns that other settings name
        self.follows: Encoder | None = None  # that of a training, whose columns have the kinds that they have there
        self.stream = Stream(self) if check_follow(follow, path, self.valid_rule) else None

    def files(self) -> list[str]:
        """Paths of the files that all ranks read. Raises DataError."""
        if self.folder is not None:
            return all_files(self.folder)
        return list_files(self.path) + (
            list_files(self.valid_rule, "data.valid") if isinstance(self.valid_rule, str) else []
        )

    def prepare(self, rank: int, size: int, barrier: Callable[[], None], report: Callable[[str], None] = print) -> None:
        """Prepares missing units, rank `rank` of `size` its share, and opens the data. Collective.

        barrier: waits for all ranks. report: prints lines of text, called on rank 0. Raises DataError, on the rank that
        detects it, for a source that is missing, empty or has too many bad rows, and for a full disk."""
        if self.stream is not None:
            raise UserError("data.follow=true is for training: a stream is opened by Stream.open")
        with enough_memory(self.path):
            self._prepare(rank, size, barrier, report if rank == 0 else lambda line: None)

    def begin_with(self, before: Encoder) -> None:
        """Makes the encoder of a run before that of this data, whose new values then get rows of their own (grown.py).
        To be called before the data are prepared."""
        self._before, self.labels = before, self.labels or before.reading.labels

    def _prepare(self, rank: int, size: int, barrier, report) -> None:
        if self.folder is None:
            job, last = self._job(rank, barrier, report)
            if last is not None:
                job.reading, self._cure = last_rows(job, last, rank, size, barrier)
            prepare_together(job, rank, size, barrier)
            self.folder = job.folder
        with reading_prepared(self.folder):
            self._open(rank, size, barrier, report)

    def train(self, start: int, stop: int) -> Samples:
        """Positions [start, stop) of the endless training stream, epoch after epoch."""
        if self.stream is not None:
            return self.stream.train(start, stop)
        check_slice(start, stop, None)
        parts, begin = [], start
        while start < stop:
            epoch, first = divmod(start, self.num_train)
            last = min(first + stop - start, self.num_train)
            parts += self._train.read(self._order(epoch), first, last, functools.partial(self._permutation, epoch))
            start += last - first
        return replace(concatenate(parts or [self.nothing()]), start=begin)

    def valid(self, start: int, stop: int) -> Samples:
        """Held-out positions [start, stop), in the order of the prepared files, which is random unless shuffle=False;
        of a stream those of the last file."""
        if self.stream is not None:
            return self.stream.valid(start, stop)
        check_slice(start, stop, self.num_valid)
        whole = self._valid.read(self._valid_order, start, stop, lambda group: np.arange(self._valid.rows[group]))
        return concatenate(whole or [self.nothing()])

    def group_by(self, name: str) -> None:
        """Gives samples the values of this feature of one value as their group. REQUIRES: prepared."""
        self.encoder.group = name
        for split in () if self.stream is not None else (self._train, self._valid):
            split.forget()

    @property
    def not_features(self) -> tuple[str, ...]:
        """The labels, and the column of weights."""
        return self.labels if self.sample_weight is None else (*self.labels, self.sample_weight)

    def nothing(self) -> Samples:
        """No samples."""
        return self.encoder.samples(self.encoder.reading.schema().empty_table())

    def _job(self, rank: int, barrier, report) -> tuple[PrepareJob, LastRule | None]:
        """The preparation; and the column whose last values are held out."""
        train, valid, share, last = list_files(self.path), [], 0.0, None
        if isinstance(self.valid_rule, str):
            valid = list_files(self.valid_rule, "data.valid")
            held_out = set(map(os.path.realpath, valid))
            train = [path for path in train if os.path.realpath(path) not in held_out]
            if not train:
                raise DataError(f"data.valid={self.valid_rule} holds out all files of data.path={self.path}")
        elif isinstance(self.valid_rule, dict):
            last = LastRule(**self.valid_rule)
        else:
            share = float(self.valid_rule)
        units = list_units(train, valid, UNIT_BYTES, self.dialect.encoding)
        units = [replace(unit, mtime_ns=self.times.get(unit.path, unit.mtime_ns)) for unit in units]
        if not units:
            raise DataError(f"data.path={self.path} is empty")
        layout = self._layout(units, last, rank, barrier)
        choices = layout.choices if self.follows is None else choices_of(self.follows, layout.types)
        columns = self.columns_of(layout.types, choices, last and last.column)
        layout.check(column.vector or column.name for column in columns)
        self._conflicts = layout.conflicts
        self._say_unread(layout, last and last.column, report)
        doubt = encoding_doubt([*train, *valid], self.dialect.encoding) if layout.form == TEXT and rank == 0 else None
        if doubt:
            report(f"data.path: {doubt}")
        if layout.decimal == COMMA and self.dialect.decimal is None:
            report(f'data.path={self.path}: numbers as 1,5 are read with a decimal comma: data.decimal="." keeps texts')
        reading = self.reading_of(layout, columns, share)
        folder = self.folder_of(reading, last)
        job = PrepareJob(
            self.path,
            units,
            reading,
            folder,
            layout.types,
            self.rules,
            self.max_bad_rows,
            report,
            shuffle=self.shuffle,
            choices=choices,
        )
        return job, last

    def columns_of(
        self,
        types: Mapping[str, str],
        choices: Mapping[str, Sequence[str]],
        splitter: str | None,
        others: Sequence[str] | None = None,
    ) -> list[Column]:
        """The columns that are used, of files with these types and choices. splitter: the column of data.valid. others:
        those that are no features. Raises DataError."""
        others = self.not_features if others is None else others
        if self._before is None:
            return resolve(self.rules, types, others, splitter, choices, self.needed)
        for name in (column.vector or column.name for column in self._before.columns):
            if name not in types:
                raise DataError(
                    f"data.path={self.path} has no column {one_line(name)}, which the run of init_from has read: "
                    f"{near(name, list(types))}"
                )
        return self._before.columns

    def _say_unread(self, layout: Layout, splitter: str | None, report) -> None:
        """Says which columns the run of init_from did not have."""
        if self._before is None:
            return
        known = {splitter, *self.not_features, *(column.name for column in self._before.columns)}
        rules = {name: next((rule for rule in self.rules if rule.matches(name)), None) for name in layout.types}
        dropped = {name for name, rule in rules.items() if rule and rule.settings.get("kind") == DROP}
        unread = [name for name in layout.types if name not in known | dropped]
        if unread:
            report(f"data.path={self.path}: not read, as the run of init_from: {one_line(', '.join(unread), 300)}")

    def encodings_of(self, folder: str, manifest: dict, columns: list[Column]) -> IdEncodings | Growth:
        """How the columns of prepared data become keys."""
        if self._before is not None:
            return Growth(self._before, folder, manifest)
        return IdEncodings(folder, manifest, columns, self.rules, self.rows_per_value, self.max_field_rows)

    def reading_of(self, layout: Layout, columns: list[Column], share: float = 0.0) -> Reading:
        """How files of this layout are read. share: of the rows that are held out. Raises DataError for rules that are
        not those of the run of init_from."""
        reading = self._reading_of(layout, columns, share)
        if self._before is not None:
            check_rules(self._before, reading, self.rules)
            reading = replace(reading, label_missing=self._before.reading.label_missing)
        return reading

    def _reading_of(self, layout: Layout, columns: list[Column], share: float) -> Reading:
        return Reading(
            layout.form, self.names, layout.delimiter, self.dialect.quote, self.missing, self.labels, self.label_kind,
            self.positive, stored_columns(columns), share, keys=tuple(layout.keys),
            label_missing=tuple(map(self.missing_of, self.labels)), sample_weight=self.sample_weight,
            encoding=self.dialect.encoding, decimal=layout.decimal,
        )  # fmt: skip

    def _layout(self, units: list[Unit], last: LastRule | None, rank: int, barrier) -> Layout:
        """The layout of the files, which the first rank finds and writes, for the others and for later runs on the same
        files. Collective."""
        folder = absolute(self.cache or "prepared", "data.cache")
        files = {unit.path: (unit.size, unit.mtime_ns) for unit in units}
        settings = [self.names, self.dialect, self.missing, self.rules, self.labels, self.positive]
        name = f".layout-{xxhash.xxh3_64_hexdigest(repr([VERSION, self.path, files, settings]).encode())}.json"
        if rank == 0 and Layout.find(folder, name) is None:
            self._look(list(files)).write(folder, name)
        barrier()
        if name not in list_folder(folder):
            raise DataError(f"data.cache={folder}: it must be a folder that all ranks share")
        with reading_prepared(folder):
            layout = Layout.read(folder, name)
        self._check_layout(layout, units[0].path, last)  # on every rank, so that all raise
        return layout

    def layout_of(self, paths: list[str]) -> Layout:
        """The layout of files. Raises DataError if a label is missing."""
        layout = self._look(paths)
        self._check_layout(layout, paths[0], None)
        return layout

    def _look(self, paths: list[str]) -> Layout:
        label = self.labels[0] if self.labels else None
        return look(self.path, paths, self.names, self.dialect, self.missing_of, label, self.positive)

    def _check_layout(self, layout: Layout, path: str, last: LastRule | None) -> None:
        """Raises DataError if a label or the column of data.valid is missing. path: of the first file."""
        wanted = [("data.label", name) for name in self.labels] + (
            [("data.valid: column", last.column)] if last else []
        )
        wanted += [] if self.sample_weight is None else [("data.sample_weight", self.sample_weight)]
        for key, name in wanted:
            if name not in layout.types:
                divided = "" if layout.form == PARQUET else f", divided by {layout.delimiter!r}"
                header = "" if self.names or layout.form == PARQUET else header_doubt(list(layout.types))
                known = near(name, list(layout.types))
                raise DataError(f"{key}={name}: {path} has no such column{divided}: {known}{header}")
        if not self.labels and self.label_kind != NO_LABEL:
            raise DataError(
                f"give data.label=COLUMN, or for task=retrieval data.label_kind={NO_LABEL}: {path} has the columns "
                f"{one_line(', '.join(layout.types), 500)}"
            )

    def missing_of(self, name: str) -> tuple[str, ...]:
        """Texts of the missing values of a column, or a label."""
        if name not in self.labels:
            return (*self.missing, *missing_by(self.rules, name))
        return (*all_missing(), *missing_by([rule for rule in self.rules if name in rule.names], name))

    def folder_of(self, reading: Reading, last=None) -> str:
        """The folder of the prepared data: other files and rules have others."""
        valid = self.valid_rule
        paths = [absolute(self.path), absolute(valid, "data.valid") if isinstance(valid, str) else last]
        identity = (paths, reading) if self.shuffle else (paths, reading, "in order")
        digest = xxhash.xxh3_64_hexdigest(repr(identity).encode())[:8]
        name = re.sub(r"[^\w.-]", "_", os.path.basename(absolute(self.path)))[:60]
        return absolute(os.path.join(self.cache or "prepared", f"{name}-{digest}"), "data.cache")

    def _open(self, rank: int, size: int, barrier, report) -> None:
        manifest = read_json(self.folder, "manifest.json")
        self.contents = {"manifest.json": xxhash.xxh3_128_hexdigest(json.dumps(manifest).encode())}
        reading = Reading.from_json(manifest["reading"])
        types, choices, splitter = manifest["types"], manifest["choices"], reading.split and reading.split[0]
        columns = self.columns_of(types, choices, splitter, reading.not_features)
        self.not_used(choices, columns, *reading.not_features, splitter)
        is_other = self.labels not in ((), reading.labels) or self.sample_weight not in (None, reading.sample_weight)
        if is_other or stored_columns(columns) != reading.columns:
            raise DataError(
                f"data.path={self.path} was prepared with other columns, another label or other weights: give the raw "
                "files, which are prepared again"
            )
        if manifest["shuffle"] != self.shuffle:
            raise DataError(
                f"data.path={self.path} was prepared with data.shuffle={str(manifest['shuffle']).lower()}: give the "
                "raw files, which are prepared again"
            )
        self.read_by(reading)
        self.check_has_ids(columns)
        if rank == 0:
            check_held_out(self.folder, manifest, reading, self._cure)
        modes = self.encodings_of(self.folder, manifest, columns)
        groups = modes.vocabularies()[rank::size]
        wanted = [(group, no_value(reading.columns[group[0]].seed)) for group in groups]
        vocabulary.count(self.folder, manifest, wanted, report)
        if reading.label_kind == CLASSES and rank == 0:
            classes.count(self.folder, manifest)
        barrier()
        self._take_classes(modes, manifest, reading, report)
        self._train, self._valid = (
            Split(self.folder, manifest[split], manifest["group_rows"], self.encoder, self.cached_groups)
            for split in ("train", "valid")
        )
        self.num_train, self.num_valid = self._train.num_samples, self._valid.num_samples
        self._valid_order = self._valid.order(np.arange(self._valid.num_groups))
        self._order = functools.lru_cache(2)(self._draw_order)
        self._permutation = functools.lru_cache(self.cached_groups)(self._draw_permutation)
        if rank == 0:
            self.report(manifest, {**self._unseen(), **modes.notes, **self._conflicts}, report)

    def _take_classes(self, modes: IdEncodings | Growth, manifest: dict, reading: Reading, report) -> None:
        """Takes the encoder, with the classes of the label."""
        if reading.label_kind != CLASSES:
            return self.take(modes.encoder(reading))
        names, counts = classes.load(self.folder, manifest)
        for line in classes.lines(reading.labels[0], names, counts):
            report(line)
        self.take(modes.encoder(reading, names))

    def read_by(self, reading: Reading) -> None:
        """Sets what describes the labels. Raises UserError for weights of others, and for data with labels where none
        are wanted."""
        if self.label_kind == NO_LABEL and reading.labels:
            raise UserError(
                f"data.label_kind={NO_LABEL}: data.path={self.path} was prepared with the label "
                f"{one_line(', '.join(reading.labels))}: give the raw files"
            )
        self.labels, self.label_kind, self.sample_weight = reading.labels, reading.label_kind, reading.sample_weight
        self.check_weights()

    def check_weights(self) -> None:
        """Raises UserError if the weights are not those of the labels, if these are known."""
        are_known = self.labels or self.label_kind == NO_LABEL
        if self.label_weights is not None and are_known and not 1 < len(self.labels) == len(self.label_weights):
            raise UserError(
                f"data.label_weights={list(self.label_weights)} must have a number for each of several labels, "
                f"data.label is {one_line(', '.join(self.labels)) or None}"
            )

    def check_has_ids(self, columns: list[Column]) -> None:
        """Raises DataError unless a column has rows."""
        if not any(column.kind == ID or column.is_buckets for column in columns):
            raise DataError(
                f"data.path={self.path}: no column is an id, at least one is needed: give a column kind: id, or edges "
                "(transform: [1, 10, 100]) that divide a number into buckets"
            )

    def not_used(self, choices: Mapping[str, Sequence[str]], columns: list[Column], *others: str | None) -> None:
        """Sets what report() says of columns that are dropped: those with a choice that are neither used nor among
        `others`."""
        used = {*self.not_features, *others, *(column.vector or column.name for column in columns)}
        used |= {column.weight_column for column in columns}
        self._choices, self._dropped = choices, [name for name in choices if name not in used]

    def take(self, encoder: Encoder) -> None:
        """Sets the attributes of a source."""
        self.encoder = encoder
        self.features, self.tables = encoder.features, encoder.tables
        self.num_features, self.dense_names = len(self.features), encoder.dense_names
        self.num_dense, self.classes = len(self.dense_names), encoder.classes
        if list(self.tables) == [TABLE] and all(feature.pool is None for feature in self.features):
            self.num_fields = self.num_features
            self.num_rows, self.field_rows = self.tables[TABLE].num_rows, list(self.tables[TABLE].field_rows)

    def report(self, manifest: dict, notes: Mapping[str, str], report) -> None:
        """Prints a line per column. notes: column -> remark."""
        rows_of = {feature.name: feature.rows for feature in self.features}
        scaled = {name: str(scaling) for name, scaling in self.encoder.scalings.items()}
        kinds = {column.name: column.kind for column in self.encoder.columns}
        chosen = {name: why for name, (kind, why) in self._choices.items() if kinds.get(name) == kind}
        whys = {name: f"{chosen[name]}; {text}" if chosen.get(name) else text for name, text in scaled.items()}
        notes = {**chosen, **whys, **notes, **no_value_notes(self.encoder.columns, manifest)}
        lines = [("column", "kind", "rows", "distinct", "missing", "bytes x dim", "")]
        for i, column in enumerate(self.encoder.columns):
            if column.vector is not None and column.place:
                continue  # one line for all
            rows = rows_of.get(column.name)
            own, missing = rows is not None and column.share is None, manifest["missing"][i]
            lines.append((
                printable(column.vector or column.name),
                kind_text(column),
                "" if rows is None else f"{rows:,}",
                f"{manifest['distinct'][i] - (missing > 0 and not column.pool):,}" if column.kind == ID else "",
                f"{missing:,}",
                f"{4 * rows:,}" if own else "",
                "" if column.vector else notes.get(column.name, ""),
            ))  # fmt: skip
        for name in self._dropped:
            kind, why = self._choices.get(name, (None, ""))
            lines.append((printable(name), DROP, "", "", "", "", why if kind == DROP else "by its rule"))
        widths = [max(len(line[j]) for line in lines) for j in range(6)]
        for line in lines:
            cells = [
                cell.ljust(width) if j < 2 else cell.rjust(width) for j, (cell, width) in enumerate(zip(line, widths))
            ]
            report("  ".join([*cells, line[6]]).rstrip())

    def _unseen(self) -> dict[str, str]:
        """Column -> remark that most held-out values were not seen in training, by a sample."""
        notes = {}
        min_count = {column.name: column.min_count for column in self.encoder.columns}
        for name, (unseen, num) in self.unseen_values().items():
            if unseen > MOST * num:
                notes[name] = unseen_text(unseen, num, min_count[name], "held-out values")
        return notes

    def unseen_values(self) -> dict[str, tuple[int, int]]:
        """Column with a vocabulary -> how many held-out values were not seen in training, and how many there are, in a
        sample."""
        groups = np.linspace(0, self._valid.num_groups - 1, min(SAMPLE_GROUPS, self._valid.num_groups)).astype(int)
        return unseen_of(self.encoder, concatenate([self._valid.group(int(group)) for group in groups]))

    def _draw_order(self, epoch: int) -> Order:
        groups = self._train.num_groups
        drawn = np.random.default_rng((self.seed, epoch)).permutation(groups) if self.shuffle else np.arange(groups)
        return self._train.order(drawn)

    def _draw_permutation(self, epoch: int, group: int) -> np.ndarray:
        rows = self._train.rows[group]
        return np.random.default_rng((self.seed, epoch, group)).permutation(rows) if self.shuffle else np.arange(rows)


def choices_of(encoder: Encoder, types: Mapping[str, str]) -> dict[str, Choice]:
    """The choices that a training made, for columns of these types."""
    kinds = {column.vector or column.name: column.kind for column in encoder.columns}
    return {name: Choice(kinds.get(name, DROP)) for name in types}


def kind_text(column: Column) -> str:
    most = "" if column.max_len is None else f"{column.keep} {column.max_len:,}"
    weighted = "weighted " if column.is_weighted else ""
    several = f"{weighted}{column.pool} of {'the ' + most if most else 'several'}"
    if column.pool == SEQUENCE:
        several = f"{most} of a sequence" if most else "a sequence"
    kind = f"id, {several}" if column.pool else "number in buckets" if column.is_buckets else column.kind
    if column.vector is not None:
        kind = f"{vector_size(column.type)} numbers{' in buckets' if column.is_buckets else ''}"
    return f"{kind}, rows of {printable(column.share)}" if column.share else kind


def no_value_notes(columns: list[Column], manifest: dict) -> dict[str, str]:
    """Of columns that are missing in all rows."""
    num_rows = sum(rows for split in ("train", "valid") for rows in manifest[split].values())
    missing = zip(columns, manifest["missing"])
    return {column.name: "no row has a value: kind: drop" for column, num in missing if num == num_rows}


class Reader:
    """Reads the rows of files in order, without preparing them: unit by unit, in blocks of Reading.schema() for
    Encoder.samples, with kept columns. path: a file, a glob or a folder; text without a header has the columns of the
    files that `reading` is from, with or without the labels, or these and the weights.

    bad  rows that were dropped so far
    kept_types  column of text that is passed on -> its type, binary for those that are not there"""

    def __init__(
        self,
        path: str,
        reading: Reading,
        kept: tuple[str, ...] = (),
        max_bad_rows: int = 0,
        **dialect: str,
    ):
        """kept: columns to pass on. dialect: delimiter, encoding and decimal of text, where they are not those of
        `reading`. Raises UserError for files that cannot be read."""
        reading = replace(reading, **dialect)
        reading.dialect.check()
        if os.path.isfile(os.path.join(absolute(path), "manifest.json")):
            raise DataError(f"data.path={path} is a folder of prepared data: give the raw files")
        self.path, self.max_bad_rows, self.bad = path, max_bad_rows, BadRows()
        self.kept_types: dict[str, pa.DataType] = {}
        self.units: list[Unit] = list_units(list_files(path), [], READER_BYTES, reading.encoding)
        top = top_of(absolute(path))
        keys = dict.fromkeys([*reading.keys, *(key for unit in self.units for key in keys_below(top, unit.path))])
        self.reading = replace(reading, keys=tuple(keys)).to_predict(kept)
        if reading.names and self.units and self.units[0].form == TEXT:
            head = head_of(self.units[0].path, encoding=reading.encoding).split(b"\n", 1)[0]
            num = count_values(head, reading.delimiter, reading.quote)
            for absent in (reading.not_features, reading.labels):
                if num == len(reading.names) - len(absent):
                    names = tuple(name for name in reading.names if name not in absent)
                    self.reading = replace(self.reading, names=names)

    def kept_kinds(self, units: Sequence[Unit]) -> dict[str, TextKind]:
        """What the columns of text that are passed on hold in units. Raises DataError."""
        reading, kinds = replace(self.reading, columns=()), dict.fromkeys(self._texts_kept, TextKind())
        for unit in units if kinds else ():
            for raw in rows_of(unit, reading).raw():
                kinds = {name: kind + kind_of(raw[name]) for name, kind in kinds.items()}
        return kinds

    @property
    def _texts_kept(self) -> list[str]:
        """Columns of text that are passed on: of Parquet the keys of folders, which are texts."""
        is_text = bool(self.units) and self.units[0].form == TEXT
        return [name for name in self.reading.kept if is_text or name in self.reading.keys]

    def keep_as(self, kinds: Sequence[Mapping[str, TextKind]], report: Callable[[str], None]) -> None:
        """Sets kept_types from the kinds of all units. report: prints lines of text."""
        for name in self._texts_kept:
            self.kept_types[name] = kind = sum((one[name] for one in kinds), TextKind()).type
            if pa.types.is_binary(kind):
                report(
                    f"{self.path}, column {one_line(name)}: not UTF-8, written as bytes: data.encoding=latin-1, or "
                    "another name, makes it text"
                )

    def files(self) -> list[str]:
        """Paths of the files, in order."""
        return list(dict.fromkeys(unit.path for unit in self.units))

    @property
    def doubt(self) -> str | None:
        """A remark on files that seem to have another encoding than they are read with."""
        paths = list(dict.fromkeys(unit.path for unit in self.units if unit.form == TEXT))
        return encoding_doubt(paths, self.reading.encoding)

    def blocks(self, unit: Unit) -> Iterator[pa.Table]:
        """The good rows of a unit. Raises DataError."""
        for rows in rows_of(unit, self.reading):
            self.bad += rows.bad
            self.bad.check(self.path, self.max_bad_rows, cures={})  # rules are those of the training
            table = rows.table
            for name, kind in self.kept_types.items():
                i = table.schema.get_field_index(KEPT + name)
                if pa.types.is_binary(table.schema.field(i).type):
                    table = table.set_column(i, KEPT + name, typed_as(table.column(i), kind))
            yield table


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


def labels_of(label) -> tuple[str, ...]:
    """The names in data.label. Raises UserError."""
    if label is None or isinstance(label, str):
        check_text("label", label, "the name of a column", is_optional=True)
        return () if label is None else (label,)
    names = plain(label)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"data.label must be the name of a column, or a list of names, got {one_line(label)}")
    if len(set(names)) < len(names):
        raise UserError(f"data.label: names must differ, got {one_line(', '.join(names))}")
    return tuple(names)


def weights_of(weights) -> tuple[float, ...] | None:
    """data.label_weights. Raises UserError."""
    weights = plain(weights)
    if weights is None:
        return None
    is_good = isinstance(weights, list) and all(
        type(weight) in (int, float) and math.isfinite(weight) and weight >= 0 for weight in weights
    )
    if not is_good or not sum(weights):
        raise UserError(f"data.label_weights must be numbers of at least 0, not all 0, got {one_line(weights)}")
    return tuple(map(float, weights))


def check_valid(valid):
    """data.valid. Raises UserError unless it is a share, a path, or {column: NAME, last: N or a span of time}."""
    if isinstance(valid, dict):
        check_last(valid)
    elif not isinstance(valid, str):
        check_number("data.valid (a share, a path, or {column: NAME, last: N})", valid, 0, 1)
        if not 0 < valid < 1:
            raise UserError(f"data.valid must be a share between 0 and 1, got {valid}")
    return valid


def check_last(valid: dict):
    """Raises UserError unless it is {column: NAME, last: N or a span of time, unit: of times that are numbers}."""
    if not {"column", "last"} <= set(valid) <= {"column", "last", "unit"}:
        raise UserError(
            "data.valid must have the keys column and last, and for times that are numbers unit, as in {column: day, "
            f"last: 1}} or {{column: ts, unit: s, last: 7d}}, got {valid}"
        )
    check_text("valid: column", valid["column"], "the name of a column")
    if valid.get("unit") not in (None, *UNITS):
        raise UserError(f"data.valid: unit must be {UNIT_LIST}, got {one_line(valid['unit'])}")
    if not isinstance(valid["last"], str):
        check_integer("data.valid: last", valid["last"], 1)
        if valid.get("unit") is not None:
            raise UserError(
                f"data.valid: last: {valid['last']} is a number of distinct values, which has no unit: remove unit, or "
                f"give a span of time as last: {valid['last']}d"
            )
    elif not span_of(valid["last"]):
        raise UserError(
            "data.valid: last must be a number of distinct values, or a span of time of seconds, minutes, hours, "
            f"days or weeks as 90s, 30m, 12h, 7d, 2w, got {valid['last']}"
        )
