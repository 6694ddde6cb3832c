"""Triples from a folder, in one of two layouts, recognised by its files.

train.txt     head TAB relation TAB tail, names, and in all lines or none a TAB and a weight; or train.tsv; or
              train.parquet or train.csv with named columns; valid and test likewise, if there are any. entities.dict
              and relations.dict, number TAB name, give the numbers, and other names are refused then. Without them
              names are numbered in the order in which they appear, those of tables column by column.
train2id.txt  OpenKE's: a line with the number of triples, then head tail relation as numbers; entity2id.txt and
              relation2id.txt: a line with their number, then name and number
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.csv

from hetmpi.bounded_file import open_regular, shown
from hetmpi.bounded_parquet import open_parquet, read_table
from hetmpi.data.files import DataError, first_line
from hetmpi.errors import UserError, one_line

PARTS = ("train", "valid", "test")
LONGEST_LINE = 1 << 20
MOST_NAMES = 1 << 40
BOM = b"\xef\xbb\xbf"
NAMES_ORDER, NUMBERS_ORDER = ("h", "r", "t"), ("h", "t", "r")
TABLES = (".parquet", ".csv")
SUFFIXES = (".txt", ".tsv", *TABLES)
TABLE_COLUMNS, WEIGHT = ("head", "relation", "tail"), "weight"
HEADERS = ((b"head", b"relation", b"tail"), (b"h", b"r", b"t"), (b"subject", b"predicate", b"object"))
LARGEST_WEIGHT = 1e30
UTF_16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass
class Triples:
    """parts: train, valid and test, each (n, 3) int64 of head, relation and tail; entities, relations: their names, by
    number; weights: of the training triples, (n,) float32, None if they have none."""

    parts: dict[str, np.ndarray]
    entities: list[str]
    relations: list[str]
    weights: np.ndarray | None = None


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


def read_triples(folder: str, columns: tuple[str, ...] | None) -> Triples:
    """columns: order of h, r and t in a line, or names of the columns of head, relation and tail; None for those of the
    layout. Raises DataError with file and line."""
    if not os.path.isdir(folder):
        raise DataError(f"data.path={shown(folder)}: there is no such folder")
    refuse_mixed(folder)
    if os.path.lexists(os.path.join(folder, "train2id.txt")):
        return read_numbers(folder, checked_order(columns or NUMBERS_ORDER))
    return read_names(folder, columns)


def refuse_mixed(folder: str):
    """Raises DataError for files of parts that would be passed over."""
    files = set(os.listdir(folder))
    of_names = [f"{part}{suffix}" for part in PARTS for suffix in SUFFIXES if f"{part}{suffix}" in files]
    of_numbers = [f"{part}2id.txt" for part in PARTS if f"{part}2id.txt" in files]
    if of_names and of_numbers:
        raise DataError(
            f"data.path={shown(folder)} has {of_names[0]} and {of_numbers[0]}, of two layouts: remove those of one"
        )
    other = next((f"dev{suffix}" for suffix in SUFFIXES if f"dev{suffix}" in files), None)
    if other and not any(name.startswith("valid") for name in of_names):
        raise DataError(
            f"data.path={shown(folder)}: held-out triples are in a file named valid: rename {other}, or remove it"
        )


def checked_order(columns: tuple[str, ...]) -> tuple[str, ...]:
    if sorted(columns) != sorted(NAMES_ORDER):
        raise DataError(
            f"data.columns must be h, r and t in the order of the files, as [h,r,t], got {one_line(str(columns))}"
        )
    return columns


def read_names(folder: str, columns: tuple[str, ...] | None) -> Triples:
    entities, relations = (
        names_in(os.path.join(folder, f"{kind}.dict"), kind[:-1].replace("entitie", "entity"))
        for kind in ("entities", "relations")
    )
    parts, weights = {}, {}
    for part in PARTS:
        path = found_in(folder, part)
        if path is not None:
            read = triples_of_table if path.endswith(TABLES) else triples_of_lines
            parts[part], weights[part] = read(path, columns, entities, relations)
    return checked(folder, parts, entities, relations, weights["train"])


def triples_of_lines(
    path: str, columns: tuple[str, ...] | None, entities: Names, relations: Names
) -> tuple[np.ndarray, np.ndarray | None]:
    """The triples (n, 3) int64 of a text file, and their weights (n,) float32, None if it has none. Raises
    DataError."""
    order, numbers, weights, num_columns = checked_order(columns or NAMES_ORDER), array("q"), array("f"), 0
    of_column = [relations if column == "r" else entities for column in order]
    for place, line in lines_of(path):
        values = line.split(b"\t")
        if not numbers and tuple(map(bytes.lower, values[:3])) in HEADERS:
            raise DataError(f"{place} is a header: remove it")
        num_columns = num_columns or (4 if len(values) == 4 else 3)
        check_columns(values, num_columns, place, "separated by tabs")
        numbers.extend([names.number(value, place) for names, value in zip(of_column, values)])
        if num_columns == 4:
            weights.append(weight_of(values[3], place))
    triples = ordered(numbers, order, path)
    return triples, np.frombuffer(weights, np.float32) if weights else None


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


def triples_of_table(
    path: str, columns: tuple[str, ...] | None, entities: Names, relations: Names
) -> tuple[np.ndarray, np.ndarray | None]:
    """As triples_of_lines, of a Parquet or CSV file. columns: names of those of head, relation and tail; None for head,
    relation and tail. A column `weight` has the weights."""
    place, numbers = f"data.path: {shown(path)}", []
    with open_regular(path) as file:
        try:
            if path.endswith(".csv"):
                as_texts = pa.csv.ConvertOptions(column_types=dict.fromkeys(columns or TABLE_COLUMNS, pa.string()))
                table = pa.csv.read_csv(file, convert_options=as_texts)
            else:
                table = read_table(open_parquet(path, place), place, "use a machine with more, or smaller files")
            names_of_columns = table.column_names
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{place}: {first_line(error)}") from error
        except UserError as error:
            raise DataError(str(error)) from error
    if not len(table):
        raise DataError(no_triples(path))
    for names, column in zip((entities, relations, entities), columns or TABLE_COLUMNS):
        if names_of_columns.count(column) != 1:
            raise DataError(
                f"{place}: there must be one column {one_line(column)}, there are "
                f"{one_line(', '.join(names_of_columns))}: name those of head, relation and tail by data.columns"
            )
        try:
            values = table[column].combine_chunks().cast(pa.string()).dictionary_encode()
            texts = values.dictionary.to_pylist()
        except (pa.ArrowException, TypeError, UnicodeDecodeError) as error:
            raise DataError(f"{place}, column {one_line(column)}: names were expected: {first_line(error)}") from error
        if values.null_count:
            row = values.is_null().index(True).as_py()
            raise DataError(f"{place}, row {row + 1:,}: column {one_line(column)} is empty")
        codes = values.indices.to_numpy()
        firsts = np.unique(codes, return_index=True)[1] + 1
        of_code = [
            names.number(name.encode(), f"{place}, row {first:,}") for name, first in zip(texts, firsts.tolist())
        ]
        numbers.append(np.array(of_code, np.int64)[codes])
    if names_of_columns.count(WEIGHT) > 1:
        raise DataError(f"{place}: there are several columns {WEIGHT}")
    other = next((name for name in names_of_columns if name.lower() == WEIGHT != name), None)
    if other is not None and WEIGHT not in names_of_columns:
        raise DataError(f"{place}: name the column {one_line(other)} {WEIGHT}, or remove it")
    if WEIGHT not in names_of_columns:
        return np.stack(numbers, axis=1), None
    weights = [weight_of(str(value).encode(), f"{place}, row {row:,}") for row, value in enumerate(table[WEIGHT], 1)]
    return np.stack(numbers, axis=1), np.array(weights, np.float32)


def read_numbers(folder: str, columns: tuple[str, ...]) -> Triples:
    entities, relations = (
        counted_names(os.path.join(folder, f"{kind}2id.txt"), kind) for kind in ("entity", "relation")
    )
    of_column = [relations if column == "r" else entities for column in columns]
    parts = {}
    for part in PARTS:
        path = os.path.join(folder, f"{part}2id.txt")
        if part != "train" and not os.path.lexists(path):
            continue
        numbers = array("q")
        for place, line in counted_lines(path):
            values = line.split()
            check_columns(values, 3, place, "separated by blanks")
            numbers.extend([number_below(value, len(names.numbers), names.kind, place)
                            for names, value in zip(of_column, values)])  # fmt: skip
        if numbers or part == "train":
            parts[part] = ordered(numbers, columns, path)
    return checked(folder, parts, entities, relations)


def found_in(folder: str, part: str) -> str | None:
    """The file of a part; None if there is none and the part is not needed."""
    found = [path for suffix in SUFFIXES if os.path.lexists(path := os.path.join(folder, f"{part}{suffix}"))]
    if len(found) > 1:
        both = " and ".join(map(os.path.basename, found))
        raise DataError(f"data.path={shown(folder)} has both {both}: remove one of them")
    if not found and part == "train":
        named = ", ".join(f"train{suffix}" for suffix in SUFFIXES)
        raise DataError(f"data.path={shown(folder)}: there is no {named} or train2id.txt")
    return found[0] if found else None


def names_in(path: str, kind: str) -> Names:
    """The names of a .dict file, if there is one."""
    names = Names(kind)
    if not os.path.exists(path):
        return names
    for place, line in lines_of(path):
        values = line.split(b"\t")
        check_columns(values, 2, place, "a number and a name, separated by a tab")
        names.add(values[1], number_below(values[0], MOST_NAMES, "number", place), place)
    return complete(names, path)


def counted_names(path: str, kind: str) -> Names:
    """The names of OpenKE's entity2id.txt or relation2id.txt."""
    names = Names(kind)
    for place, line in counted_lines(path):
        values = line.rsplit(maxsplit=1)
        check_columns(values, 2, place, "a name and a number")
        names.add(values[0].strip(), number_below(values[1], MOST_NAMES, "number", place), place)
    return complete(names, path)


