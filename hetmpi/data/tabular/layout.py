"""The columns of tabular files and their types, from the schemas of Parquet and a sample of the values of all files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.data.checked import Damaged, read_json, write_json
from hetmpi.data.files import DataError, absolute
from hetmpi.data.tabular.choices import Choice, choose, label_of
from hetmpi.data.tabular.convert import NUMBER_TEXT, as_text, hashes, moments_of, no_value, numbers, trimmed
from hetmpi.data.tabular.dialect import COMMA, COMMA_TEXT, POINT, Dialect, with_points
from hetmpi.data.tabular.files import PARQUET, TEXT, form_of
from hetmpi.data.tabular.folders import keys_below, keys_of, top_of
from hetmpi.data.tabular.prepare import list_folder
from hetmpi.data.tabular.rules import FLOAT, INTEGER, LIST, MAP, NESTED, STRING, VECTOR, vector_size
from hetmpi.data.tabular.sampling import (
    SAMPLE_BYTES,
    SAMPLE_ROWS,
    FileSample,
    by_threads,
    columns_named,
    part_of,
    sample_parquet,
    sample_text,
    texts_of,
    with_folders,
)
from hetmpi.data.tabular.scaling import Scaling
from hetmpi.data.tabular.text import count_values, head_of
from hetmpi.errors import one_line, printable

INFINITE_TEXT = r"^[+-]?(?i:inf|infinity|nan)$"  # refused, or missing, when numbers are read
WHOLE_TEXT = r"^-?(0|[1-9][0-9]*)(\.0+)?$"  # an integer; 007 is a code
CODE_TEXT = r"^-?0[0-9]+$"
DELIMITERS = ("::", ",", "\t", ";", "|")
THOUSANDS_TEXT = r"^[+-]?[0-9]{1,3},[0-9]{3}$"
WEIGHTED_TEXT = rf"^[^:]+:{NUMBER_TEXT[1:]}"
SEPARATORS = ("|", ";", ",", " ")
ONE_IN = 100  # distinct values of a column of numbers that may be texts: to be refused by line, not to become ids
NONE, TRUTH, TIME = "no values", "booleans", "dates or times"  # of one file, besides the types of rules.py
MANY = {INTEGER: "integers", FLOAT: "fractions", STRING: "texts", LIST: "lists", MAP: "maps", NESTED: "nested values"}


MissingOf = Callable[[str], tuple[str, ...]]  # column -> texts of its missing values


class NoRows(DataError):
    """Files with a header and nothing else."""


@dataclass(frozen=True)
class Layout:
    """delimiter, decimal: of text (dialect.py). types: column -> type, in the order of the first file. conflicts:
    column -> how files differ that give a column another type than one of them alone. keys: columns of folders
    (folders.py). refused: column -> why no type suits all files. choices: column -> what becomes of it without a
    rule."""

    form: str
    delimiter: str
    decimal: str
    types: dict[str, str]
    conflicts: dict[str, str]
    keys: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)

    def check(self, names: Iterable[str]) -> None:
        """Raises DataError for a column among `names` of which no type suits all files."""
        for name in names:
            if name in self.refused:
                raise DataError(self.refused[name])

    @staticmethod
    def read(folder: str, name: str) -> Layout:
        """What write() wrote. Raises Damaged, and OSError."""
        saved = read_json(folder, name)
        return Layout(**{**saved, "choices": {key: Choice(*one) for key, one in saved["choices"].items()}})

    @staticmethod
    def find(folder: str, name: str) -> Layout | None:
        """The same, None if it is missing or damaged."""
        with contextlib.suppress(OSError, Damaged):
            return Layout.read(folder, name)
        return None

    def write(self, folder: str, name: str) -> None:
        """Writes it for other ranks and runs. Raises DataError."""
        list_folder(folder)
        try:
            write_json(asdict(self), folder, name)
        except OSError as error:
            raise DataError(
                f"data.cache={folder}: {error.strerror}; set data.cache to a folder that is writable"
            ) from error


class Values(NamedTuple):
    """Distinct values of a column in a sample: all, integers, other numbers, and those with a point."""

    num: int = 0
    whole: int = 0
    fractions: int = 0
    points: int = 0

    def __add__(self, other: Values) -> Values:
        return Values(*(a + b for a, b in zip(self, other)))

    @property
    def type(self) -> str:
        """NONE, INTEGER, FLOAT or STRING. Numbers with a point make it FLOAT, with at most one text in ONE_IN."""
        if not self.num:
            return NONE
        if self.whole == self.num:
            return INTEGER
        texts = self.num - self.whole - self.fractions
        is_float = texts == 0 or (self.points and texts * ONE_IN <= self.num)
        return FLOAT if is_float else STRING


class Found(NamedTuple):
    """A column of one file. type: of its values, also TRUTH, TIME and NONE. declared: of its schema."""

    type: str
    declared: str
    values: Values


def look(
    source: str, paths: Sequence[str], names, dialect: Dialect, missing_of: MissingOf, label: str | None, positive
) -> Layout:
    """The layout of files of a source. names: of the columns of text without a header. label, positive: of Tabular.
    Raises DataError."""
    samples, dialect = sampled(source, paths, names, dialect, missing_of)
    return with_choices(layout_of(samples, dialect, missing_of), samples, missing_of, label, positive)


def with_choices(
    layout: Layout, samples: Sequence[FileSample], missing_of: MissingOf, label: str | None, positive
) -> Layout:
    """The layout with the choices for its columns."""
    values = None if label is None else label_of(texts_of(samples, label).chunks, missing_of(label), positive)
    return replace(layout, choices=choose(layout.types, samples, values, missing_of))


def sampled(
    source: str, paths: Sequence[str], names, dialect: Dialect, missing_of: MissingOf
) -> tuple[list[FileSample], Dialect]:
    """A sample of each file of a source, with the keys of its folders, and the dialect of text with its delimiter and
    decimal sign. Raises DataError."""
    samples, dialect = sampled_files(paths, names, dialect, missing_of)
    top = top_of(absolute(source))
    keys = keys_of(os.path.relpath(samples[0].path, top))
    samples = [with_folders(sample, keys_below(top, sample.path, keys)) for sample in samples]
    first = samples[0]
    other = next((sample for sample in samples if set(sample.keys) != set(first.keys)), None)
    if other is not None:
        raise DataError(
            f"data.path: {first.path} lies in folders of the keys {', '.join(first.keys) or 'none'}, {other.path} of "
            f"{', '.join(other.keys) or 'none'}: all files need the same: select the files by a glob"
        )
    return samples, dialect


def sampled_files(
    paths: Sequence[str], names, dialect: Dialect, missing_of: MissingOf
) -> tuple[list[FileSample], Dialect]:
    """As sampled(), without folders."""
    if form_of(paths[0]) == PARQUET:
        if names is not None:
            raise DataError(f"data.names is for text, {paths[0]} is Parquet, whose columns have names")
        read = partial(sample_parquet, num_rows=part_of(SAMPLE_ROWS, len(paths)))
        return by_threads(read, paths), Dialect(",", decimal=POINT)
    head = head_of(paths[0], encoding=dialect.encoding)
    dialect = replace(dialect, delimiter=dialect.delimiter or guess_delimiter(paths[0], head))
    if names is not None:
        check_names(paths[0], head, names, dialect.delimiter, dialect.quote)
    num_bytes = part_of(SAMPLE_BYTES, len(paths))
    samples = by_threads(lambda path: sample_text(path, names, dialect, num_bytes), paths)
    if not any(sample.pieces for sample in samples):
        raise NoRows(f"data.path: {paths[0]} has only a header, no rows")
    if dialect.decimal is None:
        dialect = replace(dialect, decimal=guess_decimal(samples, dialect.delimiter, missing_of))
    return [with_decimal(sample, dialect.decimal) for sample in samples], dialect


def guess_decimal(samples: Sequence[FileSample], delimiter: str, missing_of: MissingOf) -> str:
    """COMMA if values are divided by semicolons, no number has a point, and those of a column have commas."""
    if delimiter != ";":
        return POINT
    decimal = POINT
    for name in samples[0].names:
        values = distinct_of(texts_of(samples, name), missing_of(name))
        if values_of(values).points:
            return POINT
        commas = values.filter(pc.match_substring_regex(values, COMMA_TEXT))
        is_amount = pc.match_substring_regex(commas, THOUSANDS_TEXT)
        if len(commas) and values_of(with_points(values)).type == FLOAT and not pc.all(is_amount).as_py():
            decimal = COMMA
    return decimal


def with_decimal(sample: FileSample, decimal: str) -> FileSample:
    """A sample of text with points in its numbers."""
    if decimal == POINT:
        return sample
    pieces = [pa.table({n: with_points(piece[n]) for n in piece.column_names}) for piece in sample.pieces]
    return sample._replace(pieces=pieces)


def layout_of(samples: Sequence[FileSample], dialect: Dialect, missing_of: MissingOf) -> Layout:
    """The layout of files from their samples. Raises DataError for columns that no type suits."""
    form = TEXT if samples[0].schema is None else PARQUET
    types, conflicts, refused = {}, {}, {}
    for name, columns in columns_of(samples, missing_of).items():
        types[name], conflict = joined(columns)
        conflicts |= {name: conflict} if conflict else {}
        clash = clash_of(name, columns)
        refused |= {name: clash} if clash else {}
    return Layout(form, dialect.delimiter, dialect.decimal, types, conflicts, list(samples[0].keys), refused)


def clash_of(name: str, found: dict[str, Found]) -> str | None:
    """Why a column of several files cannot be used: no type suits them. found: file -> what it has."""
    first = first_of(found)
    alone = ((kind, None) for kind in first if is_alone(kind))
    for some, others in (*alone, (TRUTH, (INTEGER, FLOAT)), (TIME, (INTEGER, FLOAT))):
        clash = [kind for kind in first if kind not in (some, NONE) and (others is None or kind in others)]
        if some in first and clash:
            return (
                f"data.path: column {one_line(name)} has {many(some)} in {first[some]} and "
                f"{many(clash[0])} in {first[clash[0]]}: write it alike in all files, or give it "
                "kind: drop"
            )
    return None


def first_of(found: dict[str, Found]) -> dict[str, str]:
    """Type -> the first file that has it."""
    first: dict[str, str] = {}
    for path, column in found.items():
        first.setdefault(column.type, path)
    return first


def joined(found: dict[str, Found]) -> tuple[str, str | None]:
    """The type of a column of several files, and how they differ. found: file -> what it has."""
    first = first_of(found)
    kind = next((kind for kind in first if is_alone(kind)), None)
    kind = kind or sum((column.values for column in found.values()), Values()).type
    if kind == NONE:
        return next(iter(found.values())).declared, None
    several = {other: path for other, path in first.items() if other != NONE}
    if len({STRING if other in (TRUTH, TIME) else other for other in several}) < 2:
        return kind, None
    places = [f"{many(other)} in {os.path.basename(path)}" for other, path in list(several.items())[:2]]
    return kind, printable(f"{' and '.join(places)}: taken as {'number' if kind == FLOAT else 'id'}")


def is_alone(kind: str) -> bool:
    """Whether no other type can stand beside this one in another file."""
    return kind in (LIST, MAP, NESTED) or vector_size(kind) is not None


def many(kind: str) -> str:
    """Values of a type, for messages."""
    size = vector_size(kind)
    return MANY.get(kind, kind) if size is None else f"vectors of {size} numbers"


def columns_of(samples: Sequence[FileSample], missing_of: MissingOf) -> dict[str, dict[str, Found]]:
    """Column of the first file -> file -> what it has."""
    return {name: in_files(name, samples, missing_of(name)) for name in samples[0].names}


def in_files(name: str, samples: Sequence[FileSample], missing: tuple[str, ...]) -> dict[str, Found]:
    """File -> what it has of a column, of files that have it."""
    found, flat = {}, {}
    for sample in samples:
        if name not in sample.names:
            continue
        kind = kind_in(sample, name)
        declared = f"{VECTOR}{sample.vectors[name]}" if name in sample.vectors else type_of(kind)
        found[sample.path] = Found(declared, declared, Values())
        if name not in sample.vectors and declared not in (LIST, MAP, NESTED):
            flat.setdefault(kind, []).append(sample)
    for kind, alike in flat.items():
        counts = counted([columns_named(name, [sample]) for sample in alike], type_of(kind), missing)
        for sample, values in zip(alike, counts):
            values += Values(1, 0, 1, 1) if name in sample.fractions else Values()
            found[sample.path] = Found(type_with(kind, values), type_of(kind), values)
    return found


def kind_in(sample: FileSample, name: str) -> pa.DataType:
    """Arrow's type of a column in a file, that of its values if they are encoded by a dictionary."""
    kind = pa.binary() if sample.schema is None else sample.schema.field(sample.names.index(name)).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def type_with(kind: pa.DataType, values: Values) -> str:
    """The type of a column of Arrow's type `kind` with these values."""
    if not values.num:
        return NONE
    if pa.types.is_boolean(kind) or pa.types.is_temporal(kind):
        return TRUTH if pa.types.is_boolean(kind) else TIME
    return values.type


