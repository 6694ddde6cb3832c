"""Buckets: rows of all units, dealt at random, so that rows are shuffled over all files in bounded memory.

First the rows of each unit are dealt to the buckets (PieceWriter); then each bucket's rows are read from the pieces of
all units, and permuted. Both draw from generators seeded by the unit or the bucket: any number of ranks writes the
same. Pieces are removed when all buckets are complete."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import pyarrow as pa

from hetmpi.data.tabular.files import PARQUET, Unit, compression_of, open_parquet

BUCKET_BYTES = 256 << 20  # of a bucket's rows in memory, at most: twice that is needed to permute them
SHARED_BYTES = 64 << 20  # at which a source is divided into buckets that ranks write at the same time
SHARED_BUCKETS = 16
BATCH_BYTES = 256 << 10  # of a bucket's rows, to be read at once
BLOCK_BYTES = 64 << 20  # of rows that are dealt together, at most
TAKE_ROWS = 1 << 17
VALUE_BYTES = 8
PER_TEXT_BYTE = 4  # of text as short as "1,": a digit and a delimiter become VALUE_BYTES
PER_COMPRESSED_BYTE = 8 * PER_TEXT_BYTE


def num_buckets_of(units: Iterable[Unit], divided: Collection[str] = ()) -> int:
    """The number of buckets for the rows of all units. divided: columns whose texts are several values."""
    size = sum(largest_size(unit, divided) for unit in units)
    return max(1, -(-size // BUCKET_BYTES), min(SHARED_BUCKETS, size // SHARED_BYTES))


def largest_size(unit: Unit, divided: Collection[str] = ()) -> int:
    """Bytes that the rows of a unit can have in memory."""
    if unit.form == PARQUET:
        metadata = open_parquet(unit.path).metadata
        groups = (metadata.row_group(group) for group in range(unit.begin, unit.end))
        columns = [group.column(i) for group in groups for i in range(group.num_columns)]
        texts = sum(column.total_uncompressed_size for column in columns if column.path_in_schema in divided)
        return VALUE_BYTES * sum(column.num_values for column in columns) + PER_TEXT_BYTE * texts
    return (unit.end - unit.begin) * (PER_COMPRESSED_BYTE if compression_of(unit.path) else PER_TEXT_BYTE)


class PieceWriter:
    """Writes rows to an Arrow file, dealt to num_buckets buckets: record batch i has rows of bucket i % num_buckets."""

    def __init__(self, path: str, schema: pa.Schema, num_buckets: int, rng: np.random.Generator):
        self._schema, self._num_buckets, self._rng = schema, num_buckets, rng
        self._file = pa.OSFile(path, "wb")
        self._writer = pa.ipc.new_file(self._file, schema)
        self._block_bytes = min(BLOCK_BYTES, num_buckets * BATCH_BYTES)
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0

    def add(self, block: pa.Table) -> None:
        """Adds a block with the writer's schema."""
        self._waiting.append(block)
        self._waiting_bytes += block.nbytes
        if self._waiting_bytes >= self._block_bytes:
            self._write()

    def _write(self) -> None:
        table = pa.concat_tables([self._schema.empty_table(), *self._waiting])
        self._waiting, self._waiting_bytes = [], 0
        if not len(table):
            return
        (rows,) = table.combine_chunks().to_batches()
        sizes = [len(rows)]
        if self._num_buckets > 1:
            short = np.min_scalar_type(self._num_buckets - 1)  # such integers are sorted faster
            buckets = self._rng.integers(self._num_buckets, size=len(rows), dtype=short)
            rows = rows.take(pa.array(np.argsort(buckets, kind="stable")))
            sizes = np.bincount(buckets, minlength=self._num_buckets).tolist()
        for size, end in zip(sizes, np.cumsum(sizes).tolist()):
            self._writer.write_batch(rows.slice(end - size, size))

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, error, *_) -> None:
        try:
            if error is None:
                self._write()
                self._writer.close()
        finally:
            self._file.close()


def shuffled(paths: Iterable[str], bucket: int, num_buckets: int, schema: pa.Schema, rng: np.random.Generator):
    """The rows of a bucket in an order drawn by `rng`, in blocks of TAKE_ROWS. paths: pieces of all units."""
    batches = [batch for path in paths for batch in piece_of(path, bucket, num_buckets)]
    rows = pa.Table.from_batches(batches, schema).combine_chunks()
    del batches
    order = rng.permutation(len(rows))
    for start in range(0, len(rows), TAKE_ROWS):
        yield rows.take(pa.array(order[start : start + TAKE_ROWS]))


def piece_of(path: str, bucket: int, num_buckets: int) -> list[pa.RecordBatch]:
    """The rows of a bucket in a file of a PieceWriter."""
    with pa.OSFile(path) as file, pa.ipc.open_file(file) as piece:
        return [piece.get_batch(i) for i in range(bucket, piece.num_record_batches, num_buckets)]
