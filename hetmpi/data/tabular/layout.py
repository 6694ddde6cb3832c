"""The columns of tabular files and their types, from the schema of Parquet or a sample of text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from hetmpi.data.files import DataError, first_line
from hetmpi.data.tabular.convert import NUMBER_TEXT, as_text, moments_of, numbers, trimmed
from hetmpi.data.tabular.files import PARQUET, TEXT, form_of, open_parquet, parquet_names
from hetmpi.data.tabular.rules import FLOAT, INTEGER, LIST, NESTED, STRING
from hetmpi.data.tabular.scaling import Scaling
from hetmpi.data.tabular.text import count_values, head_of, header_of

SAMPLE_BYTES = 1 << 20
SAMPLE_ROWS = 10_000
INFINITE_TEXT = r"^[+-]?(?i:inf|infinity|nan)$"  # refused, or missing, when numbers are read
INTEGERS_TEXT = r"^-?[0-9]+$"
DELIMITERS = (",", "\t", ";", "|")
SEPARATORS = ("|", ";", ",", " ")
ONE_IN = 100  # distinct values of a column of numbers that may be texts: to be refused by line, not to become ids


class NoRows(DataError):
    """A file with a header and nothing else."""


@dataclass(frozen=True)
class Layout:
    """types: column -> type, in the file's order."""

    form: str
    delimiter: str
    types: dict[str, str]


def look(path: str, names, delimiter: str | None, quote: str | None, missing: tuple[str, ...]) -> Layout:
    """The layout of a file. names: of the columns of text without a header. Raises DataError."""
    if form_of(path) == PARQUET:
        if names is not None:
            raise DataError(f"data.names is for text, {path} is Parquet, whose columns have names")
        schema = open_parquet(path).schema_arrow
        names = parquet_names(path, schema)
        return Layout(PARQUET, ",", {name: type_of(column.type) for name, column in zip(names, schema)})
    head = head_of(path, SAMPLE_BYTES)
    delimiter = delimiter or guess_delimiter(path, head)
    if names is None:
        names = header_of(path, head, delimiter, quote)
        first, _, head = head.lstrip(b"\r\n").partition(b"\n")
        if b"\r" in first.rstrip(b"\r"):
            raise DataError(f"data.path: {path}: its lines end in CR, LF or CR LF was expected: convert it")
        if not head.strip():
            raise NoRows(f"data.path: {path} has only a header, no rows")
    else:
        check_names(path, head, names, delimiter, quote)
    texts = sample(head, list(names), delimiter, quote)
    return Layout(TEXT, delimiter, {name: guess(texts.column(name), missing) for name in names})


@dataclass(frozen=True)
class ColumnSample:
    """Values of a column in a sample of so many rows. is_binary: only 0 and 1. is_time: dates or times that
    data.valid reads. separator: one that may divide several values, None if none seems to. scaling: of numbers."""

    rows: int
    distinct: int
    examples: list[str]
    is_binary: bool
    is_number: bool
    is_time: bool
    separator: str | None
    scaling: Scaling | None


def seen_of(path: str, layout: Layout, names, missing: tuple[str, ...]) -> dict[str, ColumnSample]:
    """Values of each column, in the first SAMPLE_BYTES of text or the first SAMPLE_ROWS of Parquet."""
    if layout.form == PARQUET:
        flat = [name for name, kind in layout.types.items() if kind not in (LIST, NESTED)]
        texts = first_texts(path, flat)
    else:
        head = head_of(path, SAMPLE_BYTES)
        head = head if names else head.lstrip(b"\r\n").partition(b"\n")[2]
        table = sample(head, list(layout.types), layout.delimiter, '"')
        texts = {name: table.column(name) for name in table.column_names}
    nothing = pa.array([], pa.binary())
    return {name: seen(texts.get(name, nothing), missing, kind) for name, kind in layout.types.items()}