def counted(chunks: list[list[pa.Array]], declared: str, missing: tuple[str, ...]) -> list[Values]:
    """The distinct values of each file, counted for all files together. chunks: of each file, of one type."""
    flat = [chunk.dictionary_decode() if pa.types.is_dictionary(chunk.type) else chunk for of in chunks for chunk in of]
    sizes = [sum(map(len, of_file)) for of_file in chunks]
    if not sum(sizes):
        return [Values()] * len(chunks)
    encoded = pa.concat_arrays(flat).dictionary_encode()
    distinct = distinct_of(encoded.dictionary, missing)
    place = places_among(encoded, distinct, missing)
    file = np.repeat(np.arange(len(chunks)), sizes)[place >= 0]
    pairs = pc.unique(pa.array(file * len(distinct) + place[place >= 0])).to_numpy()
    file, place = np.divmod(pairs, max(len(distinct), 1))
    whole, fractions, points = kinds_of_floats(distinct) if declared == FLOAT else kinds_of(distinct)
    sums = [np.bincount(file[which[place]], minlength=len(chunks)) for which in (whole, fractions, points)]
    return [Values(*map(int, of_file)) for of_file in zip(np.bincount(file, minlength=len(chunks)), *sums)]


def places_among(encoded: pa.DictionaryArray, distinct: pa.Array, missing: tuple[str, ...]) -> np.ndarray:
    """The place of each value among distinct_of() of the dictionary, -1 for none, (n,) int64."""
    if not len(distinct):
        return np.full(len(encoded), -1)
    texts, _ = trimmed(as_text(encoded.dictionary), missing)
    places = pc.index_in(texts, distinct).fill_null(-1).to_numpy().astype(np.int64)
    return np.append(places, -1)[encoded.indices.fill_null(-1).to_numpy()]


