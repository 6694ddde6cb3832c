"""Prints what data=tabular would make of files, as a yaml to start from.

hetmpi inspect PATH [label=COLUMN] [delimiter=CHARACTER] > conf/data/mine.yaml

PATH is a CSV or Parquet file, a glob or a folder, of which the first MiB or the first rows are read. Edit the yaml,
then train with data=mine.
"""

from __future__ import annotations

import json
import sys

from hetmpi.data.tabular.files import DataError, list_files
from hetmpi.data.tabular.layout import Layout, Seen, look, seen_of
from hetmpi.data.tabular.reading import likely_positive
from hetmpi.data.tabular.rules import FLOAT, INTEGER, LIST, NESTED, near
from hetmpi.data.tabular.source import all_missing
from hetmpi.errors import UserError

LABEL_NAMES = ("label", "click", "clicked", "target", "y")


def main(arguments: list[str]):
    """Reads the command line and prints the yaml."""
    paths = [text for text in arguments if "=" not in text]
    own = dict(text.split("=", 1) for text in arguments if "=" in text)
    if {"-h", "--help"} & set(arguments):
        return print(__doc__)
    unknown = sorted(set(own) - {"label", "delimiter"})
    if unknown:
        sys.exit(f"hetmpi: hetmpi inspect has no {unknown[0]}: {near(unknown[0], ('label', 'delimiter'))}")
    if len(paths) != 1:
        sys.exit(__doc__)
    try:
        print(inspected(paths[0], own.get("label"), own.get("delimiter")))
    except UserError as refusal:
        sys.exit(f"hetmpi: {refusal}")


def inspected(path: str, label: str | None = None, delimiter: str | None = None) -> str:
    """The yaml. Raises UserError."""
    first = list_files(path)[0]
    names = names_without_header(first, delimiter)
    layout = look(first, names, delimiter, '"', all_missing())
    seen = seen_of(first, layout, names, all_missing())
    if label is not None and label not in layout.types:
        raise DataError(f"label={label}: {first} has no such column: {near(label, list(layout.types))}")
    label = label or guess_label(seen)
    lines = [
        f"# From {first}",
        "_target_: hetmpi.data.tabular.Tabular",
        "seed: ${seed}",
        f"path: {quoted(path)}",
        f"label: {'???  # the column to predict' if label is None else quoted(label)}",
        *label_lines(label, seen),
        "valid: 0.1  # held-out rows: a share, a path, {column: day, last: 1} or {column: time, last: 7d}",
    ]
    if layout.form == "text":
        lines.append(f"delimiter: {quoted(layout.delimiter)}")
    if names is not None:
        lines.append(f"names: [{', '.join(map(quoted, names))}]  # the first line seems to hold values, no names")
    return "\n".join([*lines, "columns:", *(column_line(n, layout, seen[n]) for n in layout.types if n != label)])


def names_without_header(path: str, delimiter: str | None) -> list[str] | None:
    """Names for a file whose first line holds a number, None for others."""
    try:
        names = list(look(path, None, delimiter, '"', all_missing()).types)
    except DataError as error:
        if "two columns are named" not in str(error):
            raise
        names = error.names
    if not any(name.replace(".", "", 1).lstrip("-").isdigit() for name in names):
        return None
    return [f"column_{i}" for i in range(len(names))]


def guess_label(seen: dict[str, Seen]) -> str | None:
    """A column with a label's name, else the only one of 0 and 1, else the only one of two values."""
    named = [name for name in seen if name.lower() in LABEL_NAMES]
    of_two = [name for name, one in seen.items() if one.distinct == 2]
    found = named or [name for name, one in seen.items() if one.is_binary] or of_two
    return found[0] if len(found) == 1 else None


def label_lines(label: str | None, seen: dict[str, Seen]) -> list[str]:
    if label is None or seen[label].is_binary:
        return []
    if seen[label].is_number:
        return ["label_kind: number  # for loss=mse"]
    values = seen[label].examples
    return [f"positive: [{quoted(likely_positive(values))}]  # those that count as 1, of {', '.join(values)}"]


def column_line(name: str, layout: Layout, seen: Seen) -> str:
    """The rule of one column, with a remark."""
    kind, examples = layout.types[name], ", ".join(seen.examples)
    remark = f"{seen.distinct:,} distinct values in {seen.rows:,} rows, as {examples}"
    rule = f"name: {quoted(name)}, kind: id"
    if kind == FLOAT:
        rule = f"name: {quoted(name)}, kind: number, transform: auto"
        remark += f"; here {seen.scaling}" if seen.scaling else ""
    elif kind == NESTED:
        rule, remark = f"name: {quoted(name)}, kind: drop", "nested values cannot be used"
    elif kind == LIST:
        rule, remark = f"{rule}, pool: mean, max_len: 50", "lists"
    elif kind == INTEGER:
        remark += "; looks like a number, taken as id"
    elif seen.separator is not None:
        remark += f"; if these are several values per row add separator: {quoted(seen.separator)}"
    return f"  - {{{rule}}}  # {remark}"


def quoted(text: str) -> str:
    """Text as YAML."""
    return json.dumps(text, ensure_ascii=False)


if __name__ == "__main__":
    main(sys.argv[1:])
