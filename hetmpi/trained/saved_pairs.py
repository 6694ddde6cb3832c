"""A checkpoint of task=retrieval: vectors of items and of queries that are rows of files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import xxhash

from hetmpi.checkpoint.dense_state import attempt
from hetmpi.checkpoint.manifest import Entries, read_manifest
from hetmpi.data.batch import Samples, concatenate
from hetmpi.data.features import NO_KEY
from hetmpi.data.pairs import PairBatch, Side
from hetmpi.data.tabular import DataError, Encoder, Reader
from hetmpi.data.tabular.convert import KEPT, NO_INTEGER, column_of, no_value
from hetmpi.data.tabular.files import PARQUET, Unit, open_parquet, parquet_names
from hetmpi.data.tabular.kept import kind_of, typed_as
from hetmpi.data.tabular.reading import INTEGER, Reading, StoredColumn
from hetmpi.data.tabular.rules import NUMBER
from hetmpi.data.tabular.text import head_of, header_of
from hetmpi.errors import UserError, one_line
from hetmpi.tasks.catalogue import bare, histories_of
from hetmpi.tasks.pair_columns import PairColumns, names_of
from hetmpi.trained.coded_values import coded
from hetmpi.trained.saved_model import MOST_FIELDS, check_config, dense_state, encoder_of, instantiated, saved_tables
from hetmpi.world.world import World

BLOCK = 1 << 12  # samples whose vectors are computed at a time
OF_TEXT = ("delimiter", "encoding", "decimal")
OF_FILES = ("data.path", "data.max_bad_rows", *(f"data.{key}" for key in OF_TEXT))


def is_of_pairs(manifest: dict) -> bool:
    """Whether a checkpoint is of task=retrieval."""
    sizes = manifest.get("model_sizes")
    return isinstance(sizes, dict) and "sequences" in sizes


class SavedPairs:
    """The model of queries and items in a checkpoint.

    digest   of the checkpoint, by which its vectors are known
    columns  those that the model reads
    encoder  of rows of files"""

    def __init__(self, checkpoint: Path, allow=()):
        """allow: as for dense_layers. Raises UserError for an incomplete or invalid checkpoint, and for one of data
        that are no files."""
        manifest = read_manifest(checkpoint)
        self.digest = xxhash.xxh3_64_hexdigest(repr(sorted(manifest["files"].items())).encode())
        state = dense_state(checkpoint, manifest)
        encoder = encoder_of(checkpoint, manifest, state)
        if not isinstance(encoder, Encoder):
            raise UserError(f"{checkpoint} is of data that are no files: its items have no values to name them by")
        self.encoder = encoder
        attempt(
            f"{checkpoint}: the model in its manifest", lambda: self._make(checkpoint, manifest, state["model"], allow)
        )
        self.none = encoder.keys_of_none(self.columns.item.name)
        self.tables = saved_tables(checkpoint, manifest, next(iter(self.columns.tables)))
        found = {name: (table.num_rows, table.dim) for name, table in self.tables.items()}
        wanted = {name: (table.num_rows, self.model.table_dims[name]) for name, table in self.columns.tables.items()}
        if found != wanted:
            raise UserError(f"{checkpoint} has tables of {found} rows and numbers, its columns need {wanted}")

    def _make(self, checkpoint: Path, manifest: dict, weights: dict, allow):
        said = Entries(f"{checkpoint}: manifest.json", manifest)
        config, dim = said.part("model_config"), said.part("model_sizes").integer("dim", 1, MOST_FIELDS)
        is_ours, encoder = check_config(checkpoint, config, allow), self.encoder
        arguments = {"dim": dim, **names_of(encoder.features, encoder.dense_names)}

        def complete():
            model = instantiated(config.values, arguments, None)
            self.columns = PairColumns(model, encoder.features, encoder.tables, encoder.dense_names)
            return self.columns.complete(model)

        if is_ours:  # before memory is allocated: the weights must have the sizes that the manifest names
            with torch.device("meta"):
                complete().load_state_dict(weights, assign=True)
        self.model = complete()
        self.model.load_state_dict(weights)
        self.model.eval()

    def items(self, given: Mapping[str, str]) -> tuple[pa.Array, np.ndarray, int]:
        """The distinct items of files whose rows were trained, in the order of their first rows in the files, then
        those of histories alone (hetmpi/tasks/catalogue.py): their values as there, and their vectors (n, W) float32;
        and the number of rows with other items. given: settings of the files. Raises UserError."""
        side, seen, parts, values, num_other = self.columns.items, set(self.none), [], [], 0
        for samples, kept in self.rows_of(given, side, (self.columns.item.name,)):
            own = side.take(samples)
            is_other = np.isin(own.ids[:, 0], self.none) | ~self.tables[self.columns.item.table].are_trained(
                own.ids[:, 0]
            )
            num_other += int(is_other.sum())
            seen.update(own.ids[is_other, 0].tolist())
            keys, firsts = np.unique(own.ids[:, 0], return_index=True)
            new = np.sort(firsts[[key not in seen for key in keys.tolist()]]) if len(keys) else firsts
            seen.update(own.ids[new, 0].tolist())
            parts.append(own[new])
            values.append(kept.column(0).combine_chunks().take(pa.array(new)))
        for keys, found in self._of_histories(given):
            new = [place for place, key in enumerate(keys.tolist()) if key not in seen]
            seen.update(keys[new].tolist())
            parts.append(bare(keys[new]))
            values.append(found.take(pa.array(new, pa.int64())))
        if not sum(map(len, parts)):
            raise UserError(f"data.path={one_line(given['data.path'])}: no row has an item that the model knows")
        items = concatenate([part for part in parts if len(part)])
        vectors = [self._embedded(self.columns.item_batch(part))[1] for part in in_blocks(items)]
        values = joined([part for part in values if len(part)])
        values = typed_as(values, kind_of(values).type) if pa.types.is_binary(values.type) else values
        return values.combine_chunks(), np.concatenate(vectors), num_other

    def _of_histories(self, given: Mapping[str, str]) -> Iterator[tuple[np.ndarray, pa.Array]]:
        """Keys (n,) int64 and values of the trained items of histories in files, each once in a block. Columns that the
        files lack are left out."""
        item, features = self.columns.item, [one for one in self.encoder.features if one.pool is not None]
        stored = {column.name: column for column in self.encoder.reading.columns}
        table, keys_of = self.tables[item.table], self.encoder.by_value()[item.name].keys
        for place in histories_of(self.encoder.features, self.columns.items):
            column = stored[features[place].name]
            reading = replace(self.encoder.reading, columns=(column,))
            if column.name not in names_in(reader_of(given, reading, ())):
                continue
            reader = reader_of(given, reading, (column.name,))
            for block in (block for unit in reader.units for block in reader.blocks(unit)):
                values = coded(column_of(block, KEPT + column.name), column, self.encoder.reading.missing_of(column))[0]
                keys = keys_of(values)
                known = np.flatnonzero(~np.isin(keys, [NO_KEY, *self.none]))
                firsts = known[np.sort(np.unique(keys[known], return_index=True)[1])]
                firsts = firsts[table.are_trained(keys[firsts])]
                yield keys[firsts], values.take(pa.array(firsts))

    def queries(self, samples: Samples) -> np.ndarray:
        """Vectors (B, W) float32."""
        return np.concatenate([self._embedded(self.columns.query_batch(part))[0] for part in in_blocks(samples)])

    @torch.no_grad()
    def _embedded(self, batch: PairBatch) -> tuple[np.ndarray | None, np.ndarray | None]:
        rows = {}
        for name, keys in batch.keys.items():
            rows[name] = torch.empty(len(keys), self.tables[name].dim)
            self.tables[name].read(keys.numpy(), rows[name].numpy())
        found = self.columns.vectors(self.model, rows, batch)
        return tuple(part if part is None else part.numpy() for part in found)

    def reader(self, given: Mapping[str, str], side: Side, keep: tuple[str, ...]) -> Reader:
        """Reads those columns of files that a side needs. given: settings of the files. keep: columns to pass on.
        Raises UserError."""
        reading = self.encoder.reading
        reading = replace(reading, columns=tuple(reading.columns[i] for i in self._numbers(side)))
        return reader_of(given, reading, keep)

    def rows_of(
        self, given: Mapping[str, str], side: Side, keep: tuple[str, ...]
    ) -> Iterator[tuple[Samples, pa.Table]]:
        """The samples of files in their order, and kept columns, in blocks; columns of the other side have no values.
        Raises UserError."""
        reader = self.reader(given, side, keep)
        for unit in reader.units:
            yield from self.blocks_of(reader, unit, side, keep)

    def blocks_of(
        self, reader: Reader, unit: Unit, side: Side, keep: tuple[str, ...]
    ) -> Iterator[tuple[Samples, pa.Table]]:
        """As rows_of(), of a unit."""
        for block in reader.blocks(unit):
            try:
                samples = self.encoder.samples(self._completed(block, side))
            except DataError as error:
                raise DataError(f"data.path: {unit}, {error}") from error
            yield samples, block.select([KEPT + name for name in keep]).rename_columns(list(keep))

    def _numbers(self, side: Side) -> list[int]:
        """Places of a side's columns among those of the encoder."""
        names = {feature.name for feature in side.features}
        names |= {self.encoder.dense_names[i] for i in side.numbers}
        return [i for i, column in enumerate(self.encoder.columns) if column.name in names]

    def _completed(self, block: pa.Table, side: Side) -> pa.Table:
        """A block of a side's columns as one of all columns."""
        place, columns = {number: i for i, number in enumerate(self._numbers(side))}, self.encoder.reading.columns
        names = [f"c{i}" for i in range(len(columns))]
        arrays = [block[f"c{place[i]}"] if i in place else nothing(one, len(block)) for i, one in enumerate(columns)]
        for i in (i for i, column in enumerate(columns) if column.is_weighted):
            names.append(f"w{i}")
            arrays.append(block[f"w{place[i]}"] if i in place else no_lists(len(block), pa.float32()))
        return pa.table(arrays, names=names)