@dataclass(frozen=True)
class ColumnSample:
    """Values of a column in a sample of so many rows. is_binary: only 0 and 1. is_time: dates or times that
    data.valid reads. separator: one that may divide several values, None if none seems to; weights: one that divides
    values with weights, as in t6:2.5|t1:1. scaling: of numbers."""

    rows: int
    distinct: int
    examples: list[str]
    is_binary: bool
    is_number: bool
    is_time: bool
    separator: str | None
    weights: str | None
    scaling: Scaling | None


def seen_of(samples: Sequence[FileSample], layout: Layout, missing: tuple[str, ...]) -> dict[str, ColumnSample]:
    """Values of each column in samples of files."""
    return {name: seen(texts_of(samples, name), missing, kind) for name, kind in layout.types.items()}


def seen(texts: pa.ChunkedArray, missing: tuple[str, ...], kind: str) -> ColumnSample:
    values = distinct_of(texts, missing)
    examples = [value.decode(errors="replace") for value in values[:3].to_pylist()]
    is_binary = sorted(values[:3].to_pylist()) == [b"0", b"1"]
    is_number = kind in (INTEGER, FLOAT) or values_of(values).type in (INTEGER, FLOAT)
    is_time = len(values) > 0 and not moments_of(values).null_count
    separator = None if is_number or is_time else separator_of(values)
    found = [numbers(chunk, missing)[0] for chunk in texts.chunks] if is_number else []
    scaling = Scaling.of(np.concatenate(found)) if found else None
    weights = None if is_number or is_time else separator_of_weights(values)
    return ColumnSample(len(texts), len(values), examples, is_binary, is_number, is_time, separator, weights, scaling)


