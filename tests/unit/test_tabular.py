"""Tabular data: CSV and Parquet, rules per column, and what is refused."""

import functools
import gzip
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import xxhash
from mutations import each_flipped_bit
from rank_threads import on_threads

from hetmpi import _C
from hetmpi.data.batch import concatenate
from hetmpi.data.tabular import DataError, Encoder, Reader, Tabular
from hetmpi.data.tabular.convert import hashes, numbers
from hetmpi.data.tabular.coverage import Coverage
from hetmpi.data.tabular.encoder import FIRST_KEY, MISSING_KEY, UNSEEN_KEY
from hetmpi.data.tabular.reading import Reading
from hetmpi.data.tabular.scaling import FARTHEST, Moments, Scaling, join
from hetmpi.errors import UserError
from hetmpi.inspect import inspected

ADULT = Path(__file__).resolve().parents[3] / "shared/data/adult"


def quiet(line):
    """A report that discards its lines."""


def source_of(path, cache, report=quiet, size=1, **settings):
    """Tabular data, prepared by `size` ranks, which are threads. Returns rank 0's."""

    def run(rank, barrier):
        source = Tabular(str(path), 0, **{"label": "click", "cache": str(cache), **settings})
        source.prepare(rank, size, barrier, report)
        return source

    return on_threads(size, run)[0]


def table_of(num=300, seed=0):
    """Columns: text and integer ids, numbers with missing values, lists, a day, labels."""
    rng = np.random.default_rng(seed)
    tags = [[str(tag) for tag in rng.integers(0, 9, rng.integers(0, 5))] for _ in range(num)]
    return pa.table(
        {
            "user": pa.array(rng.integers(0, 40, num)),
            "city": pa.array([None if i % 9 == 0 else f"city {i % 7}" for i in range(num)]),
            "price": pa.array(np.round(rng.normal(5, 2, num), 3), mask=rng.random(num) < 0.2),
            "day": pa.array(np.arange(num) * 5 // num),
            "tags": pa.array(tags, pa.list_(pa.string())),
            "click": pa.array(rng.integers(0, 2, num)),
        }
    )


def text_of(table, delimiter=","):
    """The table as CSV; lists are joined by |."""
    lines = [delimiter.join(table.column_names)]
    for row in table.to_pylist():
        cells = (
            "|".join(value) if isinstance(value, list) else "" if value is None else str(value)
            for value in row.values()
        )
        lines.append(delimiter.join(cells))
    return "\n".join(lines) + "\n"


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def samples_of(data):
    """All samples: training rows in the first epoch's order, held-out rows."""
    return data.train(0, data.num_train), data.valid(0, data.num_valid)


def equal(a, b):
    """Whether two Samples are equal, bit for bit."""
    arrays = [(a.ids, b.ids), (a.dense, b.dense), (a.label, b.label)]
    for one, other in zip(a.bags, b.bags, strict=True):
        arrays += [(one.values, other.values), (one.offsets, other.offsets)]
    return all(np.array_equal(*pair) for pair in arrays)


def contents(folder):
    """All files under a folder: name -> bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


TAGS = {"name": "tags", "pool": "sum", "separator": "|"}


SMALL_SIZES = {
    "writer.GROUP_ROWS": 16, "writer.FILE_ROWS": 64,
    "buckets.BATCH_BYTES": 500, "buckets.SHARED_BYTES": 4_000, "buckets.TAKE_ROWS": 24,
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Small sizes, so that a few rows make several units, buckets, groups and blocks."""
    for name, value in SMALL_SIZES.items():
        monkeypatch.setattr(f"hetmpi.data.tabular.{name}", value)
    monkeypatch.setattr("hetmpi.data.tabular.source.UNIT_BYTES", 2_000)
    monkeypatch.setattr("hetmpi.data.tabular.text.BLOCK_BYTES", 700)


# Hashing


def test_hashes_are_those_of_xxhash_without_spaces_around_the_text():
    texts = [b"", b"a", b" a ", b"\ta\t", b"a b", b"\xff\x00", b"x" * 1000, b"NA", b" NA", b"   "]
    array = pa.array(texts, pa.binary())
    _, offsets, data = array.buffers()
    offsets = np.frombuffer(offsets, np.int32)[: len(texts) + 1]
    for seed in (0, 5, 1 << 40):
        found = _C.hash_texts(offsets, np.frombuffer(data, np.uint8), seed, [b"NA"])
        plain = [b"" if text.strip() == b"NA" else text.strip(b" \t") for text in texts]
        assert found.tolist() == [xxhash.xxh3_64_intdigest(text, seed=seed) >> 1 for text in plain]


def test_integers_are_hashed_as_their_decimal_text():
    values = np.array([0, -1, 7, 1 << 62, -(1 << 63)])
    expected = [xxhash.xxh3_64_intdigest(str(value).encode(), seed=3) >> 1 for value in values]
    assert _C.hash_integers(values, 3).tolist() == expected


MOMENT = datetime(2024, 5, 1, 12, 30, 0, 250_000)
TEXTS = [
    "2024-05-01 12:30:00.25",
    "2024-05-01T12:30:00.250000",
    "2024-05-01T12:30:00.250Z",
    "2024-05-01 14:30:00.25+02:00",
]


@pytest.mark.parametrize(
    "value, kind, texts",
    [
        (True, pa.bool_(), ["true", "True", "TRUE"]),
        (-5, pa.int8(), ["-5", "-5.0"]),
        ((1 << 64) - 1, pa.uint64(), ["18446744073709551615"]),
        (3.0, pa.float64(), ["3", "3.0", "3.00"]),
        (0.1, pa.float32(), ["0.1"]),
        (1e-05, pa.float64(), ["1e-05", "0.00001"]),
        (1e15, pa.float64(), ["1e+15", "1000000000000000.0"]),
        (0.0002, pa.float64(), ["0.0002", "2e-04", "2.0E-4"]),
        (-0.0, pa.float64(), ["0", "-0", "-0.0"]),
        (1.5e8, pa.float64(), ["150000000", "1.5E8", "150000000.0"]),
        (-126542144.0, pa.float32(), ["-126542140", "-1.2654214e+08", "-1.2654214E8"]),
        (1e20, pa.float64(), ["1e+20", "100000000000000000000.0"]),
        (float("nan"), pa.float64(), [""]),
        (Decimal("3.10"), pa.decimal128(9, 2), ["3.10"]),
        *((MOMENT, pa.timestamp(unit), TEXTS) for unit in ("ms", "us", "ns")),
        (MOMENT, pa.timestamp("us", tz="UTC"), TEXTS),
        (MOMENT, pa.timestamp("us", tz="Asia/Tokyo"), TEXTS),
        (MOMENT.replace(microsecond=0), pa.timestamp("s"), ["2024-05-01 12:30:00", "2024-05-01 12:30:00.000000000"]),
        (datetime(2024, 1, 1), pa.timestamp("ns"), ["2024-01-01", "2024-01-01 00:00:00", "2023-12-31 23:00:00-01:00"]),
        (date(2024, 2, 29), pa.date32(), ["2024-02-29"]),
        (datetime(2024, 2, 29).time(), pa.time64("us"), ["00:00:00", "00:00:00.000000"]),
    ],
)
def test_a_value_has_one_id_in_any_type_and_however_it_is_written(value, kind, texts):
    array = pa.array([value], kind)
    typed = [hashes(array, 7, ("",)), hashes(array.dictionary_encode(), 7, ("",))]
    assert {int(found[0]) for found in typed} == {int(hashes(pa.array([text]), 7, ("",))[0]) for text in texts}


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.decimal128(18, 6)])
def test_numbers_have_the_ids_of_their_texts_in_csv(kind):
    rng = np.random.default_rng(0)
    num, digits = (1000, 6) if pa.types.is_decimal(kind) else (10_000, 25)
    values = rng.normal(size=num) * 10.0 ** rng.integers(-digits, digits, num)
    values = np.concatenate([values, np.round(values, 2), [0.0, -0.0, *10.0 ** -np.arange(6), 3.0, 16777217.0]])
    array = pa.array(values.astype(np.float32) if kind == pa.float32() else values)
    array = array if pa.types.is_floating(kind) else array.cast(kind, safe=False)
    csv.write_csv(pa.table({"x": array}), sink := pa.BufferOutputStream(), csv.WriteOptions(include_header=False))
    texts = sink.getvalue().to_pybytes().split()
    assert np.array_equal(hashes(array, 0, ("",)), hashes(pa.array(texts), 0, ("",)))


def test_texts_that_are_no_other_way_to_write_a_value_keep_their_ids():
    numbers = ["3.10", "3.1", "1e5", "100000", "007", "7", "+7", "1.0.0", "-", "-.0", "0.", "9e999", "1e+999"]
    texts = [*numbers, "truer", "t", "2024-05-01x", "2024-13-01 00:00:00", "12:30", "12:30:00.x"]
    found = hashes(pa.array(texts), 0, ("",)).tolist()
    assert found == [xxhash.xxh3_64_intdigest(text.encode(), 0) >> 1 for text in texts]


def test_offsets_outside_the_text_are_refused():
    with pytest.raises(IndexError, match="offsets must rise"):
        _C.hash_texts(np.array([0, 9], np.int32), np.zeros(3, np.uint8), 0, [])


# Forms of files


def written(folder, form, table):
    """The table in a form. Text has no list columns."""
    text = text_of(table, "\t" if "tsv" in form else ";" if form == "semicolons" else ",")
    if form == "parquet":
        pq.write_table(table, folder / "a.parquet", row_group_size=77)
        return folder / "a.parquet"
    if form == "gz":
        return write(folder / "a.csv.gz", gzip.compress(text.encode()))
    if form == "zst":
        return write(folder / "a.csv.zst", pa.Codec("zstd").compress(text.encode(), asbytes=True))
    if form == "quoted":
        return write(
            folder / "a.csv", "\n".join(",".join(f'"{c}"' for c in line.split(",")) for line in text.splitlines())
        )
    if form == "spaces":
        return write(folder / "a.csv", text.replace(",", " ,  "))
    if form == "empty lines":
        return write(folder / "a.csv", text.replace("\n", "\n\n"))
    if form == "mark":
        return write(folder / "a.csv", b"\xef\xbb\xbf" + text.encode())
    if form == "CRLF":
        return write(folder / "a.csv", text.replace("\n", "\r\n"))
    if form == "folder":
        (folder / "d").mkdir()
        write(folder / "d" / "a.csv", text)
        write(folder / "d" / "_SUCCESS", "")
        return folder / "d"
    if form == "glob":
        write(folder / "x1.csv", text)
        return folder / "x*.csv"
    return write(folder / ("a.tsv" if form == "tsv" else "a.csv"), text)


