"""The last values of a column, or its last span of time, whose rows data.valid holds out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.data.checked import read_json, write_json
from hetmpi.data.files import DataError, first_line
from hetmpi.data.tabular.convert import NUMBER_TEXT, as_text, column_of, times, trimmed
from hetmpi.data.tabular.files import Unit
from hetmpi.data.tabular.prepare import PrepareJob, list_folder, reading_prepared, rows_of
from hetmpi.data.tabular.reading import Reading

EARLIEST = np.iinfo(np.int64).min
SPAN_TEXT = r"([1-9][0-9]{0,8})([smhdw])"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def span_of(text: str) -> int | None:
    """Microseconds of a span of time as 7d, None for other texts."""
    match = re.fullmatch(SPAN_TEXT, text)
    return match and int(match[1]) * SECONDS[match[2]] * 1_000_000


def last_span(job: PrepareJob, column: str, span: str, rank: int, size: int, barrier: Callable[[], None]) -> Reading:
    """The reading rules of `job` with the span up to the column's latest time held out, found by all ranks.
    Collective."""
    bare = replace(job, reading=replace(job.reading, labels=(), columns=(), split=(column, ()), after=None))
    latest = max(
        (one["latest"] for one in by_unit(bare, latest_of, rank, size, barrier) if one["latest"] is not None),
        default=None,
    )
    if latest is None:
        raise DataError(
            f"data.valid: column {column} has no date or timestamp, as 2024-05-01 or 2024-05-01T12:30:00Z, of which "
            f"the last {span} could be held out: give last: N, a number of distinct values"
        )
    return replace(job.reading, split=(column, ()), after=latest - span_of(span))


def latest_of(unit: Unit, reading: Reading) -> dict:
    """The latest time of the column in a unit, in microseconds."""
    name, latest = reading.split[0], []
    for raw in rows_of(unit, reading).raw():
        try:
            values, none, bad = times(column_of(raw, name), reading.missing)
        except DataError as error:
            raise DataError(f"data.valid: {unit.path}, column {name}: {error}, else give last: N") from error
        latest += [int(values[~(none | bad)].max(initial=EARLIEST))]
    return {"latest": max((one for one in latest if one != EARLIEST), default=None)}


def by_unit(
    job: PrepareJob, find: Callable[[Unit, Reading], dict], rank: int, size: int, barrier: Callable[[], None]
) -> list[dict]:
    """What `find` returns for each unit, from files that the ranks write. Collective."""
    files = [f"last-{name}.json" for name in job.names]
    done = list_folder(job.folder)
    for unit, name in list(zip(job.units, files))[rank::size]:
        if name not in done:
            write_json(find(unit, job.reading), job.folder, name)
    barrier()
    with reading_prepared(job.folder):
        return [read_json(job.folder, name) for name in files]


def last_values(job: PrepareJob, column: str, num: int, rank: int, size: int, barrier: Callable[[], None]) -> Reading:
    """The reading rules of `job` with the last `num` values of the column held out, found by all ranks. Numbers are
    ordered by value, other texts as texts. Collective."""
    bare = replace(job, reading=replace(job.reading, labels=(), columns=(), split=(column, ())))
    found = by_unit(bare, lambda unit, reading: lasts([texts_of(unit, reading, column)], num), rank, size, barrier)
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
