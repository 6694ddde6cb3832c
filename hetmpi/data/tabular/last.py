"""The last values of a column, or its last span of time, whose rows data.valid holds out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.data.checked import read_json, write_json
from hetmpi.data.files import DataError, first_line
from hetmpi.data.tabular.convert import (
    NUMBER_TEXT,
    as_text,
    column_of,
    is_number_type,
    is_time_type,
    moments_of,
    pointed,
    quantities,
    times,
    trimmed,
    typed,
)
from hetmpi.data.tabular.files import Unit
from hetmpi.data.tabular.prepare import PrepareJob, list_folder, reading_prepared, rows_of
from hetmpi.data.tabular.reading import Reading
from hetmpi.data.tabular.times import NAMES, UNITS, date_of, moments, unit_of
from hetmpi.errors import one_line

EARLIEST, LATEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
OTHER_DATE = r"[0-9]{1,2}[./-][0-9]{1,2}[./-]([0-9]{4}|[0-9]{2})(?![0-9])"  # whose order as text is not that of time
MOST_SHOWN = 5
SPAN_TEXT = r"([1-9][0-9]{0,8})([smhdw])"
SHORTEST = 1_000_000  # microseconds of the shortest span
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
UNIT_LIST = f"{', '.join(UNITS[:-1])} or {UNITS[-1]}"


class LastRule(NamedTuple):
    """data.valid: the column whose last values are held out, their number or the span of time, and the unit of times
    that are numbers."""

    column: str
    last: int | str
    unit: str | None = None


class LastRows(NamedTuple):
    """Reading rules that hold them out, and advice if they are too few."""

    reading: Reading
    cure: str


def span_of(text: str) -> int | None:
    """Microseconds of a span of time as 7d, None for other texts."""
    match = re.fullmatch(SPAN_TEXT, text)
    return match and int(match[1]) * SECONDS[match[2]] * 1_000_000


def text_of(span: int) -> str:
    """A span of microseconds as 7d, rounded down."""
    seconds = max(1, span // 1_000_000)
    unit = next((unit for unit in "dhm" if seconds >= SECONDS[unit]), "s")
    return f"{seconds // SECONDS[unit]}{unit}"


def last_rows(job: PrepareJob, rule: LastRule, rank: int, size: int, barrier: Callable[[], None]) -> LastRows:
    """The reading rules of `job` with the last rows held out, found by all ranks. Collective. Raises DataError."""
    bare = replace(job.reading, labels=(), columns=(), split=(rule.column, ()), after=None, unit=rule.unit)
    find = last_span if isinstance(rule.last, str) else last_values
    return find(replace(job, reading=bare), job.reading, rule, rank, size, barrier)


def last_span(bare: PrepareJob, reading: Reading, rule: LastRule, rank: int, size: int, barrier) -> LastRows:
    """The span up to the column's latest time. Numbers are in the unit in which all are times, unless one is given."""
    column, span = rule.column, rule.last
    found = by_unit(bare, times_of, rank, size, barrier)
    unit, (earliest, latest) = rule.unit, range_of(found, "times")
    if latest is None and unit is None:
        least, most = range_of(found, "numbers")
        unit = None if least is None else unit_of(least, most)
        check_unit(rule, unit, least, most)
        [earliest, latest], _ = moments(np.array([least, most]), unit)
        bare.report(
            f"data.valid: {column} is read as {NAMES[unit]}, from {date_of(earliest)} to {date_of(latest)}; another "
            f"unit is named by unit: {UNIT_LIST}"
        )
    if latest is None:
        raise DataError(
            f"data.valid: column {column} has no times in {NAMES[unit]}: name another unit, {UNIT_LIST}, or remove "
            "unit, of texts as 2024-05-01"
        )
    length = int(latest) - int(earliest)
    if length < span_of(span):  # at equality the earliest rows are not held out
        shorter = f"a shorter span, as last: {text_of(length // 10)}, or " if length >= SHORTEST else ""
        raise DataError(
            f"data.valid: the last {span} of column {column} are all its rows, which lie from {date_of(earliest)} to "
            f"{date_of(latest)}: give {shorter}a share as data.valid=0.1"
        )
    after = int(latest) - span_of(span)
    cure = "give a longer span of time, or a share as data.valid=0.1"
    return LastRows(replace(reading, split=(column, ()), after=after, unit=unit), cure)


def check_unit(rule: LastRule, unit: str | None, least: float | None, most: float | None):
    """Raises DataError for a column without times, or numbers from `least` to `most` without a unit."""
    if least is None:
        raise DataError(
            f"data.valid: column {rule.column} has no date or timestamp, as 2024-05-01 or 2024-05-01T12:30:00Z, of "
            f"which the last {rule.last} could be held out: write them so, or give last: N, a number of distinct "
            "values, which are ordered as texts"
        )
    if unit is None:
        raise DataError(
            f"data.valid: column {rule.column} holds numbers from {least:.17g} to {most:.17g}, which are no times from "
            f"1971 to 2099 in seconds, ms, us or ns since 1970 or as yyyymmdd: give last: N, a number of distinct "
            f"values, or name the unit, {UNIT_LIST}, as data.valid='{{column: {rule.column}, unit: s, "
            f"last: {rule.last}}}'"
        )


def range_of(found: list[dict], key: str) -> tuple[float | None, float | None]:
    """The least and the greatest value of all units; None and None if there is none."""
    ranges = [one[key] for one in found if one[key]]
    return (min(one[0] for one in ranges), max(one[1] for one in ranges)) if ranges else (None, None)


