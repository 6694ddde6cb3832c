"""Rows of delimited text. Blocks are cut at line ends and parsed by Arrow with types; a block with a fault is parsed
again as text, line by line, to name the line and the column."""

from __future__ import annotations

import csv as python_csv
import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

from hetmpi.data.files import DataError, first_line
from hetmpi.data.tabular.convert import NUMBER_TEXT, convert, without
from hetmpi.data.tabular.dialect import DIVIDER, as_single, decoded, is_utf8, keeps_lines, restored
from hetmpi.data.tabular.files import (
    MAX_LINE_BYTES,
    READ_BYTES,
    Unit,
    compression_of,
    line_start,
    number_of_line,
    too_long,
)
from hetmpi.data.tabular.folders import in_file, keys_read, with_keys
from hetmpi.data.tabular.reading import CLASSES, INTEGER, MAX_EXAMPLES, BadRows, Reading, Rows, check_wanted, shown
from hetmpi.data.tabular.rules import NUMBER
from hetmpi.errors import printable

BLOCK_BYTES = 4 << 20
python_csv.field_size_limit(MAX_LINE_BYTES)
NUM_HEADS = 16  # files whose begins are looked at for their encoding
MARK = b"\xef\xbb\xbf"  # of UTF-8, before the first line


class EqualNames(DataError):
    """A first line in which a name occurs twice. names: all of them."""

    def __init__(self, message: str, names: list[str]):
        super().__init__(message)
        self.names = names


def blocks(unit: Unit, encoding: str | None = None) -> Iterator[bytes]:
    """The unit's text in blocks of about BLOCK_BYTES that end at the end of a line. encoding: of the file; that of
    blocks is UTF-8. Raises DataError for a line longer than MAX_LINE_BYTES, for compressed data that are cut short, and
    for bytes that the encoding has not."""
    rest, num_lines = b"", 0
    for text in decoded(pieces(unit), encoding, unit.path):
        end = text.rfind(b"\n") + 1
        if end:
            block, rest = rest + text[:end], text[end:]
            num_lines += block.count(b"\n")
            yield block
        else:
            rest += text
        if len(rest) > MAX_LINE_BYTES:
            raise too_long(unit.path, first_line_of(unit) + num_lines)
    if rest:
        yield rest


def pieces(unit: Unit) -> Iterator[bytes]:
    compression = compression_of(unit.path)
    if compression is None:
        begin, end = (line_start(unit.path, position) for position in (unit.begin, unit.end))
        with open(unit.path, "rb", buffering=0) as file:
            file.seek(begin)
            while begin < end:
                text = file.read(min(BLOCK_BYTES, end - begin))
                if not text:
                    raise DataError(f"data.path: {unit.path} has become shorter while it was read")
                begin += len(text)
                yield text
        return
    try:
        with pa.CompressedInputStream(pa.OSFile(unit.path), compression) as stream:
            while text := stream.read(BLOCK_BYTES):
                yield text
    except OSError as error:
        raise DataError(f"data.path: {unit.path} cannot be decompressed: {first_line(error)}") from error


def first_line_of(unit: Unit) -> int:
    """Number of the unit's first line in its file."""
    return 1 if unit.begin == 0 else number_of_line(unit.path, line_start(unit.path, unit.begin))


def head_of(path: str, num_bytes: int = READ_BYTES, encoding: str | None = None) -> bytes:
    """The first whole lines of a file, about num_bytes. Raises DataError as blocks() does."""
    text = b""
    size = os.path.getsize(path)
    for piece in decoded(pieces(Unit(0, path, size, 0, 0, min(size, num_bytes))), encoding, path, is_cut=True):
        text += piece
        if len(text) >= num_bytes and b"\n" in text:
            break
        if len(text) > MAX_LINE_BYTES:
            raise too_long(path, 1)
    if not keeps_lines(encoding):
        text = text[: text.rfind(b"\n") + 1 or None]
    return text.removeprefix(MARK)


def header_of(path: str, head: bytes, delimiter: str, quote: str | None) -> list[str]:
    """The names in the first line of text. Raises DataError for names that are not UTF-8, occur twice or are empty."""
    line = next((line for line in head.splitlines() if line.strip()), b"")
    if not line:
        raise DataError(f"data.path: {path} is empty: a line with the columns' names was expected")
    try:
        if b"\0" in line:
            raise ValueError("NUL")
        names = split_line(line, delimiter, quote)
    except ValueError as error:
        raise DataError(
            f"data.path: {path}, line 1: no UTF-8 text, the columns' names were expected: {shown(line)}: give "
            "data.encoding, as latin-1 or utf-16, or convert the file to UTF-8; the names of compressed files end in "
            ".gz or .zst"
        ) from error
    names = [name or f"column_{i}" for i, name in enumerate(names)]  # pandas writes its index without a name
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise EqualNames(
            f"data.path: {path}, line 1: two columns are named {printable(', '.join(twice))[:500]}: rename one, or "
            "give data.names",
            names,
        )
    return names


