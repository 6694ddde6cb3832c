"""Prints what data=tabular would make of files, as a yaml to start from.

hetmpi inspect PATH [label=COLUMN] [delimiter=CHARACTERS] [encoding=NAME] [decimal=CHARACTER] > conf/data/mine.yaml

PATH is a CSV or Parquet file, a glob or a folder, of which the first MiB or the first rows are read. Edit the yaml,
then train with data=mine.
"""

from __future__ import annotations

import fnmatch
import glob
import re
import sys

from hetmpi.data.files import DataError
from hetmpi.data.tabular.dialect import POINT, Dialect
from hetmpi.data.tabular.files import PARQUET, TEXT, form_of, list_files, list_units, open_parquet
from hetmpi.data.tabular.layout import (
    ColumnSample,
    Layout,
    guess_delimiter,
    layout_of,
    sampled,
    seen_of,
    with_choices,
)
from hetmpi.data.tabular.prepare import UNIT_BYTES, enough_memory
from hetmpi.data.tabular.reading import all_missing, likely_positive
from hetmpi.data.tabular.rules import DROP, LIST, MAP, NESTED, NUMBER, Column, near, resolve, vector_size
from hetmpi.data.tabular.text import EqualNames, head_of, header_of
from hetmpi.errors import UserError, printable

LABEL_NAMES = ("label", "click", "clicked", "target", "y")
EXAMPLE_CHARS = 60
OWN = ("label", "delimiter", "encoding", "decimal")
SETTING = re.compile(r"\w+=")  # else a path, as data/day=1


def main(arguments: list[str]):
    """Reads the command line and prints the yaml."""
    own = dict(text.split("=", 1) for text in arguments if SETTING.match(text))
    paths = [text for text in arguments if not SETTING.match(text)]
    if {"-h", "--help"} & set(arguments):
        return print(__doc__)
    unknown = sorted(set(own) - set(OWN))
    if unknown:
        sys.exit(f"hetmpi: hetmpi inspect has no {unknown[0]}: {near(unknown[0], OWN)}")
    if len(paths) != 1:
        sys.exit(__doc__)
    try:
        with enough_memory(paths[0]):
            print(inspected(paths[0], **own))
    except UserError as refusal:
        sys.exit(f"hetmpi: {refusal}")


def inspected(path: str, label: str | None = None, **settings: str) -> str:
    """The yaml. settings: of the dialect of text. Raises UserError."""
    dialect = Dialect(**settings)
    dialect.check()
    files = files_with_rows(path)
    names = names_without_header(files[0], dialect)
    samples, dialect = sampled(path, files, names, dialect, lambda name: all_missing())
    layout = layout_of(samples, dialect, lambda name: all_missing())
    seen = seen_of(samples, layout, all_missing())
    if label is not None and label not in layout.types:
        raise DataError(
            f"label={printable(label)}: {files[0]} has no such column: {printable(near(label, list(layout.types)))}"
        )
    label = label or guess_label(seen)
    positive = positive_of(label, seen)
    layout = with_choices(layout, samples, lambda name: all_missing(), label, positive and [positive])
    columns = {
        column.vector or column.name: column for column in resolve([], layout.types, [label], None, layout.choices)
    }
    layout.check(columns)
    lines = [
        f"# From {printable(files[0])}{f' and {len(files) - 1:,} more' if len(files) > 1 else ''}",
        "_target_: hetmpi.data.tabular.Tabular",
        "seed: ${seed}",
        f"path: {quoted(path)}",
        f"label: {'???  # the column to predict' if label is None else quoted(label)}",
        *label_lines(label, seen),
        "valid: 0.1  # held-out rows: a share, a path, {column: day, last: 1} or {column: time, last: 7d}",
    ]
    if layout.form == TEXT:
        lines.append(f"delimiter: {quoted(layout.delimiter)}")
        lines += [f"encoding: {quoted(dialect.encoding)}"] if dialect.encoding else []
        lines += [f"decimal: {quoted(dialect.decimal)}"] if dialect.decimal != POINT else []
    if names is not None:
        lines.append(f"names: [{', '.join(map(quoted, names))}]  # the first line seems to hold values, no names")
    rules = (column_line(n, layout, seen[n], columns.get(n)) for n in layout.types if n != label)
    return "\n".join([*lines, "columns:", *rules])


def files_with_rows(path: str) -> list[str]:
    """The files of a path, of Parquet those with rows. Raises DataError."""
    files = list_files(path)
    units = list_units(files, [], UNIT_BYTES)  # refuses text beside Parquet
    found = [
        file
        for file in dict.fromkeys(unit.path for unit in units)
        if form_of(file) == TEXT or open_parquet(file).metadata.num_rows
    ]
    if not found:
        raise DataError(f"data.path: {files[0]} has no rows")
    return found