def separator_of_weights(values: pa.Array) -> str | None:
    """The first separator whose parts are all a value, a colon and a number; None if there is none, or no parts."""
    for separator in SEPARATORS:
        parts = pc.list_flatten(pc.split_pattern(values, separator.encode()))
        if len(parts) > len(values) and pc.all(pc.match_substring_regex(parts, WEIGHTED_TEXT)).as_py():
            return separator
    return None


def separator_of(values: pa.Array) -> str | None:
    """The first separator whose parts of the distinct values recur, None if there is none."""
    for separator in SEPARATORS:
        parts = pc.list_flatten(pc.split_pattern(values, separator.encode()))
        if len(parts) > len(values) and len(pc.unique(parts)) <= len(values) // 2:
            return separator
    return None


def distinct_of(values: pa.Array | pa.ChunkedArray, missing: tuple[str, ...]) -> pa.Array:
    """Distinct values as binary texts, without missing ones; none of what cannot be read, which preparing names."""
    try:
        texts = as_text(pc.unique(values))
        texts, none = trimmed(texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts, missing)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return pa.array([], pa.binary())
    none |= hashes(texts, 0, missing) == no_value(0)
    return pc.unique(texts.filter(pa.array(~none)))


def values_of(texts: pa.Array) -> Values:
    """Of distinct values of text."""
    return Values(len(texts), *(int(np.count_nonzero(which)) for which in kinds_of(texts)))


