"""Held-out rows by times that are numbers: the unit, which is given or recognized, and advice that works."""

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from test_tabular import equal, samples_of, source_of, text_of, write

from hetmpi.data.files import DataError
from hetmpi.data.tabular.times import moments, unit_of
from hetmpi.errors import UserError

DAYS = [datetime(2024, 6, 30, tzinfo=UTC) - timedelta(hours=4 * i) for i in range(360)]  # 60 days, the newest first
LATER = sum(DAYS[0] - day < timedelta(days=7) for day in DAYS)
SECONDS = [int(day.timestamp()) for day in DAYS]
NUMBERS = {
    "s": SECONDS,
    "ms": [1000 * second for second in SECONDS],
    "us": [10**6 * second for second in SECONDS],
    "ns": [10**9 * second for second in SECONDS],
    "yyyymmdd": [int(day.strftime("%Y%m%d")) for day in DAYS],
}
KINDS = {
    "integers": lambda values: pa.array(values, pa.int64()),
    "unsigned": lambda values: pa.array(values, pa.uint64()),
    "floats": lambda values: pa.array(map(float, values)),
    "decimals": lambda values: pa.array([Decimal(value) for value in values]),
    "texts": lambda values: pa.array(map(str, values)),
    "dictionary": lambda values: pa.array(map(str, values)).dictionary_encode(),
}


def log_of(folder, times, form="csv"):
    """A file with a column of times."""
    num = len(times)
    table = pa.table({"ts": times, "item": [f"i{i % 7}" for i in range(num)], "click": [i % 3 % 2 for i in range(num)]})
    if form == "csv":
        return write(folder / "log.csv", text_of(table))
    pq.write_table(table, folder / "log.parquet")
    return folder / "log.parquet"


@pytest.mark.parametrize(
    "unit, form", [*((unit, "csv") for unit in NUMBERS), *(("s", form) for form in KINDS), ("ns", "floats")]
)
def test_a_span_of_times_that_are_numbers_is_held_out(tmp_path, unit, form):
    values, lines = NUMBERS[unit], []
    path = log_of(tmp_path, values if form == "csv" else KINDS[form](values), form)
    num = LATER if unit != "yyyymmdd" else sum((DAYS[0].date() - day.date()).days < 7 for day in DAYS)
    source = source_of(path, tmp_path / "cache", lines.append, valid={"column": "ts", "last": "7d"})
    assert (source.num_train, source.num_valid) == (360 - num, num)
    assert [feature.name for feature in source.features] == ["item"]
    [line] = [line for line in lines if line.startswith("data.valid")]
    assert "from 2024-05-01 to 2024-06-30" in line and f"unit: s, ms, us, ns or {'yyyymmdd'}" in line
    assert ("days as yyyymmdd" if unit == "yyyymmdd" else "seconds since 1970") in line
    told = source_of(path, tmp_path / "told", lines.append, valid={"column": "ts", "last": "7d", "unit": unit}, size=2)
    assert all(map(equal, samples_of(source), samples_of(told)))


def test_parts_of_a_second_and_missing_times(tmp_path):
    text = "ts,a,click\n" + "".join(f"{SECONDS[i]}.5,x,{i % 2}\n" for i in range(100)) + ",x,1\n"
    rule = {"column": "ts", "last": "7d"}
    source = source_of(write(tmp_path / "a.csv", text), tmp_path / "cache", valid=rule)
    assert (source.num_train, source.num_valid) == (59, LATER)
    times = pa.array([*NUMBERS["ms"][:100], None])
    source = source_of(log_of(tmp_path, times, "parquet"), tmp_path / "cache", valid=rule)
    assert (source.num_train, source.num_valid) == (59, LATER)


def test_a_number_that_is_no_day_is_a_bad_row(tmp_path):
    path = log_of(tmp_path, [*NUMBERS["yyyymmdd"][::-1], 20240631])
    rule = {"column": "ts", "last": "7d", "unit": "yyyymmdd"}
    with pytest.raises(DataError, match="line 362, column ts: '20240631' is no time in days as yyyymmdd"):
        source_of(path, tmp_path / "cache", valid=rule)
    assert source_of(path, tmp_path / "cache2", valid=rule, max_bad_rows=1).num_valid == 37


def test_units_are_recognized_from_1971_to_2099():
    assert [unit_of(values[-1], values[0]) for values in NUMBERS.values()] == list(NUMBERS)
    assert unit_of(1, 31) is unit_of(0, SECONDS[0]) is unit_of(SECONDS[0], 1000 * SECONDS[0]) is None
    assert unit_of(14_102_100, 14_103_023) is None  # hours as yymmddhh
    assert unit_of(97_044_039, 97_048_018) == "s" and unit_of(20241301, 20241302) is None


def test_days_are_those_of_the_calendar():
    days = np.arange(np.datetime64("1903-12-30"), np.datetime64("2104-03-02"))
    numbers = np.array([int(str(day).replace("-", "")) for day in days])
    found, bad = moments(numbers, "yyyymmdd")
    assert not bad.any() and np.array_equal(found, days.astype("datetime64[us]").astype(np.int64))
    wrong = np.array([20230229, 20240230, 20241301, 20240001, 20240100, 0, -20240101, 10**9])
    assert moments(wrong, "yyyymmdd")[1].all() and moments(wrong + 0.5, "yyyymmdd")[1].all()
    assert moments(np.array([1 << 62, np.nan, 1e300]), "s")[1].all()


