"""Files of rows by id, of columns without a fixed vocabulary: all of a checkpoint, or what changed since another.

    FOLDER/ids.parquet      column, the name in data.columns; id, the hash of a value, null for the row that all other
                            ids share; weight, a list of float32; count, how often the id was seen, aged until step;
                            step, in which it was seen last. In the order of columns and ids
    FOLDER/removed.parquet  column and id: of ids that have lost their rows. In what changed only

The files' metadata say by which seeds values are hashed, and the steps of the checkpoints, and have a checksum of the
contents. A full export with what changed later is the later full export, byte for byte.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from hetmpi.bounded_file import parsed_json, shown
from hetmpi.bounded_parquet import batches_of, open_parquet, readable
from hetmpi.errors import UserError, check_integer, one_line
from hetmpi.memory import check_fits
from hetmpi.open_rows import places_of
from hetmpi.run.output import cannot_write, part_of

IDS, REMOVED = "ids.parquet", "removed.parquet"
SCHEMA = pa.schema([
    ("column", pa.string()), ("id", pa.int64()), ("weight", pa.list_(pa.float32())), ("count", pa.int64()),
    ("step", pa.int64()),
])  # fmt: skip
OF_REMOVED = pa.schema([("column", pa.string()), ("id", pa.int64())])
ABOUT, SUM = b"hetmpi", "xxh3_128"  # of the metadata, and in it
GROUP_ROWS = 1 << 18
MOST_NUMBERS = 1 << 28  # of a row group
ROW_BYTES = 32  # of a row in memory beside its weight
CURE = "write it again by hetmpi export"


@dataclass(frozen=True)
class About:
    """Steps of the checkpoint, and of the earlier one if the rows are what changed since."""

    step: int
    since: int | None = None


@dataclass
class IdRows:
    """Rows of a column. seed: of the hashes of its values; ids (n,) int64, ascending; weight (n, dim) float32; count,
    step (n,) int64; shared (1, dim) float32, the row of all other ids, (0, dim) if it has not changed."""

    column: str
    seed: int
    ids: np.ndarray
    weight: np.ndarray
    count: np.ndarray
    step: np.ndarray
    shared: np.ndarray

    @property
    def dim(self) -> int:
        return self.weight.shape[1]

    def has_rows(self) -> bool:
        return len(self.ids) + len(self.shared) > 0

    def where(self, chosen: np.ndarray | slice, shared: np.ndarray) -> IdRows:
        """The chosen rows."""
        parts = {name: getattr(self, name)[chosen] for name in ("ids", "weight", "count", "step")}
        return replace(self, **parts, shared=shared)

    def groups(self):
        """In parts of one row group, of which the first has the shared row."""
        num = max(1, min(GROUP_ROWS, MOST_NUMBERS // max(1, self.dim)))
        for begin in range(0, max(1, len(self.ids)), num):
            yield self.where(slice(begin, begin + num), self.shared if begin == 0 else self.shared[:0])

    def table(self) -> pa.Table:
        whole, num_shared = np.concatenate([self.shared, self.weight]), len(self.shared)
        num = len(whole)
        weights = pa.ListArray.from_arrays(np.arange(num + 1, dtype=np.int32) * self.dim, pa.array(whole.reshape(-1)))
        is_shared, before = np.arange(num) < num_shared, np.zeros(num_shared, np.int64)
        return pa.table([
            pa.array([self.column] * num, pa.string()), pa.array(np.concatenate([before, self.ids]), mask=is_shared),
            weights, pa.array(np.concatenate([before, self.count])), pa.array(np.concatenate([before, self.step])),
        ], schema=SCHEMA)  # fmt: skip


def changes(before: Sequence[IdRows], now: Sequence[IdRows]) -> tuple[list[IdRows], list[tuple[str, np.ndarray]]]:
    """Of each column the rows that are new or have changed, and the ids that are gone. Raises UserError for other
    columns."""
    check_columns("since", before, now)
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


def applied(
    rows: list[IdRows], about: About, changed: list[IdRows], later: About, removed: dict[str, np.ndarray]
) -> tuple[list[IdRows], About]:
    """Rows with later changes. Raises UserError for changes since another checkpoint, or of other columns."""
    if later.since != about.step:
        raise UserError(
            f"deltas: the rows are of step {about.step:,}, the next changes are since {later.since}: give all changes, "
            "in their order"
        )
    by_column, found = {one.column: one for one in changed}, []
    check_columns("deltas", [one for one in rows if one.column in by_column], changed)
    for old in rows:
        new = by_column.get(old.column, old.where(slice(0), old.shared[:0]))
        gone = np.concatenate([removed.get(old.column, new.ids[:0]), new.ids])
        kept = old.where(~np.isin(old.ids, gone), new.shared if len(new.shared) else old.shared)
        order = np.argsort(np.concatenate([kept.ids, new.ids]))
        parts = {
            name: np.concatenate([getattr(kept, name), getattr(new, name)])[order]
            for name in ("ids", "weight", "count", "step")
        }
        found.append(replace(kept, **parts))
    return found, About(later.step)


def folders_of(text: str) -> list[Path]:
    """The folders of an export and of changes, with commas between. Raises UserError if there is none."""
    if not text.strip():
        raise UserError("the folder of an export was expected, as in EXPORT or EXPORT,CHANGES; got nothing")
    return [Path(text)] if Path(text).exists() else [Path(part.strip()) for part in text.split(",")]


def read_changed(folders: Sequence[Path]) -> tuple[list[IdRows], About]:
    """The rows of an export, with the changes in further folders. Raises UserError."""
    rows, about = read_rows(folders[0])
    if about.since is not None:
        raise UserError(
            f"{folders[0]} has only the changes since step {about.since:,}: name an export of all rows first"
        )
    for folder in folders[1:]:
        changed, later = read_rows(folder)
        rows, about = applied(rows, about, changed, later, read_removed(folder, later))
    return rows, about


def check_columns(what: str, before: Sequence[IdRows], now: Sequence[IdRows]):
    """Raises UserError unless both have the same columns, hashes and widths."""
    kinds = [[(one.column, one.seed, one.dim) for one in rows] for rows in (before, now)]
    if kinds[0] != kinds[1]:
        texts = [", ".join(f"{one_line(column, 100)} (dim {dim})" for column, _, dim in kind) for kind in kinds]
        raise UserError(f"{what}: the columns with ids are {texts[0] or 'none'} there, and {texts[1] or 'none'} here")


# Files.


def write_rows(folder: Path, rows: list[IdRows], about: About) -> Path:
    """Writes ids.parquet, and removes removed.parquet of an earlier export where these are all rows."""
    path, said = folder / IDS, {"seeds": {one.column: one.seed for one in rows}, **vars(about)}
    schema = SCHEMA.with_metadata(metadata_of(said, sum_of_rows(rows)))
    with part_of(path) as part, cannot_write(path), pq.ParquetWriter(part, schema) as writer:
        for one in rows:
            for group in filter(IdRows.has_rows, one.groups()):
                writer.write_table(group.table().replace_schema_metadata(schema.metadata))
    if about.since is None:
        with cannot_write(path), contextlib.suppress(FileNotFoundError):
            (folder / REMOVED).unlink()
    return path


def write_removed(folder: Path, removed: list[tuple[str, np.ndarray]], about: About) -> Path:
    path = folder / REMOVED
    schema = OF_REMOVED.with_metadata(metadata_of(vars(about), sum_of_removed(dict(removed))))
    with part_of(path) as part, cannot_write(path), pq.ParquetWriter(part, schema) as writer:
        for column, ids in removed:
            table = pa.table([pa.array([column] * len(ids), pa.string()), ids], schema=schema)
            writer.write_table(table, GROUP_ROWS)
    return path


def metadata_of(said: dict, digest: str) -> dict[bytes, bytes]:
    """said: what the metadata say. digest: of the contents."""
    return {ABOUT: json.dumps({**said, SUM: with_metadata(said, digest)}).encode()}


def with_metadata(said: dict, digest: str) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([said, digest]).encode())


def sum_of_rows(rows: Sequence[IdRows]) -> str:
    """Checksum of the columns that have rows."""
    digest = xxhash.xxh3_128()
    for one in filter(IdRows.has_rows, rows):
        digest.update(json.dumps([one.column, one.seed, len(one.ids), len(one.shared)]).encode())
        for array in (one.ids, one.weight, one.count, one.step, one.shared):
            digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def sum_of_removed(removed: Mapping[str, np.ndarray]) -> str:
    digest = xxhash.xxh3_128()
    for column, ids in removed.items():
        if len(ids):
            digest.update(json.dumps([column, len(ids)]).encode())
            digest.update(np.ascontiguousarray(ids))
    return digest.hexdigest()


def read_rows(folder: Path) -> tuple[list[IdRows], About]:
    """Those that write_rows has written. Raises UserError for other files."""
    path = folder / IDS
    file = opened(path, SCHEMA)
    about, said = about_of(file, path)
    check_size(file, path)
    parts: dict[str, list[IdRows]] = {}
    with of_export(path):
        for number in range(file.num_row_groups):
            part = rows_of_group(file.read_row_group(number, use_threads=False), said.get("seeds", {}))
            parts.setdefault(part.column, []).append(part)
        found = [joined(of_column) for of_column in parts.values()]
    check_sum(path, said, sum_of_rows(found))
    return found, about


def read_removed(folder: Path, about: About) -> dict[str, np.ndarray]:
    """The ids (n,) int64 of each column that have lost their rows. about: of the ids.parquet beside it. Raises
    UserError."""
    path = folder / REMOVED
    if not path.exists():
        raise UserError(
            f"{folder} has no {REMOVED}: give a folder that hetmpi export has written with since=CHECKPOINT"
        )
    file = opened(path, OF_REMOVED)
    steps, said = about_of(file, path)
    check_size(file, path)
    parts: dict[str, list[np.ndarray]] = {}
    with of_export(path):
        for batch in batches_of(file, shown(path), num_rows=GROUP_ROWS):
            names, ids = batch.column("column"), batch.column("id").to_numpy()
            codes = names.indices.to_numpy()
            for number, name in enumerate(names.dictionary.to_pylist()):
                parts.setdefault(name, []).append(ids[codes == number])
    found = {name: np.concatenate(of_column) for name, of_column in parts.items()}
    check_sum(path, said, sum_of_removed(found))
    if steps != about:
        raise UserError(f"{shown(path)} is of other steps than {IDS} beside it: {CURE}")
    return found


def opened(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    """The file, not yet read, with its names as a dictionary. Raises UserError for one of other columns."""
    if not open_parquet(path).schema_arrow.equals(schema):
        raise UserError(f"{shown(path)} must have the columns {', '.join(schema.names)} of an export of rows by id")
    return open_parquet(path, dictionaries=["column"])


def about_of(file: pq.ParquetFile, path: Path) -> tuple[About, dict]:
    """The steps of the checkpoints, and all of the metadata. Raises UserError."""
    place = f"{shown(path)}: its metadata"
    said = parsed_json((file.schema_arrow.metadata or {}).get(ABOUT, b"{}"), place)
    if not isinstance(said, dict) or not isinstance(said.get(SUM), str) or not isinstance(said.get("seeds", {}), dict):
        raise UserError(f"{place} has no checksum: {CURE}")
    check_integer(f"{place}: step", said.get("step"), 0)
    if said.get("since") is not None:
        check_integer(f"{place}: since", said["since"], 0)
    for column, seed in said.get("seeds", {}).items():
        check_integer(f"{place}: the seed of column {one_line(column, 100)}", seed, 0)
    return About(said["step"], said.get("since")), said


def check_size(file: pq.ParquetFile, path: Path):
    """Raises UserError for a row group larger than those of an export, and for rows that do not fit into memory."""
    num_bytes = 0
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        numbers = max(group.column(i).num_values for i in range(group.num_columns))
        if group.num_rows > GROUP_ROWS or numbers > MOST_NUMBERS:
            raise UserError(
                f"{shown(path)}: row group {number + 1:,} has {group.num_rows:,} rows and {numbers:,} numbers, an "
                f"export has at most {GROUP_ROWS:,} and {MOST_NUMBERS:,}: {CURE}"
            )
        num_bytes += ROW_BYTES * group.num_rows + 4 * numbers
    check_fits(2 * num_bytes, shown(path), "use a machine with more")


@contextlib.contextmanager
def of_export(path: Path):
    """A context that turns errors of contents of another form into a UserError."""
    try:
        with readable(shown(path)):
            yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{shown(path)} is no export of rows by id: {one_line(error)}: {CURE}") from error


def check_sum(path: Path, said: dict, digest: str):
    if said[SUM] != with_metadata({name: value for name, value in said.items() if name != SUM}, digest):
        raise UserError(f"{shown(path)} is not as it was written: {CURE}")


def rows_of_group(table: pa.Table, seeds: dict[str, int]) -> IdRows:
    """Raises ValueError or LookupError for a group of another form."""
    for name in ("column", "weight", "count", "step"):
        if table[name].null_count:
            raise ValueError(f"column {name} has rows without a value")
    [column] = table["column"].unique().to_pylist()
    table = table.combine_chunks()
    is_shared, weights = np.asarray(table["id"].is_null()), table["weight"].combine_chunks()
    [dim] = np.unique(weights.value_lengths().to_numpy(zero_copy_only=False)).tolist()
    ids, values = table["id"].fill_null(0).to_numpy(), weights.flatten().to_numpy().reshape(len(table), int(dim))
    count, step = (table[name].to_numpy() for name in ("count", "step"))
    rows = [one[~is_shared] for one in (ids, values, count, step)]
    return IdRows(column, int(seeds[column]), *rows, values[is_shared])


def joined(parts: list[IdRows]) -> IdRows:
    """The groups of a column. Raises ValueError unless they follow each other."""
    whole = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "weight", "count", "step")
    }
    shared = np.concatenate([part.shared for part in parts])
    if (whole["ids"][1:] <= whole["ids"][:-1]).any() or len(shared) > 1:
        raise ValueError(f"column {parts[0].column}: ids must rise, and one row be shared")
    return replace(parts[0], **whole, shared=shared)