def names_without_header(path: str, dialect: Dialect) -> list[str] | None:
    """Names for text whose first line holds a number, None for other files."""
    if form_of(path) == PARQUET:
        return None
    try:
        head = head_of(path, encoding=dialect.encoding)
        names = header_of(path, head, dialect.delimiter or guess_delimiter(path, head), '"')
    except EqualNames as error:
        names = error.names
    if not any(name.replace(".", "", 1).lstrip("-").isdigit() for name in names):
        return None
    return [f"column_{i}" for i in range(len(names))]


def guess_label(seen: dict[str, ColumnSample]) -> str | None:
    """A column with a label's name, else the only one of 0 and 1, else the only one of two values."""
    named = [name for name in seen if name.lower() in LABEL_NAMES]
    of_two = [name for name, one in seen.items() if one.distinct == 2]
    found = named or [name for name, one in seen.items() if one.is_binary] or of_two
    return found[0] if len(found) == 1 else None


def label_lines(label: str | None, seen: dict[str, ColumnSample]) -> list[str]:
    if label is None or seen[label].is_binary:
        return []
    if seen[label].is_number:
        return ["label_kind: number  # for loss=mse; classes, for loss=classes, if they are codes"]
    if seen[label].distinct > 2:
        remark = f"for loss=classes, as {shown(seen[label].examples)}; or positive: [TEXT], those that count as 1"
        return [f"label_kind: classes  # {remark}"]
    positive = positive_of(label, seen)
    if positive is None:
        return ["positive: ???  # labels that count as 1; none was seen"]
    return [f"positive: [{quoted(positive)}]  # those that count as 1, of {shown(seen[label].examples)}"]


def positive_of(label: str | None, seen: dict[str, ColumnSample]) -> str | None:
    """The text of a label that seems to count as 1, None for numbers and classes."""
    if label is None or seen[label].is_number or not 0 < seen[label].distinct <= 2:
        return None
    return likely_positive(seen[label].examples)


def column_line(name: str, layout: Layout, seen: ColumnSample, column: Column | None) -> str:
    """The rule of one column, with a remark. column: as training has it without a rule, None if it is dropped."""
    where, place = f"name: {quoted(as_rule(name, layout))}", f"{seen.rows:,} rows"
    kind, why = layout.choices[name]
    if column is None and not seen.distinct:
        return f"  - {{{where}, kind: drop}}  # {why if layout.types[name] == NESTED else f'no value in {place}'}"
    place = "names of folders" if name in layout.keys else place
    remarks = [f"{seen.distinct:,} distinct values in {place}, as {shown(seen.examples)}"]
    remarks += [why] if why and kind == (DROP if column is None else column.kind) else []
    if column is None:
        rule = "kind: drop"
    elif vector_size(layout.types[name]) is not None:
        rule = "kind: number, transform: auto"
        remarks = [f"vectors of {vector_size(layout.types[name])} numbers"]
    elif column.kind == NUMBER:
        rule = "kind: number, transform: auto"
        remarks += [f"here {seen.scaling}"] if seen.scaling else []
    elif column.type in (LIST, MAP):
        rule, remarks = "kind: id, pool: mean, max_len: 50", ["lists" if column.type == LIST else "values with weights"]
    else:
        rule = "kind: id"
    if seen.weights is not None:
        rule = f"kind: id, separator: {quoted(seen.weights)}, weights: {quoted(':')}"
        remarks = [remarks[0], "values with weights"]
    elif seen.separator is not None:
        remarks += [f"if these are several values per row add separator: {quoted(seen.separator)}"]
    return f"  - {{{where}, {rule}}}  # {'; '.join(remarks)}"


def as_rule(name: str, layout: Layout) -> str:
    """A name as a rule has it, in which it may be a glob, and ??? is OmegaConf's missing value."""
    escaped = glob.escape(name)
    matches_others = escaped != name and any(
        fnmatch.fnmatchcase(other, name) for other in layout.types if other != name
    )
    return escaped if matches_others or name == "???" else name


def shown(examples: list[str]) -> str:
    """Examples for a comment, which ends at the end of the line."""
    return ", ".join(
        printable(text[:EXAMPLE_CHARS]) + ("..." if len(text) > EXAMPLE_CHARS else "") for text in examples
    )


def quoted(text: str) -> str:
    """Text as YAML that OmegaConf reads literally: no interpolations, and escapes of what is not printable."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    escaped = (
        one if one.isprintable() else rf"\U{ord(one):08x}" for one in text.replace("\\", r"\\").replace('"', r"\"")
    )
    return f'"{"".join(escaped)}"'


if __name__ == "__main__":
    main(sys.argv[1:])
