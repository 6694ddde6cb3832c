"""Files of the vectors of items with their values, and the best items for queries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash

from hetmpi.bounded_file import shown
from hetmpi.bounded_parquet import open_parquet, read_table
from hetmpi.errors import UserError, one_line
from hetmpi.run.output import cannot_write, part_of, rows_to
from hetmpi.trained.link_answers import NOBODY, Best
from hetmpi.trained.saved_pairs import SavedPairs, find_kept_types
from hetmpi.world.same_files import check_same_files
from hetmpi.world.world import World

VECTOR, ITEMS, SCORES = "vector", "items", "scores"
DIGEST, SUM = b"hetmpi.checkpoint", b"hetmpi.xxh3_64"  # in the metadata of a Parquet file: of what it is, its sum
QUESTIONS = 512  # scored at a time
BLOCK = 1 << 14


def export_items(checkpoint: Path, out: Path, kind: str, given: Mapping[str, str], allow=()) -> dict[Path, str]:
    """Writes the vectors of the items of files to `out`: as Parquet, with a column of their values, or as npy, with
    their values in another file. Returns the paths, each with a description. Raises UserError."""
    saved = SavedPairs(checkpoint, allow)
    values, vectors, num_other = saved.items(given)
    if num_other:
        print(f"hetmpi: {num_other:,} rows have no item, or one that training did not have: left out", flush=True)
    about = f"{len(vectors):,} items of {vectors.shape[1]} numbers"
    if kind == "parquet":
        path, name = out / "items.parquet", saved.columns.item.name
        if name == VECTOR:
            raise UserError(f"items=parquet: the items' column is named {VECTOR}, as that of their vectors: items=npy")
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        table = pa.table({name: values, VECTOR: column})
        metadata = {DIGEST: saved.digest.encode(), SUM: sum_of(values, vectors)}
        with part_of(path) as part, cannot_write(path):
            pq.write_table(table.replace_schema_metadata(metadata), part)
        return {path: about}
    path, names = out / "items.npy", out / "items.names.txt"
    with part_of(path) as part, cannot_write(path), open(part, "wb") as file:
        np.save(file, vectors)
    with part_of(names) as part, cannot_write(names):
        part.write_text("".join(f"{one_line(value, 1 << 20)}\n" for value in values.to_pylist()), encoding="utf-8")
    return {path: about, names: "their values"}


def sum_of(values: pa.Array, vectors: np.ndarray) -> bytes:
    """Checksum of items."""
    return xxhash.xxh3_64_hexdigest(repr(values.to_pylist()).encode(errors="replace") + vectors.tobytes()).encode()


def read_items(path: Path, saved: SavedPairs) -> tuple[pa.Array, torch.Tensor]:
    """The values and the vectors (n, W) float32 in a file of export_items(). Raises UserError for another file, one
    that is not as it was written, and vectors of another checkpoint."""
    cure = "write it by `hetmpi export CHECKPOINT OUT items=parquet data.path=FILES`"
    place, name = f"items={shown(path)}", saved.columns.item.name
    try:
        file = open_parquet(path, place)
        metadata, schema = file.schema_arrow.metadata or {}, file.schema_arrow
        if metadata.get(DIGEST) != saved.digest.encode():
            raise UserError(f"{place} is not of this checkpoint")
        if sorted(schema.names) != sorted([name, VECTOR]) or not is_vectors(schema.field(VECTOR).type):
            raise UserError(f"{place} must have the columns {one_line(name)} and {VECTOR}, lists of float32")
        table = read_table(file, place, "use a machine with more")
    except UserError as error:
        raise UserError(f"{error}: {cure}") from error
    values, column = (table[name].combine_chunks() for name in (name, VECTOR))
    vectors = column.flatten().to_numpy(zero_copy_only=False)
    if len(vectors) != len(table) * column.type.list_size:
        raise UserError(f"{place} has rows without a vector: {cure}")
    vectors = vectors.reshape(len(table), column.type.list_size).copy()
    if metadata.get(SUM) != sum_of(values, vectors):
        raise UserError(f"{place} is not as it was written: {cure}")
    return values, torch.from_numpy(vectors)


def is_vectors(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_list(kind) and pa.types.is_float32(kind.value_type)


class BestItems:
    """The best items for the queries in files. Each rank answers those of every size-th unit of the files."""

    def __init__(
        self, world: World, checkpoint: Path, given: Mapping[str, str], items: Path, top: int, keep: tuple[str, ...],
        allow=(),
    ):  # fmt: skip
        """given: settings of the files. items: a file of export_items(). keep: columns of the files to write as well.
        Raises UserError."""
        self.world, self.saved, self.keep = world, SavedPairs(checkpoint, allow), keep
        self.reader = self.saved.reader(given, self.saved.columns.queries, keep)
        check_same_files(world, lambda: [*self.reader.files(), str(items)])
        find_kept_types(world, self.reader)
        self.values, self.vectors = read_items(items, self.saved)
        self.top = min(top, len(self.values))
        wrong = [name for name in keep if name in (ITEMS, SCORES) or keep.count(name) > 1]
        if wrong:
            raise UserError(f"predict.keep: {wrong[0]} would be in the result twice")

    def write(self, out: Path) -> int:
        """Writes a row for each of the files, in their order: kept columns, items and scores, lists of the best ones
        first. Returns their number on rank 0. Collective. Raises UserError."""
        torch.set_num_threads(1)  # sums of more threads have other roundings
        reader, size, num = self.reader, self.world.size, 0
        with rows_to(out) if self.world.rank == 0 else contextlib.nullcontext() as rows:
            for begin in range(0, len(reader.units), size):
                units = reader.units[begin : begin + size][self.world.rank : self.world.rank + 1]
                tables = [table for unit in units for table in self._answered(unit)]
                for table in sum(self.world.comm.gather(tables) or [], []):
                    rows.write(table)
                    num += len(table)
            bad = sum(self.world.comm.allgather(reader.bad), type(reader.bad)())
            bad.check(reader.path, reader.max_bad_rows)
            if self.world.rank == 0 and bad.rows:
                print(f"{reader.path}: {bad}", flush=True)
        return num

    def _answered(self, unit) -> Iterator[pa.Table]:
        for samples, kept in self.saved.blocks_of(self.reader, unit, self.saved.columns.queries, self.keep):
            for begin in range(0, len(samples), QUESTIONS):
                part = slice(begin, begin + QUESTIONS)
                places, scores = self._best(self.saved.queries(samples[part]))
                columns = {name: kept[name][part] for name in self.keep}
                offsets = pa.array(np.arange(len(places) + 1, dtype=np.int32) * self.top)
                items = pa.ListArray.from_arrays(offsets, self.values.take(pa.array(places.reshape(-1))))
                lists = pa.ListArray.from_arrays(offsets, pa.array(scores.reshape(-1)))
                yield pa.table({**columns, ITEMS: items, SCORES: lists})

    def _best(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places of items and scores, (B, top)."""
        best, queries = Best(len(queries), self.top), torch.from_numpy(queries)
        for begin in range(0, len(self.vectors), BLOCK):
            scores = queries @ self.vectors[begin : begin + BLOCK].T
            best.add(begin, scores.nan_to_num_(nan=-1e38, posinf=1e38, neginf=-1e38))
        assert (best.entities != NOBODY).all()
        return best.entities, best.scores