def advice(refusal):
    """The values of data.valid that a refusal advises."""
    rules = [yaml.safe_load(text) for text in re.findall(r"data\.valid='(\{.*?\})'", refusal)]
    return rules + [float(text) for text in re.findall(r"data\.valid=(0\.[0-9]+)", refusal)]


@pytest.mark.parametrize(
    "rule",
    [
        {"column": "ts", "last": 7},
        {"column": "ts", "last": "400d"},
        {"column": "ts", "last": "1s"},
        {"column": "ts", "last": "7d", "unit": "us"},
    ],
)
@pytest.mark.parametrize("form", ["csv", "integers"])
def test_what_a_refusal_of_held_out_rows_advises_works(tmp_path, rule, form):
    values = np.linspace(SECONDS[-1], SECONDS[0], 12_000).astype(int).tolist()
    path = log_of(tmp_path, values if form == "csv" else KINDS[form](values), form)
    with pytest.raises(UserError) as refusal:
        source_of(path, tmp_path / "cache", valid=rule)
    rules = advice(str(refusal.value))
    rules += [{**rule, "last": span} for span in re.findall(r"as last: (\w+)", str(refusal.value))]
    assert rules, refusal.value
    for advised in rules:
        assert source_of(path, tmp_path / "cache", valid=advised).num_valid >= 100


def test_a_span_as_long_as_all_times_holds_out_all_but_the_earliest(tmp_path):
    times = pa.array(["2024-05-01"] * 20 + ["2024-05-02"] * 40)
    source = source_of(log_of(tmp_path, times), tmp_path / "cache", valid={"column": "ts", "last": "1d"})
    assert (source.num_train, source.num_valid) == (20, 40)


@pytest.mark.parametrize("times", [["2024-05-01"] * 60, [f"2024-05-01 12:30:00.{i:02d}" for i in range(60)]])
def test_no_shorter_span_is_advised_if_all_times_are_within_a_second(tmp_path, times):
    with pytest.raises(DataError, match="are all its rows.*: give a share as data.valid=0.1$"):
        source_of(log_of(tmp_path, pa.array(times)), tmp_path / "cache", valid={"column": "ts", "last": "7d"})


def test_numbers_that_are_no_times_have_no_span(tmp_path):
    path = log_of(tmp_path, [i % 31 + 1 for i in range(12_000)])
    with pytest.raises(DataError) as refusal:
        source_of(path, tmp_path / "cache", valid={"column": "ts", "last": "7d"})
    assert "numbers from 1 to 31, which are no times" in str(refusal.value)
    assert "give last: N" in str(refusal.value) and "unit: s" in str(refusal.value)
    assert source_of(path, tmp_path / "cache", valid={"column": "ts", "last": 7}).num_valid > 2_000
    path = log_of(tmp_path, list(range(12_000)))
    with pytest.raises(DataError) as refusal:
        source_of(path, tmp_path / "cache", valid={"column": "ts", "last": 7})
    assert advice(str(refusal.value)) == [0.1] and "give more" in str(refusal.value)


def test_a_unit_is_for_spans_of_numbers(tmp_path):
    for valid, words in (
        ({"column": "ts", "last": 7, "unit": "s"}, "remove unit, or give a span of time as last: 7d"),
        ({"column": "ts", "last": "7d", "unit": "h"}, "unit must be s, ms, us, ns or yyyymmdd, got h"),
        ({"column": "ts", "last": "7d", "uint": "s"}, "must have the keys column and last, and for times"),
    ):
        with pytest.raises(UserError, match=words):
            source_of(tmp_path, tmp_path / "cache", valid=valid)
    path = log_of(tmp_path, pa.array(DAYS), "parquet")
    with pytest.raises(DataError, match="holds timestamp.*, numbers were expected: remove unit"):
        source_of(path, tmp_path / "cache", valid={"column": "ts", "last": "7d", "unit": "s"})


def test_last_values_that_are_ordered_as_texts_are_said_and_dates_in_another_order_are_refused(tmp_path):
    weeks, lines = [f"week {i // 40}" for i in range(360)], []
    source = source_of(log_of(tmp_path, weeks), tmp_path / "cache", lines.append, valid={"column": "ts", "last": 2})
    assert source.num_valid == 80
    assert "data.valid: values of ts are ordered as texts, held out: week 7, week 8" in lines
    days = [day.strftime("%d.%m.%Y") for day in DAYS]
    for last in (7, "7d"):
        with pytest.raises(DataError, match="write them (as 2024-05-01|so)"):
            source_of(log_of(tmp_path, days), tmp_path / "cache", valid={"column": "ts", "last": last})
    lines.clear()
    source_of(log_of(tmp_path, [str(day) for day in DAYS]), tmp_path / "cache", lines.append,
              valid={"column": "ts", "last": 7})  # fmt: skip
    assert not any("ordered as texts" in line for line in lines)