def kinds_of(texts: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which distinct values of text (n,) are integers, other numbers, and those with a point, (n,) bool."""
    whole = matching(texts, np.ones(len(texts), bool), WHOLE_TEXT)
    number = matching(texts, ~whole, NUMBER_TEXT)
    infinite = matching(texts, ~whole & ~number, INFINITE_TEXT)
    fractions = infinite | (number & ~matching(texts, number, CODE_TEXT))
    return whole, fractions, matching(texts, fractions, r"\.")


def matching(texts: pa.Array, is_tried: np.ndarray, pattern: str) -> np.ndarray:
    """Which of the texts (n,) are tried, as is_tried (n,) bool says, and match, (n,) bool."""
    matches = np.zeros(len(texts), bool)
    matches[is_tried] = np.asarray(pc.match_substring_regex(texts.filter(pa.array(is_tried)), pattern))
    return matches


def kinds_of_floats(texts: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of distinct floats and decimals, as texts."""
    values = texts.cast(pa.string()).cast(pa.float64()).to_numpy(zero_copy_only=False)
    whole = np.isfinite(values) & (values == np.floor(values))
    return whole, ~whole, ~whole


def type_of(kind: pa.DataType) -> str:
    """The type of a Parquet column. Booleans, dates and times count as text, decimals as floats."""
    if pa.types.is_dictionary(kind):
        return type_of(kind.value_type)
    if pa.types.is_integer(kind):
        return INTEGER
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return FLOAT
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return LIST if type_of(kind.value_type) in (INTEGER, STRING) else NESTED
    if pa.types.is_map(kind) and type_of(kind.item_type) in (INTEGER, FLOAT):
        return MAP if type_of(kind.key_type) in (INTEGER, STRING) else NESTED
    is_flat = not pa.types.is_nested(kind) and not pa.types.is_duration(kind)
    return STRING if is_flat else NESTED


def guess_delimiter(path: str, head: bytes) -> str:
    """By the file's name, else the most frequent candidate of the first line; a comma if there is none."""
    if ".tsv" in path.lower():
        return "\t"
    first = head.lstrip(b"\r\n").partition(b"\n")[0]
    found = [one for one in DELIMITERS if one.encode() in first]
    return max(found, key=lambda one: first.count(one.encode()), default=",")


def check_names(path: str, head: bytes, names, delimiter: str, quote: str | None):
    """Raises DataError unless one of the first lines has as many values as there are names."""
    lines = [line for line in head.splitlines()[:20] if line.strip()]
    if not lines:
        raise DataError(f"data.path: {path} is empty")
    numbers = [count_values(line, delimiter, quote) for line in lines]
    if len(names) not in numbers:
        raise DataError(
            f"data.path: {path}: data.names has {len(names)} names, but the first lines have "
            f"{', '.join(map(str, sorted(set(numbers))))} values, divided by {delimiter!r}"
        )
