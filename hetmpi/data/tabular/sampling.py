"""A sample of the rows of files: from the begin of each and, where that is cheap, from its middle and its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from hetmpi.data.files import DataError
from hetmpi.data.tabular.convert import as_text, column_of
from hetmpi.data.tabular.dialect import Dialect, as_single, keeps_lines, restored
from hetmpi.data.tabular.files import Unit, compression_of, open_parquet, parquet_names
from hetmpi.data.tabular.folders import repeated
from hetmpi.data.tabular.text import blocks, count_values, head_of, header_of

SAMPLE_BYTES = 2 << 20  # of the begin of one file of text
SAMPLE_ROWS = 10_000  # of a row group of one file of Parquet
FIRST_ROWS = 64  # read at a time for a vector
NUM_FILES = 4  # that are sampled as one is; of each of many less is read
LEAST = 128  # at most so many times less
MOST_CELLS = 4_000_000  # of a row group of Parquet
COMPRESSED = 100.0  # times the rows of its begin, of a large compressed file
NUM_PIECES = 4  # after the begin of a file of text
NUM_THREADS = 8
Result = TypeVar("Result")


class FileSample(NamedTuple):
    """names: of the file's columns. schema: of Parquet. pieces: columns as Arrow reads them, those of text as binary
    texts; of Parquet without lists and nested values. fractions: floats of Parquet that are no integers by the
    statistics of their row groups. keys: columns of folders (folders.py). vectors: columns of lists of fractions of
    Parquet -> the length of the first. num_rows: of the file, of text by the bytes of those in the pieces."""

    path: str
    names: list[str]
    schema: pa.Schema | None
    pieces: list[pa.Table]
    fractions: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()
    vectors: Mapping[str, int] = MappingProxyType({})
    num_rows: float = 0.0


def columns_named(name: str, samples: Sequence[FileSample]) -> list[pa.Array]:
    """The column of this name in each piece that has it."""
    pieces = (piece for sample in samples for piece in sample.pieces)
    return [column_of(piece, name) for piece in pieces if piece.schema.get_field_index(name) >= 0]


def texts_of(samples: Sequence[FileSample], name: str) -> pa.ChunkedArray:
    """The values of a column as binary texts, a chunk for each piece; none of lists and nested values."""
    try:
        return pa.chunked_array([as_text(column) for column in columns_named(name, samples)], pa.binary())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # preparing names what cannot be read
        return pa.chunked_array([], pa.binary())


def with_folders(sample: FileSample, keys: Mapping[str, str | None]) -> FileSample:
    """A sample with the keys of the file's folders as columns of texts."""
    new, schema = [key for key in keys if key not in sample.names], sample.schema
    if schema is not None:
        schema = pa.schema([*schema, *(pa.field(key, pa.binary()) for key in new)])
    pieces = sample.pieces
    for key in new:
        pieces = [piece.append_column(key, repeated(keys[key], len(piece))) for piece in pieces]
    return sample._replace(names=[*sample.names, *new], schema=schema, pieces=pieces, keys=tuple(keys))


def by_threads(call: Callable[[str], Result], paths: Sequence[str]) -> list[Result]:
    """What `call` returns for each path, of many by NUM_THREADS threads."""
    if len(paths) <= NUM_THREADS:
        return [call(path) for path in paths]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(call, paths))


