"""The files of tabular data and the units in which they are prepared."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from hetmpi.bounded_file import open_file
from hetmpi.data.files import DataError, absolute, first_line
from hetmpi.data.tabular.dialect import keeps_lines
from hetmpi.errors import printable

MAX_LINE_BYTES = 16 << 20
READ_BYTES = 1 << 20
PARQUET_ENDS = (".parquet", ".parq", ".pq")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
PARQUET, TEXT = "parquet", "text"


@dataclass(frozen=True)
class Unit:
    """A part of the source that is prepared at once: the lines whose first byte lies in [begin, end) of a text file, a
    whole compressed file, or the row groups [begin, end) of a Parquet file. is_valid: all its rows are held out."""

    number: int
    path: str
    size: int
    mtime_ns: int
    begin: int
    end: int
    form: str = TEXT
    is_valid: bool = False

    def __str__(self) -> str:
        if self.form == PARQUET:
            last = f" to {self.end:,}" if self.end > self.begin + 1 else ""
            return (
                f"{self.path} (row groups {self.begin + 1:,}{last})"
                if last
                else f"{self.path} (row group {self.end:,})"
            )
        whole = self.begin == 0 and self.end == self.size
        return self.path if whole else f"{self.path} (bytes {self.begin:,} to {self.end:,})"


def compression_of(path: str) -> str | None:
    """Arrow's name of the compression that a file's name ends with."""
    return COMPRESSIONS.get(os.path.splitext(path)[1].lower())


def list_files(source: str, key: str = "data.path") -> list[str]:
    """Absolute paths of a source's files, sorted: a file, a glob, or a folder, with those in its folders named
    KEY=VALUE, without files that begin with . or _. Raises DataError if there is none, or one cannot be read."""
    path = absolute(source, key)
    if os.path.isdir(path):
        found = [os.path.join(path, name) for name in names_below(path, source, key)]
    else:
        candidates = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
        found = sorted(name for name in candidates if os.path.isfile(name))
    if not found:
        if os.path.lexists(path) and not os.path.isdir(path):
            raise DataError(f"{key}: {path} is no file that can be read, but a device, a pipe or a broken link")
        what = "no file in the folder" if os.path.isdir(path) else "no file"
        raise DataError(f"{key}: there is {what} {path}")
    return found


def names_below(folder: str, source: str, key: str = "data.path") -> list[str]:
    """As names_in(), with the paths of the files in folders named KEY=VALUE."""
    names = names_in(folder, source, key)
    for inner in folders_in(folder, source, key):
        names += [os.path.join(inner, name) for name in names_below(os.path.join(folder, inner), source, key)]
    return sorted(names)


def folders_in(folder: str, source: str, key: str) -> list[str]:
    """Names of the folders in a folder that are KEY=VALUE."""
    with listed(folder, source, key) as entries:
        return [entry.name for entry in entries if entry.name[0] not in "._" and is_key(entry.name) and entry.is_dir()]


def names_in(folder: str, source: str, key: str = "data.path") -> list[str]:
    """Names of the files in a folder, sorted, without those that begin with . or _. source, key: for messages. Raises
    DataError if the folder cannot be read."""
    with listed(folder, source, key) as entries:
        return sorted(entry.name for entry in entries if entry.name[0] not in "._" and is_file(entry))


@contextlib.contextmanager
def listed(folder: str, source: str, key: str) -> Iterator[Iterator[os.DirEntry]]:
    """The entries of a folder. Raises DataError if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            yield entries
    except OSError as error:
        raise DataError(f"{key}={source}: the folder cannot be read: {error.strerror}") from error


def is_key(folder: str) -> bool:
    """Whether the name of a folder is KEY=VALUE (folders.py)."""
    return folder.find("=") > 0


def is_file(entry: os.DirEntry) -> bool:
    """Whether an entry of a folder is a file or a link to one; a link to nothing is none."""
    return os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file()


