"""Files of prepared data with checksums (xxh3_64), so that a flipped bit is refused and not read as other data.

A file of Parquet has a file of sums beside it: of each column of each row group, the units of reading, and of the
footer. An array has the sums of its blocks after its last byte, where np.load does not read. JSON has its sum as a key
of its own."""

from __future__ import annotations

import bisect
import io
import json
import os
import socket
import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from hetmpi.bounded_file import open_file

KEY = "xxh3_64"  # of the sum of JSON
BLOCK_BYTES = 16 << 20  # of an array, with a sum of its own
_PARSING = threading.Lock()  # np.load parses a header by ast, which fails now and then in two threads of Python 3.11


class Damaged(ValueError):
    """A file that is not as it was written."""

    def __init__(self, path: str):
        super().__init__(f"{path} is not as it was written")


def save_array(path: str, array: np.ndarray) -> None:
    """Writes an array and its sums, under another name first."""
    part = f"{path}.part-{socket.gethostname()}-{os.getpid()}"
    try:
        with open(part, "wb+") as file:
            np.save(file, array)
            end = file.seek(0, os.SEEK_END)
            sums = [sum_of_block(file, block, end) for block in range(num_blocks(end))]
            trailer = np.array([*sums, end], np.uint64).tobytes()
            file.seek(end)
            file.write(trailer + sum_of_trailer(trailer, path))
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.remove(part)


def load_array(path: str, is_mapped: bool = False) -> np.ndarray:
    """Raises Damaged, and OSError."""
    check_array(path)
    with _PARSING:
        return np.load(path, mmap_mode="r" if is_mapped else None)


def check_array(path: str, rank: int = 0, size: int = 1) -> None:
    """Verifies every size-th block from block `rank` on, so that ranks share a large array. Raises Damaged, and
    OSError."""
    with open_file(path) as file:
        sums, end = trailer_of(file, path)
        for block in range(rank, num_blocks(end), size):
            if sum_of_block(file, block, end) != sums[block]:
                raise Damaged(path)


def trailer_of(file, path: str) -> tuple[list[int], int]:
    """The sums of an array's blocks, and the end of the array in its file."""
    total = file.seek(0, os.SEEK_END)
    last = bytes_of(file, max(total - 16, 0), total)  # the end, and the sum of the trailer
    end = int.from_bytes(last[:8], "little")
    if end + 8 * num_blocks(end) + 16 != total:
        raise Damaged(path)
    trailer = bytes_of(file, end, total - 8)
    if sum_of_trailer(trailer, path) != last[8:]:
        raise Damaged(path)
    return np.frombuffer(trailer, np.uint64)[:-1].tolist(), end


def sum_of_trailer(trailer: bytes, path: str) -> bytes:
    """Of the trailer and the file's name: a file in the place of another is no array of that name."""
    return xxhash.xxh3_64_digest(trailer + os.path.basename(path).encode())


def num_blocks(end: int) -> int:
    return -(-end // BLOCK_BYTES)


def sum_of_block(file, block: int, end: int) -> int:
    begin = block * BLOCK_BYTES
    return xxhash.xxh3_64_intdigest(bytes_of(file, begin, min(begin + BLOCK_BYTES, end)))


def write_json(content: dict, *path: str) -> None:
    """Writes `content` and its sum to the joined path atomically."""
    final = os.path.join(*path)
    part = f"{final}.part-{socket.gethostname()}-{os.getpid()}"
    with open(part, "w") as file:
        json.dump({**content, KEY: sum_of_json(content, final)}, file, indent=1)
    os.replace(part, final)


def read_json(*path: str) -> dict:
    """The content of the file at the joined path. Raises Damaged, and OSError."""
    path = os.path.join(*path)
    try:
        with open_file(path) as file:
            content = json.load(file)
        known = content.pop(KEY)
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        raise Damaged(path) from None
    if known != sum_of_json(content, path):
        raise Damaged(path)
    return content


def sum_of_json(content: dict, path: str) -> str:
    """Of the content and the file's name, as sum_of_trailer."""
    return xxhash.xxh3_64_hexdigest(json.dumps([os.path.basename(path), content]).encode())


def write_sums(path: str) -> None:
    """Writes the sums of a complete Parquet file beside it."""
    metadata = pq.read_metadata(path)
    sums = []
    with open(path, "rb") as file:
        for group in range(metadata.num_row_groups):
            found = metadata.row_group(group)
            for begin, end in (place_of(found.column(i)) for i in range(metadata.num_columns)):
                sums.append(xxhash.xxh3_64_intdigest(bytes_of(file, begin, end)))
        begin, end = footer(file, metadata)
        sums.append(xxhash.xxh3_64_intdigest(bytes_of(file, begin, end)))
    save_array(f"{path}.sums", np.array([*sums, begin, end], np.uint64))


class CheckedParquet:
    """A Parquet file that write_sums() has seen. Raises Damaged, and OSError."""

    def __init__(self, path: str):
        self.path = path
        *sums, begin, end = load_array(f"{path}.sums").tolist()
        with open_file(path) as file:
            self.metadata = pq.read_metadata(pa.BufferReader(self._checked(file, begin, end, sums[-1])))
        num_groups, num_columns = self.metadata.num_row_groups, self.metadata.num_columns
        self._size = end
        schema = self.metadata.schema
        self._numbers = {schema.column(i).path.split(".")[0]: i for i in range(num_columns)}
        self._sums = [sums[group * num_columns : (group + 1) * num_columns] for group in range(num_groups)]

    def read(self, group: int, names: Sequence[str] | None = None) -> pa.Table:
        """The columns `names` of a row group, all of them by default. REQUIRES: names without points, no structs."""
        found, pieces = self.metadata.row_group(group), {}
        with open_file(self.path) as file:
            for i in range(self.metadata.num_columns) if names is None else (self._numbers[name] for name in names):
                begin, end = place_of(found.column(i))
                pieces[begin] = self._checked(file, begin, end, self._sums[group][i])
        parquet = pq.ParquetFile(Pieces(pieces, self._size), metadata=self.metadata, pre_buffer=False)
        return parquet.read_row_group(group, names, use_threads=False)

    def _checked(self, file, begin: int, end: int, known: int) -> bytes:
        found = bytes_of(file, begin, end)
        if xxhash.xxh3_64_intdigest(found) != known:
            raise Damaged(self.path)
        return found


def place_of(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """First byte and end of a column of a row group."""
    begin = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    return begin, begin + column.total_compressed_size


def footer(file, metadata: pq.FileMetaData) -> tuple[int, int]:
    """First byte and end of the footer: metadata, their length as 4 bytes, and 4 bytes that name the format."""
    end = file.seek(0, os.SEEK_END)
    return end - metadata.serialized_size - 8, end


def bytes_of(file, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


class Pieces(io.RawIOBase):
    """A file of which only some pieces can be read. pieces: first byte -> bytes."""

    def __init__(self, pieces: dict[int, bytes], size: int):
        self._pieces, self._begins, self._size, self._place = pieces, sorted(pieces), size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        begin = self._begins[bisect.bisect_right(self._begins, self._place) - 1]
        offset = self._place - begin
        found = self._pieces[begin][offset:] if size < 0 else self._pieces[begin][offset : offset + size]
        self._place += len(found)
        return found