FORMS = [
    "parquet", "gz", "zst", "tsv", "semicolons", "quoted", "spaces", "empty lines", "mark", "CRLF", "folder", "glob",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_files_does_not_matter(tmp_path, form):
    table = table_of()
    plain = source_of(write(tmp_path / "plain.csv", text_of(table)), tmp_path / "cache", columns=[TAGS])
    (tmp_path / "other").mkdir()
    rule = {"name": "tags", "pool": "sum"} if form == "parquet" else TAGS
    other = source_of(written(tmp_path / "other", form, table), tmp_path / "cache", columns=[rule])
    assert all(map(equal, samples_of(plain), samples_of(other)))
    assert plain.features == other.features and plain.num_train + plain.num_valid == 300


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_number_of_ranks_does_not_matter(tmp_path, small, size):
    path = write(tmp_path / "a.csv", text_of(table_of()))
    source_of(path, tmp_path / "one", columns=[TAGS])
    source_of(path, tmp_path / "many", columns=[TAGS], size=size)
    assert len(contents(tmp_path / "one")) > 10 and contents(tmp_path / "one") == contents(tmp_path / "many")


def test_columns_in_another_order_are_read_by_name(tmp_path):
    (tmp_path / "d").mkdir()
    table = table_of()
    write(tmp_path / "d" / "a.csv", text_of(table.slice(0, 150)))
    write(tmp_path / "d" / "b.csv", text_of(table.slice(150).select(table.column_names[::-1])))
    data = source_of(tmp_path / "d", tmp_path / "cache", columns=[TAGS])
    assert data.num_train + data.num_valid == 300 and data.tables["table"].field_rows[0] <= 42


def test_a_rule_drops_columns_that_other_files_have_not(tmp_path):
    (tmp_path / "d").mkdir()
    table, debug = table_of(), pa.array(range(150))
    write(tmp_path / "d" / "a.csv", text_of(table.slice(0, 150).append_column("debug_a", debug)))
    write(tmp_path / "d" / "b.csv", text_of(table.slice(150).append_column("debug_b", debug)))
    data = source_of(tmp_path / "d", tmp_path / "cache", columns=[TAGS, {"name": "debug_*", "kind": "drop"}])
    assert data.num_train + data.num_valid == 300


def test_prepared_data_are_read_again_without_preparing(tmp_path):
    path = write(tmp_path / "a.csv", text_of(table_of()))
    data = source_of(path, tmp_path / "cache", columns=[TAGS])
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")}
    again = source_of(path, tmp_path / "cache", columns=[TAGS])
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")}
    assert all(map(equal, samples_of(data), samples_of(again)))
    path.unlink()
    assert all(map(equal, samples_of(data), samples_of(source_of(data.folder, "x", columns=[TAGS]))))


def test_other_rules_have_another_folder_and_do_not_erase_the_first(tmp_path):
    path = write(tmp_path / "a.csv", text_of(table_of()))
    first = source_of(path, tmp_path / "cache", columns=[TAGS])
    kept = contents(first.folder)
    second = source_of(path, tmp_path / "cache", columns=[TAGS, {"name": "day", "kind": "drop"}])
    assert second.folder != first.folder and contents(first.folder) == kept


def test_copies_with_other_times_of_change_are_those_that_the_first_rank_prepares(tmp_path):
    path = write(tmp_path / "a.csv", text_of(table_of()))
    first, other = (Tabular(str(path), 0, "click", cache=str(tmp_path / "cache"), columns=[TAGS]) for _ in range(2))
    names = first._job(0, lambda: None, print)[0].names
    first.times = {str(path): path.stat().st_mtime_ns}
    os.utime(path, (1, 1))
    assert first._job(0, lambda: None, print)[0].names == names != other._job(0, lambda: None, print)[0].names


def test_rows_and_transforms_need_no_other_preparation(tmp_path):
    path = write(tmp_path / "a.csv", text_of(table_of()))
    first = source_of(path, tmp_path / "cache", columns=[TAGS])
    rules = [TAGS, {"name": "user", "rows": 5, "dim": 4}, {"name": "price", "transform": "standardize"}]
    assert source_of(path, tmp_path / "cache", columns=rules).folder == first.folder


def test_data_of_an_earlier_version_are_refused_in_one_sentence(tmp_path):
    write(tmp_path / "manifest.json", '{"version": 1}')
    with pytest.raises(
        DataError, match="was prepared by another version: give the raw files, which are prepared again"
    ):
        source_of(tmp_path, tmp_path / "cache")


KILLED = """
import os, sys, threading
from hetmpi.data.tabular import Tabular, buckets, source, text, writer
writer.GROUP_ROWS, writer.FILE_ROWS = 16, 64
buckets.BATCH_BYTES, buckets.SHARED_BYTES, buckets.TAKE_ROWS = 500, 20_000, 24
source.UNIT_BYTES, text.BLOCK_BYTES = 40_000, 8_000
data = Tabular(sys.argv[1], 0, "click", cache=sys.argv[2], columns=[{"name": "tags", "pool": "sum", "separator": "|"}])
print("ready", flush=True)
data.prepare(0, 1, lambda: None, report=lambda line: None)
"""


def test_a_killed_preparation_started_again_ends_with_the_same_bytes(tmp_path):
    path = write(tmp_path / "a.csv", text_of(table_of(6_000)))
    run = [sys.executable, "-c", KILLED, str(path)]
    subprocess.run([*run, str(tmp_path / "whole")], check=True, capture_output=True)
    killed = 0
    for turn in range(4):
        process = subprocess.Popen([*run, str(tmp_path / "killed")], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(float(np.random.default_rng((os.getpid(), turn)).uniform(0, 0.4)))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    subprocess.run([*run, str(tmp_path / "killed")], check=True, capture_output=True)
    left = {name: data for name, data in contents(tmp_path / "killed").items() if ".part-" not in name}
    assert killed and left == contents(tmp_path / "whole")


# Kinds of columns


def test_types_decide_without_rules(tmp_path):
    told = []
    data = source_of(write(tmp_path / "a.csv", text_of(table_of())), tmp_path / "cache", told.append)
    assert [feature.name for feature in data.features] == ["user", "city", "day", "tags"]
    assert data.dense_names == ["price"] and data.num_dense == 1 and data.num_features == data.num_fields == 4
    assert data.num_rows == sum(data.field_rows) == data.tables["table"].num_rows
    lines = {line.split()[0]: line for line in told[-6:]}
    assert "integers taken as ids: kind: number" in lines["user"] and "taken as" not in lines["city"]
    assert lines["price"].split()[1] == "number" and lines["city"].split()[2:5] == ["9", "7", "34"]


def test_the_first_matching_rule_wins(tmp_path):
    rules = [{"name": "da*", "kind": "drop"}, {"name": ["day", "user"], "rows": 3}, {"name": "*", "kind": "id"}]
    data = source_of(write(tmp_path / "a.csv", text_of(table_of())), tmp_path / "cache", columns=rules)
    assert [(f.name, f.rows) for f in data.features][0] == ("user", 3)
    assert {f.name for f in data.features} == {"user", "city", "price", "tags"} and data.num_dense == 0


def one_column(tmp_path, values, name="x", **settings):
    """The source of a file with a column of texts and an alternating label, where all rows but the last two are for
    training."""
    lines = [f"{value},{i % 2},{int(i >= len(values) - 2)}" for i, value in enumerate(values)]
    path = write(tmp_path / "one.csv", f"{name},click,last\n" + "\n".join(lines) + "\n")
    return source_of(path, tmp_path / "cache", valid={"column": "last", "last": 1}, **settings)


ALIGNED, NOT_ALIGNED = True, False
PAIRS_OF_LISTS = {  # of items and of their kinds
    "none is missing": ("1 2 3", "a b c", ALIGNED),
    "missing at one place": ("1  3", "a  c", ALIGNED),
    "missing at two places": ("1  3", "a b ", NOT_ALIGNED),
    "missing at both ends": (" 2 3", "a b ", NOT_ALIGNED),
    "as many, by the text of data.missing": ("1 NA 3", "NA b c", NOT_ALIGNED),
    "before the values that max_len keeps": ("1  3 4 5", " b c d e", ALIGNED),
    "among the values that max_len keeps": ("1 2 3  5", "a b c d e", NOT_ALIGNED),
    "of other lengths, which the model judges": (" 2 3", "b c", ALIGNED),
    "no list": ("", "", ALIGNED),
}


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("case", PAIRS_OF_LISTS)
def test_lists_whose_missing_values_are_at_other_places_are_bad_rows(tmp_path, case, form):
    items, kinds, is_aligned = PAIRS_OF_LISTS[case]
    rows = [("7 8", "x y")] * 3 + [(items, kinds)] + [("9", "z")] * 4
    table = pa.table({"items": [one[0] for one in rows], "kinds": [one[1] for one in rows], "click": [0, 1] * 4})
    rules = [{"name": name, "pool": "none", "max_len": 3} for name in ("items", "kinds")]
    if form == "parquet":
        lists = {name: pc.split_pattern(table[name], " ") for name in ("items", "kinds")}
        pq.write_table(pa.table({**lists, "click": table["click"]}), tmp_path / "a.parquet")
    else:
        write(tmp_path / "a.csv", text_of(table))
        rules = [{**rule, "separator": " "} for rule in rules]
    make = functools.partial(source_of, tmp_path / f"a.{form}", tmp_path / "cache", valid=0.2, columns=rules)
    if is_aligned:
        return make()
    with pytest.raises(DataError, match=r"column items: .* has missing values, which are skipped, at other places than "
                                        "kinds") as refused:  # fmt: skip
        make()
    assert "give missing values of lists with pool: none a value" in str(refused.value)
    assert make(max_bad_rows=1).num_train < 8
    make(columns=[rules[0], {**rules[1], "pool": "mean"}])  # their order does not matter


def in_file_order(data, path):
    """Samples of a file's rows, in order."""
    return concatenate([data.encoder.samples(block) for block in blocks_of(path, data.encoder)])


def blocks_of(path, encoder):
    reader = Reader(str(path), encoder.reading)
    return [block for unit in reader.units for block in reader.blocks(unit)]


def test_a_vocabulary_has_rows_for_missing_and_unseen_values(tmp_path):
    data = one_column(tmp_path, ["a", "b", "", "a", "NA", "new", ""])
    keys = in_file_order(data, tmp_path / "one.csv").ids[:, 0]
    assert data.field_rows == [2 + FIRST_KEY]
    assert keys[2] == keys[4] == keys[6] == MISSING_KEY and keys[5] == UNSEEN_KEY
    assert keys[0] == keys[3] >= FIRST_KEY and keys[1] >= FIRST_KEY and keys[0] != keys[1]


def test_rare_values_share_a_row(tmp_path):
    data = one_column(tmp_path, ["a", "a", "a", "b", "b", "c", "z", "z"], columns=[{"name": "x", "min_count": 2}])
    keys = in_file_order(data, tmp_path / "one.csv").ids[:, 0]
    assert data.field_rows == [4] and keys[5] == UNSEEN_KEY and sorted(set(keys[:5])) == [2, 3]


def test_hashed_rows(tmp_path):
    values = [f"{i}" for i in range(1000)] * 2
    data = one_column(tmp_path, values, columns=[{"name": "x", "rows": 50}])
    keys = in_file_order(data, tmp_path / "one.csv").ids[:, 0]
    hashes = [xxhash.xxh3_64_intdigest(value.encode(), seed=0) >> 1 for value in values]
    assert data.field_rows == [50] and keys.tolist() == [one % 50 for one in hashes]
    auto = one_column(tmp_path, values, columns=[{"name": "x", "hash": True}])
    assert auto.field_rows[0] == pytest.approx(2000, rel=0.03)


def test_integers_as_they_are_and_a_row_for_missing_ones(tmp_path):
    data = one_column(tmp_path, ["0", "6", "", "3", "1"], columns=[{"name": "x", "rows": 7, "hash": False}])
    assert in_file_order(data, tmp_path / "one.csv").ids[:, 0].tolist() == [0, 6, 7, 3, 1]
    with pytest.raises(DataError, match=r"one.csv, line 3, column x: 6 has no row, data.columns has rows: 6"):
        one_column(tmp_path, ["0", "6", "", "3", "1"], columns=[{"name": "x", "rows": 6, "hash": False}])


def test_a_vocabulary_too_large_is_hashed_and_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr("hetmpi.data.tabular.encodings.MOST_VALUES", 10)
    told = []
    data = one_column(tmp_path, [f"v{i}" for i in range(40)], report=told.append)
    assert data.field_rows[0] == pytest.approx(80, abs=4) and "hashed, as it has more than 10" in told[-1]
    with pytest.raises(DataError, match="column x has about 40 distinct values.*rows: N or hash: true"):
        one_column(tmp_path, [f"v{i}" for i in range(40)], columns=[{"name": "x", "min_count": 2}])


def test_columns_that_share_rows_have_the_same_key_for_a_value(tmp_path):
    text = "item,seen,click\n" + "".join(f"i{i % 5},i{i % 7}|i{(i + 1) % 7},{i % 2}\n" for i in range(100))
    rules = [{"name": "seen", "share": "item", "separator": "|", "pool": "mean"}]
    data = source_of(write(tmp_path / "a.csv", text), tmp_path / "cache", columns=rules)
    samples = in_file_order(data, tmp_path / "a.csv")
    assert data.features[0].first == data.features[1].first == 0 and data.features[1].pool == "mean"
    assert data.tables["table"].field_rows == (7 + FIRST_KEY,)
    bag = samples.bags[0]
    assert samples.ids[0, 0] == bag.values[0] and samples.ids[1, 0] == bag.values[1] == bag.values[2]


@pytest.mark.parametrize("max_len, sizes", [(None, [2, 0, 3, 0, 2]), (2, [2, 0, 2, 0, 2]), (1, [1, 0, 1, 0, 1])])
def test_the_first_values_of_a_list_are_kept(tmp_path, max_len, sizes):
    values = ["a|b", "", "c|a|b", "NA", " a || b "]
    rule = {"name": "x", "separator": "|", "pool": "sum", **({"max_len": max_len} if max_len else {})}
    data = one_column(tmp_path, values, columns=[rule, {"name": "last"}])
    (bag,) = in_file_order(data, tmp_path / "one.csv").bags
    assert np.diff(bag.offsets).tolist() == sizes
    assert bag.values[bag.offsets[0]] == bag.values[bag.offsets[4]] and data.features[1].pool == "sum"
    with pytest.raises(AttributeError):
        _ = data.num_fields


def test_features_of_one_value_come_first(tmp_path):
    data = source_of(
        write(tmp_path / "a.csv", text_of(table_of())), tmp_path / "c", columns=[TAGS, {"name": "user", "dim": 4}]
    )
    assert [feature.name for feature in data.features] == ["user", "city", "day", "tags"]
    assert {name: table.dim for name, table in data.tables.items()} == {"dim4": 4, "table": None}
    samples = data.train(0, 50)
    for j, feature in enumerate(data.features[:3]):
        assert (samples.ids[:, j] >= feature.first).all() and (samples.ids[:, j] < feature.first + feature.rows).all()


def test_settings_of_a_table_are_passed_on(tmp_path):
    rule = {"name": "user", "optim": {"rows_lr": 0.1}, "cache": {"capacity_fraction": 1.0}}
    data = source_of(write(tmp_path / "a.csv", text_of(table_of())), tmp_path / "c", columns=[rule])
    table = data.tables[data.features[0].table]
    assert table.optim == {"rows_lr": 0.1} and table.cache == {"capacity_fraction": 1.0}


@pytest.mark.parametrize("transform", ["none", "log1p", "standardize"])
def test_numbers_are_transformed_and_missing_ones_are_zero(tmp_path, transform):
    values = ["1", "-2.5", "", "7e1", "0.5", "3"]
    rule = {"name": "x", "kind": "number", "transform": transform}
    data = one_column(tmp_path, values, columns=[rule, {"name": "last", "kind": "id"}])
    dense = in_file_order(data, tmp_path / "one.csv").dense[:, 0]
    x = np.array([1, -2.5, np.nan, 70, 0.5, 3])
    train = x[:4][~np.isnan(x[:4])]
    expected = {"none": x, "log1p": np.log1p(np.maximum(x, 0)), "standardize": (x - train.mean()) / train.std()}
    assert dense == pytest.approx(np.nan_to_num(expected[transform]), rel=1e-6) and dense.dtype == np.float32


def skewed(num):
    """Incomes of about 36,000 with the skewness of a logarithmic normal distribution."""
    return np.random.default_rng(0).lognormal(10, 1, num)


def test_a_number_is_standardized_by_the_training_rows_and_after_a_logarithm_where_it_is_skewed(tmp_path):
    rng, told = np.random.default_rng(0), []
    table = pa.table({
        "income": skewed(3000), "height": rng.normal(170, 9, 3000), "debt": -skewed(3000),
        "flag": rng.random(3000) < 0.03, "day": np.arange(3000) >= 2000, "city": ["a"] * 3000, "click": [0, 1] * 1500,
    })  # fmt: skip
    path = write(tmp_path / "a.csv", text_of(table).replace("True", "1").replace("False", "0"))
    data = source_of(
        path, tmp_path / "cache", told.append, valid={"column": "day", "last": 1},
        columns=[{"name": "flag", "kind": "number"}, {"name": "city"}],
    )  # fmt: skip
    train = data.train(0, data.num_train).dense
    assert train.mean(0) == pytest.approx(0, abs=1e-6) and train.std(0) == pytest.approx(1, rel=1e-5)
    found = in_file_order(data, path).dense
    logs = [np.log1p(skewed(3000)), table["height"].to_numpy(), -np.log1p(skewed(3000))]
    for j, expected in enumerate(logs):
        expected = (expected - expected[:2000].mean()) / expected[:2000].std()
        assert found[:, j] == pytest.approx(expected, abs=1e-5)
    lines = {line.split()[0]: line for line in told[-7:]}
    assert "(log(1 + x) - 9.972) / 1" in lines["income"] and "as it is skewed" in lines["income"]
    assert "(x - 169.7) / 9.002" in lines["height"] and "skewed" not in lines["height"] + lines["flag"]


def test_the_scaling_of_numbers_is_the_same_bits_on_any_number_of_ranks_and_in_a_saved_encoder(tmp_path, small):
    path = write(tmp_path / "a.csv", text_of(table_of()))
    one = source_of(path, tmp_path / "one", columns=[TAGS])
    three = source_of(path, tmp_path / "three", columns=[TAGS], size=3)
    np.savez(tmp_path / "encoder.npz", **one.encoder.to_arrays())
    saved = Encoder.from_arrays(np.load(tmp_path / "encoder.npz"))
    assert one.encoder.scalings == three.encoder.scalings == saved.scalings and one.encoder.scalings["price"].deviation
    assert one.encoder.difference(saved) is None
    none = source_of(path, tmp_path / "one", columns=[TAGS, {"name": "price", "transform": "none"}]).encoder
    assert none.difference(one.encoder) == "column price had transform: none, now auto"


def test_values_far_outside_the_training_range_are_finite_numbers_without_a_warning(recwarn):
    values = np.array([-3e38, 1.0, np.nan, 3e38], np.float32)
    found = Scaling(False, 1.0, 0.001)(values)
    assert np.array_equal(found, np.array([-FARTHEST, 0, np.nan, FARTHEST], np.float32), equal_nan=True)
    assert not recwarn.list


def test_the_text_of_a_scaling_has_one_sign():
    assert str(Scaling(False, -0.0039, 0.98)) == "(x + 0.0039) / 0.98"
    assert str(Scaling(True, 2.5, 1.0)) == "(log(1 + x) - 2.5) / 1, as it is skewed"


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64()])
def test_large_integers_are_the_same_numbers_in_parquet_and_text(kind):
    values = [(1 << 53) + 1, 1_714_566_600_123_456_789, (1 << 63) - 1, None]
    found, bad = numbers(pa.array(values, kind), ("",))
    expected, _ = numbers(pa.array(["" if value is None else str(value) for value in values]), ("",))
    assert bad is None and np.array_equal(found, expected, equal_nan=True) and found[2] == 2.0**63


