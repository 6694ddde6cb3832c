"""What becomes of columns without a rule: judged by their values and the label, alike in inspect and training."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from hetmpi.data.tabular import DataError, Tabular
from hetmpi.data.tabular.choices import has_order, recurring
from hetmpi.data.tabular.dialect import Dialect
from hetmpi.data.tabular.encoder import FIRST_KEY
from hetmpi.data.tabular.layout import look
from hetmpi.data.tabular.reading import all_missing
from hetmpi.inspect import inspected

NUM = 6000


def log(num=NUM, seed=0):
    """A log of clicks: ids, quantities of which the clicks depend, times, and what differs in every row."""
    rng = np.random.default_rng(seed)
    user, age, visits = rng.integers(0, 300, num), rng.integers(18, 90, num), rng.geometric(0.02, num)
    logit = 1.5 * rng.normal(size=300)[user] + (age - 50) / 15 - np.log(visits) / 2 + 1.5
    return pa.table({
        "user": user, "age": age, "visits": visits, "weekday": rng.integers(0, 7, num),
        "hour": rng.integers(0, 24, num), "zip": [f"{value:05d}" for value in rng.integers(0, 400, num)],
        "order": rng.permutation(num) + 10**6, "number": np.arange(num),
        "session": [f"s{value}" for value in rng.permutation(num)],
        "seconds": 1_700_000_000 + rng.integers(0, 10**6, num),
        "time": pa.array(1_700_000_000 + rng.integers(0, 10**6, num)).cast(pa.timestamp("s")),
        "day": pa.array(19_000 + rng.integers(0, 60, num), pa.int32()).cast(pa.date32()),
        "price": np.round(rng.lognormal(size=num), 2), "empty": pa.nulls(num, pa.string()),
        "place": [{"x": 1.0}] * num, "tags": [["a", "b"]] * num,
        "click": (rng.random(num) < 1 / (1 + np.exp(-logit))).astype(int),
    })  # fmt: skip


KINDS = {
    "user": "id", "age": "number", "visits": "number", "weekday": "id", "hour": "id", "zip": "id", "order": "drop",
    "number": "drop", "session": "drop", "seconds": "drop", "time": "drop", "day": "id", "price": "number",
    "empty": "drop", "place": "drop", "tags": "id",
}  # fmt: skip
FLAT = [name for name in KINDS if name not in ("place", "tags")]


def prepared(path, cache, told=None, **settings):
    """Tabular data of one rank. told: takes the lines of its report."""
    needed = settings.pop("needed", ())
    source = Tabular(str(path), 0, **{"label": "click", "cache": str(cache), **settings})
    source.needed = needed
    source.prepare(0, 1, lambda: None, [].append if told is None else told.append)
    return source


def kinds_of(told):
    """Column -> kind, of a report's table."""
    begin = next(i for i, line in enumerate(told) if line.startswith("column "))
    return {line.split()[0]: line.split()[1].rstrip(",") for line in told[begin + 1 :]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    pq.write_table(log(), folder / "log.parquet")
    flat = log().select([*FLAT, "click"])
    lines = [",".join("" if value is None else str(value) for value in row.values()) for row in flat.to_pylist()]
    (folder / "log.csv").write_text("\n".join([",".join(flat.column_names), *lines]) + "\n")
    return folder


@pytest.mark.parametrize("form, names", [("log.parquet", list(KINDS)), ("log.csv", FLAT)])
def test_training_does_what_inspect_advises_and_its_table_says_so(files, tmp_path, form, names):
    told = []
    source = prepared(files / form, tmp_path / "cache", told)
    assert kinds_of(told) == {name: KINDS[name] for name in names}
    assert source.dense_names == ["age", "visits", "price"]
    advised = OmegaConf.create(inspected(str(files / form)).replace("${seed}\n", "0\n"))
    assert {rule["name"]: rule["kind"] for rule in advised["columns"]} == kinds_of(told)
    lines = {line.split()[0]: line for line in told}
    for name in ("age", "order", "number", "session", "seconds", "time", "empty"):
        assert "kind: id" in lines[name]  # how to say otherwise
    assert "kind: number" in lines["user"] and "valid: {column, last}" in lines["time"]


def test_prepared_data_are_opened_with_the_choices_of_their_preparation(files, tmp_path):
    told, again = [], []
    source = prepared(files / "log.csv", tmp_path / "cache", told)
    prepared(source.folder, tmp_path / "cache", again)
    assert kinds_of(again) == kinds_of(told)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"columns": [{"name": "session"}]}, {"session": "id"}),
        ({"columns": [{"name": "time", "min_count": 2}]}, {"time": "id"}),
        ({"columns": [{"name": "user", "share": "session"}]}, {"session": "id", "user": "id"}),
        ({"columns": [{"name": "age", "dim": 4}]}, {"age": "id"}),
        ({"columns": [{"name": "age", "missing": [18]}]}, {"age": "number"}),
        ({"columns": [{"name": "order", "kind": "number"}]}, {"order": "number"}),
        ({"columns": [{"name": "user", "kind": "drop"}]}, {"user": "drop"}),
        ({"columns": [{"name": "s*", "missing": ["?"]}]}, {"session": "drop", "seconds": "drop"}),
        ({"needed": ["session", "age"]}, {"session": "id", "age": "id"}),
    ],
)
def test_columns_that_a_setting_names_are_kept(files, tmp_path, settings, expected):
    told = []
    prepared(files / "log.csv", tmp_path / "cache", told, **settings)
    expected = {**{name: KINDS[name] for name in FLAT}, **expected}
    assert kinds_of(told) == expected


