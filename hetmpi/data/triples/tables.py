"""Triples in tables with named columns, Parquet or CSV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.bounded_file import shown
from hetmpi.bounded_parquet import open_parquet, read_table
from hetmpi.data.files import DataError, first_line
from hetmpi.data.graph.columns import as_texts
from hetmpi.data.graph.reading import CURE, first_values, named_by_first, read_lines
from hetmpi.data.triples.lines import BLANKS, Names, no_triples, weight_of
from hetmpi.errors import UserError, one_line

TABLES = (".parquet", ".csv")
NAMES_ORDER = ("h", "r", "t")
TABLE_COLUMNS, WEIGHT = ("head", "relation", "tail"), "weight"
HEADERS = (TABLE_COLUMNS, NAMES_ORDER, ("subject", "predicate", "object"))


def triples_of_table(
    path: str, columns: tuple[str, ...] | None, entities: Names, relations: Names, delimiter: str | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The triples (n, 3) int64 of a Parquet or CSV file, and their weights (n,) float32, None if it has no column
    `weight`. columns: names of those of head, relation and tail, or, of a CSV file without a header, h, r and t in
    their order; None for those of HEADERS. Raises DataError."""
    place, numbers = f"data.path: {shown(path)}", []
    table = csv_table(path, columns, delimiter) if path.endswith(".csv") else parquet_table(path, place)
    names_of_columns = table.column_names
    if not len(table):
        raise DataError(no_triples(path))
    if columns is None or set(columns) == set(NAMES_ORDER):
        columns = next((names for names in HEADERS if set(names) <= set(names_of_columns)), TABLE_COLUMNS)
    for names, column in zip((entities, relations, entities), columns):
        if names_of_columns.count(column) != 1:
            raise DataError(
                f"{place}: there must be one column {one_line(column)}, there are "
                f"{one_line(', '.join(names_of_columns))}: name those of head, relation and tail by data.columns; if "
                "the first line of a CSV file is a triple, give the order of its values, as data.columns=[h,r,t]"
            )
        try:
            values = pc.utf8_trim(names_in(table[column]), BLANKS.decode()).dictionary_encode()
            texts = values.dictionary.to_pylist()
        except (pa.ArrowException, TypeError, UnicodeDecodeError) as error:
            raise DataError(f"{place}, column {one_line(column)}: names were expected: {first_line(error)}") from error
        if values.null_count:
            row = values.is_null().index(True).as_py()
            raise DataError(f"{place}, row {row + 1:,}: column {one_line(column)} is empty")
        codes = values.indices.to_numpy()
        firsts = np.unique(codes, return_index=True)[1] + 1
        of_code = [
            names.number(name.encode(), f"{place}, row {first:,}") for name, first in zip(texts, firsts.tolist())
        ]
        numbers.append(np.array(of_code, np.int64)[codes])
    if names_of_columns.count(WEIGHT) > 1:
        raise DataError(f"{place}: there are several columns {WEIGHT}")
    other = next((name for name in names_of_columns if name.lower() == WEIGHT != name), None)
    if other is not None and WEIGHT not in names_of_columns:
        raise DataError(f"{place}: name the column {one_line(other)} {WEIGHT}, or remove it")
    if WEIGHT not in names_of_columns:
        return np.stack(numbers, axis=1), None
    weights = [weight_of(str(value).encode(), f"{place}, row {row:,}") for row, value in enumerate(table[WEIGHT], 1)]
    return np.stack(numbers, axis=1), np.array(weights, np.float32)


def header_order(values: Sequence[str]) -> tuple[str, ...] | None:
    """The order of h, r and t in a line of the usual names of columns; None for any other line."""
    given = [value.lower() for value in values[:3]]
    header = next((names for names in HEADERS if sorted(names) == sorted(given)), None)
    return None if header is None else tuple(NAMES_ORDER[header.index(name)] for name in given)


def names_in(column: pa.ChunkedArray) -> pa.Array:
    """The texts of names; null for missing ones, as NaN. Numbers are as in other files: 2.0 is 2."""
    values = column.combine_chunks()
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
    return as_texts(values)


def parquet_table(path: str, place: str) -> pa.Table:
    try:
        return read_table(open_parquet(path, place), place, CURE)
    except UserError as error:
        raise DataError(str(error)) from error


def csv_table(path: str, columns: Sequence[str] | None, delimiter: str | None) -> pa.Table:
    """The columns of a CSV file as texts, named by its first line; or h, r, t and `weight` if the file has no
    header."""
    try:
        table = read_lines(path, delimiter)
    except UserError as error:
        raise DataError(str(error)) from error
    if not columns or set(columns) != set(NAMES_ORDER) or set(NAMES_ORDER) <= set(first_values(table)):
        return named_by_first(table)
    if header_order(first_values(table)) is not None:
        raise DataError(
            f"data.path: {shown(path)}, line 1 is a header: leave out data.columns, or set it to the names of the "
            "columns of head, relation and tail"
        )
    if table.num_columns not in (3, 4):
        raise DataError(
            f"data.path: {shown(path)}: data.columns=[{','.join(columns)}] is for 3 or 4 columns without a header, it "
            f"has {table.num_columns:,}"
        )
    return table.rename_columns([*columns, WEIGHT][: table.num_columns])
