"""Parquet files that anybody may have written, read without trust: only regular files, in parts, and only what fits
into memory. A short file may promise more rows, or longer ones, than any machine has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hetmpi.bounded_file import open_regular, shown
from hetmpi.errors import UserError, one_line
from hetmpi.memory import check_fits

BUFFER_BYTES = 1 << 20  # per column and file; without buffers Parquet reads a whole row group
BATCH_ROWS = 1 << 12, 1 << 16  # least and most rows that are decoded at a time
BATCH_BYTES = 1 << 30
FAULTS = (OSError, pa.ArrowException, UnicodeDecodeError, MemoryError)  # of the contents of a file


def open_parquet(
    path: str | Path, place: str | None = None, dictionaries: Sequence[str] = (), is_summed: bool = False
) -> pq.ParquetFile:
    """The Parquet file, not yet read. place: the path in messages. dictionaries: columns of texts that are read as
    dictionaries, as the text of each row may be long. is_summed: pages with a checksum are verified. Raises UserError
    for any other file."""
    open_regular(path).close()
    with readable(place or shown(path)):
        file = pq.ParquetFile(
            path, read_dictionary=list(dictionaries), buffer_size=BUFFER_BYTES, pre_buffer=False,
            page_checksum_verification=is_summed,
        )  # fmt: skip
        assert file.schema_arrow is not None  # raises for columns that Arrow does not read
        return file


@contextmanager
def readable(place: str):
    """A context that turns errors of a file's contents into a UserError."""
    try:
        yield
    except FAULTS as error:
        text = one_line(" ".join(str(error).split()).rstrip("."), 300)
        raise UserError(f"{place} cannot be read: {text}") from error


def batches_of(
    file: pq.ParquetFile, place: str, columns: Sequence[str] | None = None, num_rows: int | None = None
) -> Iterator[pa.RecordBatch]:
    """All rows, in parts of at most num_rows. Raises UserError for a damaged file."""
    num_rows = num_rows or batch_rows(file.metadata)
    with readable(place):
        yield from file.iter_batches(num_rows, columns=columns, use_threads=False)


def read_table(file: pq.ParquetFile, place: str, cure: str, copies: int = 2) -> pa.Table:
    """The whole table. copies: bytes that its use takes, per byte of it. cure: for a table that does not fit into
    memory. Raises UserError."""
    schema, batches, nbytes = file.schema_arrow, [], 0
    check_fits(copies * file.metadata.num_rows * sum(map(width_of, schema.types)), place, cure)
    for batch in batches_of(file, place):
        batches.append(batch)
        nbytes += batch.nbytes
        check_fits((copies - 1) * nbytes, place, cure)
    with readable(place):
        table = pa.Table.from_batches(batches, schema)
        table.validate(full=True)  # texts may be no UTF-8
        return table


def width_of(kind: pa.DataType) -> int:
    """Least bytes that a value takes in memory."""
    try:
        return max(1, kind.bit_width // 8)
    except ValueError:  # texts and lists have offsets
        return 4


def batch_rows(metadata: pq.FileMetaData) -> int:
    """Rows to decode at a time: of a column that is a dictionary, each may take as much as a whole chunk."""
    least, most = BATCH_ROWS
    groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    sizes = (group.column(c).total_uncompressed_size for group in groups for c in range(group.num_columns))
    return min(most, max(least, BATCH_BYTES // max(1, max(sizes, default=1))))
