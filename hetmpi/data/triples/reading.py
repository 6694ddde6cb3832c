"""Triples from a file of names, or from a folder in one of two layouts, recognised by its files.

Blanks around names are dropped.

train.txt     head TAB relation TAB tail, names, and in all lines or none a TAB and a weight; or train.tsv; train.nt,
              N-Triples; or train.parquet or train.csv with named columns; valid and test likewise, if there are any.
              entities.dict and relations.dict, number TAB name, give the numbers, and other names are refused then.
              Without them names are numbered in the order in which they appear, those of tables column by column.
train2id.txt  OpenKE's: a line with the number of triples, then head tail relation as numbers; entity2id.txt and
              relation2id.txt: a line with their number, then name and number
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass

import numpy as np

from hetmpi.bounded_file import shown
from hetmpi.data.files import DataError
from hetmpi.data.triples.lines import (
    BLANKS,
    MOST_NAMES,
    Names,
    check_columns,
    check_triple,
    counted_lines,
    lines_of,
    n_triple,
    no_triples,
    number_below,
    values_of,
    weight_of,
)
from hetmpi.data.triples.tables import NAMES_ORDER, TABLES, header_order, triples_of_table
from hetmpi.errors import one_line

PARTS = ("train", "valid", "test")
NUMBERS_ORDER = ("h", "t", "r")
LINES = (".txt", ".tsv", ".nt")
SUFFIXES = (*LINES, *TABLES)


@dataclass
class Triples:
    """parts: train, valid and test, each (n, 3) int64 of head, relation and tail; entities, relations: their names, by
    number; weights: of the training triples, (n,) float32, None if they have none."""

    parts: dict[str, np.ndarray]
    entities: list[str]
    relations: list[str]
    weights: np.ndarray | None = None


def read_triples(path: str, columns: tuple[str, ...] | None, delimiter: str | None = None) -> Triples:
    """columns: order of h, r and t in a line, or names of the columns of head, relation and tail; None for those of the
    layout. delimiter: between values; None for tabs, and in a CSV file for that of its first line. Raises DataError
    with file and line."""
    if os.path.isfile(path):
        return read_one(path, columns, delimiter)
    if not os.path.isdir(path):
        raise DataError(f"data.path={shown(path)}: there is no such folder or file")
    refuse_mixed(path)
    if os.path.lexists(os.path.join(path, "train2id.txt")):
        if delimiter is not None:
            raise DataError("data.delimiter is for files of names, train2id.txt has blanks between numbers")
        return read_numbers(path, checked_order(columns or NUMBERS_ORDER))
    return read_names(path, columns, delimiter)


def read_one(path: str, columns: tuple[str, ...] | None, delimiter: str | None) -> Triples:
    """The triples of one file, all to train on."""
    if not path.endswith(SUFFIXES):
        raise DataError(f"data.path={shown(path)}: the name of a file of triples ends in {', '.join(SUFFIXES)}")
    entities, relations = Names("entity"), Names("relation")
    triples, weights = triples_in(path, columns, entities, relations, delimiter)
    return checked(path, {"train": triples}, entities, relations, weights)


def triples_in(path: str, columns, entities: Names, relations: Names, delimiter: str | None):
    """As triples_of_lines, of a file of any kind."""
    read = triples_of_table if path.endswith(TABLES) else triples_of_lines
    return read(path, columns, entities, relations, delimiter)


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
            f"data.columns must be h, r and t in the order of the files, as [h,r,t], got {one_line(columns)}"
        )
    return columns


def read_names(folder: str, columns: tuple[str, ...] | None, delimiter: str | None) -> Triples:
    entities, relations = (
        names_in(os.path.join(folder, f"{kind}.dict"), kind[:-1].replace("entitie", "entity"))
        for kind in ("entities", "relations")
    )
    parts, weights = {}, {}
    for part in PARTS:
        path = found_in(folder, part)
        if path is not None:
            parts[part], weights[part] = triples_in(path, columns, entities, relations, delimiter)
    return checked(folder, parts, entities, relations, weights["train"])


def triples_of_lines(
    path: str, columns: tuple[str, ...] | None, entities: Names, relations: Names, delimiter: str | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The triples (n, 3) int64 of a text file, and their weights (n,) float32, None if it has none. Raises
    DataError."""
    order, numbers, weights, num_columns = checked_order(columns or NAMES_ORDER), array("q"), array("f"), 0
    of_column = [relations if column == "r" else entities for column in order]
    between, is_n_triples = (delimiter or "\t").encode(), path.endswith(".nt")
    for place, line in lines_of(path):
        values = n_triple(line, place) if is_n_triples else values_of(line, between)
        if values is None:
            continue
        if not numbers:
            refuse_header(values, order, place)
        num_columns = num_columns or (4 if len(values) == 4 else 3)
        check_triple(values, num_columns, place, line, between)
        numbers.extend([names.number(value, place) for names, value in zip(of_column, values)])
        if num_columns == 4:
            weights.append(weight_of(values[3], place))
    triples = ordered(numbers, order, path)
    return triples, np.frombuffer(weights, np.float32) if weights else None


def refuse_header(values: list[bytes], order: tuple[str, ...], place: str):
    """Raises DataError for a line of the names of columns. order: in which these are read."""
    found = header_order([value.decode(errors="replace") for value in values])
    if found is not None:
        cure = "" if found == order else f", and set data.columns=[{','.join(found)}]"
        raise DataError(f"{place} is a header: remove it{cure}")


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
        named, there = ", ".join(f"train{suffix}" for suffix in SUFFIXES), sorted(os.listdir(folder))
        seen = f": there are {one_line(', '.join(there), 200)}" if there else ""
        raise DataError(f"data.path={shown(folder)}: there is no {named} or train2id.txt{seen}")
    return found[0] if found else None


def names_in(path: str, kind: str) -> Names:
    """The names of a .dict file, if there is one."""
    names = Names(kind)
    if not os.path.exists(path):
        return names
    for place, line in lines_of(path):
        values = [value.strip(BLANKS) for value in line.split(b"\t")]
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


def ordered(numbers: array, columns: tuple[str, ...], path: str) -> np.ndarray:
    """(n, 3) int64 of head, relation and tail. Raises DataError for a file without triples."""
    if not numbers:
        raise DataError(no_triples(path))
    triples = np.frombuffer(numbers, np.int64).reshape(-1, 3)
    return np.ascontiguousarray(triples[:, [columns.index(column) for column in NAMES_ORDER]])


def checked(
    folder: str, parts: dict[str, np.ndarray], entities: Names, relations: Names, weights: np.ndarray | None = None
) -> Triples:
    if len(entities.numbers) < 2:
        raise DataError(f"data.path={shown(folder)} must have at least two entities, it has {len(entities.numbers)}")
    none = np.empty((0, 3), np.int64)
    parts = {part: parts.get(part, none) for part in PARTS}
    return Triples(parts, entities.in_order(), relations.in_order(), weights)
