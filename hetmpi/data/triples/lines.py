"""Lines of files of triples: names and numbers between delimiters, N-Triples, and the numbers of names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hetmpi.bounded_file import open_regular, shown
from hetmpi.data.files import DataError
from hetmpi.errors import one_line

LONGEST_LINE = 1 << 20
MOST_NAMES = 1 << 40
LARGEST_WEIGHT = 1e30
BOM = b"\xef\xbb\xbf"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
BLANKS = b" \t"  # around names, as in tabular data
DELIMITERS = (b"\t", b";", b",", b"|", b" ")
IRI, BLANK_NODE = rb"<([^<>\s]*)>", rb"(_:[^\s<>\"]+)"
LITERAL = rb'("(?:[^"\\]|\\.)*"(?:@[A-Za-z0-9-]+|\^\^<[^<>\s]*>)?)'
N_TRIPLE = re.compile(
    rb"\s*(?:%s|%s)\s*%s\s*(?:%s|%s|%s)\s*\.\s*(?:#.*)?" % (IRI, BLANK_NODE, IRI, IRI, BLANK_NODE, LITERAL)
)
ESCAPE = re.compile(rb"\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})")


@dataclass
class Names:
    """Names and their numbers. listed: the file that has all of them, None if further names are taken."""

    kind: str
    numbers: dict[bytes, int] = field(default_factory=dict)
    listed: str | None = None

    def number(self, name: bytes, place: str) -> int:
        """Raises DataError for an unknown, empty or undecodable name."""
        found = self.numbers.get(name)
        if found is not None:
            return found
        if self.listed is not None:
            raise DataError(f"{place}: the {self.kind} {text_of(name)} is not in {os.path.basename(self.listed)}")
        return self.add(name, len(self.numbers), place)

    def add(self, name: bytes, number: int, place: str) -> int:
        if not name or b"\n" in name or b"\r" in name:
            raise DataError(f"{place}: a name is empty" if not name else f"{place}: a name has a line's end in it")
        try:
            name.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{place}: the name {text_of(name)} is not UTF-8") from error
        if name in self.numbers:
            raise DataError(f"{place}: the {self.kind} {text_of(name)} occurs twice")
        self.numbers[name] = number
        return number

    def in_order(self) -> list[str]:
        return [name.decode() for name in sorted(self.numbers, key=self.numbers.get)]


def text_of(name: bytes) -> str:
    return repr(one_line(name.decode(errors="replace"), 80))


def weight_of(text: bytes, place: str) -> float:
    """Raises DataError unless the text is a number above 0."""
    try:
        weight = float(text) if text.isascii() and b"_" not in text else 0.0
    except ValueError:
        weight = 0.0
    if not 0 < weight <= LARGEST_WEIGHT or np.float32(weight) == 0:
        raise DataError(
            f"{place}: the weight must be a number above 0, at most {LARGEST_WEIGHT:g}, got {text_of(text)}"
            + (": a tab at the end of a line makes an empty fourth column" if not text else "")
        )
    return float(np.float32(weight))


def lines_of(path: str) -> Iterator[tuple[str, bytes]]:
    """(file and line for messages, line without its end), without empty lines."""
    file_name = f"data.path: {shown(path)}"
    with open_regular(path) as file:
        begin = file.read(3)
        if begin[:2] in UTF_16:
            raise DataError(f"{file_name} is in UTF-16: convert it, as by iconv -f UTF-16 -t UTF-8")
        if begin != BOM:
            file.seek(0)
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
            if len(line) > LONGEST_LINE:
                raise DataError(f"{file_name}, line {number:,}: is longer than {LONGEST_LINE:,} bytes")
            line = line.rstrip(b"\r\n")
            if line:
                yield f"{file_name}, line {number:,}", line


def counted_lines(path: str) -> Iterator[tuple[str, bytes]]:
    """As lines_of, after a first line with their number. Raises DataError if there are more or fewer."""
    if not os.path.lexists(path):
        raise DataError(f"data.path: there is no {shown(path)}")
    expected, num, lines = None, 0, lines_of(path)
    for place, line in lines:
        if expected is None:
            expected = number_below(line.strip(), MOST_NAMES, "number of lines that follow", place)
            continue
        num += 1
        yield place, line
    if expected is None:
        raise DataError(f"data.path: {shown(path)} is empty")
    if expected != num:
        raise DataError(f"data.path: {shown(path)} says {expected} lines in its first line, it has {num:,}")


def check_columns(values: list, num: int, place: str, how: str):
    if len(values) != num:
        raise DataError(f"{place}: expected {num} columns, {how}, got {len(values)}")


def number_below(text: bytes, limit: int, kind: str, place: str) -> int:
    """Raises DataError unless the text is an integer from 0 to below `limit`."""
    if not text.isdigit() or len(text) > 18:
        raise DataError(f"{place}: the {kind} must be an integer of at least 0, got {text_of(text)}")
    number = int(text)
    if number >= limit:
        there = "is too large" if limit == MOST_NAMES else f"is out of range, there are {limit:,}"
        raise DataError(f"{place}: the {kind} {number:,} {there}")
    return number


def values_of(line: bytes, delimiter: bytes) -> list[bytes]:
    """The values of a line, without blanks around them. A blank as delimiter stands for several, and tabs."""
    return line.split() if delimiter == b" " else [value.strip(BLANKS) for value in line.split(delimiter)]


def delimiter_text(delimiter: bytes) -> str:
    return {b"\t": "tabs", b" ": "blanks"}.get(delimiter, repr(delimiter.decode()))


def check_triple(values: list, num: int, place: str, line: bytes, delimiter: bytes):
    """As check_columns; the message names a delimiter that the line seems to have."""
    if len(values) != num:
        others = [other for other in DELIMITERS if other != delimiter and len(values_of(line, other)) in (3, 4)]
        seen = (
            f": it has {delimiter_text(others[0])} between values: set data.delimiter='{others[0].decode()}'"
            if others
            else ""
        )
        seen = seen.replace("\t", "\\t")
        raise DataError(
            f"{place}: expected {num} columns, separated by {delimiter_text(delimiter)}, got {len(values)}{seen}"
        )


def n_triple(line: bytes, place: str) -> list[bytes] | None:
    """Subject, predicate and object of a line of N-Triples (www.w3.org/TR/n-triples): IRIs without < and >, blank
    nodes and literals as they are; None for a comment. Raises DataError."""
    if line.lstrip(BLANKS).startswith(b"#") or not line.strip(BLANKS):
        return None
    found = N_TRIPLE.fullmatch(line)
    if not found:
        raise DataError(f"{place}: <subject> <predicate> <object> . of N-Triples was expected, got {text_of(line)}")
    groups = found.groups()
    terms = next(filter(None, groups[:2]), b""), groups[2], next(filter(None, groups[3:]), b"")
    return [term if term.startswith(b'"') else ESCAPE.sub(unescaped, term) for term in terms]


def unescaped(escape: re.Match) -> bytes:
    code = int(escape[1] or escape[2], 16)
    return chr(code).encode() if code < 0x110000 and not 0xD800 <= code < 0xE000 else escape[0]


def no_triples(path: str) -> str:
    cure = "" if os.path.basename(path).startswith("train") else ": remove the file, if there are none"
    return f"data.path: {shown(path)} has no triples{cure}"