def split_line(line: bytes, delimiter: str, quote: str | None) -> list[str]:
    quoting = {"quotechar": quote} if quote else {"quoting": python_csv.QUOTE_NONE}
    line, single = as_single(line, delimiter)
    names = next(python_csv.reader([line.decode()], delimiter=single, **quoting), [])
    return [name.replace(single, delimiter).strip() for name in names]


def encoding_doubt(paths: Sequence[str], encoding: str | None) -> str | None:
    """A remark on files whose begins seem to have another encoding than they are read with, None if none has."""
    for path in paths[:NUM_HEADS]:
        head = head_of(path)
        head = head[: head.rfind(b"\n") + 1]  # a character may be cut
        if encoding is None and not is_utf8(head):
            return (
                f"{path}: bytes that are not UTF-8 are ids as they are: data.encoding=latin-1, or another name, reads "
                "them as text"
            )
        if encoding is not None and not encoding.lower().startswith("utf") and not head.isascii() and is_utf8(head):
            return f"{path} is UTF-8 and read by data.encoding={encoding}: its texts are other ids than elsewhere"
    return None


class TextRows:
    """Iterates over the rows of a unit of text. A line with a fault is dropped and counted. Empty lines are skipped,
    but in a file of one column they are missing values."""

    def __init__(self, unit: Unit, reading: Reading):
        self.unit, self.reading = unit, reading
        self.names = reading.names or self._header()
        self._keys = keys_read(unit.path, reading)
        check_wanted(reading.wanted, unit.path, [*self.names, *self._keys], reading.delimiter)
        self._wanted = in_file(reading.wanted, self.names)
        self._skips_empty = len(self.names) > 1

    def _header(self) -> list[str]:
        reading, path = self.reading, self.unit.path
        return header_of(path, head_of(path, encoding=reading.encoding), reading.delimiter, reading.quote)

    def __iter__(self) -> Iterator[Rows]:
        for block, num_lines in self._blocks():
            yield self._fast(block, num_lines) or self._slow(block, num_lines)

    def raw(self) -> Iterator[pa.Table]:
        """The columns as texts, in blocks. Lines with a fault are skipped."""
        for block, _ in self._blocks():
            try:
                yield self._read(block, dict.fromkeys(self._wanted, pa.binary()))
            except pa.ArrowInvalid:  # lines with too few or too many values
                size, quote, between = len(self.names), self.reading.quote, self.reading.delimiter
                good = (line + b"\n" for line in block.splitlines() if count_values(line, between, quote) == size)
                yield self._read(b"".join(good), dict.fromkeys(self._wanted, pa.binary()))

    def _blocks(self) -> Iterator[tuple[bytes, int]]:
        """Blocks without the header, and the number of lines before each."""
        num_lines = 0
        for block in blocks(self.unit, self.reading.encoding):
            if num_lines == 0 and self.unit.begin == 0:
                block, num_lines = self._without_header(block)
            yield block, num_lines
            num_lines += count_lines(block)

    def _without_header(self, block: bytes) -> tuple[bytes, int]:
        """A file's first block without its header, and the number of lines removed."""
        block = block.removeprefix(MARK)
        if self.reading.names:
            return block, 0
        lines = block.splitlines(keepends=True)
        first = next((i for i, line in enumerate(lines) if line.strip()), len(lines) - 1)
        return block[sum(map(len, lines[: first + 1])) :], first + 1

    def _fast(self, block: bytes, num_lines: int) -> Rows | None:
        """The rows of a block, None if anything is wrong with it."""
        try:
            raw = self._read(block, self._types())
        except pa.ArrowInvalid:
            return None
        if len(raw) != count_lines(block):
            return None
        table, faults = convert(raw, self.reading, self.unit.path)
        return None if faults else Rows(table, BadRows(), lambda row: num_lines + row)

    def _slow(self, block: bytes, num_lines: int) -> Rows:
        """The good rows of a block. Raises DataError for lines that cannot be told apart."""
        numbered = [(num_lines + i, line) for i, line in enumerate(block.splitlines()) if line or not self._skips_empty]
        self._refuse_open_quotes(numbered)
        bad = BadRows()
        good = [(number, line) for number, line in numbered if self._has_all_values(number, line, bad)]
        numbers = np.array([number for number, _ in good], np.int64)
        try:
            raw = self._read(b"".join(line + b"\n" for _, line in good), dict.fromkeys(self._wanted, pa.binary()))
        except pa.ArrowInvalid as error:
            raise DataError(f"data.path: {self.place(num_lines)} or further: {first_line(error)}") from error
        if len(raw) != len(good):
            raise DataError(
                f"data.path: {self.place(num_lines)} or further: lines cannot be told apart: is "
                f"data.quote={self.reading.quote} right?"
            )
        table, faults = convert(raw, self.reading, self.unit.path)
        table, kept = without(table, raw, faults, lambda row: self.place(int(numbers[row])), bad)
        numbers = numbers[kept]
        return Rows(table, bad, lambda row: int(numbers[row]))

    def _has_all_values(self, number: int, line: bytes, bad: BadRows) -> bool:
        """Whether a line has a value for each column. Otherwise it is counted as bad."""
        found = count_values(line, self.reading.delimiter, self.reading.quote)
        if found == len(self.names) or not (line or self._skips_empty):
            return True
        bad.rows += 1
        bad.add("wrong number of columns")
        if len(bad.examples) < MAX_EXAMPLES:
            bad.show(self.place(number), f"{found} columns instead of {len(self.names)}: {shown(line)}")
        return False

    def _read(self, text: bytes, types: dict[str, pa.DataType]) -> pa.Table:
        if text.strip(b"\r\n") if self._skips_empty else text:
            table = self._parsed(text, types)
        else:
            table = pa.table({name: pa.array([], types[name]) for name in self._wanted})
        return with_keys(table, self._keys, self.reading.missing, self.unit.path)

    def _parsed(self, text: bytes, types: dict[str, pa.DataType]) -> pa.Table:
        delimiter, quote = self.reading.delimiter, self.reading.quote
        if len(delimiter) > 1 and DIVIDER.encode() in text:
            raise DataError(
                f"data.path: {self.unit.path} holds the byte 0x1f, which hetmpi writes in place of a delimiter of "
                "several characters: remove it from the values"
            )
        text, single = as_single(text, delimiter)
        table = csv.read_csv(
            pa.BufferReader(text),
            csv.ReadOptions(column_names=self.names, block_size=len(text) + 1, use_threads=False),
            csv.ParseOptions(
                delimiter=single,
                quote_char=quote or False,
                ignore_empty_lines=self._skips_empty,
            ),
            csv.ConvertOptions(
                column_types=types,
                include_columns=self._wanted,
                strings_can_be_null=False,
                check_utf8=False,
                null_values=self._missing(),
                decimal_point=self.reading.decimal,
            ),
        )
        return restored(table, delimiter) if single != delimiter and quote and quote.encode() in text else table

    def _types(self) -> dict[str, pa.DataType]:
        """Numbers are parsed by Arrow, which knows the same missing texts for all, others by convert.py."""
        reading, types = self.reading, dict.fromkeys(self._wanted, pa.binary())
        for column in reading.columns:
            kind = {NUMBER: pa.float64(), INTEGER: pa.int64()}.get(column.as_)
            if (
                column.name in types
                and kind
                and not column.is_list
                and words(reading.missing_of(column)) == words(reading.missing)
            ):
                types[column.name] = kind
        for name, missing in zip(reading.labels, reading.label_missing):
            is_number = reading.positive is None and reading.label_kind != CLASSES
            if name in types and is_number and words(missing) == words(reading.missing):
                types[name] = pa.float64()
        if reading.sample_weight in types:
            types[reading.sample_weight] = pa.float64()
        for name in {*([reading.split[0]] if reading.split else []), *reading.kept} & set(types):
            types[name] = pa.binary()  # as it is written
        return types

    def _missing(self) -> list[str]:
        """Texts of missing numbers. Arrow compares them with the spaces around them."""
        return [a + text + b for text, a, b in itertools.product(words(self.reading.missing), ("", " "), ("", " "))]

    def _refuse_open_quotes(self, numbered: list[tuple[int, bytes]]):
        quote = (self.reading.quote or "").encode()
        for number, line in numbered:
            if quote and line.count(quote) % 2 and ends_in_quotes(line, self.reading.delimiter, self.reading.quote):
                raise DataError(
                    f"data.path: {self.place(number)}: a quoted value goes on in the next line, which is not "
                    "supported: replace line breaks in values by spaces, or give data.quote=null if quotes are part of "
                    "the values"
                )

    def place(self, number: int) -> str:
        """File and line, of a line of the unit. Reads the file up to the unit."""
        return f"{self.unit.path}, line {self._first_line + number:,}"

    @functools.cached_property
    def _first_line(self) -> int:
        return first_line_of(self.unit)


def words(missing: tuple[str, ...]) -> set[str]:
    """Those of texts of missing values that are no numbers."""
    return {text for text in missing if not re.match(NUMBER_TEXT, text)}


def count_lines(block: bytes) -> int:
    return block.count(b"\n") + (not block.endswith(b"\n") and block != b"")


def count_values(line: bytes, delimiter: str, quote: str | None) -> int:
    """Number of values in a line."""
    line, delimiter = as_single(line, delimiter)
    if quote is None or quote.encode() not in line:
        return line.count(delimiter.encode()) + 1 if line else 0
    return len(next(python_csv.reader([line.decode("latin-1")], delimiter=delimiter, quotechar=quote)))


def ends_in_quotes(line: bytes, delimiter: str, quote: str) -> bool:
    """Whether a line ends inside a quoted value."""
    line, delimiter = as_single(line, delimiter)
    reader = python_csv.reader([line.decode("latin-1")], delimiter=delimiter, quotechar=quote, strict=True)
    try:
        next(reader, None)
    except python_csv.Error as error:
        return "unexpected end" in str(error)
    return False
