"""Pretrained rows: fills a table from Parquet files with the columns key (int64) and weight (lists of dim float32), as
`hetmpi export rows=parquet` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.table.table import EmbeddingTable

BATCH_BYTES = 16 << 20  # of the rows that a rank reads at a time
BUFFER_BYTES = 1 << 20  # per column and file; without buffers Parquet reads a whole row group


def fill_from(table: EmbeddingTable, place: Path) -> int:
    """Replaces the rows whose keys are in `place`, a Parquet file or a folder of *.parquet files, and returns their
    number. All other rows, and the optimizer's state, stay. Each rank reads all files in parts of BATCH_BYTES and takes
    the rows of its shard. REQUIRES: no read or write yet. Collective.

    Raises UserError on every rank if a file is missing or has other columns, for a row of another width or with values
    that are not finite, and for a key that is out of range or occurs twice."""
    num, error = 0, None
    try:
        num = fill_shard(table, place)
    except UserError as refusal:
        error = refusal
    table.world.agree(error)
    table.resume_at(table.step)
    return table.world.comm.allreduce(num)


def fill_shard(table: EmbeddingTable, place: Path) -> int:
    """As fill_from, on one rank."""
    paths = files_of(place)
    for path in paths:
        check_columns(path, table.dim)
    is_filled = np.zeros(len(table.shard), bool)
    for path in paths:
        for keys, rows in parts_of(path, table.dim):
            take(table, path, keys, rows, is_filled)
    return int(is_filled.sum())


def files_of(place: Path) -> list[Path]:
    """The Parquet files at `place`, by name. Raises UserError if there is none."""
    if place.is_file():
        return [place]
    found = sorted(place.glob("*.parquet"))
    if not found:
        what = "this folder holds no *.parquet file" if place.is_dir() else "there is no such file or folder"
        raise UserError(f"table.init_from={place}: {what}: name a Parquet file, or a folder of them")
    return found


def check_columns(path: Path, dim: int):
    """Raises UserError unless the file has columns of the right types."""
    import pyarrow.types as types

    schema = opened(path).schema_arrow
    for name in ("key", "weight"):
        if schema.get_field_index(name) < 0:
            columns = ", ".join(schema.names[:9])
            raise UserError(f"{path}: must have one column {name}, got the columns {columns}: rename or add it")
    key, weight = schema.field("key").type, schema.field("weight").type
    if not types.is_int64(key):
        raise UserError(f"{path}: column key must be int64, got {key}: cast it")
    is_list = types.is_list(weight) or types.is_large_list(weight) or types.is_fixed_size_list(weight)
    if not is_list or not types.is_float32(weight.value_type):
        raise UserError(f"{path}: column weight must be lists of float32, got {str(weight)[:100]}: cast it")
    if types.is_fixed_size_list(weight) and weight.list_size != dim:
        raise wrong_width(path, weight.list_size, dim)


def opened(path: Path):
    """The Parquet file, not yet read. Raises UserError for any other file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES)
    except (pa.ArrowException, OSError) as problem:
        raise unreadable(path, problem) from problem


def parts_of(path: Path, dim: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """keys (n,) int64 and rows (n, dim) float32 of a file, in parts. Raises UserError for missing values, rows of
    another width, and a damaged file."""
    import pyarrow as pa

    num = max(1, BATCH_BYTES // (4 * dim))
    parts = opened(path).iter_batches(num, columns=["key", "weight"])
    while True:
        try:
            part = next(parts, None)
        except (pa.ArrowException, OSError) as problem:
            raise unreadable(path, problem) from problem
        if part is None:
            return
        keys, weight = part.column("key"), part.column("weight")
        numbers = weight.flatten()
        if keys.null_count or weight.null_count or numbers.null_count:
            raise UserError(f"{path}: key and weight must have a value in every row, got null: leave such rows out")
        lengths = weight.value_lengths().to_numpy(zero_copy_only=False)
        if (lengths != dim).any():
            raise wrong_width(path, int(lengths[lengths != dim][0]), dim)
        yield keys.to_numpy(), numbers.to_numpy(zero_copy_only=False).reshape(len(keys), dim)


def take(table: EmbeddingTable, path: Path, keys: np.ndarray, rows: np.ndarray, is_filled: np.ndarray):
    """Assigns the rows (n, dim) of the keys (n,) that this rank owns. is_filled: rows of the shard that are assigned
    already, updated. Raises UserError as fill_from."""
    is_wrong = (keys < 0) | (keys >= table.num_rows)
    if is_wrong.any():
        raise UserError(f"{path}: keys must lie in [0, {table.num_rows:,}), got {keys[is_wrong][0]}")
    owners, places = table.partition.locate(keys)
    mine = owners == table.world.rank
    keys, rows, places = keys[mine], rows[mine], places[mine]
    again = _C.first_repeated(keys)
    repeated = keys[again : again + 1] if again >= 0 else keys[is_filled[places]][:1]
    if len(repeated):
        raise UserError(f"{path}: each key must occur once in all files, got {repeated[0]} twice: remove one of them")
    if not _C.all_finite(rows):
        first = keys[~np.isfinite(rows).all(1)][0]
        raise UserError(f"{path}: rows must be finite, that of key {first} is not: replace it or leave it out")
    table.shard.assign(places, weight=rows)
    is_filled[places] = True


def wrong_width(path: Path, got: int, dim: int) -> UserError:
    return UserError(f"{path}: rows must have {dim} numbers, as those of the table, got {got}: give rows of this width")


def unreadable(path: Path, problem: Exception) -> UserError:
    text = " ".join(str(problem).split())[:200]
    return UserError(f"{path} cannot be read as Parquet: {text}")
