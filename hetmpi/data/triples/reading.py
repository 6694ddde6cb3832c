"""Triples from a folder, in one of two layouts, recognised by its files.

train.txt     head TAB relation TAB tail, names; or train.tsv; valid and test likewise, if there are any. entities.dict
              and relations.dict, number TAB name, give the numbers, and other names are refused then. Without them
              names are numbered in the order in which they appear.
train2id.txt  OpenKE's: a line with the number of triples, then head tail relation as numbers; entity2id.txt and
              relation2id.txt: a line with their number, then name and number
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hetmpi.bounded_file import open_regular, shown
from hetmpi.data.files import DataError
from hetmpi.errors import one_line

PARTS = ("train", "valid", "test")
LONGEST_LINE = 1 << 20
BOM = b"\xef\xbb\xbf"
NAMES_ORDER, NUMBERS_ORDER = ("h", "r", "t"), ("h", "t", "r")


@dataclass
class Triples:
    """parts: train, valid and test, each (n, 3) int64 of head, relation and tail; entities, relations: their names, by
    number."""

    parts: dict[str, np.ndarray]
    entities: list[str]
    relations: list[str]


@dataclass
class Names:
    """Names and their numbers. is_complete: whether further names are refused."""

    kind: str
    numbers: dict[bytes, int] = field(default_factory=dict)
    is_complete: bool = False

    def number(self, name: bytes, place: str) -> int:
        """Raises DataError for an unknown, empty or undecodable name."""
        found = self.numbers.get(name)
        if found is not None:
            return found
        if self.is_complete:
            raise DataError(f"{place}: the {self.kind} {text_of(name)} is not in the list of names")
        return self.add(name, len(self.numbers), place)

    def add(self, name: bytes, number: int, place: str) -> int:
        if not name:
            raise DataError(f"{place}: a name is empty")
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


def read_triples(folder: str, columns: tuple[str, ...] | None) -> Triples:
    """columns: order of h, r and t in a line; None for that of the layout. Raises DataError with file and line."""
    if not os.path.isdir(folder):
        raise DataError(f"data.path={shown(folder)}: there is no such folder")
    if os.path.exists(os.path.join(folder, "train2id.txt")):
        return read_numbers(folder, columns or NUMBERS_ORDER)
    return read_names(folder, columns or NAMES_ORDER)


def read_names(folder: str, columns: tuple[str, ...]) -> Triples:
    entities, relations = (
        names_in(os.path.join(folder, f"{kind}.dict"), kind[:-1].replace("entitie", "entity"))
        for kind in ("entities", "relations")
    )
    of_column = [relations if column == "r" else entities for column in columns]
    parts = {}
    for part in PARTS:
        path = found_in(folder, part)
        if path is None:
            continue
        numbers = array("q")
        for place, line in lines_of(path):
            values = line.split(b"\t")
            check_columns(values, 3, place, "separated by tabs")
            numbers.extend([names.number(value, place) for names, value in zip(of_column, values)])
        parts[part] = ordered(numbers, columns, path)
    return checked(folder, parts, entities, relations)


def read_numbers(folder: str, columns: tuple[str, ...]) -> Triples:
    entities, relations = (
        counted_names(os.path.join(folder, f"{kind}2id.txt"), kind) for kind in ("entity", "relation")
    )
    of_column = [relations if column == "r" else entities for column in columns]
    parts = {}
    for part in PARTS:
        path = os.path.join(folder, f"{part}2id.txt")
        if part != "train" and not os.path.exists(path):
            continue
        numbers = array("q")
        for place, line in counted_lines(path):
            values = line.split()
            check_columns(values, 3, place, "separated by blanks")
            numbers.extend([number_below(value, len(names.numbers), names.kind, place)
                            for names, value in zip(of_column, values)])  # fmt: skip
        parts[part] = ordered(numbers, columns, path)
    return checked(folder, parts, entities, relations)


def found_in(folder: str, part: str) -> str | None:
    """The file of a part; None if there is none and the part is not needed."""
    found = [path for suffix in ("txt", "tsv") if os.path.exists(path := os.path.join(folder, f"{part}.{suffix}"))]
    if len(found) > 1:
        raise DataError(f"data.path={shown(folder)} has both {part}.txt and {part}.tsv: remove one of them")
    if not found and part == "train":
        raise DataError(f"data.path={shown(folder)}: there is no train.txt, train.tsv or train2id.txt")
    return found[0] if found else None


def names_in(path: str, kind: str) -> Names:
    """The names of a .dict file, if there is one."""
    names = Names(kind)
    if not os.path.exists(path):
        return names
    for place, line in lines_of(path):
        values = line.split(b"\t")
        check_columns(values, 2, place, "a number and a name, separated by a tab")
        names.add(values[1], number_below(values[0], 1 << 40, "line", place), place)
    return complete(names, path)


def counted_names(path: str, kind: str) -> Names:
    """The names of OpenKE's entity2id.txt or relation2id.txt."""
    names = Names(kind)
    for place, line in counted_lines(path):
        values = line.rsplit(maxsplit=1)
        check_columns(values, 2, place, "a name and a number")
        names.add(values[0].strip(), number_below(values[1], 1 << 40, "line", place), place)
    return complete(names, path)


def complete(names: Names, path: str) -> Names:
    if sorted(names.numbers.values()) != list(range(len(names.numbers))):
        raise DataError(f"data.path: {shown(path)}: the numbers must be 0 to {len(names.numbers) - 1:,}, once each")
    names.is_complete = True
    return names


def lines_of(path: str) -> Iterator[tuple[str, bytes]]:
    """(file and line for messages, line without its end), without empty lines."""
    file_name = f"data.path: {shown(path)}"
    with open_regular(path) as file:
        if file.read(3) != BOM:
            file.seek(0)
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
            if len(line) > LONGEST_LINE:
                raise DataError(f"{file_name}, line {number:,}: is longer than {LONGEST_LINE:,} bytes")
            line = line.rstrip(b"\r\n")
            if line:
                yield f"{file_name}, line {number:,}", line


def counted_lines(path: str) -> Iterator[tuple[str, bytes]]:
    """As lines_of, after a first line with their number. Raises DataError if there are more or fewer."""
    if not os.path.exists(path):
        raise DataError(f"data.path: there is no {shown(path)}")
    expected, num, lines = None, 0, lines_of(path)
    for place, line in lines:
        if expected is None:
            expected = number_below(line.strip(), 1 << 40, "count", place)
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
        raise DataError(f"{place}: expected an integer of at least 0, got {text_of(text)}")
    number = int(text)
    if number >= limit:
        raise DataError(f"{place}: the {kind} {number:,} is out of range, there are {limit:,}")
    return number


def ordered(numbers: array, columns: tuple[str, ...], path: str) -> np.ndarray:
    """(n, 3) int64 of head, relation and tail. Raises DataError for a file without triples."""
    if not numbers:
        raise DataError(f"data.path: {shown(path)} has no triples")
    triples = np.frombuffer(numbers, np.int64).reshape(-1, 3)
    return np.ascontiguousarray(triples[:, [columns.index(column) for column in NAMES_ORDER]])


def checked(folder: str, parts: dict[str, np.ndarray], entities: Names, relations: Names) -> Triples:
    if len(entities.numbers) < 2:
        raise DataError(f"data.path={shown(folder)} must have at least two entities, it has {len(entities.numbers)}")
    none = np.empty((0, 3), np.int64)
    return Triples({part: parts.get(part, none) for part in PARTS}, entities.in_order(), relations.in_order())