@functools.lru_cache(4096)
def form_of(path: str) -> str:
    """PARQUET or TEXT, by the file's name and first bytes. Raises DataError for a file that cannot be read."""
    try:
        with open_file(path) as file:
            return PARQUET if file.read(4) == b"PAR1" or path.lower().endswith(PARQUET_ENDS) else TEXT
    except OSError as error:
        raise DataError(f"data.path: {path} cannot be read: {error.strerror}") from error


def list_units(train: list[str], valid: list[str], unit_bytes: int, encoding: str | None = None) -> list[Unit]:
    """The units of the files `train`, then of `valid`. encoding: of text. Raises DataError for files of two forms, or
    without data."""
    files = [(path, False) for path in train] + [(path, True) for path in valid]
    forms = {form_of(path): path for path, _ in files}
    if len(forms) > 1:
        raise DataError(
            f"data.path: {forms[TEXT]} is text and {forms[PARQUET]} is Parquet: select files of one form by a glob, as "
            "in data.path='folder/*.csv'"
        )
    units = []
    for path, is_valid in files:
        status = os.stat(path)
        ranges = (
            row_group_ranges(path, unit_bytes)
            if PARQUET in forms
            else byte_ranges(path, status.st_size, unit_bytes, keeps_lines(encoding))
        )
        for begin, end in ranges:
            place = path, status.st_size, status.st_mtime_ns, begin, end
            units.append(Unit(len(units), *place, form_of(path), is_valid))
    return units


def byte_ranges(path: str, size: int, unit_bytes: int, has_lines: bool) -> list[tuple[int, int]]:
    step = unit_bytes if has_lines and compression_of(path) is None else max(size, 1)
    return [(begin, min(begin + step, size)) for begin in range(0, size, step)]


def row_group_ranges(path: str, unit_bytes: int) -> list[tuple[int, int]]:
    """Row groups of at least unit_bytes together, but for the last range."""
    metadata = open_parquet(path).metadata
    ranges, begin, total = [], 0, 0
    for group in range(metadata.num_row_groups):
        total += metadata.row_group(group).total_byte_size
        if total >= unit_bytes or group + 1 == metadata.num_row_groups:
            ranges.append((begin, group + 1))
            begin, total = group + 1, 0
    return ranges


def open_parquet(path: str) -> pq.ParquetFile:
    """Raises DataError for a file that is not Parquet, or is cut short."""
    try:
        return pq.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False)
    except (OSError, ValueError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"data.path: {path} is no complete Parquet file: {first_line(error)}") from error


def parquet_names(path: str, schema: pa.Schema) -> list[str]:
    """Names of the columns. Raises DataError for columns without a name or of one name, which cannot be selected."""
    names = list(schema.names)
    if "" in names:
        raise DataError(f"data.path: {path}: column {names.index('') + 1:,} has no name: rename it")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"data.path: {path}: two columns are named {printable(', '.join(twice))[:500]}: rename one")
    return names


def line_start(path: str, position: int) -> int:
    """Offset of the first line that starts at `position` or later; the file's end if there is none. Raises DataError if
    that needs more than MAX_LINE_BYTES."""
    if position == 0:
        return 0
    with open(path, "rb") as file:
        file.seek(position - 1)
        for _ in range(MAX_LINE_BYTES // READ_BYTES):
            text = file.read(READ_BYTES)
            if not text:
                return file.tell()
            if b"\n" in text:
                return file.tell() - len(text) + text.index(b"\n") + 1
    raise too_long(path, number_of_line(path, position))


def number_of_line(path: str, position: int) -> int:
    """Number of the line that holds the byte at `position`, from 1."""
    number = 1
    with open(path, "rb") as file:
        while position > 0:
            text = file.read(min(position, 4 * READ_BYTES))
            if not text:
                break
            number += text.count(b"\n")
            position -= len(text)
    return number


def too_long(path: str, line: int) -> DataError:
    return DataError(
        f"data.path: {path}, line {line:,} is longer than {MAX_LINE_BYTES >> 20} MiB: the file is no table, or its "
        "lines do not end in a newline"
    )