def complete(names: Names, path: str) -> Names:
    if sorted(names.numbers.values()) != list(range(len(names.numbers))):
        raise DataError(f"data.path: {shown(path)}: the numbers must be 0 to {len(names.numbers) - 1:,}, once each")
    names.listed = path
    return names


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


def ordered(numbers: array, columns: tuple[str, ...], path: str) -> np.ndarray:
    """(n, 3) int64 of head, relation and tail. Raises DataError for a file without triples."""
    if not numbers:
        raise DataError(no_triples(path))
    triples = np.frombuffer(numbers, np.int64).reshape(-1, 3)
    return np.ascontiguousarray(triples[:, [columns.index(column) for column in NAMES_ORDER]])


def no_triples(path: str) -> str:
    cure = "" if os.path.basename(path).startswith("train") else ": remove the file, if there are none"
    return f"data.path: {shown(path)} has no triples{cure}"


def checked(
    folder: str, parts: dict[str, np.ndarray], entities: Names, relations: Names, weights: np.ndarray | None = None
) -> Triples:
    if len(entities.numbers) < 2:
        raise DataError(f"data.path={shown(folder)} must have at least two entities, it has {len(entities.numbers)}")
    none = np.empty((0, 3), np.int64)
    parts = {part: parts.get(part, none) for part in PARTS}
    return Triples(parts, entities.in_order(), relations.in_order(), weights)
