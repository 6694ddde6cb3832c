"""Pretrained rows: fills tables from Parquet files with a column weight (lists of dim float32) and either a column key
(int64), as `hetmpi export rows=parquet` writes them, or one named like an id column of the data, with its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from hetmpi import _C
from hetmpi.bounded_file import shown
from hetmpi.bounded_parquet import batches_of, open_parquet
from hetmpi.data.features import NO_KEY, ValueMap
from hetmpi.errors import UserError, one_line
from hetmpi.run.id_rows import IDS, IdRows, read_changed
from hetmpi.table.table import EmbeddingTable

BATCH_BYTES = 16 << 20  # of the rows that a rank reads at a time


def fill_from(tables: Mapping[str, EmbeddingTable], place: Path, columns: Mapping[str, ValueMap]) -> int:
    """Replaces the rows that are in `place`, a Parquet file or a folder of *.parquet files, and returns their number.
    All other rows, and the optimizer's state, stay. With several tables, files by key lie in a folder of `place` with
    the table's name. columns: id columns whose values files may name. Each rank reads all files in parts of BATCH_BYTES
    and takes the rows of its shards. REQUIRES: no read or write yet. Collective.

    Raises UserError on every rank if a file is missing or has other columns, for a row of another width or with values
    that are not finite, and for a key that is out of range, or a key or value that occurs twice."""
    num = together(tables, partial(fill_shards, tables, place, columns))
    return next(iter(tables.values())).world.comm.allreduce(num)


def together(tables: Mapping[str, EmbeddingTable], fill: Callable[[], int]) -> int:
    """fill(), which fills rows on this rank; its UserError is raised on every rank. Collective."""
    num, error = 0, None
    try:
        num = fill()
    except UserError as refusal:
        error = refusal
    next(iter(tables.values())).world.agree(error)
    for table in tables.values():
        table.resume_at(table.step)
    return num


def fill_ids(
    tables: Mapping[str, EmbeddingTable], folders: list[Path], columns: Mapping[str, str], seeds: Mapping[str, int]
) -> int:
    """As fill_from, of columns without a fixed vocabulary, by the ids in a folder that `hetmpi export ids=parquet` has
    written, and in others with later changes. columns: their tables; seeds: of their hashes. Every rank reads all."""
    return together(tables, partial(fill_columns, tables, folders, columns, seeds))


def fill_columns(
    tables: Mapping[str, EmbeddingTable], folders: list[Path], columns: Mapping[str, str], seeds: Mapping[str, int]
) -> int:
    """As fill_ids, on one rank."""
    place = folders[0]
    rows = [one for one in read_changed(folders)[0] if one.column in columns]
    if not rows:
        raise UserError(f"table.init_from={place}: its ids are of none of the columns {', '.join(columns)}")
    for one in rows:
        if one.seed != seeds[one.column]:
            raise UserError(
                f"{place / IDS}, column {one_line(one.column)}: its ids are hashes of column {one.seed + 1} of the "
                f"ids in the data, here it is column {seeds[one.column] + 1}: give the columns in the same order"
            )
        fill_column(tables[columns[one.column]], f"{place / IDS}, column {one_line(one.column)}", one)
    return sum(len(one.ids) for one in rows)


def fill_column(table: EmbeddingTable, place: str, one: IdRows):
    """Gives the ids of a column their rows. place: for messages."""
    if one.weight.shape[1] != table.dim:
        raise wrong_width(place, one.weight.shape[1], table.dim)
    if not all(_C.all_finite(np.ascontiguousarray(rows)) for rows in (one.weight, one.shared)):
        raise UserError(f"{place}: rows must be finite: replace those that are not or leave them out")
    if (one.count < 0).any():
        raise UserError(f"{place}: counts must be at least 0")
    try:
        table.vocabulary.start_with(one.ids, one.count, one.weight, one.shared)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def fill_shards(tables: Mapping[str, EmbeddingTable], place: Path, columns: Mapping[str, ValueMap]) -> int:
    """As fill_from, on one rank."""
    files = [(path, *column_of(path, of_table, tables, columns)) for path, of_table in files_of(place, tables)]
    is_filled = {name: np.zeros(len(table.shard), bool) for name, table in tables.items()}
    for path, column, how in files:
        table = tables[how.table]
        for values, rows in parts_of(path, column, table.dim):
            take(table, f"{path}, column {column}", how, values, rows, is_filled[how.table])
    return sum(int(filled.sum()) for filled in is_filled.values())


def files_of(place: Path, tables: Mapping[str, EmbeddingTable]) -> list[tuple[Path, str | None]]:
    """The Parquet files at `place` by name, and the table in whose folder they lie. Raises UserError if there is
    none."""
    if place.is_file():
        return [(place, None)]
    found = [(path, None) for path in sorted(place.glob("*.parquet"))]
    found += [(path, name) for name in tables for path in sorted((place / name).glob("*.parquet"))]
    if not found:
        what = "this folder holds no *.parquet file" if place.is_dir() else "there is no such file or folder"
        raise UserError(f"table.init_from={place}: {what}: name a Parquet file, or a folder of them")
    return found


def column_of(
    path: Path, of_table: str | None, tables: Mapping[str, EmbeddingTable], columns: Mapping[str, ValueMap]
) -> tuple[str, ValueMap]:
    """The column that says which rows are in a file. of_table: the table in whose folder it lies. Raises UserError
    unless the file has columns of the right types, and names one table."""
    import pyarrow.types as types

    schema = open_parquet(path).schema_arrow
    if schema.get_field_index("weight") < 0:
        raise lacking(path, "weight", schema.names)
    named = [name for name in columns if name in schema.names and name != "weight"]
    if "key" in schema.names:
        if named:
            raise UserError(f"{path}: has the columns key and {named[0]}, rows come by one of them: leave one out")
        if of_table is None and len(tables) > 1:
            raise UserError(
                f"{path}: the tables are {', '.join(tables)}: put the file into a folder of its table's name, as "
                f"{path.parent / next(iter(tables)) / path.name}"
            )
        if not types.is_int64(schema.field("key").type):
            raise UserError(f"{path}: column key must be int64, got {schema.field('key').type}: cast it")
        name = next(iter(tables)) if of_table is None else of_table
        if tables[name].vocabulary is not None:
            raise UserError(f"{path}: rows of columns with rows: open come by id: export them with ids=parquet")
        found = "key", ValueMap(name, partial(checked_keys, tables[name].num_rows))
    elif len(named) == 1:
        found = named[0], columns[named[0]]
    else:
        raise lacking(path, " or ".join(["key", *columns]), schema.names)
    check_weight(path, schema.field("weight").type, tables[found[1].table].dim)
    return found


def checked_keys(num_rows: int, keys) -> np.ndarray:
    """keys (n,) of Arrow as numpy. Raises UserError for a key out of range."""
    keys = keys.to_numpy()
    is_wrong = (keys < 0) | (keys >= num_rows)
    if is_wrong.any():
        raise UserError(f"keys must lie in [0, {num_rows:,}), got {keys[is_wrong][0]}")
    return keys


def check_weight(path: Path, kind, dim: int):
    """Raises UserError unless an Arrow type is that of rows (n, dim)."""
    import pyarrow.types as types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_float32(kind.value_type):
        raise UserError(f"{path}: column weight must be lists of float32, got {str(kind)[:100]}: cast it")
    if types.is_fixed_size_list(kind) and kind.list_size != dim:
        raise wrong_width(path, kind.list_size, dim)


def parts_of(path: Path, column: str, dim: int) -> Iterator[tuple]:
    """Arrow's values (n,) of a column, and rows (n, dim) float32, in parts. Raises UserError for missing values, rows
    of another width, and a damaged file."""
    file = open_parquet(path, is_summed=True)
    check_numbers(file, path, dim)
    for part in batches_of(file, shown(path), [column, "weight"], max(1, BATCH_BYTES // (4 * dim))):
        values, weight = part.column(column), part.column("weight")
        numbers = weight.flatten()
        if values.null_count or weight.null_count or numbers.null_count:
            raise UserError(
                f"{path}: {column} and weight must have a value in every row, got null: leave such rows out"
            )
        lengths = weight.value_lengths().to_numpy(zero_copy_only=False)
        if (lengths != dim).any():
            raise wrong_width(path, int(lengths[lengths != dim][0]), dim)
        yield values, numbers.to_numpy(zero_copy_only=False).reshape(len(values), dim)


def check_numbers(file, path: Path, dim: int):
    """Raises UserError for a row group whose rows have more than `dim` numbers, before it is read."""
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        columns = map(group.column, range(group.num_columns))
        numbers = max(column.num_values for column in columns if column.path_in_schema.startswith("weight."))
        if numbers > group.num_rows * dim:
            raise wrong_width(path, -(-numbers // group.num_rows), dim)


def take(table: EmbeddingTable, place: str, how: ValueMap, values, rows: np.ndarray, is_filled: np.ndarray):
    """Assigns the rows (n, dim) of Arrow's values (n,) that this rank owns. place: for messages. is_filled: rows of the
    shard that are assigned already, updated. Raises UserError as fill_from."""
    try:
        keys = how.keys(values)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    owners, places = table.partition.locate(np.maximum(keys, 0))
    mine = np.flatnonzero((owners == table.world.rank) & (keys != NO_KEY))
    if how.shares:
        mine = mine[~is_filled[places[mine]]]
        mine = mine[np.sort(np.unique(places[mine], return_index=True)[1])]
    rows, places = rows[mine], places[mine]
    again = _C.first_repeated(places)
    repeated = mine[again : again + 1] if again >= 0 else mine[is_filled[places]][:1]
    if len(repeated):
        value = values[int(repeated[0])]
        raise UserError(f"{place}: each must occur once in all files, got {value} twice: remove one of them")
    if not _C.all_finite(rows):
        first = values[int(mine[~np.isfinite(rows).all(1)][0])]
        raise UserError(f"{place}: rows must be finite, that of {first} is not: replace it or leave it out")
    table.shard.assign(places, weight=rows)
    is_filled[places] = True


def lacking(path: Path, column: str, names: list[str]) -> UserError:
    return UserError(f"{path}: must have one column {column}, got the columns {', '.join(names[:9])}: rename or add it")


def wrong_width(path: Path, got: int, dim: int) -> UserError:
    return UserError(f"{path}: rows must have {dim} numbers, as those of the table, got {got}: give rows of this width")