@pytest.mark.parametrize("value", ["0.1", "1e-38", "33554432.5", ""])
def test_a_number_of_one_value_or_none_is_always_zero(tmp_path, value):
    told = []
    column = {"name": "x", "kind": "number"}
    values = [value] * 1001 + ["7", "-1e30"]
    data = one_column(tmp_path, values, columns=[column, {"name": "last", "kind": "id"}], report=told.append)
    assert not in_file_order(data, tmp_path / "one.csv").dense.any()
    assert any("one value or none in the training rows: always 0" in line for line in told)


def test_moments_of_parts_are_those_of_the_whole():
    values = skewed(1000)
    parts = [Moments.of(part) for part in np.split(values, [1, 3, 500])]
    assert functools.reduce(join, parts, Moments()) == pytest.approx(Moments.of(values), rel=1e-12)
    mean, std = values.mean(), values.std()
    assert Moments.of(values).skewness == pytest.approx((((values - mean) / std) ** 3).mean(), rel=1e-12)


def test_edges_divide_a_number_into_buckets(tmp_path):
    data = one_column(tmp_path, ["0.5", "1", "9.5", "", "10", "-3"], columns=[{"name": "x", "transform": [1, 10]}])
    assert in_file_order(data, tmp_path / "one.csv").ids[:, 0].tolist() == [0, 1, 1, 3, 2, 0]
    assert data.field_rows == [4] and data.num_dense == 0


def test_a_number_that_equals_an_edge_is_in_the_bucket_above_it(tmp_path):
    values = ["0.7", "0.6999", "9.99", "9.98", "1e30", "-1"]  # 0.7 and 9.99 are less in float32
    data = one_column(tmp_path, values, columns=[{"name": "x", "transform": [0.7, 9.99]}])
    assert in_file_order(data, tmp_path / "one.csv").ids[:, 0].tolist() == [1, 0, 2, 1, 2, 0]


def test_labels_by_their_texts_and_labels_that_are_numbers(tmp_path):
    text = "a,click\n" + "".join(f"{i % 3},{' >50K' if i % 4 == 0 else '<=50K '}\n" for i in range(100))
    data = source_of(write(tmp_path / "a.csv", text), tmp_path / "cache", positive=[">50K"])
    assert sum(part.label.sum() for part in samples_of(data)) == 25
    text = "a,click\n" + "".join(f"{i % 3},{i / 4}\n" for i in range(100))
    data = source_of(write(tmp_path / "b.csv", text), tmp_path / "cache", label_kind="number")
    assert sorted(np.concatenate([part.label for part in samples_of(data)])) == [i / 4 for i in range(100)]