def part_of(whole: int, num_files: int) -> int:
    """What is read of each of several files, where `whole` is read of one."""
    return max(whole * NUM_FILES // max(num_files, NUM_FILES), whole // LEAST)


def sample_text(path: str, names: Sequence[str] | None, dialect: Dialect, num_bytes: int) -> FileSample:
    """names: of a file without a header. There are no pieces of a file that has only a header. Raises DataError."""
    delimiter, quote, encoding = dialect.delimiter, dialect.quote, dialect.encoding
    head, size, compression = head_of(path, num_bytes, encoding), os.path.getsize(path), compression_of(path)
    if compression and len(head) >= num_bytes:
        head = head[: head.rfind(b"\n") + 1]
    if names is None:
        names = header_of(path, head, delimiter, quote)
        first, _, head = head.lstrip(b"\r\n").partition(b"\n")
        if b"\r" in first.rstrip(b"\r"):
            raise DataError(f"data.path: {path}: its lines end in CR, LF or CR LF was expected: convert it")
        if not head.strip():
            return FileSample(path, list(names), None, [])
    texts = [head]
    if compression is None and size > num_bytes and keeps_lines(encoding):
        texts += [b"".join(blocks(Unit(0, path, size, 0, *place), encoding)) for place in later_places(size, num_bytes)]
    pieces = [text_table(text, list(names), delimiter, quote) for text in texts]
    read = sum(map(len, texts))
    times = COMPRESSED if compression and read >= num_bytes else max(1.0, size / max(read, 1))
    return FileSample(path, list(names), None, pieces, num_rows=times * sum(map(len, pieces)))


def later_places(size: int, num_bytes: int) -> list[tuple[int, int]]:
    """Where the bytes of a file after the first num_bytes are sampled: all of few, else pieces up to the end."""
    if size <= 2 * num_bytes:
        return [(num_bytes, size)]
    part = num_bytes // NUM_PIECES
    begins = np.linspace(num_bytes, size - part, NUM_PIECES).astype(int).tolist()
    return [(begin, begin + part) for begin in begins]


def text_table(text: bytes, names: list[str], delimiter: str, quote: str | None) -> pa.Table:
    """Lines as texts, without those of another number of columns."""
    try:
        if quote is None or not has_quoted_lines(text, quote.encode()):
            return parsed(text, names, delimiter, quote)
    except pa.ArrowInvalid:  # some line has another number of columns
        pass
    good = b"".join(line + b"\n" for line in text.splitlines() if count_values(line, delimiter, quote) == len(names))
    try:
        return parsed(good, names, delimiter, quote)
    except pa.ArrowInvalid:  # preparing finds the line
        return pa.table({name: pa.array([], pa.binary()) for name in names})


def has_quoted_lines(text: bytes, quote: bytes) -> bool:
    """Whether the end of some line lies between quotes."""
    if quote not in text:
        return False
    values = np.frombuffer(text, np.uint8)
    ends = np.append(np.flatnonzero(values == ord("\n")), len(values))
    return bool((np.searchsorted(np.flatnonzero(values == quote[0]), ends) % 2).any())


def parsed(text: bytes, names: list[str], delimiter: str, quote: str | None) -> pa.Table:
    """All lines as texts. Raises pa.ArrowInvalid."""
    text, single = as_single(text, delimiter)
    table = csv.read_csv(
        pa.BufferReader(text),
        csv.ReadOptions(column_names=names, block_size=len(text) + 1, use_threads=False),
        csv.ParseOptions(delimiter=single, quote_char=quote or False),
        csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()), strings_can_be_null=False, check_utf8=False),
    ).combine_chunks()
    return restored(table, delimiter) if single != delimiter else table


def sample_parquet(path: str, num_rows: int) -> FileSample:
    """The first num_rows of the first, the middle and the last row group with rows. Raises DataError."""
    file = open_parquet(path)
    schema, metadata = file.schema_arrow, file.metadata
    names = parquet_names(path, schema)
    flat = [name for name, column in zip(names, schema) if not is_nested(column.type)]
    groups = [group for group in range(metadata.num_row_groups) if metadata.row_group(group).num_rows]
    chosen = sorted({groups[i] for i in (0, len(groups) // 2, len(groups) - 1)}) if groups else []
    pieces, num_rows = [], min(num_rows, max(MOST_CELLS // max(len(flat), 1), LEAST))
    try:
        for group in chosen:
            batch = next(file.iter_batches(num_rows, [group], flat, use_threads=False))
            pieces.append(pa.Table.from_batches([batch]))
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError):  # preparing names what cannot be read
        pieces = []
    vectors = {name: size_of(file, chosen, name, column.type) for name, column in zip(names, schema)}
    vectors = {name: size for name, size in vectors.items() if size}
    return FileSample(path, names, schema, pieces, fractions_in(metadata), vectors=vectors, num_rows=metadata.num_rows)


def size_of(file: pq.ParquetFile, groups: list[int], name: str, kind: pa.DataType) -> int:
    """The length of a column of vectors of fractions, that of the first in these row groups; 0 for other columns."""
    is_any_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    is_vector = is_any_list or pa.types.is_fixed_size_list(kind)
    if not is_vector or not (pa.types.is_floating(kind.value_type) or pa.types.is_decimal(kind.value_type)):
        return 0
    if not is_any_list:
        return kind.list_size
    try:
        for batch in file.iter_batches(FIRST_ROWS, groups, [name], use_threads=False) if groups else ():
            found = next((size for size in pc.list_value_length(batch.column(0)).to_pylist() if size), 0)
            if found:
                return found
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError):  # preparing names what cannot be read
        pass
    return 0


def fractions_in(metadata: pq.FileMetaData) -> frozenset[str]:
    """Columns of floats of which the least or the greatest value of a row group is no integer."""
    found = set()
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            known = column.statistics
            is_float = known is not None and known.has_min_max and isinstance(known.min, float)
            if is_float and not (known.min.is_integer() and known.max.is_integer()):
                found.add(column.path_in_schema)
    return frozenset(found)


def is_nested(kind: pa.DataType) -> bool:
    """Whether a column holds lists, structs or maps."""
    return pa.types.is_nested(kind.value_type if pa.types.is_dictionary(kind) else kind)