def first_texts(path: str, names: list[str]) -> dict[str, pa.Array]:
    """The first values of columns of Parquet, as texts. Raises DataError."""
    try:
        batch = next(open_parquet(path).iter_batches(SAMPLE_ROWS, columns=names, use_threads=False), None)
        return {name: as_text(batch.column(name)) for name in names} if batch else {}
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"data.path: {path} cannot be read: {first_line(error)}") from error


def seen(texts: pa.Array | pa.ChunkedArray, missing: tuple[str, ...], kind: str) -> ColumnSample:
    values = distinct_of(texts, missing)
    examples = [value.decode(errors="replace") for value in values[:3].to_pylist()]
    is_binary = sorted(values[:3].to_pylist()) == [b"0", b"1"]
    is_number = kind in (INTEGER, FLOAT) or guess_of(values) in (INTEGER, FLOAT)
    is_time = len(values) > 0 and not moments_of(values).null_count
    separator = None if is_number or is_time else separator_of(values)
    scaling = Scaling.of(np.concatenate([numbers(one, missing)[0] for one in chunks_of(texts)])) if is_number else None
    return ColumnSample(len(texts), len(values), examples, is_binary, is_number, is_time, separator, scaling)


def chunks_of(texts: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    return texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]


def separator_of(values: pa.Array) -> str | None:
    """The first separator whose parts of the distinct values recur, None if there is none."""
    for separator in SEPARATORS:
        parts = pc.list_flatten(pc.split_pattern(values, separator.encode()))
        if len(parts) > len(values) and len(pc.unique(parts)) <= len(values) // 2:
            return separator
    return None


def distinct_of(texts, missing: tuple[str, ...]) -> pa.Array:
    """Distinct values without missing ones."""
    values, none = trimmed(pc.unique(texts), missing)
    return pc.unique(values.filter(pa.array(~none)))


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
    is_flat = not pa.types.is_nested(kind) and not pa.types.is_duration(kind)
    return STRING if is_flat else NESTED


def guess_delimiter(path: str, head: bytes) -> str:
    """By the file's name, else the most frequent candidate of the first line."""
    if ".tsv" in path.lower():
        return "\t"
    first = head.lstrip(b"\r\n").partition(b"\n")[0]
    return max(DELIMITERS, key=lambda one: first.count(one.encode()))


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


def sample(head: bytes, names: list[str], delimiter: str, quote: str | None) -> pa.Table:
    """The first lines as texts, without those of another number of columns."""
    lines = [line + b"\n" for line in head.splitlines() if count_values(line, delimiter, quote) == len(names)]
    text = b"".join(lines[:-1] if len(head) >= SAMPLE_BYTES else lines)  # the last line may be cut
    try:
        return csv.read_csv(
            pa.BufferReader(text),
            csv.ReadOptions(column_names=names, block_size=len(text) + 1, use_threads=False),
            csv.ParseOptions(delimiter=delimiter, quote_char=quote or False),
            csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.binary()), strings_can_be_null=False, check_utf8=False
            ),
        ).combine_chunks()
    except pa.ArrowInvalid:  # preparing finds the line
        return pa.table({name: pa.array([], pa.binary()) for name in names})


def guess(texts: pa.Array | pa.ChunkedArray, missing: tuple[str, ...]) -> str:
    """The type of a column, STRING if all values are missing. Numbers with a point make it FLOAT, with at most one in
    ONE_IN of its distinct values a text."""
    return guess_of(distinct_of(texts, missing))


def guess_of(values: pa.Array) -> str:
    """The same, of distinct values."""
    if not len(values):
        return STRING
    if np.asarray(pc.match_substring_regex(values, INTEGERS_TEXT)).all():
        return INTEGER
    is_number = pc.or_(pc.match_substring_regex(values, NUMBER_TEXT), pc.match_substring_regex(values, INFINITE_TEXT))
    num_texts = len(values) - int(np.count_nonzero(is_number))
    has_points = num_texts and pc.any(pc.match_substring_regex(values.filter(is_number), r"\.")).as_py()
    return FLOAT if num_texts == 0 or (has_points and num_texts * ONE_IN <= len(values)) else STRING
