"""Files that a command writes: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hetmpi.errors import UserError


@contextlib.contextmanager
def part_of(out: Path) -> Iterator[Path]:
    """A context with the path of a part file beside `out`, whose folder is created. Without an error the part file
    becomes `out`, otherwise it is removed. Raises UserError if the folder or `out` cannot be written."""
    part = out.with_name(f".{out.name}.{socket.gethostname()}.{os.getpid()}.part")
    with cannot_write(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # a link, or the file of a killed process
        part.touch(exist_ok=False)  # by O_EXCL, which follows no link
    try:
        yield part
        with cannot_write(out):
            part.replace(out)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def parts_of(out: Path) -> list[Path]:
    """The part files of `out`, of any process."""
    name = re.compile(re.escape(f".{out.name}.") + r".+\.[0-9]{1,9}\.part")
    return [path for path in out.parent.iterdir() if name.fullmatch(path.name)]


class RowsFile:
    """A Parquet file of predictions that is written table by table; out: for messages."""

    def __init__(self, out: Path, part: Path):
        self._out, self._part = out, part
        self._writer: pq.ParquetWriter | None = None

    def write(self, table: pa.Table):
        """Adds rows. Raises UserError for a disk that cannot be written, and for kept columns of another type than in
        the tables before."""
        try:
            with cannot_write(self._out):
                self._writer = self._writer or pq.ParquetWriter(
                    self._part, table.schema, compression="zstd", write_page_checksum=True
                )
                self._writer.write_table(table.cast(self._writer.schema))
        except pa.ArrowException as error:
            raise UserError(f"predict.keep: the files have columns of different types: {error}") from error

    def close(self):
        """Raises UserError if nothing was written."""
        if self._writer is None:
            raise UserError("data.path has no rows to predict")
        with cannot_write(self._out):
            self._writer.close()


@contextlib.contextmanager
def rows_to(out: Path) -> Iterator[RowsFile]:
    """A context with a RowsFile that becomes `out`, as part_of()."""
    with part_of(out) as part:
        rows = RowsFile(out, part)
        yield rows
        rows.close()


@contextlib.contextmanager
def cannot_write(out: Path):
    """A context that turns an error of the disk into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
