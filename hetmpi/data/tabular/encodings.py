"""How the columns of prepared data become keys and numbers, from the counts in their manifest."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np

from hetmpi.data.checked import load_array
from hetmpi.data.distinct import estimate
from hetmpi.data.files import DataError
from hetmpi.data.tabular import vocabulary
from hetmpi.data.tabular.encoder import FIRST_KEY, HASHED, IDS, INTEGERS, VOCABULARY, Encoder, IdEncoder
from hetmpi.data.tabular.prepare import place_of
from hetmpi.data.tabular.reading import Reading
from hetmpi.data.tabular.rules import AUTO, ID, OPEN, Column, Rule
from hetmpi.data.tabular.scaling import Moments, Scaling
from hetmpi.errors import one_line

MOST_VALUES = 10_000_000  # distinct values of a vocabulary
MOST_OWN = 0.5  # distinct values per row, beyond which an id has a remark


def scalings(columns: list[Column], manifest: dict) -> dict[str, Scaling]:
    """Of the numbers with the transform auto."""
    return {
        column.name: Scaling.chosen(Moments(*manifest["moments"][i]), Moments(*manifest["log_moments"][i]))
        for i, column in enumerate(columns)
        if column.transform == AUTO
    }


class IdEncodings:
    """How the id columns of prepared data become keys. notes: column -> remark for its line at the start."""

    def __init__(
        self,
        folder: str,
        manifest: dict,
        columns: list[Column],
        rules: Sequence[Rule],
        rows_per_value: float = 2.0,
        max_field_rows: int | None = None,
    ):
        """folder, manifest: of the prepared data. columns: in the file's order. The others: as Tabular's."""
        self._folder, self._manifest, self._columns, self._rules = folder, manifest, columns, rules
        self._rows_per_value, self._max_field_rows = rows_per_value, max_field_rows
        self._registers = load_array(os.path.join(folder, "registers.npy"))
        self._num_rows = sum(rows for split in ("train", "valid") for rows in manifest[split].values())
        self.notes: dict[str, str] = {}
        self._modes = {
            column.name: self._mode(column) for column in columns if column.kind == ID and column.share is None
        }

    def vocabularies(self) -> list[list[int]]:
        """The prepared columns of each vocabulary."""
        return [self._sharing(name) for name, mode in self._modes.items() if mode == VOCABULARY]

    def encoder(self, reading: Reading, classes: Sequence[str] = ()) -> Encoder:
        """That of the prepared data. classes: of the label. REQUIRES: the vocabularies are counted."""
        coders = {column.name: self._coder(column) for column in self._columns if column.name in self._modes}
        moments = [one[:3] for one in self._manifest["moments"]]
        return Encoder(reading, self._columns, coders, moments, scalings(self._columns, self._manifest), classes)

    def _sharing(self, name: str) -> list[int]:
        """Numbers of the columns that use the rows of column `name`."""
        return [i for i, column in enumerate(self._columns) if name in (column.share, column.name)]

    def _distinct(self, column: Column) -> int:
        return estimate(functools.reduce(np.maximum, self._registers[self._sharing(column.name)]))

    def _mode(self, column: Column) -> str:
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
            check_integers(self._folder, self._manifest, self._columns, column)
            return IdEncoder(INTEGERS, column.rows + 1)
        if mode == VOCABULARY:
            group = self._sharing(column.name)
            values = vocabulary.load(self._folder, self._manifest, group, column.min_count)
            return IdEncoder(VOCABULARY, len(values) + FIRST_KEY, column.number, values)
        if mode == IDS:
            return IdEncoder(IDS, column.open.num_rows, column.number)
        return IdEncoder(HASHED, column.rows if column.rows != AUTO else self._hashed_rows(column))

    def _hashed_rows(self, column: Column) -> int:
        rows, most = max(1, round(self._distinct(column) * self._rows_per_value)), self._max_field_rows
        return rows if most is None else min(rows, most)


def check_integers(folder: str, manifest: dict, columns: Sequence[Column], column: Column) -> None:
    """Raises DataError for a value of prepared data that has no row of a column of integers as they are. columns: of
    the data, of which others may share its rows."""
    for i in [i for i, one in enumerate(columns) if column.name in (one.share, one.name)]:
        largest, unit, number = manifest["largest"][i]
        if largest >= column.rows:
            place = place_of(folder, manifest, unit, number)
            raise DataError(
                f"data.path: {place}, column {one_line(columns[i].name)}: {largest} has no row, data.columns has "
                f"rows: {column.rows}, for integers from 0 to {column.rows - 1}"
            )
