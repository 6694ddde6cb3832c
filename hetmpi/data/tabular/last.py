"""The last values of a column, whose rows data.valid holds out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.data.checked import read_json, write_json
from hetmpi.data.tabular.convert import NUMBER_TEXT, as_text, column_of, trimmed
from hetmpi.data.tabular.files import DataError, Unit, first_line
from hetmpi.data.tabular.prepare import Job, list_folder, reading_prepared, rows_of
from hetmpi.data.tabular.reading import Reading


def last_values(job: Job, column: str, num: int, rank: int, size: int, barrier: Callable[[], None]) -> Reading:
    """The reading rules of `job` with the last `num` values of the column held out, found by all ranks. Numbers are
    ordered by value, other texts as texts. Collective."""
    bare = replace(job, reading=replace(job.reading, label=None, columns=(), split=(column, ())))
    files = [f"last-{name}.json" for name in bare.names]
    done = list_folder(job.folder)
    for unit, name in list(zip(bare.units, files))[rank::size]:
        if name not in done:
            write_json(lasts([texts_of(unit, bare.reading, column)], num), job.folder, name)
    barrier()
    with reading_prepared(job.folder):
        found = [read_json(job.folder, name) for name in files]
    kind = "numbers" if all(one["are_numbers"] for one in found) else "texts"
    merged = lasts([[text.encode(errors="surrogateescape") for one in found for text in one[kind]]], num)[kind]
    if not merged:
        raise DataError(f"data.valid: column {column} has no values")
    return replace(job.reading, split=(column, tuple(merged)))


def texts_of(unit: Unit, reading: Reading, column: str) -> Iterator[bytes]:
    """The distinct values of the column, block by block."""
    for raw in rows_of(unit, reading).raw():
        try:
            texts, none = trimmed(pc.unique(as_text(column_of(raw, column))), reading.missing)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"data.valid: {unit.path}, column {column}: {first_line(error)}") from error
        yield from texts.filter(pa.array(~none)).to_pylist()


def lasts(values: Iterable[Iterable[bytes]], num: int) -> dict:
    """The last `num` distinct values in the order of texts, and in that of numbers if all are numbers."""
    distinct: set[bytes] = set()
    are_numbers = True
    texts: list[bytes] = []
    numbers: list[bytes] = []
    for value in (value for part in values for value in part):
        if value not in distinct:
            distinct.add(value)
            are_numbers = are_numbers and is_number(value)
            if are_numbers:
                numbers.append(value)
            texts.append(value)
        if len(distinct) > 100_000 + num:
            texts, numbers = sorted(texts)[-num:], sorted(numbers, key=float)[-num:]
            distinct = {*texts, *numbers}
    return {
        "are_numbers": are_numbers,
        "texts": [text.decode(errors="surrogateescape") for text in sorted(texts)[-num:]],
        "numbers": [text.decode() for text in sorted(numbers, key=float)[-num:]] if are_numbers else [],
    }


def is_number(text: bytes) -> bool:
    return re.match(NUMBER_TEXT, text.decode("latin-1")) is not None
