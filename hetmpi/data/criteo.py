"""Criteo: raw Criteo text as tabular data.

`python -m hetmpi.data.criteo SOURCE [CACHE]` prepares in one process before training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hetmpi.data.tabular import DataError, Tabular
from hetmpi.errors import UserError, check_integer

NUM_DENSE, NUM_FIELDS = 13, 26
DENSE_NAMES = [f"d{j}" for j in range(NUM_DENSE)]
FIELD_NAMES = [f"c{f}" for f in range(NUM_FIELDS)]
MAX_BAD_ROWS = 100


class Criteo(Tabular):
    """The Criteo display-advertising data, Kaggle's (2014) or the Terabyte logs: lines of a label, 13 integers and 26
    hexadecimal strings, separated by tabs; empty means missing.

    A number is log(1 + max(x, 0)). The id of a value is its hash modulo the field's number of rows."""

    name = "criteo"

    def __init__(
        self,
        path: str,
        seed: int,
        cache: str | None = None,
        max_bad_rows: int = MAX_BAD_ROWS,
        rows_per_value: float = 2.0,
        max_field_rows: int | None = None,
        field_rows: list[int] | None = None,
        cached_groups: int = 32,
        shuffle: bool = True,
    ):
        """As Tabular. field_rows: the rows of the 26 fields, instead of rows_per_value."""
        super().__init__(
            path, seed, "label",
            columns=[{"name": "d*", "kind": "number", "transform": "log1p"}, *field_rules(field_rows)],
            names=["label", *DENSE_NAMES, *FIELD_NAMES], missing=[""], delimiter="\t", quote=None,
            max_bad_rows=max_bad_rows, cache=cache, rows_per_value=rows_per_value, max_field_rows=max_field_rows,
            cached_groups=cached_groups, shuffle=shuffle,
        )  # fmt: skip

    def report(self, manifest, notes, report) -> None:
        """Nothing: the columns are known."""


def field_rules(field_rows: Sequence[int] | None) -> list[dict]:
    """The rules of the 26 fields. Raises UserError for invalid field_rows."""
    if field_rows is None:
        return [{"name": "c*", "rows": "auto", "hash": True}]
    if isinstance(field_rows, str) or not isinstance(field_rows, Sequence) or len(field_rows) != NUM_FIELDS:
        raise UserError(f"data.field_rows must be a list of {NUM_FIELDS} integers, got {field_rows}")
    for rows in field_rows:
        check_integer("each of data.field_rows", rows, 1)
    return [{"name": name, "rows": rows} for name, rows in zip(FIELD_NAMES, field_rows)]


def main(arguments: list[str]) -> None:
    """SOURCE [CACHE]: prepares the source in this process."""
    if len(arguments) not in (1, 2):
        sys.exit("usage: python -m hetmpi.data.criteo SOURCE [CACHE]")
    try:
        data = Criteo(arguments[0], 0, *arguments[1:])
        data.prepare(0, 1, lambda: None)
    except DataError as error:
        sys.exit(f"hetmpi: {error}")
    print(
        f"{data.folder}: {data.num_train:,} rows to train on, {data.num_valid:,} held out; {data.num_rows:,} table rows"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
