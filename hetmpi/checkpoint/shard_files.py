"""Reads the files of saved shards row by row.

At most three files are open at a time, for any number of ranks in the checkpoint, so that a job of thousands of ranks
stays within the usual limit on open files: keys are routed in blocks, and for each block the shards are read one after
the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetmpi import _C
from hetmpi.checkpoint.files import CHUNK_BYTES, DTYPES, open_array, wrong_values
from hetmpi.checkpoint.manifest import ARRAYS, file_name, read_base, tables_of
from hetmpi.errors import UserError
from hetmpi.owner.route import make_partition
from hetmpi.table.table import EmbeddingTable, num_used_here

EarlierKeys = Callable[[np.ndarray], np.ndarray]
BLOCK_ROWS = 1 << 20  # rows routed together; each block opens the files of the shards that it reads


@dataclass(frozen=True)
class ShardFiles:
    """The files of one rank's shard of one table. files: array -> file of the checkpoint: weight, state, clock, and
    rows if it is incremental; base: array -> file of its base, {} for a full checkpoint."""

    files: dict[str, Path]
    base: dict[str, Path]
    num_rows: int
    dim: int
    state_dim: int

    def check(self):
        """Raises UserError unless every file contains an array of the dtype and shape that the manifest requires, and
        rows are ascending and within the shard. Reads headers, and the rows of an incremental checkpoint."""
        for name in ARRAYS:
            self.open(name)
        if self.base:
            rows = self.rows()
            if len(rows) and not (rows[0] >= 0 and rows[-1] < self.num_rows and (np.diff(rows) > 0).all()):
                raise UserError(f"{self.files['rows']} must hold ascending rows in [0, {self.num_rows:,}), it does not")

    def rows(self) -> np.ndarray:
        """Rows of the shard in the incremental checkpoint: (n,) int64."""
        return open_array(self.files["rows"], np.int64, (None,))

    def open(self, name: str) -> OpenArray:
        """One array: weight (num_rows, dim) float32, state (num_rows, state_dim) float32, or clock (num_rows,)
        int32."""
        dtype, width = DTYPES[name], {"weight": (self.dim,), "state": (self.state_dim,), "clock": ()}[name]
        if not self.base:
            return OpenArray(open_array(self.files[name], dtype, (self.num_rows, *width)))
        rows = self.rows()
        newer = open_array(self.files[name], dtype, (len(rows), *width))
        return OpenArray(open_array(self.base[name], dtype, (self.num_rows, *width)), newer, rows)


class OpenArray:
    """One array of a shard: `whole`, with `rows` (ascending) replaced by `newer`. Keeps its files open."""

    def __init__(self, whole: np.ndarray, newer: np.ndarray | None = None, rows: np.ndarray | None = None):
        self.whole, self.newer, self.rows = whole, newer, rows

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Rows (n,) of the array: (n, ...)."""
        out = self.whole[rows]
        if self.rows is not None and len(self.rows):
            place = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
            is_newer = self.rows[place] == rows
            out[is_newer] = self.newer[place[is_newer]]
        return out


def collect(shards: list[ShardFiles], partition: _C.Partition, route: _C.Route, name: str, out: np.ndarray):
    """Reads array `name` of the keys of `route` (n) to their positions in out (n, ...). Opens one shard at a time.
    partition: by which the shards were saved."""
    for owner in route.owners:
        keys, order = route.of(owner)
        rows = _C.Directory(partition, owner).rows_of(keys)
        array = shards[owner].open(name)
        step = max(1, CHUNK_BYTES * len(out) // max(1, out.nbytes))
        for i in range(0, len(rows), step):
            out[order[i : i + step]] = array.take(rows[i : i + step])


def shards_of(path: Path, manifest: dict) -> dict[str, list[ShardFiles]]:
    """The files of each rank's shard of each table, and of the base. Raises UserError as read_base."""
    folder = None if read_base(path, manifest) is None else path.parent / manifest["base"]
    found = {}
    for name, table in tables_of(manifest).items():
        partition = make_partition(table["partition"], table["num_rows"], manifest["size"])
        found[name] = []
        for rank in range(manifest["size"]):
            base = {array: folder / file_name(name, rank, array) for array in ARRAYS} if folder else {}
            files = {array: path / file_name(name, rank, array) for array in (*ARRAYS, *(("rows",) if base else ()))}
            found[name].append(
                ShardFiles(files, base, partition.num_local_rows(rank), table["dim"], table["state_dim"])
            )
    return found


def fill(table: EmbeddingTable, place: str, saved: dict, shards: list[ShardFiles], earlier: EarlierKeys | None = None):
    """Fills this rank's shard from the saved ones. place: name of the table, for messages. earlier: the saved keys of
    the table's keys, below 0 for new rows, which stay as they are. Raises UserError for values that are invalid for
    training."""
    partition, rank = make_partition(saved["partition"], saved["num_rows"], len(shards)), table.world.rank
    if earlier is None:
        table.num_used = saved["num_rows"]
    num_here = num_used_here(table)
    for begin in range(0, num_here, BLOCK_ROWS):
        keys = table.partition.keys_of(rank, begin, min(begin + BLOCK_ROWS, num_here))
        rows = slice(begin, begin + len(keys))
        if earlier is not None:
            keys = earlier(keys)
            rows, keys = begin + np.flatnonzero(keys >= 0), keys[keys >= 0]
        route = partition.route(keys)
        for name in ARRAYS:
            values = table.shard.empty(name, len(keys))
            collect(shards, partition, route, name, values)
            wrong = wrong_values(name, values)
            if wrong is not None:
                raise UserError(f"{place}: {name} has {wrong}")
            table.shard.assign(rows, **{name: values})