def test_the_column_of_data_valid_is_no_feature_and_has_no_line(files, tmp_path):
    told = []
    prepared(files / "log.csv", tmp_path / "cache", told, valid={"column": "time", "last": "1d"})
    assert set(kinds_of(told)) == set(FLAT) - {"time"}


def test_without_a_label_integers_are_ids(files, tmp_path):
    told = []
    prepared(files / "log.csv", tmp_path / "cache", told, label=None, label_kind="none")
    assert kinds_of(told)["age"] == "id" and kinds_of(told)["session"] == "drop"


@pytest.mark.parametrize("names, ids", [(["age", "price"], ["age"]), (["session", "price"], ["session"])])
def test_where_no_id_would_be_left_integers_and_then_all_columns_are_ids(tmp_path, names, ids):
    pq.write_table(log().select([*names, "click"]), tmp_path / "a.parquet")
    source = prepared(tmp_path / "a.parquet", tmp_path / "cache")
    assert [feature.name for feature in source.features] == ids
    pq.write_table(log().select(["price", "click"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="no column is an id, at least one is needed"):
        prepared(tmp_path / "b.parquet", tmp_path / "cache")


@pytest.mark.parametrize("rows", [100, 199])
def test_few_rows_are_not_judged(tmp_path, rows):
    pq.write_table(log().slice(0, rows).select(["session", "order", "click"]), tmp_path / "a.parquet")
    source = prepared(tmp_path / "a.parquet", tmp_path / "cache")
    assert [feature.name for feature in source.features] == ["session", "order"]


def chosen(path, label="click"):
    found = look(str(path), [str(path)], None, Dialect(), lambda name: all_missing(), label, None)
    return {name: kind for name, (kind, _) in found.choices.items()}


@pytest.mark.parametrize("order", ["random", "by user"])
@pytest.mark.parametrize("rows_per_user", [4, 40])
def test_users_that_recur_in_a_file_of_which_little_is_sampled_are_ids(tmp_path, order, rows_per_user):
    num, rng = 400_000, np.random.default_rng(1)
    user = rng.integers(0, num // rows_per_user, num)
    user = np.sort(user) if order == "by user" else user
    columns = {"user": [f"u{value}" for value in user], "own": rng.permutation(num), "click": rng.integers(0, 2, num)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=50_000)
    assert chosen(tmp_path / "a.parquet") == {"user": "id", "own": "drop", "click": "id"}


def test_integers_in_any_order_of_effects_are_ids_and_those_in_their_order_are_numbers():
    rng = np.random.default_rng(2)
    values = rng.integers(0, 500, 20_000)
    effects = rng.normal(size=500)
    label = (rng.random(20_000) < 1 / (1 + np.exp(-effects[values]))).astype(float)
    assert not has_order(values.astype(float), label)
    label = (rng.random(20_000) < 1 / (1 + np.exp(-np.sort(effects)[values]))).astype(float)
    assert has_order(values.astype(float), label)
    found = [has_order(values.astype(float), rng.integers(0, 2, 20_000).astype(float)) for _ in range(100)]
    assert sum(found) <= 2  # labels that do not depend on the values


def test_recurring_counts_the_further_rows_of_a_value():
    codes = np.repeat(np.arange(1000), 3)
    one = np.zeros(3000, int)
    assert recurring(codes, one, 3000) == 2 and recurring(np.arange(3000), one, 3000) == 0
    places = np.tile([0, 1, 2], 1000)  # each value once in each piece
    assert recurring(codes, places, 3000) == pytest.approx(2, rel=0.01)
    assert recurring(np.arange(100), one[:100], 100) is None


OF_TABLE = {  # values of 600 rows of a log, as Parquet has them
    "texts": [pa.array(["Oslo", "Lima"] * 300), pa.array(["Oslo", "Lima"] * 300).dictionary_encode()],
    "codes": [pa.array([f"{i % 50:03d}" for i in range(600)])],
    "booleans": [pa.array([True, False] * 300)],
    "integers": [pa.array([3, 4] * 300), pa.array([3, None] * 300, pa.float64()), pa.array([3, 4] * 300, pa.uint8())],
    "fractions": [pa.array([i / 8 for i in range(600)]), pa.array([0.25, 1.5] * 300).cast(pa.decimal128(9, 2))],
    "dates": [pa.array([19_000 + i % 60 for i in range(600)], pa.int32()).cast(pa.date32())],
    "times": [pa.array([1_714_566_600 + i for i in range(600)]).cast(pa.timestamp("s"))],
    "numbers of seconds": [pa.array([1_714_566_600 + i % 99 for i in range(600)])],
    "lists": [pa.array([["a"], [], ["b", "c"]] * 200)],
    "structs": [pa.array([{"x": 1}] * 600)],
    "no value": [pa.nulls(600), pa.array(["", "NA"] * 300)],
}  # fmt: skip


def test_the_table_of_the_page_says_what_values_become(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs/columns.md").read_text()
    lines = page.split("| values | as in CSV", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows] == list(OF_TABLE)
    for values, as_text, _, becomes in rows:
        expected = becomes.replace(",", "").split()[0]
        for array in OF_TABLE[values]:
            table = pa.table({"x": array, "click": [0, 1, 1] * 200})
            pq.write_table(table, tmp_path / "a.parquet")
            assert chosen(tmp_path / "a.parquet")["x"] == expected, (values, array.type)
            if not as_text:
                continue
            texts = ["" if value is None else str(value) for value in array.to_pylist()]
            lines = "\n".join(["x,click", *(f"{text},{i % 2}" for i, text in enumerate(texts))])
            (tmp_path / "a.csv").write_text(lines + "\n")
            assert chosen(tmp_path / "a.csv")["x"] == expected, (values, texts[:2])


def test_both_columns_of_clashing_types_can_be_dropped(tmp_path):
    (tmp_path / "d").mkdir()
    for number, x in enumerate([pa.array([1, 2] * 50), pa.array([True, False] * 50)]):
        table = pa.table({"x": x, "t": [f"t{i % 3}" for i in range(100)], "click": [0, 1] * 50})
        pq.write_table(table, tmp_path / "d" / f"{number}.parquet")
    with pytest.raises(DataError, match="column x has .* give it kind: drop"):
        prepared(tmp_path / "d", tmp_path / "cache")
    source = prepared(tmp_path / "d", tmp_path / "cache", columns=[{"name": "x", "kind": "drop"}])
    assert [feature.name for feature in source.features] == ["t"] and source.features[0].rows == 3 + FIRST_KEY
