"""Rows by id of a checkpoint's columns without a fixed vocabulary, and the ids of values."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from hetmpi.checkpoint.checkpoints import entries_of
from hetmpi.checkpoint.manifest import read_manifest, tables_of
from hetmpi.checkpoint.shard_files import shards_of
from hetmpi.data.tabular import Encoder
from hetmpi.errors import UserError, one_line
from hetmpi.open_rows import COUNT, ID, KEY, LAST, SHARED_KEY
from hetmpi.run.id_rows import IDS, REMOVED, About, IdRows, changes, read_changed, write_removed, write_rows
from hetmpi.run.output import parts_of
from hetmpi.trained.saved_model import Saved, dense_state, encoder_of


def rows_of(checkpoint: Path) -> tuple[list[IdRows], About]:
    """All rows by id of a checkpoint, and its step. Raises UserError for one without columns that have rows: open."""
    manifest = read_manifest(checkpoint)
    state = dense_state(checkpoint, manifest)
    encoder = encoder_of(checkpoint, manifest, state)
    names = encoder.open_columns() if isinstance(encoder, Encoder) else {}
    if not names:
        raise UserError(f"{checkpoint} has no columns with rows: open, whose rows have ids")
    tables, shards, found = tables_of(manifest), shards_of(checkpoint, manifest), []
    for column, table in names.items():
        name = "" if len(tables) == 1 else table
        saved = Saved(tables[name], shards[name])
        entries = entries_of(checkpoint, state, name, saved.num_rows)
        entries = entries[entries[:, KEY] >= 0]
        weight = np.empty((len(entries) + 1, saved.dim), np.float32)
        saved.read(np.concatenate([[SHARED_KEY], entries[:, KEY]]), weight)
        ids, count, last = (np.ascontiguousarray(entries[:, i]) for i in (ID, COUNT, LAST))
        found.append(IdRows(column, encoder.coders[column].seed, ids, weight[1:], count, last, weight[:1]))
    return found, About(manifest["step"])


def export_changes(folder: Path, checkpoint: Path):
    """Writes to a folder of `folder`, called as the checkpoint, what has changed since the newest export there whose
    checkpoint still exists beside it; all rows if there is none. Raises UserError if it cannot be written."""
    remove_parts(folder)
    rows, about = rows_of(checkpoint)
    earlier = [
        checkpoint.parent / path.parent.name
        for path in sorted(folder.glob(f"step-*/{IDS}"), reverse=True)
        if path.parent.name < checkpoint.name and (checkpoint.parent / path.parent.name).is_dir()
    ]
    if earlier:
        before, since = rows_of(earlier[0])
        rows, removed = changes(before, rows)
        about = About(about.step, since.step)
        write_removed(folder / checkpoint.name, removed, about)  # first: without it the changes are not read
    write_rows(folder / checkpoint.name, rows, about)


def remove_parts(folder: Path):
    """Removes what killed processes have left of exports in the folders of `folder`. REQUIRES: no other process writes
    there."""
    for path in folder.glob("step-*"):
        if path.is_symlink() or not path.is_dir():
            continue
        for part in (*parts_of(path / IDS), *parts_of(path / REMOVED)):
            part.unlink()
        if not (path / IDS).exists():  # it is written last
            (path / REMOVED).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.rmdir()


class IdTable:
    """Rows by id in the place of a checkpoint's table (hetmpi.trained.saved_model.Saved): that of key SHARED_KEY is
    shared, the others follow in the order of their ids."""

    def __init__(self, rows: IdRows):
        self._rows = np.concatenate([rows.shared, rows.weight])
        self.num_rows, self.dim = self._rows.shape

    def read(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Reads the rows of keys (n,) int64 into rows (n, dim) float32."""
        np.take(self._rows, keys, axis=0, out=rows)


def replaced(encoder: Encoder | None, folders: list[Path]) -> tuple[Encoder, dict[str, IdTable]]:
    """A checkpoint's encoder with the ids of an export, and their tables. folders: of the export, and of changes.
    Raises UserError unless the export has the columns of the encoder."""
    names = encoder.open_columns() if isinstance(encoder, Encoder) else {}
    rows = {one.column: one for one in read_changed(folders)[0]}
    seeds = {column: one.seed for column, one in rows.items()}
    if not names or seeds != {name: encoder.coders[name].seed for name in names}:
        raise UserError(
            f"ids={folders[0]}: it has rows of the columns {one_line(', '.join(rows), 300)}, the checkpoint has "
            f"{one_line(', '.join(names), 300) or 'no columns'} with rows: open, in this order"
        )
    tables = {names[column]: IdTable(one) for column, one in rows.items()}
    found = {names[column]: (one.ids, np.arange(1, len(one.ids) + 1)) for column, one in rows.items()}
    return encoder.with_keys(found), tables


def ids_of(checkpoint: Path, column: str, values: pa.Array) -> np.ndarray:
    """The ids (n,) int64 of values (n,) of a column with rows: open. Raises UserError for another column."""
    manifest = read_manifest(checkpoint)
    encoder = encoder_of(checkpoint, manifest, dense_state(checkpoint, manifest))
    names = encoder.open_columns() if isinstance(encoder, Encoder) else {}
    if column not in names:
        raise UserError(
            f"{checkpoint} has no column {one_line(column, 100)} with rows: open, it has {', '.join(names) or 'none'}"
        )
    return encoder.ids_of(column, values)
