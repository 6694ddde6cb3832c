"""Files of rows by id, of columns without a fixed vocabulary: all of a checkpoint, or what changed since another one.

    FOLDER/ids.parquet      column, the name in data.columns; id, the hash of a value, null for the row that
                            all other ids share; weight, a list of float32; count, how often the id was seen, aged until
                            step; step, in which it was seen last. In the order of columns and ids
    FOLDER/removed.parquet  column and id: of ids that have lost their rows. In what changed only

A full export with what changed later is the later full export, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hetmpi.errors import UserError, one_line
from hetmpi.run.output import cannot_write, part_of

IDS, REMOVED = "ids.parquet", "removed.parquet"
SCHEMA = pa.schema([
    ("column", pa.string()), ("id", pa.int64()), ("weight", pa.list_(pa.float32())), ("count", pa.int64()),
    ("step", pa.int64()),
])  # fmt: skip
OF_REMOVED = pa.schema([("column", pa.string()), ("id", pa.int64())])
GROUP_ROWS = 1 << 18


@dataclass
class IdRows:
    """Rows of a column. ids (n,) int64, ascending; weight (n, dim) float32; count, step (n,) int64; shared (1, dim)
    float32, the row of all other ids, (0, dim) if it has not changed."""

    column: str
    ids: np.ndarray
    weight: np.ndarray
    count: np.ndarray
    step: np.ndarray
    shared: np.ndarray

    def where(self, chosen: np.ndarray, shared: np.ndarray) -> IdRows:
        """The chosen (n,) bool of the rows."""
        return IdRows(self.column, *(one[chosen] for one in (self.ids, self.weight, self.count, self.step)), shared)

    def table(self) -> pa.Table:
        whole, num_shared = np.concatenate([self.shared, self.weight]), len(self.shared)
        num, dim = whole.shape
        weights = pa.ListArray.from_arrays(np.arange(num + 1, dtype=np.int32) * dim, pa.array(whole.reshape(-1)))
        is_shared = np.arange(num) < num_shared
        before = np.zeros(num_shared, np.int64)
        return pa.table([
            pa.array([self.column] * num, pa.string()), pa.array(np.concatenate([before, self.ids]), mask=is_shared),
            weights, pa.array(np.concatenate([before, self.count])), pa.array(np.concatenate([before, self.step])),
        ], schema=SCHEMA)  # fmt: skip


def changes(before: list[IdRows], now: list[IdRows]) -> tuple[list[IdRows], list[tuple[str, np.ndarray]]]:
    """Of each column the rows that are new or have changed, and the ids that are gone. Raises UserError for other
    columns."""
    if [one.column for one in before] != [one.column for one in now]:
        raise UserError("since: the checkpoint has other columns with rows: open")
    changed, removed = [], []
    for old, new in zip(before, now):
        place, is_known = places_of(new.ids, old.ids)
        same = is_known.copy()
        at, here = place[is_known], np.flatnonzero(is_known)
        same[here] = (
            (old.weight[at].view(np.int32) == new.weight[here].view(np.int32)).all(1)
            & (old.count[at] == new.count[here])
            & (old.step[at] == new.step[here])
        )
        has_moved = not np.array_equal(old.shared.view(np.int32), new.shared.view(np.int32))
        changed.append(new.where(~same, new.shared if has_moved else new.shared[:0]))
        removed.append((new.column, old.ids[~places_of(old.ids, new.ids)[1]]))
    return changed, removed


def applied(rows: list[IdRows], changed: list[IdRows], removed: dict[str, np.ndarray]) -> list[IdRows]:
    """Rows with later changes."""
    by_column, found = {one.column: one for one in changed}, []
    for old in rows:
        new = by_column.get(old.column)
        gone = [removed.get(old.column, np.empty(0, np.int64)), *([] if new is None else [new.ids])]
        kept = old.where(~np.isin(old.ids, np.concatenate(gone)), old.shared)
        if new is not None:
            parts = [(getattr(kept, name), getattr(new, name)) for name in ("ids", "weight", "count", "step")]
            ids, weight, count, step = map(np.concatenate, parts)
            order = np.argsort(ids)
            shared = new.shared if len(new.shared) else old.shared
            kept = IdRows(old.column, ids[order], weight[order], count[order], step[order], shared)
        found.append(kept)
    return found


def places_of(ids: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of ids (n,) among ascending others, and which are there: (n,) int64, (n,) bool."""
    if not len(among):
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
    place = np.minimum(np.searchsorted(among, ids), len(among) - 1)
    return place, among[place] == ids


# Files.


def write_rows(folder: Path, rows: list[IdRows]) -> Path:
    path = folder / IDS
    with part_of(path) as part, cannot_write(path), pq.ParquetWriter(part, SCHEMA) as writer:
        for one in rows:
            writer.write_table(one.table(), row_group_size=GROUP_ROWS)
    return path


def write_removed(folder: Path, removed: list[tuple[str, np.ndarray]]) -> Path:
    path = folder / REMOVED
    with part_of(path) as part, cannot_write(path), pq.ParquetWriter(part, OF_REMOVED) as writer:
        for column, ids in removed:
            writer.write_table(pa.table([pa.array([column] * len(ids), pa.string()), ids], schema=OF_REMOVED))
    return path


def read_rows(folder: Path) -> list[IdRows]:
    """Those of a folder that write_rows has written. Raises UserError for other files."""
    table, found = read_table(folder / IDS, SCHEMA), []
    columns = table["column"].to_pylist()
    begins = [i for i in range(len(columns)) if i == 0 or columns[i] != columns[i - 1]]
    for begin, end in zip(begins, [*begins[1:], len(columns)]):
        part = table.slice(begin, end - begin).combine_chunks()
        is_shared = np.asarray(part["id"].is_null())
        weights = part["weight"].combine_chunks()
        sizes = np.unique(weights.value_lengths().to_numpy(zero_copy_only=False))
        ids = part["id"].fill_null(0).to_numpy()[~is_shared]
        if len(sizes) != 1 or is_shared[1:].any() or (ids[1:] <= ids[:-1]).any() or columns[begin] in columns[:begin]:
            raise UserError(f"{folder / IDS} is no export of rows by id: column {one_line(columns[begin], 100)}")
        values = weights.flatten().to_numpy().reshape(-1, int(sizes[0]))
        count, step = (part[name].to_numpy()[~is_shared] for name in ("count", "step"))
        found.append(IdRows(columns[begin], ids, values[~is_shared], count, step, values[is_shared]))
    return found


def read_removed(folder: Path) -> dict[str, np.ndarray]:
    if not (folder / REMOVED).exists():
        raise UserError(
            f"{folder} has no {REMOVED}: give a folder that hetmpi export has written with since=CHECKPOINT"
        )
    table = read_table(folder / REMOVED, OF_REMOVED)
    columns, ids = np.array(table["column"].to_pylist(), object), table["id"].to_numpy()
    return {column: ids[columns == column] for column in dict.fromkeys(columns)}


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {one_line(str(error))}") from error
    if not table.schema.equals(schema):
        raise UserError(f"{path} must have the columns {', '.join(schema.names)} of an export of rows by id")
    return table