def names_in(reader: Reader) -> list[str]:
    """The columns of the first file."""
    reading, unit = reader.reading, reader.units[0]
    if unit.form == PARQUET:
        return [*parquet_names(unit.path, open_parquet(unit.path).schema_arrow), *reading.keys]
    head = head_of(unit.path, encoding=reading.encoding)
    return [*(reading.names or header_of(unit.path, head, reading.delimiter, reading.quote)), *reading.keys]


def joined(parts: list[pa.Array]) -> pa.ChunkedArray:
    """Values of one type, that of the first, as texts if others are not."""
    if len({part.type for part in parts}) > 1:
        try:
            parts = [part.cast(parts[0].type) for part in parts]
        except pa.ArrowException:
            parts = [part.cast(pa.string()) for part in parts]
    return pa.chunked_array(parts)


def reader_of(given: Mapping[str, str], reading: Reading, keep: tuple[str, ...]) -> Reader:
    """Reads files. given: their settings. keep: columns to pass on. Raises UserError."""
    wrong, bad = sorted(set(given) - set(OF_FILES)), given.get("data.max_bad_rows", "0")
    if wrong or "data.path" not in given:
        raise UserError(f"{wrong[0]} cannot be given, only {', '.join(OF_FILES)}" if wrong else "give data.path=FILES")
    if not bad.isdecimal():
        raise UserError(f"data.max_bad_rows must be an integer of at least 0, got {one_line(bad)}")
    dialect = {key: given[f"data.{key}"].strip("'\"") for key in OF_TEXT if f"data.{key}" in given}
    if "delimiter" in dialect:
        dialect["delimiter"] = dialect["delimiter"].replace("\\t", "\t")
    return Reader(given["data.path"].strip("'\""), reading, keep, int(bad), **dialect)


def find_kept_types(world: World, reader: Reader) -> None:
    """Sets the types of the columns of text that are passed on. Collective."""
    kinds = world.comm.allgather(reader.kept_kinds(reader.units[world.rank :: world.size]))
    reader.keep_as(kinds, (lambda line: print(f"hetmpi: {line}", flush=True)) if world.rank == 0 else lambda line: None)


def nothing(column: StoredColumn, num: int) -> pa.Array:
    """`num` missing values."""
    if column.is_list:
        return no_lists(num, column.type.value_type)
    if column.as_ == NUMBER:
        return pa.array(np.full(num, np.nan, np.float32))
    return pa.array(np.full(num, NO_INTEGER if column.as_ == INTEGER else no_value(column.seed), np.int64))


def no_lists(num: int, kind: pa.DataType) -> pa.Array:
    """`num` empty lists of values of a kind."""
    return pa.ListArray.from_arrays(pa.array(np.zeros(num + 1, np.int32)), pa.array([], kind))


def in_blocks(samples: Samples) -> list[Samples]:
    """At least one, of at most BLOCK samples."""
    return [samples[i : i + BLOCK] for i in range(0, max(1, len(samples)), BLOCK)]
