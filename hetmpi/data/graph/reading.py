"""Tables of a graph's files, read only if they are regular files that fit into memory: a short compressed file may
unpack to more than any machine has."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.csv as csv

from hetmpi.bounded_file import open_regular, shown
from hetmpi.bounded_parquet import read_table
from hetmpi.data.files import DataError, first_line
from hetmpi.data.tabular.files import PARQUET, compression_of, form_of, open_parquet
from hetmpi.data.tabular.layout import guess_delimiter
from hetmpi.data.tabular.text import head_of
from hetmpi.errors import one_line
from hetmpi.memory import check_fits

COPIES = 3  # bytes that reading a graph takes, per byte of its tables
MOST_GZIP_RATIO = 1032
CHUNK_BYTES = 1 << 20
CURE = "use a machine with more, or smaller files"
MOST_COLUMNS = 1 << 14  # of a CSV file


def read_file(path: str) -> pa.Table:
    """The table of a Parquet file, or of a CSV file, whose columns are texts. Raises UserError."""
    open_regular(path).close()
    return read_parquet_file(path) if is_parquet(path) else read_texts(path)


def is_parquet(path: str) -> bool:
    return form_of(path) == PARQUET


def read_texts(path: str) -> pa.Table:
    """The columns of a CSV file as texts, named by its first line. Raises UserError."""
    return named_by_first(read_lines(path))


def read_lines(path: str, delimiter: str | None = None) -> pa.Table:
    """The lines of a CSV file, the first one included, in columns of texts. delimiter: None to find it. Raises
    UserError."""
    open_regular(path).close()
    delimiter = delimiter or guess_delimiter(path, head_of(path))
    if len(delimiter) > 1:
        raise DataError(f"data.path: {shown(path)} has values divided by {delimiter!r}, write a comma between them")
    as_texts = csv.ConvertOptions(column_types=dict.fromkeys(map("f{}".format, range(MOST_COLUMNS)), pa.large_string()))
    table = read_csv_file(
        path, csv.ReadOptions(autogenerate_column_names=True), csv.ParseOptions(delimiter=delimiter), as_texts
    )
    if table.num_columns > MOST_COLUMNS:
        raise DataError(f"data.path: {shown(path)} must have at most {MOST_COLUMNS:,} columns")
    return table


def first_values(table: pa.Table) -> list[str]:
    """The values of the first line of read_lines(), without blanks around."""
    return [column[0].as_py().strip() for column in table.columns]


def named_by_first(table: pa.Table) -> pa.Table:
    """The further lines of read_lines(), their columns named by the first one."""
    return table.slice(1).rename_columns(first_values(table))


def read_csv_file(path: str, *options) -> pa.Table:
    """The table of a CSV file, which may be compressed. options: pyarrow's. Raises UserError."""
    open_regular(path).close()
    with reading(path):
        check_unpacked(path)
        table = csv.read_csv(path, *options)
        return table.rename_columns(list(table.column_names))  # raises for a name that is no text


def read_parquet_file(path: str) -> pa.Table:
    """The table of a Parquet file. Raises UserError."""
    return read_table(open_parquet(path), f"data.path: {shown(path)}", CURE, COPIES)


@contextmanager
def reading(path: str):
    """A context that turns errors of a file's contents into a DataError."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError, MemoryError) as error:
        why = one_line(first_line(error))
        raise DataError(f"data.path: {shown(path)} cannot be read: {why}") from error


def check_unpacked(path: str):
    """Raises UserError if a compressed file unpacks to more than fits into memory."""
    kind, size = compression_of(path), os.path.getsize(path)
    if kind is None:
        return check_need(path, size)
    if kind == "gzip" and size * MOST_GZIP_RATIO < 1 << 28:
        return None
    nbytes = 0
    with pa.input_stream(path, compression=kind) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            nbytes += len(chunk)
            if nbytes % (64 * CHUNK_BYTES) < CHUNK_BYTES:
                check_need(path, nbytes)
    return check_need(path, nbytes)


def check_need(path: str, nbytes: int):
    """Raises UserError if a table of `nbytes` cannot be read into memory."""
    check_fits(COPIES * nbytes, f"data.path: {shown(path)}", CURE)
