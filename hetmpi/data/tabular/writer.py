"""RowWriter: writes prepared rows to Parquet files."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq

from hetmpi.data.checked import write_sums

GROUP_ROWS = 8192  # rows of a Parquet row group, the unit of reading
LEVEL = -3  # of zstd, faster than the default: without dictionaries of fractions the files are no larger
FILE_ROWS = 128 * GROUP_ROWS  # rows of a Parquet file, whose footer is held in memory


class RowWriter:
    """Writes rows, in order, to Parquet files of FILE_ROWS rows in groups of GROUP_ROWS; the last file and the last
    group may be smaller.

    files  name -> number of rows written to the file so far
    """

    def __init__(self, folder: str, name: str, schema: pa.Schema):
        self._folder, self._name, self._schema = folder, name, schema
        self._of_ids = [leaf_of(field) for field in schema if not pa.types.is_floating(field.type)]
        self._file = None
        self._waiting = schema.empty_table()
        self.files: dict[str, int] = {}

    def add(self, block: pa.Table) -> None:
        """Adds a block with the writer's schema."""
        self._waiting = pa.concat_tables([self._waiting, block])
        while len(self._waiting) >= GROUP_ROWS:
            self._write(len(self._waiting) // GROUP_ROWS * GROUP_ROWS)

    def _write(self, rows: int) -> None:
        """Writes the first `rows` waiting rows, or those of them for which the file has room."""
        if self._file is None:
            self._open()
        name = next(reversed(self.files))
        rows = min(rows, FILE_ROWS - self.files[name])
        self._file.write_table(self._waiting.slice(0, rows), row_group_size=GROUP_ROWS)
        self._waiting = self._waiting.slice(rows)
        self.files[name] += rows
        if self.files[name] == FILE_ROWS:
            self._complete()

    def _complete(self) -> None:
        self._close()
        write_sums(os.path.join(self._folder, next(reversed(self.files))))

    def _open(self) -> None:
        name = f"{self._name}-{len(self.files):03d}.parquet"
        self._file = pq.ParquetWriter(
            os.path.join(self._folder, name), self._schema, compression="zstd", compression_level=LEVEL,
            use_dictionary=self._of_ids,
        )  # fmt: skip
        self.files[name] = 0

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, error, *_) -> None:
        try:
            if error is None and len(self._waiting):
                self._write(len(self._waiting))
            if error is None and self._file is not None:
                self._complete()
        finally:
            self._close()


def leaf_of(field: pa.Field) -> str:
    """What Parquet calls the values of a column."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