@pytest.mark.parametrize(
    "label, positive", [("1", ["True"]), ("Yes", ["yes"]), ("true", ["1"]), ("YES", ["yes", "Yes"])]
)
def test_other_spellings_of_labels_that_count_as_1_are_refused(tmp_path, label, positive):
    lines = [f"{i % 3},{['no', positive[0], label][i % 3]}" for i in range(99)]
    path = write(tmp_path / "a.csv", "a,click\n" + "\n".join(lines) + "\n")
    with pytest.raises(DataError, match=f"(?s)name all spellings.*'{label}' seems to be another spelling") as refusal:
        source_of(path, tmp_path / "cache", positive=positive)
    assert "line 4" in str(refusal.value)
    data = source_of(path, tmp_path / "cache", positive=[*positive, label])
    assert sum(part.label.sum() for part in samples_of(data)) == 66


SEVERAL = "a,click,buy\n" + "".join(f"{i % 3},{i % 2},{'' if i % 5 == 0 else i % 2}\n" for i in range(200))


@pytest.mark.parametrize("texts", [None, ["1"]])
def test_one_of_several_labels_may_be_missing(tmp_path, texts):
    data = source_of(write(tmp_path / "a.csv", SEVERAL), tmp_path / "c", label=["buy", "click"], positive=texts)
    label = np.concatenate([part.label for part in samples_of(data)])
    assert label.shape == (200, 2) and label.dtype == np.float32 and not np.isnan(label[:, 1]).any()
    has = ~np.isnan(label[:, 0])
    assert has.sum() == 160 and (label[has, 0] == label[has, 1]).all() and label[:, 1].sum() == 100
    assert data.nothing().label.shape == (0, 2) and data.encoder.reading.to_predict().schema().names == ["c0"]


def test_a_reading_of_a_version_with_one_label(tmp_path):
    data = source_of(write(tmp_path / "a.csv", "a,click\n" + "1,0\n2,1\n" * 60), tmp_path / "c")
    saved = data.encoder.reading.to_json()
    assert saved["labels"] == ("click",)
    earlier = {**{key: value for key, value in saved.items() if key != "labels"}, "label": "click"}
    assert Reading.from_json(json.loads(json.dumps(earlier))) == data.encoder.reading


def test_ids_are_bytes(tmp_path):
    text = b"a,click\n" + b"".join(b"\xff\xfe%d,%d\n" % (i % 3, i % 2) for i in range(60))
    assert source_of(write(tmp_path / "a.csv", text), tmp_path / "cache").field_rows == [5]


def test_integers_beyond_64_bits_are_ids_by_their_text(tmp_path):
    text = "a,click\n" + "".join(f"{10**30 + i % 3},{i % 2}\n" for i in range(60))
    assert source_of(write(tmp_path / "a.csv", text), tmp_path / "cache").field_rows == [5]


