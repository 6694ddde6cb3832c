"""Files of the rows of id columns by the values of these columns, as table.init_from reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from hetmpi.checkpoint.manifest import read_manifest
from hetmpi.data.features import NO_KEY
from hetmpi.data.tabular import DataError, Encoder
from hetmpi.data.tabular.convert import KEPT, column_of
from hetmpi.data.tabular.dialect import POINT, with_points
from hetmpi.data.tabular.encoder import VOCABULARY
from hetmpi.data.tabular.kept import kind_of, typed_as
from hetmpi.data.tabular.reading import StoredColumn
from hetmpi.data.triples.names import TripleNames
from hetmpi.errors import UserError, one_line
from hetmpi.run.output import cannot_write, part_of
from hetmpi.trained.coded_values import coded
from hetmpi.trained.saved_model import WEIGHT, Saved, dense_state, encoder_of, saved_tables, write_rows
from hetmpi.trained.saved_pairs import reader_of

TAKEN = (WEIGHT, "key", "rows", "items", "nodes", "ids", "removed")  # columns and files with another meaning
BLOCK = 1 << 16  # rows read at a time
MOST_NAME_BYTES = 200


class Distinct:
    """Distinct values, by their codes, in the order in which they come."""

    def __init__(self):
        self.parts: list[pa.Array] = []
        self._runs: list[np.ndarray] = []  # known codes, each ascending, the longest first

    def add(self, values: pa.Array, codes: np.ndarray):
        """codes (n,) int64: equal for spellings of one value."""
        codes, firsts = np.unique(codes, return_index=True)
        is_new = np.ones(len(codes), bool)
        for run in self._runs:
            is_new &= run[np.minimum(np.searchsorted(run, codes), len(run) - 1)] != codes
        if not is_new.any():
            return
        self.parts.append(values.take(pa.array(np.sort(firsts[is_new]))))
        run = codes[is_new]
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]))
        self._runs.append(run)

    def values(self) -> pa.ChunkedArray:
        """As texts if they are of several types, or none."""
        is_one_type = len({part.type for part in self.parts}) == 1
        texts = self.parts if is_one_type else [part.cast(pa.string()) for part in self.parts]
        return pa.chunked_array(texts, None if is_one_type else pa.string())


def export_values(checkpoint: Path, out: Path, given: Mapping[str, str]) -> dict[Path, str]:
    """Writes OUT/COLUMN.parquet for each id column with a fixed number of rows that shares no other's: its distinct
    values in files, and those of columns that share its rows, in the order in which they come; and their rows
    (fixed-size list of float32) as `weight`. Left out are missing values, texts that are not UTF-8, values outside a
    vocabulary, and, of columns without one, values whose rows were never updated. given: settings of the files. Returns
    the paths, each with a description. Raises UserError."""
    manifest = read_manifest(checkpoint)
    encoder = encoder_of(checkpoint, manifest, dense_state(checkpoint, manifest), has_ids=False)
    columns, maps, found = owners_of(encoder, checkpoint), encoder.by_value(), {}
    tables = saved_tables(checkpoint, manifest, next(iter(encoder.tables)))
    rows = {name: table.num_rows for name, table in tables.items()}
    fixed = {name: table.num_rows for name, table in encoder.tables.items() if table.open is None}
    if fixed.items() - rows.items():
        raise UserError(f"{checkpoint} has tables of {rows} rows, its columns need others")
    for name, distinct in distinct_values(encoder, given, columns).items():
        values, table = distinct.values(), tables[maps[name].table]
        try:
            keys = np.concatenate([np.empty(0, np.int64), *(maps[name].keys(part) for part in values.chunks)])
        except DataError as error:
            raise UserError(f"data.path={one_line(given['data.path'])}, column {one_line(name)}: {error}") from error
        has_row = keys != NO_KEY
        if encoder.mode(name) != VOCABULARY:
            has_row[has_row] = table.are_trained(keys[has_row])
        found[name] = values.filter(pa.array(has_row)), keys[has_row], table
    if not any(len(keys) for _, keys, _ in found.values()):
        raise UserError(f"data.path={one_line(given['data.path'])}: no row has a value that the model knows")
    written = {}
    for name, (values, keys, table) in found.items():
        if pa.types.is_binary(values.type):  # of files of text
            values = typed_as(values, kind_of(values).type)
        path = out / f"{name}.parquet"
        with part_of(path) as part, cannot_write(path):
            write_rows(part, name, values.type, table.dim, parts_of(values, keys, table))
        written[path] = f"{len(keys):,} values with rows of {table.dim} numbers"
    return written


def parts_of(values: pa.ChunkedArray, keys: np.ndarray, table: Saved) -> Iterator[tuple[pa.ChunkedArray, np.ndarray]]:
    """Values (n,) and their rows (n, dim), in parts. keys: of all values."""
    for begin in range(0, len(keys), BLOCK):
        rows = np.empty((len(keys[begin : begin + BLOCK]), table.dim), np.float32)
        table.read(np.ascontiguousarray(keys[begin : begin + BLOCK]), rows)
        yield values.slice(begin, BLOCK), rows


def owners_of(encoder: Encoder | TripleNames | None, checkpoint: Path) -> dict[str, list[StoredColumn]]:
    """Id column -> the columns that use its rows; without those whose names cannot name a file."""
    maps = encoder.by_value() if isinstance(encoder, Encoder) else {}
    if not maps:
        has_ids = isinstance(encoder, Encoder) and encoder.open_columns()
        cure = "export its ids by ids=parquet" if has_ids else "rows=parquet exports rows by key"
        raise UserError(f"values=parquet: {checkpoint} has no id columns with a fixed number of rows: {cure}")
    stored, found = {column.name: column for column in encoder.reading.columns}, {}
    for column in encoder.columns:
        if column.name in maps:
            found.setdefault(column.share or column.name, []).append(stored[column.name])
    if encoder.open_columns():
        print(f"hetmpi: left out: {one_line(', '.join(encoder.open_columns()))}: export ids by ids=parquet", flush=True)
    for name in [name for name in found if is_unfit(name)]:
        print(f"hetmpi: column {one_line(name)} is left out: a file cannot have its name", flush=True)
        del found[name]
    if not found:
        raise UserError("values=parquet: no column has a name that a file can have")
    return found


def is_unfit(name: str) -> bool:
    return (
        name.casefold() in TAKEN
        or name.startswith(".")
        or "/" in name
        or not name.isprintable()
        or len(name.encode(errors="replace")) > MOST_NAME_BYTES
    )


def distinct_values(
    encoder: Encoder, given: Mapping[str, str], columns: Mapping[str, list[StoredColumn]]
) -> dict[str, Distinct]:
    """Id column -> the values in files of all columns that use its rows. columns: as owners_of."""
    stored = [column for group in columns.values() for column in group]
    reading = replace(encoder.reading, columns=tuple(stored))
    reader = reader_of(given, reading, tuple(column.name for column in stored))
    found, num_bad_texts = {name: Distinct() for name in columns}, 0
    for unit in reader.units:
        for block in reader.blocks(unit):
            for name, group in columns.items():
                for column in group:
                    try:
                        texts = column_of(block, KEPT + column.name)
                        if reading.decimal != POINT and pa.types.is_binary(texts.type) and not column.is_list:
                            texts = with_points(texts)
                        values, codes, num_bad = coded(texts, column, reading.missing_of(column))
                    except (DataError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                        raise UserError(f"data.path: {unit}, column {one_line(column.name)}: {error}") from error
                    found[name].add(values, codes)
                    num_bad_texts += num_bad
    if reader.bad.rows:
        print(f"{reader.path}: {reader.bad}", flush=True)
    if num_bad_texts:
        print(f"hetmpi: {num_bad_texts:,} values are not UTF-8: left out", flush=True)
    return found
