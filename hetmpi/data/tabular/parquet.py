"""Rows of Parquet files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pyarrow as pa

from hetmpi.data.files import DataError, first_line
from hetmpi.data.tabular.convert import convert, without
from hetmpi.data.tabular.files import Unit, open_parquet, parquet_names
from hetmpi.data.tabular.folders import in_file, keys_read, with_keys
from hetmpi.data.tabular.reading import BadRows, Reading, Rows, check_wanted

BATCH_ROWS = 1 << 14


class ParquetRows:
    """Iterates over the rows of a unit of Parquet. A row with a fault is dropped and counted."""

    def __init__(self, unit: Unit, reading: Reading):
        self.unit, self.reading = unit, reading
        self._file = open_parquet(unit.path)
        self.names = parquet_names(unit.path, self._file.schema_arrow)
        self._keys = keys_read(unit.path, reading)
        check_wanted(reading.wanted, unit.path, [*self.names, *self._keys])
        self._wanted = in_file(reading.wanted, self.names)

    def __iter__(self) -> Iterator[Rows]:
        first = 0
        for raw in self.raw():
            yield self._rows(raw, first)
            first += len(raw)

    def raw(self) -> Iterator[pa.Table]:
        """The columns as they are, in blocks."""
        for batch in self._batches():
            yield with_keys(pa.Table.from_batches([batch]), self._keys, self.reading.missing, self.unit.path)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        groups = list(range(self.unit.begin, self.unit.end))
        try:
            yield from self._file.iter_batches(BATCH_ROWS, groups, self._wanted, use_threads=False)
        except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"data.path: {self._faulty(groups)} cannot be read: {first_line(error)}") from error

    def _faulty(self, groups: list[int]) -> str:
        """The first row group and column that cannot be read."""
        for group, name in itertools.product(groups, self._wanted):
            try:
                for _ in self._file.iter_batches(BATCH_ROWS, [group], [name], use_threads=False):
                    pass
            except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError):
                return f"{self.unit.path}, row group {group + 1}, column {name},"
        return str(self.unit)

    def _rows(self, raw: pa.Table, first: int) -> Rows:
        try:
            table, faults = convert(raw, self.reading, self.unit.path)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"data.path: {self.unit}: {first_line(error)}") from error
        bad = BadRows()
        if not faults:
            return Rows(table, bad, lambda row: first + row)
        table, kept = without(table, raw, faults, lambda row: self.place(first + row), bad)
        return Rows(table, bad, lambda row: first + int(kept[row]))

    def place(self, number: int) -> str:
        """File, row group and row, of a row of the unit."""
        group, row = self._group_of(number)
        return f"{self.unit.path}, row group {group + 1}, row {row + 1:,}"

    def _group_of(self, row: int) -> tuple[int, int]:
        """The row group of a row of the unit, and its number therein."""
        for group in range(self.unit.begin, self.unit.end):
            num_rows = self._file.metadata.row_group(group).num_rows
            if row < num_rows:
                return group, row
            row -= num_rows
        raise IndexError(row)
