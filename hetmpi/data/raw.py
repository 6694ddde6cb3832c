"""Raw Criteo text: its files, the units in which they are read, and the parser, which hashes values and drops bad rows.

A line consists of a label, 13 integers and 26 hexadecimal strings, separated by tabs; empty means missing (Criteo
Display Advertising Challenge, Kaggle 2014, and the Terabyte logs). Memory use is bounded by BLOCK_BYTES of text.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import xxhash

from hetmpi.data.distinct import NUM_REGISTERS, observe
from hetmpi.errors import UserError

NUM_DENSE, NUM_FIELDS = 13, 26
DENSE_NAMES = [f"d{j}" for j in range(NUM_DENSE)]
FIELD_NAMES = [f"c{f}" for f in range(NUM_FIELDS)]
NAMES = ["label", *DENSE_NAMES, *FIELD_NAMES]
EXPECTED = "lines of label, 13 integers and 26 hex strings separated by tabs, plain or .gz"

BLOCK_BYTES = 4 << 20
MAX_EXAMPLES = 5
EXAMPLE_CHARS = 120

# Result of parsing: dense features are log(x + 1) of the integer, 0 if it is negative or missing; ids are 63 bits of
# the string's hash, a missing string counts as a value.
SCHEMA = pa.schema(
    [pa.field(name, pa.float32()) for name in ["label", *DENSE_NAMES]]
    + [pa.field(name, pa.int64()) for name in FIELD_NAMES]
)


class DataError(UserError):
    """Data that cannot be read or prepared; the message is complete without a traceback."""


@dataclass(frozen=True)
class Unit:
    """A part of the source that is prepared at once: the lines whose first byte lies in [begin, end) of a file. A .gz
    file is one unit, with offsets in compressed bytes."""

    number: int
    path: str
    size: int
    mtime_ns: int
    begin: int
    end: int

    def __str__(self) -> str:
        whole = self.begin == 0 and self.end == self.size
        return self.path if whole else f"{self.path} (bytes {self.begin:,} to {self.end:,})"

    def open(self) -> pa.NativeFile:
        """Opens the unit's text as a stream."""
        if self.path.endswith(".gz"):
            return pa.CompressedInputStream(pa.OSFile(self.path), "gzip")
        begin, end = (line_start(self.path, position) for position in (self.begin, self.end))
        return pa.OSFile(self.path).get_stream(begin, end - begin)


def line_start(path: str, position: int) -> int:
    """Offset of the first line that starts at `position` or later; the file's end if there is none."""
    if position == 0:
        return 0
    with open(path, "rb") as file:
        file.seek(position - 1)
        file.readline()
        return file.tell()


def list_units(source: str, unit_bytes: int) -> list[Unit]:
    """The units of `source`: a file, a glob, or a folder (all files except hidden ones). Plain files are divided every
    unit_bytes. Raises DataError if there is no file, or all are empty."""
    units = []
    for path in list_files(source):
        status = os.stat(path)
        step = max(status.st_size, 1) if path.endswith(".gz") else unit_bytes
        for begin in range(0, status.st_size, step):
            end = min(begin + step, status.st_size)
            units.append(Unit(len(units), path, status.st_size, status.st_mtime_ns, begin, end))
    if not units:
        raise DataError(f"data.path={source} is empty; expected {EXPECTED}")
    return units


def list_files(source: str) -> list[str]:
    """Absolute paths of the source's files, sorted. Raises DataError if there is none, or one is not readable."""
    path = absolute(source)
    if os.path.isdir(path):
        candidates = [os.path.join(path, name) for name in os.listdir(path) if not name.startswith(".")]
    else:
        candidates = [path] if os.path.exists(path) else glob.glob(path)
    found = sorted(name for name in candidates if os.path.isfile(name))
    if not found:
        raise DataError(f"data.path: there is no file {path}; expected {EXPECTED}")
    for name in found:
        if not os.access(name, os.R_OK):
            raise DataError(f"data.path: {name} is not readable: check its permissions")
    return found


def absolute(path: str) -> str:
    """The absolute path, with ~ expanded."""
    return os.path.abspath(os.path.expanduser(path))


@dataclass
class BadRows:
    """Dropped rows: their number, the number of faults of each kind, and the first few as examples."""

    rows: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def add(self, kind: str, count: int) -> None:
        """Counts faults of a kind."""
        self.kinds[kind] = self.kinds.get(kind, 0) + count

    def show(self, what: str, line: str) -> None:
        """Keeps a bad line as an example, if there is room."""
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{what}: {line[:EXAMPLE_CHARS]!r}")

    def __add__(self, other: BadRows) -> BadRows:
        kinds = {kind: self.kinds.get(kind, 0) + other.kinds.get(kind, 0) for kind in {**self.kinds, **other.kinds}}
        return BadRows(self.rows + other.rows, kinds, (self.examples + other.examples)[:MAX_EXAMPLES])

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self.kinds.items())
        return "\n  ".join([f"{self.rows:,} bad rows dropped ({kinds}), such as", *self.examples])

    def check(self, source: str, limit: int) -> None:
        """Raises DataError if there are more bad rows than `limit`."""
        if self.rows > limit:
            raise DataError(
                f"data.path={source}: more bad rows than data.max_bad_rows={limit}; expected {EXPECTED}. Correct them, "
                f"raise data.max_bad_rows, or select the right files of a folder by a glob.\n  {self}"
            )


