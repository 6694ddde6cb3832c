"""Files of the rows of id columns by the values of these columns, as table.init_from reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hetmpi.checkpoint.manifest import read_manifest, tables_of
from hetmpi.checkpoint.shard_files import shards_of
from hetmpi.data.features import NO_KEY, ValueMap
from hetmpi.data.tabular import DataError, Encoder
from hetmpi.data.tabular.convert import KEPT
from hetmpi.data.tabular.reading import StoredColumn
from hetmpi.errors import UserError, one_line
from hetmpi.run.output import cannot_write, part_of
from hetmpi.trained.saved_model import Saved, dense_state, encoder_of
from hetmpi.trained.saved_pairs import reader_of

WEIGHT = "weight"
BLOCK = 1 << 16  # rows written at a time


def export_values(checkpoint: Path, out: Path, given: Mapping[str, str]) -> dict[Path, str]:
    """Writes OUT/COLUMN.parquet for each id column with a fixed number of rows: the distinct values of that column in
    files, in the order of their first rows there, and their rows (fixed-size list of float32) as `weight`. Missing
    values, and those not seen in training, are left out. given: settings of the files. Returns the paths, each with a
    description. Raises UserError."""
    manifest = read_manifest(checkpoint)
    encoder = encoder_of(checkpoint, manifest, dense_state(checkpoint, manifest), has_ids=False)
    maps = encoder.by_value() if isinstance(encoder, Encoder) else {}
    if not maps:
        raise UserError(f"values=parquet: {checkpoint} has no id columns of files: rows=parquet exports rows by key")
    unfit = [name for name in maps if name == WEIGHT or "/" in name or name.startswith(".")]
    if unfit:
        raise UserError(f"values=parquet: column {one_line(unfit[0])} cannot name a file and a column beside weight")
    tables, shards = tables_of(manifest), shards_of(checkpoint, manifest)
    for shard in (shard for of_table in shards.values() for shard in of_table):
        shard.check()
    stored = {column.name: column for column in encoder.reading.columns if column.name in maps}
    written = {}
    for name, values in distinct_values(encoder, given, stored).items():
        table = maps[name].table if len(tables) > 1 else next(iter(tables))
        path, saved = out / f"{name}.parquet", Saved(tables[table], shards[table])
        values, keys = with_keys(values, maps[name], stored[name], given["data.path"])
        with part_of(path) as part, cannot_write(path):
            write(part, name, values, keys, saved)
        written[path] = f"{len(keys):,} values with rows of {saved.dim} numbers"
    return written


def distinct_values(
    encoder: Encoder, given: Mapping[str, str], stored: Mapping[str, StoredColumn]
) -> dict[str, pa.Array]:
    """The distinct values of columns in files, without missing ones."""
    reading = replace(encoder.reading, columns=tuple(stored.values()))
    reader, found = reader_of(given, reading, tuple(stored)), {}
    for unit in reader.units:
        for block in reader.blocks(unit):
            for name, column in stored.items():
                new = pc.unique(one_by_one(block[KEPT + name].combine_chunks(), column))
                new = new.filter(is_present(new, reading.missing))
                known = found.get(name, new.slice(0, 0))
                if new.type != known.type:  # in files of several types
                    known, new = known.cast(pa.string()), new.cast(pa.string())
                found[name] = pc.unique(pa.concat_arrays([known, new]))
    return found


def one_by_one(values: pa.Array, column: StoredColumn) -> pa.Array:
    """The values of a column, those of lists one after the other."""
    if not column.is_list:
        return values
    if pa.types.is_string(values.type):
        values = pc.split_pattern(values, column.separator or " ")
    return values.flatten()


def is_present(values: pa.Array, missing: tuple[str, ...]) -> pa.Array:
    texts = pc.utf8_trim_whitespace(values.cast(pa.string()))
    return pc.and_(values.is_valid(), pc.invert(pc.is_in(texts, value_set=pa.array(missing, pa.string()))))


def with_keys(values: pa.Array, how: ValueMap, column: StoredColumn, path: str) -> tuple[pa.Array, np.ndarray]:
    """Those values (n,) that have a row, and their keys (n,) int64; of several spellings of a value the first."""
    try:
        keys = how.keys(values)
    except DataError as error:
        raise UserError(f"data.path={one_line(path)}, column {one_line(column.name)}: {error}") from error
    has_row = keys != NO_KEY
    if not how.shares:
        is_first = np.zeros(len(keys), bool)
        is_first[np.unique(keys, return_index=True)[1]] = True
        has_row &= is_first
    places = np.flatnonzero(has_row)
    return values.take(pa.array(places)), keys[places]


def write(path: Path, name: str, values: pa.Array, keys: np.ndarray, saved: Saved):
    schema = pa.schema([(name, values.type), (WEIGHT, pa.list_(pa.float32(), saved.dim))])
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, len(keys), BLOCK):
            part = slice(begin, begin + BLOCK)
            rows = np.empty((len(keys[part]), saved.dim), np.float32)
            saved.read(np.ascontiguousarray(keys[part]), rows)
            weights = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), saved.dim)
            writer.write_table(pa.table([values[begin : begin + BLOCK], weights], schema=schema))