def test_parquet_types(tmp_path):
    num = 60
    table = pa.table({
        "flag": pa.array([i % 2 == 0 for i in range(num)]),
        "when": pa.array([i * 86_400_000 for i in range(num)], pa.timestamp("ms")),
        "cost": pa.array([i * 2 for i in range(num)]).cast(pa.decimal128(22, 2)),
        "kind": pa.array([f"k{i % 3}" for i in range(num)]).dictionary_encode(),
        "big": pa.array([(1 << 63) + i % 4 for i in range(num)], pa.uint64()),
        "click": pa.array([i % 2 == 0 for i in range(num)]),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    data = source_of(tmp_path / "a.parquet", tmp_path / "cache", columns=[{"name": "cost", "transform": "none"}])
    assert [feature.name for feature in data.features] == ["flag", "when", "kind", "big"]
    assert data.dense_names == ["cost"] and data.features[0].rows == 4 and data.features[2].rows == 5
    assert max(part.dense.max() for part in samples_of(data)) == 118


def test_a_run_on_text_predicts_from_parquet_of_the_same_rows_and_back(tmp_path):
    num = 200
    table = pa.table({
        "flag": pa.array([i % 3 == 0 for i in range(num)]),
        "when": pa.array([MOMENT + timedelta(hours=i % 7) for i in range(num)], pa.timestamp("ns")),
        "day": pa.array([date(2024, 1, 1 + i % 9) for i in range(num)]),
        "grade": pa.array([i % 5 / 2 for i in range(num)]),
        "cost": pa.array([Decimal(i % 4) / 4 for i in range(num)], pa.decimal128(9, 2)),
        "click": pa.array([i % 2 for i in range(num)]),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    csv.write_csv(table, tmp_path / "a.csv")
    rules = [{"name": ["grade", "cost"], "kind": "id"}]
    forms = ("a.csv", "a.parquet")
    encoders = [source_of(tmp_path / form, tmp_path / "cache", columns=rules).encoder for form in forms]
    first, *others = [
        concatenate([encoder.samples(block) for block in blocks_of(tmp_path / form, encoder)]).ids
        for encoder, form in itertools.product(encoders, forms)
    ]
    assert first.min() >= FIRST_KEY and all(np.array_equal(first, ids) for ids in others)


# Types of several files


def column_in_files(folder, *files):
    """A folder with a file for each column x: CSV of texts, else Parquet. Each row also has a text and a label."""
    (folder / "d").mkdir()
    for number, values in enumerate(files):
        num = len(values)
        if isinstance(values, list):
            lines = (f"{value},t{i % 3},{i % 2}" for i, value in enumerate(values))
            write(folder / "d" / f"{number}.csv", "\n".join(["x,t,click", *lines]) + "\n")
            continue
        table = pa.table({"x": values, "t": [f"t{i % 3}" for i in range(num)], "click": [i % 2 for i in range(num)]})
        pq.write_table(table, folder / "d" / f"{number}.parquet")
    return folder / "d"


CODES = [i % 30 for i in range(300)]
WITH_NULLS = [None if i % 7 == 0 else i % 30 for i in range(300)]
ALIKE = {
    "integers": pa.array(CODES),
    "doubles with nulls": pa.array(WITH_NULLS, pa.float64()),
    "halves": pa.array(WITH_NULLS, pa.float16()),
    "nulls": pa.nulls(300),
    "doubles without a value": pa.nulls(300, pa.float64()),
    "texts": pa.array([str(code) for code in CODES]),
    "large texts": pa.array([str(code) for code in CODES], pa.large_string()),
    "views": pa.array([str(code) for code in CODES], pa.string_view()),
    "categories": pa.array([str(code) for code in CODES]).dictionary_encode(),
    "decimals": pa.array([Decimal(code) for code in CODES], pa.decimal128(9, 2)),
}


@pytest.mark.parametrize("form", ALIKE)
@pytest.mark.parametrize("is_first", [False, True])
def test_integers_are_ids_however_a_file_writes_them(tmp_path, form, is_first):
    files = [ALIKE["integers"], ALIKE[form]]
    data = source_of(column_in_files(tmp_path, *(files[::-1] if is_first else files)), tmp_path / "cache")
    assert [feature.name for feature in data.features] == ["x", "t"] and data.features[0].rows == 30 + FIRST_KEY


def test_integers_with_a_point_are_the_ids_of_those_without(tmp_path):
    plain, points = [str(code) for code in CODES], ["" if c is None else f"{c}.0" for c in WITH_NULLS]
    data = source_of(column_in_files(tmp_path, plain, points), tmp_path / "cache")
    assert data.features[0].rows == 30 + FIRST_KEY and data.dense_names == []


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_column_without_values_in_a_file_has_the_type_of_the_others(tmp_path, form, is_first):
    numbers = [i / 8 for i in range(300)]
    files = [["NA"] * 300, numbers] if form == "csv" else [pa.nulls(300), pa.array(numbers)]
    data = source_of(column_in_files(tmp_path, *(files[::-1] if is_first else files)), tmp_path / "cache")
    assert data.dense_names == ["x"]


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    "files, kind, remark",
    [
        (([1, 2, 3] * 50, [0.5, 1.25] * 50), "number", "integers in 0.csv and fractions in 1.csv: taken as number"),
        (([0.5, 1.25] * 50, ["a", "b"] * 50), "id", "fractions in 0.csv and texts in 1.csv: taken as id"),
        ((pa.array([1, 2] * 50), pa.array(["a", "b"] * 50)), "id", "integers in 0.parquet and texts in 1.parquet"),
    ],
)
def test_files_with_other_types_are_joined_in_one_way(tmp_path, files, kind, remark, is_first):
    told = []
    path = column_in_files(tmp_path, *(files[::-1] if is_first else files))
    data = source_of(path, tmp_path / "cache", told.append)
    assert (data.dense_names == ["x"]) == (kind == "number")
    [line] = [line for line in told if line.split()[0] == "x"]
    assert f"taken as {kind}" in line and (is_first or remark in line)


@pytest.mark.parametrize(
    "other", [pa.array([True, False] * 9), pa.array([date(2024, 5, 1)] * 18), pa.array([["a"]] * 18)]
)
@pytest.mark.parametrize("is_first", [False, True])
def test_files_whose_values_cannot_be_the_same_are_refused_by_name(tmp_path, other, is_first):
    files = [pa.array([1, 2] * 9), other]
    path = column_in_files(tmp_path, *(files[::-1] if is_first else files))
    with pytest.raises(DataError, match="column x has .* in .*parquet and .* in .*parquet: write it alike") as refusal:
        source_of(path, tmp_path / "cache")
    assert "0.parquet" in str(refusal.value) and "1.parquet" in str(refusal.value)


def test_unchanged_files_are_sampled_once(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("click,user,x\n" + "".join(f"{i % 2},u{i % 7},{i}.5\n" for i in range(300)))
    source_of(file, tmp_path / "cache")
    [layout] = (tmp_path / "cache").glob(".layout-*")
    written = layout.stat().st_mtime_ns
    source_of(file, tmp_path / "cache")
    assert layout.stat().st_mtime_ns == written
    file.write_text(file.read_text().replace(".5", ".words"))
    assert "x" not in source_of(file, tmp_path / "cache").dense_names
    assert len(list((tmp_path / "cache").glob(".layout-*"))) == 2


def test_fractions_that_begin_late_are_numbers(tmp_path):
    num = 60_000
    values = [str(i % 50) for i in range(num)] + ["0.5"] * 1000
    lines = "".join(f"{value},{i % 2}\n" for i, value in enumerate(values))
    rules = [{"name": "other"}]
    text = "x,click,other\n" + lines.replace("\n", f",{'a' * 80}\n")
    assert source_of(write(tmp_path / "a.csv", text), tmp_path / "cache", columns=rules).dense_names == ["x"]
    x = pa.array([float(i) for i in range(20_000)] + [99_999.5] + [-1.0] * 20_000)
    pq.write_table(pa.table({"x": x, "other": ["a"] * 40_001, "click": [0, 1] * 20_000 + [1]}), tmp_path / "a.parquet")
    assert source_of(tmp_path / "a.parquet", tmp_path / "cache", columns=rules).dense_names == ["x"]


def test_a_saved_encoder_reads_integers_of_any_type_as_the_ids_of_training(tmp_path):
    encoder = source_of(column_in_files(tmp_path, ALIKE["integers"]), tmp_path / "cache").encoder
    found = []
    for form in ("integers", "texts", "views", "categories", "decimals"):
        pq.write_table(pa.table({"x": ALIKE[form], "t": ["t0"] * 300}), tmp_path / "new.parquet")
        found.append(
            concatenate([encoder.samples(block) for block in blocks_of(tmp_path / "new.parquet", encoder)]).ids
        )
    assert found[0].min() >= FIRST_KEY and all(np.array_equal(found[0], ids) for ids in found)


# Missing values


def padded(form, codes):
    """Integers in a form of Parquet, or the lines of a CSV."""
    if form in ("csv", "csv with a point"):
        return [f"{code}{'.0' if form != 'csv' else ''}" for code in codes]
    kinds = {"doubles": pa.float64(), "unsigned": pa.uint64(), "decimals": pa.decimal128(9, 2), "texts": pa.string()}
    kinds |= {"categories": pa.dictionary(pa.int32(), pa.string())}
    values = [str(code) for code in codes] if form in ("texts", "categories") else codes
    return pa.array(values, kinds.get(form, pa.int32()))


PADDED = ["csv", "csv with a point", "integers", "doubles", "unsigned", "decimals", "texts", "categories"]


@pytest.mark.parametrize("form", PADDED)
@pytest.mark.parametrize("settings", [{"missing": [0]}, {"columns": [{"name": "x", "missing": [0]}]}])
def test_a_missing_value_is_missing_in_any_type(tmp_path, form, settings):
    path, told = column_in_files(tmp_path, padded(form, [0, 5, 7] * 50)), []
    data = source_of(path, tmp_path / "cache", told.append, **settings)
    [line] = [line.split() for line in told if line.split()[0] == "x"]
    assert line[1:5] == ["id", "4", "2", "50"] and data.field_rows[0] == 2 + FIRST_KEY
    [*_, block] = blocks_of(next(path.iterdir()), Encoder.from_arrays(data.encoder.to_arrays()))
    assert (data.encoder.samples(block).ids[:, 0] == MISSING_KEY).tolist() == [True, False, False] * 50


@pytest.mark.parametrize("form", PADDED)
@pytest.mark.parametrize(
    "rule, none", [({"kind": "number", "transform": "none"}, 0.0), ({"rows": 8, "hash": False}, 8)]
)
def test_a_missing_value_is_missing_in_numbers_and_integers_as_they_are(tmp_path, form, rule, none):
    path = column_in_files(tmp_path, padded(form, [1, 5, 7] * 50))
    data = source_of(
        path, tmp_path / "cache", columns=[{"name": "x", "missing": [1], **rule}, {"name": "t", "kind": "id"}]
    )
    [block] = blocks_of(next(path.iterdir()), data.encoder)
    samples = data.encoder.samples(block)
    found = samples.dense[:, 0] if data.num_dense else samples.ids[:, 0]
    assert found.tolist() == [none, 5, 7] * 50


def test_missing_values_in_lists_are_skipped(tmp_path):
    lists = {"x": [[0, 3, 0], [0], [4, 0, 5]] * 20, "click": [0, 1] * 30}
    pq.write_table(pa.table(lists), tmp_path / "a.parquet")
    lines = "".join(f"{'|'.join(map(str, x))},{click}\n" for x, click in zip(*lists.values()))
    write(tmp_path / "a.csv", "x,click\n" + lines)
    for name, rule in (("a.parquet", {}), ("a.csv", {"separator": "|"})):
        data = source_of(tmp_path / name, tmp_path / "cache", columns=[{"name": "x", "missing": [0], **rule}])
        [block] = blocks_of(tmp_path / name, data.encoder)
        assert np.diff(data.encoder.samples(block).bags[0].offsets).tolist() == [1, 0, 2] * 20


@pytest.mark.parametrize(
    "separator, written",
    [(",", str), (",", json.dumps), (" ", lambda x: str(np.array(x))), (",", lambda x: str(tuple(x)))],
)
def test_lists_that_programs_have_written_as_text_are_without_brackets_and_quotes(tmp_path, separator, written):
    lists = [["a", f"b{i % 3}", f"c{i % 4}"][: i % 5] for i in range(120)]
    clicks = [i % 2 for i in range(120)]
    pq.write_table(pa.table({"x": lists, "click": clicks}), tmp_path / "a.parquet")
    csv.write_csv(pa.table({"x": [written(x) for x in lists], "click": clicks}), tmp_path / "a.csv")
    told, expected = [
        samples_of(source_of(tmp_path / name, tmp_path / "cache", columns=[{"name": "x", "pool": "sum", **rule}]))
        for name, rule in (("a.csv", {"separator": separator}), ("a.parquet", {}))
    ]
    assert all(map(equal, told, expected))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_missing_values_are_none_of_labels_unless_their_rule_names_them(tmp_path, form):
    clicks, texts = [0, 1, -1] * 40, [f"t{i % 3}" for i in range(120)]
    table = pa.table({"t": texts, "click": clicks, "buy": [1, 0, 1] * 40})
    path = tmp_path / f"a.{form}"
    csv.write_csv(table, path) if form == "csv" else pq.write_table(table, path)
    rule = {"name": "click", "missing": [-1]}
    data = source_of(path, tmp_path / "cache", label=["click", "buy"], missing=[0], columns=[rule])
    label = np.concatenate([part.label for part in samples_of(data)])
    assert np.isnan(label[:, 0]).sum() == 40 and np.nansum(label[:, 0]) == 40 and label[:, 1].sum() == 80
    with pytest.raises(DataError, match="column click: .*-1.* is no label, as it is missing"):
        source_of(path, tmp_path / "cache", columns=[rule])
    with pytest.raises(DataError, match="click is a label, whose rule can only have missing"):
        source_of(path, tmp_path / "cache", columns=[{"name": "click", "kind": "id"}])


def test_words_that_are_missing_in_one_column_of_numbers_are_refused_in_another(tmp_path):
    lines = "".join(f"{i / 8},{i / 8},{i % 2}\n" for i in range(100))
    path = write(tmp_path / "a.csv", f"a,b,click\n?,1,0\n{lines}")
    rules = [{"name": "a", "missing": ["?"]}, {"name": "c", "kind": "id"}]
    path.write_text(path.read_text().replace("\n", ",x\n").replace("click,x", "click,c"))
    assert source_of(path, tmp_path / "cache", columns=rules).num_dense == 2
    path.write_text(path.read_text() + "1,?,0,x\n")
    with pytest.raises(DataError, match="line 103, column b: .* is no finite number"):
        source_of(path, tmp_path / "cache", columns=rules)


# What is held out


def test_a_share_is_held_out(tmp_path):
    text = "a,click\n" + "".join(f"{i},{i % 2}\n" for i in range(3000))
    data = source_of(write(tmp_path / "a.csv", text), tmp_path / "cache", valid=0.3)
    assert data.num_train + data.num_valid == 3000 and 800 < data.num_valid < 1000


def test_the_last_values_of_a_column_are_held_out(tmp_path, small):
    text = "day,a,click\n" + "".join(f"{i % 12},{i},{i % 2}\n" for i in range(1200))
    path = write(tmp_path / "a.csv", text)
    data = source_of(path, tmp_path / "one", valid={"column": "day", "last": 2})
    assert data.num_valid == 200 and [feature.name for feature in data.features] == ["a"]
    assert set(data.valid(0, 200).ids[:, 0]) == {UNSEEN_KEY}
    source_of(path, tmp_path / "two", valid={"column": "day", "last": 2}, size=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    pq.write_table(
        pa.table({"day": pa.array([i % 12 for i in range(1200)]), "a": range(1200), "click": [0, 1] * 600}),
        tmp_path / "a.parquet",
    )
    assert source_of(tmp_path / "a.parquet", tmp_path / "p", valid={"column": "day", "last": 2}).num_valid == 200


NOON = datetime(2024, 5, 30, 12)
TIMES = [NOON - timedelta(hours=5 * i) for i in range(400)]


@pytest.mark.parametrize("form", ["text", "text with zones", "ns", "tz", "date", "dictionary"])
@pytest.mark.parametrize("last, num", [("7d", 34), ("10h", 2), ("2w", 68)])
def test_the_last_span_of_time_is_held_out(tmp_path, small, form, last, num):
    rows = {"a": [f"a{i % 5}" for i in range(400)], "click": [i % 2 for i in range(400)]}
    if form.startswith("text"):
        write_time = {"text": "%Y-%m-%d %H:%M:%S.25", "text with zones": "%Y-%m-%dT%H:%M:%S-02:00"}[form]
        times = pa.array([time.strftime(write_time) for time in TIMES])
    elif form == "date":
        times = pa.array([time.date() for time in TIMES])
        num = sum((NOON.date() - time.date()).days < {"7d": 7, "10h": 1, "2w": 14}[last] for time in TIMES)
    else:
        kind = pa.timestamp("us", "Asia/Tokyo") if form == "tz" else pa.timestamp("ns")
        times = pa.array(TIMES, kind) if form != "dictionary" else pa.array(map(str, TIMES)).dictionary_encode()
    table = pa.table({"when": times, **rows})
    path = tmp_path / ("a.csv" if form.startswith("text") else "a.parquet")
    if path.suffix == ".csv":
        write(path, text_of(table) + ",a0,1\n")
    else:
        pq.write_table(table, path, row_group_size=100)
    rule = {"column": "when", "last": last}
    data = source_of(path, tmp_path / "one", valid=rule)
    assert data.num_valid == num and [feature.name for feature in data.features] == ["a"]
    assert data.num_train == 400 - num + (path.suffix == ".csv")  # a missing time is trained on
    source_of(path, tmp_path / "three", valid=rule, size=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_a_file_without_values_in_a_column_of_times_or_lists_is_read(tmp_path):
    rows = {"a": ["x", "y"] * 50, "click": [0, 1] * 50}
    pq.write_table(pa.table({"when": TIMES[:100], "tags": [["s", "t"]] * 100, **rows}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"when": pa.nulls(100), "tags": pa.nulls(100), **rows}), tmp_path / "b.parquet")
    data = source_of(tmp_path / "*.parquet", tmp_path / "cache", valid={"column": "when", "last": "10h"})
    assert (data.num_train, data.num_valid) == (198, 2)
    assert len(data.train(0, 198).bags[0].values) == 2 * 98


def test_a_time_beyond_the_range_of_microseconds_is_a_bad_row(tmp_path):
    when = pa.array([86_400_000 * i for i in range(100)] + [1 << 62], pa.timestamp("ms"))
    rows = {"a": ["x"] * 101, "click": [i % 2 for i in range(101)]}
    pq.write_table(pa.table({"when": when, **rows}), tmp_path / "a.parquet")
    rule = {"column": "when", "last": "7d"}
    with pytest.raises(DataError, match="row 101, column when: .* is no date or timestamp"):
        source_of(tmp_path / "a.parquet", tmp_path / "cache", valid=rule)
    data = source_of(tmp_path / "a.parquet", tmp_path / "cache2", valid=rule, max_bad_rows=1)
    assert (data.num_train, data.num_valid) == (93, 7)


def test_the_rows_of_another_file_are_held_out(tmp_path):
    table = table_of()
    write(tmp_path / "a.csv", text_of(table.slice(0, 250)))
    write(tmp_path / "b.csv", text_of(table.slice(250)))
    data = source_of(tmp_path / "a.csv", tmp_path / "cache", valid=str(tmp_path / "b.csv"))
    assert (data.num_train, data.num_valid) == (250, 50)
    data = source_of(tmp_path / "*.csv", tmp_path / "cache", valid=str(tmp_path / "b.csv"))
    assert (data.num_train, data.num_valid) == (250, 50)


def test_a_file_held_out_through_a_link_is_not_trained_on(tmp_path):
    (tmp_path / "log").mkdir()
    write(tmp_path / "log" / "a.csv", "a,click\n" + "1,0\n2,1\n" * 30)
    write(tmp_path / "log" / "b.csv", "a,click\n" + "3,0\n4,1\n" * 10)
    (tmp_path / "link").symlink_to(tmp_path / "log")
    data = source_of(tmp_path / "log", tmp_path / "cache", valid=str(tmp_path / "link" / "b.csv"))
    assert (data.num_train, data.num_valid) == (60, 20)


def test_columns_of_unseen_held_out_values_and_without_values_are_said(tmp_path):
    lines = [f"s{i},t{i // 2},,{i % 3},{i // 500},{i % 2}" for i in range(1000)]
    path = write(tmp_path / "a.csv", "session,task,note,kind,day,click\n" + "\n".join(lines) + "\n")
    told, rules = [], [{"name": "task", "min_count": 2}, {"name": "session", "rows": 100}]
    source_of(path, tmp_path / "cache", told.append, valid={"column": "day", "last": 1}, columns=rules)
    lines = {line.split()[0]: line for line in told[-5:]}
    assert "100 % of the held-out values were not seen 2 times in training" in lines["task"]
    assert lines["note"].split()[1] == "drop" and "no row has a value: kind: id keeps it" in lines["note"]
    assert "seen" not in lines["session"] + lines["kind"]


# Encoder and reader


def test_a_saved_encoder_encodes_files_in_order_without_labels(tmp_path):
    table = table_of()
    rules = [TAGS, {"name": "price", "transform": "standardize"}, {"name": "user", "rows": 11}]
    data = source_of(write(tmp_path / "a.csv", text_of(table)), tmp_path / "cache", columns=rules)
    np.savez(tmp_path / "encoder.npz", **data.encoder.to_arrays())
    encoder = Encoder.from_arrays(np.load(tmp_path / "encoder.npz"))
    assert encoder.features == data.features and encoder.tables == data.tables
    whole = in_file_order(data, tmp_path / "a.csv")
    assert sorted(map(tuple, whole.ids)) == sorted(map(tuple, np.concatenate([part.ids for part in samples_of(data)])))
    write(tmp_path / "b.csv", text_of(table.drop_columns(["click"])))
    found = [encoder.samples(block) for block in blocks_of(tmp_path / "b.csv", encoder)]
    assert equal(found[0], type(whole)(whole.ids, whole.dense, np.zeros(300, np.float32), bags=whole.bags))


def test_files_with_mostly_unseen_values_or_without_values_have_remarks(tmp_path):
    rules = [TAGS, {"name": "day", "rows": 5, "hash": False}, {"name": "user", "rows": 11}]
    encoder = source_of(write(tmp_path / "a.csv", text_of(table_of())), tmp_path / "cache", columns=rules).encoder

    def remarks(table):
        path, coverage = write(tmp_path / "b.csv", text_of(table)), Coverage(encoder)
        for block in blocks_of(path, encoder):
            coverage.add(block, encoder.samples(block))
        return coverage.remarks()

    table, nothing = table_of(), pa.nulls(300)
    cities = pa.array([f"town {i}" if i % 5 < 3 else "city 1" for i in range(300)])
    assert remarks(table) == []
    assert remarks(table.set_column(1, "city", cities)) == ["column city: 60 % of the values were not seen in training"]
    for i, name in enumerate(table.column_names[:5]):
        assert remarks(table.set_column(i, name, nothing)) == [f"column {name} has no value in any row"]


def test_inspect_prints_a_source_that_can_be_used(tmp_path):
    from omegaconf import OmegaConf

    path = write(tmp_path / "a.csv", text_of(table_of()))
    config = OmegaConf.to_container(OmegaConf.create(inspected(str(path)).replace("${seed}", "0")))
    assert config.pop("_target_") == "hetmpi.data.tabular.Tabular" and config["label"] == "click"
    data = Tabular(**config, cache=str(tmp_path / "cache"))
    data.prepare(0, 1, lambda: None, quiet)
    assert data.dense_names == ["price"]


def test_adult_is_read_as_its_notes_say(tmp_path):
    if not ADULT.exists():
        pytest.skip(f"{ADULT} is absent: it is not part of the project")
    names = [f"a{i}" for i in range(14)] + ["income"]
    rules = [{"name": "a0", "kind": "number"}]
    data = source_of(
        ADULT / "adult.data", tmp_path / "cache", valid=str(ADULT / "adult.test"), names=names, label="income",
        positive=[">50K", ">50K."], missing=["?"], max_bad_rows=1, columns=rules,
    )  # fmt: skip
    assert (data.num_train, data.num_valid) == (32_561, 16_281)
    assert samples_of(data)[1].label.mean() == pytest.approx(0.236, abs=0.001)


# What is refused

GOOD = "user,price,click\n" + "".join(f"u{i % 5},{i}.5,{i % 2}\n" for i in range(100))
LINE = "u1,0.5,1\n"


def csv_file(text):
    return lambda folder: write(folder / "a.csv", text)


def parquet_file(**columns):
    def made(folder):
        pq.write_table(pa.table(columns), folder / "a.parquet")
        return folder / "a.parquet"

    return made


def cut(name, whole):
    return lambda folder: write(folder / name, whole[: len(whole) // 2])


def damaged_parquet(folder):
    path = parquet_file(user=[f"u{i}" for i in range(2000)], click=[0, 1] * 1000)(folder)
    text = bytearray(path.read_bytes())
    text[100:2000] = bytes(byte ^ 0x5A for byte in text[100:2000])
    path.write_bytes(text)
    return path


def cut_parquet(folder):
    path = parquet_file(user=[f"{i}" for i in range(100)], click=[0, 1] * 50)(folder)
    return write(path, path.read_bytes()[:-100])


def long_line(folder):
    with open(folder / "a.csv", "wb") as file:
        file.write(GOOD.encode())
        file.truncate(1 << 30)
    return folder / "a.csv"


def two_files(second, first=GOOD):
    def made(folder):
        write(folder / "a.csv", first)
        write(folder / "b.csv", second)
        return folder / "*.csv"

    return made


def two_tables(names=(), **second):
    """names: of columns of the second file that are all alike."""

    def made(folder):
        (folder / "d").mkdir()
        pq.write_table(pa.table({"user": ["a", "b"] * 9, "click": [0, 1] * 9}), folder / "d" / "a.parquet")
        alike = pa.table([pa.array([1])] * len(names), names=list(names))
        pq.write_table(alike if names else pa.table(second), folder / "d" / "b.parquet")
        return folder / "d"

    return made


def mixed_forms(folder):
    (folder / "d").mkdir()
    write(folder / "d" / "a.csv", GOOD)
    pq.write_table(pa.table({"user": ["a"], "click": [1]}), folder / "d" / "b.parquet")
    return folder / "d"


def folder_of(name, *hidden):
    def made(folder):
        (folder / name).mkdir()
        for one in hidden:
            (folder / name / one).touch()
        return folder / name

    return made


def rules(*columns, **settings):
    return {"columns": list(columns), **settings}


MANY = "".join(np.random.default_rng(0).integers(0, 10, 200_000).astype(str).tolist())
CSV = csv_file(GOOD)
PRICES = "user,price,click\n" + "".join(f"u{i % 7},{i / 8},{i % 2}\n" for i in range(300))
USER_NUMBER = rules({"name": "user", "kind": "number"})
A_INTEGER = rules({"name": "a", "rows": 3, "hash": False})
PRICE = rules({"name": "price", "kind": "number"})
BIG = (GOOD + "".join(f"u{MANY[i : i + 20]},0.5,1\n" for i in range(20_000))).encode()
LISTS = parquet_file(user=["a", "b"] * 30, tags=[["x"], ["y", "z"]] * 30, click=[0, 1] * 30)
REFUSED = {
    "no file": (lambda f: f / "none.csv", {}, ["data.path: there is no file", "none.csv"]),
    "a folder without files": (folder_of("d"), {}, ["no file in the folder", "/d"]),
    "a folder of hidden files": (folder_of("d", ".x", "_SUCCESS"), {}, ["no file in the folder", "/d"]),
    "an empty folder named .parquet": (folder_of("d.parquet"), {}, ["no file in the folder", "d.parquet"]),
    "an empty file": (csv_file(""), {}, ["a.csv is empty"]),
    "only line ends": (csv_file("\n\n\n"), {}, ["a.csv is empty"]),
    "only a header": (csv_file("user,click\n"), {}, ["a.csv has only a header, no rows"]),
    "an empty Parquet file": (parquet_file(user=pa.array([], pa.string()), click=pa.array([], pa.int64())), {},
                              ["a.parquet: 0 good rows to train on and 0 to hold out"]),
    "no label given": (CSV, {"label": None}, ["give data.label=COLUMN", "user, price, click"]),
    "no such label": (CSV, {"label": "clik"}, ["data.label=clik", "a.csv", "did you mean click?"]),
    "wrong delimiter": (CSV, {"delimiter": ";"}, ["data.label=click", "divided by ';'", "user,price,click"]),
    "no header": (csv_file("u1,0.5,1\n" * 9), {}, ["data.label=click", "did the first line", "data.names"]),
    "names of wrong length": (CSV, {"names": ["a", "click"]}, ["data.names has 2 names", "3 values"]),
    "names for Parquet": (LISTS, {"names": ["a", "click"]}, ["data.names is for text", "a.parquet"]),
    "a label of 2": (csv_file(GOOD + "u1,0.5,2\n"), {}, ["a.csv, line 102, column click: '2' is neither 0 nor 1"]),
    "a label of text": (csv_file(GOOD + "u1,0.5,yes\n"), {}, ["line 102, column click: 'yes'",
                        "give data.positive=[yes], the labels that count as 1; or correct"]),
    "labels of texts": (parquet_file(a=["x"] * 40_000, click=["no", "yes"] * 20_000), {},
                        ["give data.positive=[yes], the", "16,384 bad rows so far, where reading stopped (bad label"]),
    "labels of texts to quote": (csv_file("a,click\n" + "x, >50K\nx, <=50K\n" * 50), {},
                                 ["""give 'data.positive=[">50K"]', the labels"""]),
    "labels from 1 to 5": (csv_file("a,click\n" + "x,1\nx,5\n" * 50), {},
                           ["give data.positive=[TEXT, ...], the labels that count as 1, or data.label_kind=number"]),
    "a missing label": (csv_file(GOOD + "u1,0.5,\n"), {}, ["line 102, column click: a missing value"]),
    "a missing label by text": (csv_file(GOOD + "u1,0.5,NA\n"), {"positive": ["1"]}, ["line 102, column click: 'NA'"]),
    "a label that is no number": (csv_file(GOOD + "u1,0.5,x\n"), {"label_kind": "number"}, ["line 102, column click"]),
    "rows without any label": (csv_file(SEVERAL + "1,,\n"), {"label": ["click", "buy"]},
                               ["line 202, column click: a missing value and none in buy", "no label 1"]),
    "a bad one of several labels": (csv_file(SEVERAL + "1,0,2\n"), {"label": ["click", "buy"]},
                                    ["line 202, column buy: '2' is neither 0 nor 1"]),
    "no such label among several": (CSV, {"label": ["click", "bui"]}, ["data.label=bui", "a.csv"]),
    "labels twice": (CSV, {"label": ["click", "click"]}, ["data.label: names must differ, got click, click"]),
    "no labels": (CSV, {"label": []}, ["data.label must be the name of a column, or a list of names, got []"]),
    "weights of one label": (CSV, {"label_weights": [2]}, ["data.label_weights=[2.0] must have a number for each of"]),
    "weights of others": (csv_file(SEVERAL), {"label": ["click", "buy"], "label_weights": [1, 2, 3]},
                          ["for each of several labels, data.label is click, buy"]),
    "negative weights": (csv_file(SEVERAL), {"label": ["click", "buy"], "label_weights": [1, -1]},
                         ["data.label_weights must be numbers of at least 0, not all 0, got [1, -1]"]),
    "a label that no training row has": (csv_file(SEVERAL.replace("buy\n", "buy,gone\n").replace("\n", ",\n")
                                         .replace("gone,", "gone")), {"label": ["click", "gone"], "positive": ["1"]},
                                         ["no training label of gone is one of data.positive=['1']"]),
    "a kind of label": (CSV, {"label_kind": "rank"},
                        ["data.label_kind must be one of click, number, probability, classes, none, got rank"]),
    "text for a number": (csv_file(GOOD + LINE + "u1,cheap,1\n"), PRICE, ["line 103, column price: 'cheap'"]),
    "infinity": (csv_file(GOOD + "u1,inf,1\n"), {}, ["line 102, column price: 'inf' is no finite number"]),
    "beyond float32": (csv_file(GOOD + "u1,1e39,1\n"), PRICE, ["line 102, column price: '1e39' is no finite number"]),
    "too few columns": (csv_file(GOOD + "u1,1\n" * 7), {}, ["line 102, 2 columns instead of 3: 'u1,1'", "line 106"]),
    "too many columns": (csv_file(GOOD + "u1,1,1,1\n"), {}, ["line 102, 4 columns instead of 3"]),
    "bad lines above the limit": (csv_file(GOOD + "x\n" * 3), {"max_bad_rows": 2}, ["data.max_bad_rows=2", "line 104"]),
    "columns that differ": (two_files("user,cost,click\n" + LINE), {}, ["b.csv has no column price", "cost"]),
    "a further column": (two_files("x,user,price,click\nq,u1,0.5,1\n"), {}, ["b.csv has x, which ", "a.csv has not"]),
    "a further column of Parquet": (two_tables(user=["a"], click=[1], x=[2.5]), {}, ["b.parquet has x, which "]),
    "two columns of one name in a second file": (two_tables(["user", "click", "user"]), {}, ["b.parquet: two columns"]),
    "a column without a name": (two_tables(["user", "click", ""]), {}, ["b.parquet: column 3 has no name"]),
    "a quoted line end": (csv_file(GOOD + '"u\n1",0.5,1\n'), {}, ["line 102: a quoted value goes on in the next line"]),
    "an open quote": (csv_file(GOOD + '"u1,0.5,1\n' + LINE), {}, ["line 102: a quoted value goes on"]),
    "two columns of one name": (csv_file("a,a,click\n1,2,0\n"), {}, ["line 1: two columns are named a"]),
    "names that are not UTF-8": (csv_file(b"us\xff,click\n1,0\n"), {}, ["line 1: no UTF-8 text, the columns' names"]),
    "zeros": (csv_file(b"\0" * 999), {}, ["line 1: no UTF-8 text", "end in .gz or .zst"]),
    "UTF-16": (csv_file(GOOD.encode("utf-16")), {}, ["line 1: no UTF-8 text", "convert the file to UTF-8"]),
    "lines that end in CR": (csv_file(GOOD.replace("\n", "\r")), {}, ["a.csv: its lines end in CR"]),
    "a stray text": (csv_file(PRICES + "u1,cheap,1\n"), {}, ["line 302, column price: 'cheap'", "data.missing"]),
    "a pipe": (lambda f: (os.mkfifo(f / "a.csv"), f / "a.csv")[1], {}, ["a.csv is no file that can be read"]),
    "a loop of links": (lambda f: (os.symlink(f / "a.csv", f / "a.csv"), f / "a.csv")[1], {}, ["a broken link"]),
    "a damaged page of Parquet": (damaged_parquet, {}, ["a.parquet, row group 1, column user, cannot be read"]),
    "a gz cut short": (cut("a.csv.gz", gzip.compress(BIG)), {}, ["a.csv.gz cannot be decompressed"]),
    "a zst cut short": (cut("a.csv.zst", pa.Codec("zstd").compress(BIG, asbytes=True)), {}, ["a.csv.zst cannot be"]),
    "text named gz": (lambda f: write(f / "a.csv.gz", GOOD), {}, ["a.csv.gz cannot be decompressed"]),
    "a Parquet file cut short": (cut_parquet, {}, ["a.parquet is no complete Parquet file"]),
    "text named Parquet": (lambda f: write(f / "a.parquet", GOOD), {}, ["a.parquet is no complete Parquet file"]),
    "a line of 1 GB": (long_line, {}, ["a.csv, line 102 is longer than 16 MiB"]),
    "two forms": (mixed_forms, {}, ["a.csv is text", "b.parquet is Parquet", "by a glob"]),
    "infinity in Parquet": (parquet_file(user=["a"] * 9, x=[1.0] * 8 + [float("inf")], click=[1] * 9), {},
                            ["a.parquet, row group 1, row 9, column x: 'inf'"]),
    "nested values": (parquet_file(user=["a"], s=[{"x": 1}], click=[1]), rules({"name": "s"}),
                      ["column s holds nested", "kind: drop"]),
    "lists of numbers": (parquet_file(user=["a"], s=[[1.5]], click=[1]), rules({"name": "s", "kind": "id"}),
                         ["column s holds vectors of numbers, which cannot be used as id", "kind: drop"]),
    "unequal vectors": (parquet_file(user=["a", "b"], s=[[1.5], [1.0, 2.0]], click=[1, 0]), {},
                        ["row 2, column s", "has another length than 1", "write lists of ids as integers"]),
    "text in Parquet for a number": (parquet_file(user=["a"] * 9, click=[1] * 9), USER_NUMBER,
                                     ["row group 1, row 1, column user: 'a' is no finite number"]),
    "an integer above rows": (CSV, rules({"name": "user", "rows": 3, "hash": False}),
                              ["line 2, column user: 'u0' is no integer of at least 0"]),
    "an integer beyond 64 bits": (csv_file(f"a,click\n1,0\n{10**30},1\n"), A_INTEGER,
                                  ["line 3, column a", "is no integer of at least 0"]),
    "a negative integer": (csv_file("a,click\n1,0\n-1,1\n"), A_INTEGER,
                           ["line 3, column a: '-1' is no integer of at least 0"]),
    "an unknown key": (CSV, rules({"name": "user", "row": 3}), ["name: user: there is no key row", "rows"]),
    "a rule without a name": (CSV, rules({"kind": "id"}), ["each rule needs a name"]),
    "a rule that matches nothing": (CSV, rules({"name": "usr"}), ["no column is named usr: did you mean"]),
    "a glob that matches nothing": (CSV, rules({"name": "x*"}), ["no column is named x*"]),
    "a rule for the label": (CSV, rules({"name": "click"}), ["click is a label"]),
    "min_count of 0": (CSV, rules({"name": "user", "min_count": 0}), ["min_count must be an integer of at"]),
    "min_count of hashed rows": (CSV, rules({"name": "user", "min_count": 2, "rows": 9}), ["min_count needs"]),
    "rows of 0": (CSV, rules({"name": "user", "rows": 0}), ["rows (a number, auto or open) must be an integer"]),
    "a kind": (CSV, rules({"name": "user", "kind": "text"}), ["kind must be id, number or drop, got text"]),
    "a pool": (CSV, rules({"name": "user", "pool": "max", "separator": "|"}), ["pool must be one of sum, mean"]),
    "a pool of text": (CSV, rules({"name": "user", "pool": "sum"}), ["column user: pool needs"]),
    "max_len of text": (CSV, rules({"name": "user", "max_len": 3}), ["column user: max_len needs several"]),
    "keep without max_len": (LISTS, rules({"name": "tags", "keep": "last"}), ["keep says which values max_len keeps"]),
    "an unknown keep": (LISTS, rules({"name": "tags", "max_len": 2, "keep": "newest"}), ["keep must be first or last"]),
    "a separator of lists": (LISTS, rules({"name": "tags", "separator": "|"}), ["column tags: it holds lists already"]),
    "share of no column": (CSV, rules({"name": "user", "share": "itm"}), ["no id column is named itm"]),
    "share of itself": (CSV, rules({"name": "user", "share": "user"}), ["share names the column itself"]),
    "share of a sharing one": (csv_file("a,b,c,click\nx,y,z,1\n"),
                               rules({"name": "a", "share": "b"}, {"name": "b", "share": "c"}),
                               ["column a: share: b shares the rows of c itself"]),
    "rows where it shares": (csv_file("a,b,click\nx,y,1\n"),
                             rules({"name": "a", "share": "b", "rows": 4}), ["has no rows"]),
    "a transform of an id": (CSV, rules({"name": "user", "kind": "id", "transform": "log1p"}),
                             ["column user: a column of kind id has no transform"]),
    "a transform": (CSV, rules({"name": "price", "transform": "log"}), ["transform must be auto, none, log1p"]),
    "edges": (CSV, rules({"name": "price", "transform": [3, 1]}), ["edges of transform must be rising"]),
    "rows of a number": (CSV, rules({"name": "price", "kind": "number", "rows": 3}), ["kind number has no rows"]),
    "no id": (CSV, rules({"name": "user", "kind": "drop"}), ["no column is an id, at least one is needed"]),
    "a share of 2": (CSV, {"valid": 2}, ["data.valid", "at most 1"]),
    "a share of 0": (CSV, {"valid": 0}, ["data.valid must be a share between 0 and 1, got 0"]),
    "keys of valid": (CSV, {"valid": {"column": "user"}}, ["data.valid must have the keys column and last"]),
    "no such column of valid": (CSV, {"valid": {"column": "usr", "last": 1}}, ["data.valid: column=usr"]),
    "few rows to hold out": (csv_file("t,a,click\n" + "".join(f"{i},{i % 9},{i % 2}\n" for i in range(10_000))),
                             {"valid": {"column": "t", "last": 7}},
                             ["holds out 7 of 10,000 rows, at least 100 are", "last: 7 counts distinct values of t",
                              "give more, or a share as data.valid=0.1"]),
    "a small share": (csv_file("a,click\n" + "".join(f"{i % 9},{i % 2}\n" for i in range(10_000))), {"valid": 1e-3},
                      ["of 10,000 rows, at least 100 are needed", "data.valid=0.1"]),
    "one label to hold out": (csv_file("t,a,click\n" + "0,a,0\n" * 9000 + "1,a,1\n2,a,1\n" * 5000),
                              {"valid": {"column": "t", "last": 2}},
                              ["holds out 10,000 of 19,000 rows, all with the label 1", "AUC"]),
    "a span of another unit": (CSV, {"valid": {"column": "user", "last": "7y"}}, ["span of time", "7d, 2w, got 7y"]),
    "a span of texts": (CSV, {"valid": {"column": "user", "last": "7d"}}, ["column user has no date or timestamp"]),
    "a span of integers": (parquet_file(t=[1, 2] * 50, a=["x"] * 100, click=[0, 1] * 50),
                           {"valid": {"column": "t", "last": "7d"}}, ["column t holds numbers from 1 to 2, which"]),
    "a time of another form": (csv_file("t,a,click\n2024-05-01,x,1\n2024-04-01,y,0\n2024-02-30,x,1\n"),
                               {"valid": {"column": "t", "last": "7d"}},
                               ["line 4, column t: '2024-02-30' is no date or timestamp"]),
    "nothing to train": (CSV, {"valid": {"column": "user", "last": 9}}, ["0 good rows to train on and 100"]),
    "nothing to hold out": (csv_file("a,click\nx,1\n"), {}, ["1 good rows to train on and 0 to hold out"]),
    "no file to hold out": (CSV, {"valid": "none.csv"}, ["data.valid: there is no file", "none.csv"]),
    "all files held out": (two_files(GOOD), {"valid": "FOLDER/*.csv"}, ["data.valid=", "holds out all files"]),
    "a delimiter with a quote": (CSV, {"delimiter": '";'}, ["data.delimiter must be 1 to 16 characters of ASCII"]),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(tmp_path, case, size):
    make, settings, words = REFUSED[case]
    if isinstance(settings.get("valid"), str):
        settings = {**settings, "valid": settings["valid"].replace("FOLDER", str(tmp_path))}
    path, begin = make(tmp_path), time.monotonic()
    with pytest.raises(UserError) as refusal:
        source_of(path, tmp_path / "cache", size=size, **settings)
    for word in words:
        assert word in str(refusal.value), refusal.value
    assert time.monotonic() - begin < 10 and len(str(refusal.value).splitlines()) <= 7
    assert not list((tmp_path / "cache").rglob("*.part-*"))


def test_no_right_to_read_is_refused_by_name(tmp_path):
    if os.geteuid() != 0:
        path = write(tmp_path / "a.csv", GOOD)
        path.chmod(0)
        with pytest.raises(DataError, match="a.csv cannot be read: Permission denied"):
            source_of(path, tmp_path / "cache")
        return
    folder = Path("/tmp") / f"hetmpi-unreadable-{os.getpid()}"  # pytest's folders are closed to other users
    folder.mkdir(mode=0o755)
    try:
        path = write(folder / "a.csv", GOOD)
        path.chmod(0)
        os.seteuid(65534)
        with pytest.raises(DataError, match="a.csv cannot be read: Permission denied"):
            Tabular(str(path), 0, "click", cache=str(folder / "cache")).prepare(0, 1, lambda: None, quiet)
    finally:
        os.seteuid(0)
        shutil.rmtree(folder)


def test_a_full_disk_is_refused_by_name(tmp_path):
    rng = np.random.default_rng(0)
    text = "a,b,click\n" + "".join(f"{a},{b},{a % 2}\n" for a, b in rng.integers(0, 1 << 60, (30_000, 2)).tolist())
    path, before = write(tmp_path / "a.csv", text), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(DataError, match="data.cache=.*: no space left while preparing .*a.csv"):
            source_of(path, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert source_of(path, tmp_path / "cache").num_train


LIMITED = """
import resource, sys
from hetmpi.data.tabular import Tabular
from hetmpi.errors import UserError
from hetmpi import inspect
def limit(megabytes):
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (megabytes << 20), resource.RLIM_INFINITY))
limit(1)
for call in (
    lambda: Tabular(sys.argv[1], 0, "click", cache=sys.argv[2]).prepare(0, 1, lambda: None, lambda line: None),
    lambda: inspect.main([sys.argv[1]]),
):
    try:
        call()
    except (UserError, SystemExit) as refusal:
        print(refusal)
"""


def test_memory_that_is_refused_is_said_in_one_line(tmp_path):
    path = write(tmp_path / "a.csv", "a,click\n" + "".join(f"{'x' * 900}{i},{i % 2}\n" for i in range(10_000)))
    run = [sys.executable, "-c", LIMITED, str(path), str(tmp_path / "cache")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("this process got no more memory" in line for line in lines), (lines, done.stderr)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:90])


def emptied(path):
    path.write_bytes(b"")


def made_a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [cut_short, emptied, Path.unlink, made_a_folder])
@pytest.mark.parametrize("of", ["train-000.parquet", "train-000.parquet.sums", "registers.npy", "counts"])
def test_damaged_prepared_data_are_refused_by_name(tmp_path, of, damage):
    path = write(tmp_path / "a.csv", GOOD)
    folder = source_of(path, tmp_path / "cache").folder
    damaged = next(file for pattern in (of, f"{of}-*", f"*/{of}") for file in Path(folder).glob(pattern))
    damage(damaged)
    if of == "counts" and damage == Path.unlink:
        assert source_of(path, tmp_path / "cache").num_train  # counted again
        return
    with pytest.raises(DataError, match=f"data.cache: .*{folder}.*damaged: .*remove the folder and give the raw files"):
        source_of(path, tmp_path / "cache").train(0, 10)


def test_a_damaged_manifest_is_written_again_where_the_raw_files_are_given(tmp_path):
    path = write(tmp_path / "a.csv", GOOD)
    data = source_of(path, tmp_path / "cache")
    whole = contents(data.folder)
    write(Path(data.folder) / "manifest.json", "{")
    with pytest.raises(DataError, match="its manifest.json is damaged, or another program's: give the raw files"):
        source_of(data.folder, tmp_path / "cache")
    source_of(path, tmp_path / "cache")
    assert contents(data.folder) == whole


def test_a_flipped_bit_in_prepared_data_is_refused_or_changes_nothing(tmp_path):
    lists = [{"name": "tags", "separator": "|"}, {"name": "city", "rows": 50}]
    path = write(tmp_path / "a.csv", text_of(table_of(2_000)))
    data = source_of(path, tmp_path / "cache", columns=lists)
    samples, refused = samples_of(data), 0
    for seed, file in enumerate(2 * sorted(file for file in Path(data.folder).rglob("*") if file.is_file())):
        for _ in each_flipped_bit(file, seed, 6):
            try:
                assert all(map(equal, samples_of(source_of(path, tmp_path / "cache", columns=lists)), samples))
            except DataError as refusal:
                assert "damaged" in str(refusal) and len(str(refusal).splitlines()) == 1, refusal
                refused += 1
    assert refused > 50


def test_empty_lines_of_a_file_of_one_column_are_rows(tmp_path):
    data = source_of(write(tmp_path / "a.csv", GOOD), tmp_path / "cache", columns=[{"name": "price", "kind": "drop"}])
    path = write(tmp_path / "new.csv", "user\nu1\n\nu2\r\n\r\n\n")
    reader = Reader(str(path), data.encoder.reading)
    [block] = [block for unit in reader.units for block in reader.blocks(unit)]
    ids = data.encoder.samples(block).ids[:, 0]
    assert (ids == MISSING_KEY).tolist() == [False, True, False, True, True]
    path = write(tmp_path / "two.csv", "user,price\nu1,1\n\nu2,1\n\n")
    reader = Reader(str(path), data.encoder.reading)
    assert sum(len(block) for unit in reader.units for block in reader.blocks(unit)) == 2


def test_lists_and_texts_to_divide_are_read_alike(tmp_path):
    lines = "".join(f"t{i % 3} t{i % 5},{i % 2}\n" for i in range(50))
    data = source_of(
        write(tmp_path / "a.csv", "tags,click\n" + lines), tmp_path / "cache",
        columns=[{"name": "tags", "separator": " "}],
    )  # fmt: skip
    pq.write_table(pa.table({"tags": [["t0", "t4"], [], ["t2"]]}), tmp_path / "new.parquet")
    write(tmp_path / "new.csv", "tags,x\nt0 t4,1\n,1\nt2,1\n")
    found = []
    for name in ("new.parquet", "new.csv"):
        reader = Reader(str(tmp_path / name), data.encoder.reading)
        [block] = [block for unit in reader.units for block in reader.blocks(unit)]
        found.append(data.encoder.samples(block).bags[0])
    assert found[0].values.tolist() == found[1].values.tolist() and found[0].offsets.tolist() == [0, 2, 2, 3]


def test_another_delimiter_can_be_given_to_predict(tmp_path):
    rules = [{"name": "price", "transform": "none"}]
    data = source_of(write(tmp_path / "a.csv", GOOD), tmp_path / "cache", columns=rules)
    path = write(tmp_path / "new.csv", "user;price\nu1;1.5\n")
    with pytest.raises(DataError, match="new.csv has no column user, .* divided by ',': user;price"):
        reader = Reader(str(path), data.encoder.reading)
        list(reader.blocks(reader.units[0]))
    reader = Reader(str(path), data.encoder.reading, delimiter=";")
    [block] = reader.blocks(reader.units[0])
    assert data.encoder.samples(block).dense.tolist() == [[1.5]]


def test_ids_of_their_own_in_most_rows_have_a_remark(tmp_path):
    told = []
    source_of(write(tmp_path / "a.csv", "order,click\n" + "".join(f"{i},{i % 2}\n" for i in range(99))),
              tmp_path / "cache", told.append)  # fmt: skip
    assert any("most rows have a value of their own" in line for line in told)


def test_inspect_suggests_labels_separators_and_known_arguments(tmp_path):
    rows = "".join(f"{['no', 'yes'][i % 2]};2024-01-{i % 9 + 1};{i % 5},{i % 3},x{i % 4}\n" for i in range(200))
    told = inspected(str(write(tmp_path / "a.csv", "bought;day;tags\n" + rows)))
    for words in ('label: "bought"', 'positive: ["yes"]', "in 200 rows", 'several values per row add separator: ","'):
        assert words in told
    assert told.count("separator") == 1
    with pytest.raises(DataError, match="did you mean bought?"):
        inspected(str(tmp_path / "a.csv"), "bougt")
    assert 'positive: ["ja"]' in inspected(str(write(tmp_path / "b.csv", "u,kauf\n" + "x,nein\ny,ja\n" * 9)), "kauf")


def test_lists_in_files_to_predict_are_refused_where_training_had_single_values(tmp_path):
    clicks, path = [i % 2 for i in range(60)], tmp_path / "b.parquet"
    pq.write_table(pa.table({"u": [i % 7 for i in range(60)], "click": clicks}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"u": [[i % 7] for i in range(60)]}), path)
    source = source_of(tmp_path / "a.parquet", tmp_path / "cache")
    with pytest.raises(DataError, match="column u: it holds list<element: int64>, single values were expected"):
        blocks_of(path, source.encoder)