class Parser:
    """Iterates over the good rows of a unit as pa.Table blocks with schema SCHEMA, and counts bad and missing values.

    bad        BadRows
    missing    (13 + 26,) int64, missing values of each column
    registers  (26, NUM_REGISTERS) uint8, for the number of distinct values of each field
    """

    def __init__(self, unit: Unit):
        self.unit = unit
        self.bad = BadRows()
        self.missing = np.zeros(NUM_DENSE + NUM_FIELDS, dtype=np.int64)
        self.registers = np.zeros((NUM_FIELDS, NUM_REGISTERS), dtype=np.uint8)

    def __iter__(self) -> Iterator[pa.Table]:
        with self.unit.open() as text:
            if not text.read(1):  # Arrow raises an error for an empty file
                return
        with self.unit.open() as text:
            for block in csv.open_csv(text, *self._options()):
                yield self._convert(block)

    def _options(self):
        read = csv.ReadOptions(column_names=NAMES, block_size=BLOCK_BYTES, use_threads=False, encoding="latin-1")
        parse = csv.ParseOptions(delimiter="\t", quote_char=False, invalid_row_handler=self._skip)
        strings = pa.dictionary(pa.int32(), pa.binary())
        convert = csv.ConvertOptions(column_types=dict.fromkeys(NAMES, strings), strings_can_be_null=False)
        return read, parse, convert

    def _skip(self, row: csv.InvalidRow) -> str:
        self.bad.rows += 1
        self.bad.add("wrong number of columns", 1)
        self.bad.show(f"{self.unit}: {row.actual_columns} columns instead of {row.expected_columns}", row.text)
        return "skip"

    def _convert(self, block: pa.RecordBatch) -> pa.Table:
        """The good rows of a block of dictionary-encoded text columns. Converts each distinct text once."""
        columns, is_bad = [], np.zeros(len(block), dtype=bool)
        for position, column in enumerate(block.columns):
            texts, index = column.dictionary, column.indices.to_numpy()
            values, is_good = self._values(position, texts)
            columns.append(pa.array(values[index]))
            self._count_missing(position, texts, index)
            if not is_good.all():
                is_fault = ~is_good[index]
                self.bad.add(f"bad {kind_of(position)}", int(is_fault.sum()))
                is_bad |= is_fault
        table = pa.table(columns, schema=SCHEMA)
        if not is_bad.any():
            return table
        self._drop(block, np.flatnonzero(is_bad))
        return table.filter(pa.array(~is_bad))

    def _values(self, position: int, texts: pa.BinaryArray) -> tuple[np.ndarray, np.ndarray]:
        """texts (n,) of the column at `position` -> values (n,), is_good (n,) bool."""
        kind = kind_of(position)
        if kind == "label":
            return labels(texts)
        if kind == "integer":
            return log_counts(texts)
        field = position - 1 - NUM_DENSE
        hashes, is_good = hash_texts(texts, field)
        observe(self.registers[field], hashes[is_good])
        return (hashes >> np.uint64(1)).astype(np.int64), is_good

    def _count_missing(self, position: int, texts: pa.BinaryArray, index: np.ndarray) -> None:
        empty = pc.index(texts, b"").as_py()
        if position and empty >= 0:
            self.missing[position - 1] += np.count_nonzero(index == empty)

    def _drop(self, block: pa.RecordBatch, rows: np.ndarray) -> None:
        self.bad.rows += len(rows)
        for row in rows[:MAX_EXAMPLES].tolist():
            line = b"\t".join(column[row].as_py() for column in block.columns)
            self.bad.show(f"{self.unit}: bad value in", line.decode())


def kind_of(position: int) -> str:
    """Description of the column at `position` of a line."""
    return "label" if position == 0 else "integer" if position <= NUM_DENSE else "hex"


def labels(texts: pa.BinaryArray) -> tuple[np.ndarray, np.ndarray]:
    """texts (n,) -> label (n,) float32, is_good (n,) bool."""
    is_one = np.asarray(pc.equal(texts, b"1"))
    return is_one.astype(np.float32), is_one | np.asarray(pc.equal(texts, b"0"))


def log_counts(texts: pa.BinaryArray) -> tuple[np.ndarray, np.ndarray]:
    """texts (n,) of integers -> log(max(x, 0) + 1) (n,) float32, 0 for missing ones, and is_good (n,) bool."""
    is_good = pc.match_substring_regex(texts, r"^(-?[0-9]{1,18})?$")
    is_number = pc.and_(is_good, pc.greater(pc.binary_length(texts), 0))
    numbers = pc.if_else(is_number, texts, b"0").cast(pa.string()).cast(pa.int64())
    return np.log1p(np.maximum(np.asarray(numbers), 0)).astype(np.float32), np.asarray(is_good)


def hash_texts(texts: pa.BinaryArray, field: int) -> tuple[np.ndarray, np.ndarray]:
    """texts (n,) of hexadecimal digits -> hashes (n,) uint64, seeded by the field, and is_good (n,) bool."""
    is_good = pc.match_substring_regex(texts, r"^[0-9a-fA-F]{0,16}$")
    hashes = (xxhash.xxh3_64_intdigest(text, seed=field) for text in texts.to_pylist())
    return np.fromiter(hashes, dtype=np.uint64, count=len(texts)), np.asarray(is_good)