def times_of(unit: Unit, reading: Reading) -> dict:
    """The range of the column's times in a unit, in microseconds, and that of its numbers, where reading.unit is None;
    None for none."""
    name, of_times, of_numbers = reading.split[0], [], []
    for raw in rows_of(unit, reading).raw():
        try:
            array = plain_of(pointed(column_of(raw, name), reading))
            if reading.unit is None and not is_time_type(array.type):
                of_numbers += [one for values, _ in quantities(array, reading.missing)[0] for one in ends_of(values)]
            if reading.unit is not None or not is_number_type(array.type):
                values, none, bad = times(array, reading.missing, reading.unit)
                of_times += ends_of(values[~(none | bad)])
        except DataError as error:
            cure = "give last: N, a number of distinct values" if reading.unit is None else "remove unit, for dates"
            raise DataError(f"data.valid: {unit.path}, column {name}: {error}: {cure}") from error
    return {"times": ends_of(np.array(of_times)), "numbers": [min(of_numbers), max(of_numbers)] if of_numbers else None}


def plain_of(array: pa.Array) -> pa.Array:
    """Values without a dictionary; of none, times."""
    array = typed(array, pa.timestamp("us"))
    return array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array


def ends_of(values: np.ndarray) -> list:
    """The least and the greatest value, nothing of none."""
    return [values.min().item(), values.max().item()] if len(values) else []


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


def last_values(bare: PrepareJob, reading: Reading, rule: LastRule, rank: int, size: int, barrier) -> LastRows:
    """The last values. Numbers are ordered by value, other texts as texts."""
    column, num = rule.column, rule.last
    found = by_unit(bare, lambda unit, reading: lasts([texts_of(unit, reading, column)], num), rank, size, barrier)
    kind = "numbers" if all(one["are_numbers"] for one in found) else "texts"
    merged = lasts([[text.encode(errors="surrogateescape") for one in found for text in one[kind]]], num)[kind]
    if not merged:
        raise DataError(f"data.valid: column {column} has no values")
    if kind == "texts" and moments_of(as_binary(merged)).null_count:
        check_order(column, merged)
        shown = one_line(", ".join(merged[-MOST_SHOWN:]))
        bare.report(f"data.valid: values of {column} are ordered as texts, held out: {shown}")
    firsts = [text for one in found for text in one["first"][kind]]
    cure = (
        f"last: {num} counts distinct values of {column}: give more,{span_cure(column, firsts, merged)} or a share as "
        "data.valid=0.1"
    )
    return LastRows(replace(reading, split=(column, tuple(merged))), cure)


def check_order(column: str, texts: list[str]):
    """Raises DataError for the last values of a column, as texts, that seem to be dates in another order."""
    if all(re.match(OTHER_DATE, text) for text in texts):
        raise DataError(
            f"data.valid: column {column} holds dates as {one_line(texts[-1], 40)}, whose order as texts is not that "
            "of time: write them as 2024-05-01, or give a share as data.valid=0.1"
        )


def span_cure(column: str, firsts: list[str], lasts: list[str]) -> str:
    """A span of a tenth of the column's times, as advice; empty for a column of other values."""
    found = moments_of(as_binary([*firsts, *lasts]))
    if not found.null_count:
        micros = found.cast(pa.int64()).to_numpy(zero_copy_only=False)
    else:
        numbers = np.array([float(text) if is_number(text.encode()) else np.nan for text in (*firsts, *lasts)])
        unit = unit_of(numbers.min(), numbers.max())
        if unit is None:
            return ""
        micros = moments(numbers, unit)[0]
    tenth = text_of(int(micros.max() - micros.min()) // 10)
    return f" or a span of time as data.valid='{{column: {column}, last: {tenth}}}',"


def as_binary(texts: Iterable[str]) -> pa.Array:
    return pa.array([text.encode(errors="surrogateescape") for text in texts], pa.binary())


def texts_of(unit: Unit, reading: Reading, column: str) -> Iterator[bytes]:
    """The distinct values of the column, block by block."""
    for raw in rows_of(unit, reading).raw():
        try:
            texts, none = trimmed(pc.unique(as_text(pointed(column_of(raw, column), reading))), reading.missing)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"data.valid: {unit.path}, column {column}: {first_line(error)}") from error
        yield from texts.filter(pa.array(~none)).to_pylist()


def lasts(values: Iterable[Iterable[bytes]], num: int) -> dict:
    """The last `num` distinct values in the order of texts, and in that of numbers if all are numbers; first: the first
    one in each order."""
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
            texts, numbers = sorted(texts), sorted(numbers, key=float)
            texts, numbers = texts[:1] + texts[-num:], numbers[:1] + numbers[-num:]
            distinct = {*texts, *numbers}
    ordered = {"texts": sorted(texts), "numbers": sorted(numbers, key=float) if are_numbers else []}
    decoded = {kind: [text.decode(errors="surrogateescape") for text in one] for kind, one in ordered.items()}
    return {
        "are_numbers": are_numbers,
        "first": {kind: one[:1] for kind, one in decoded.items()},
        **{kind: one[-num:] for kind, one in decoded.items()},
    }


def is_number(text: bytes) -> bool:
    return re.match(NUMBER_TEXT, text.decode("latin-1")) is not None
