"""Columns of files beside predictions: as they were."""

from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign import write_tabular

from hetmpi import predict
from hetmpi.data.tabular.kept import TextKind, kind_of, typed_as
from hetmpi.errors import UserError
from hetmpi.trained.value_files import export_values
from hetmpi.world.world import World

ROWS = {"user": ["a", "b", "c"], "item": [1, 2, 4], "price": [0.5, 1.25, 2.0]}


@pytest.fixture
def model(tmp_path):
    """The folder of a checkpoint of user, item and price."""
    write_tabular(tmp_path / "step-00000002", tmp_path)
    return tmp_path


def predicted(model, path, names, *more):
    given = [str(model / "step-00000002"), f"out={model / 'p.parquet'}", f"data.path={path}"]
    predict.main(World(), [*given, f"predict.keep=[{','.join(names)}]", *more])
    return pq.read_table(model / "p.parquet").drop_columns(["probability"])


def lines_of(**columns):
    columns = {"user": ["a", "b", "c"], "item": [1, 2, 4], "price": ["0.5", "1", "2"], **columns}
    return "\n".join([",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values()))]) + "\n"


KINDS = {
    "integers": (["7", "-3", "0"], pa.int64(), [7, -3, 0]),
    "integers and none": (["7", "", "12"], pa.int64(), [7, None, 12]),
    "floats": (["0.5", "-1.25", "3"], pa.float64(), [0.5, -1.25, 3.0]),
    "floats as pandas writes them": (["5.0", "1e-05", "1e+20"], pa.float64(), [5.0, 1e-5, 1e20]),
    "codes": (["007", "1", "2"], pa.string(), ["007", "1", "2"]),
    "versions": (["3.10", "3.2", "4"], pa.string(), ["3.10", "3.2", "4"]),
    "large integers": (["9" * 20, "1", "2"], pa.string(), ["9" * 20, "1", "2"]),
    "more digits than a float has": (["0.1234567890123456789", "1", "2"], pa.string(), None),
    "texts": (["x", "", "NA"], pa.string(), ["x", "", "NA"]),
    "spaces": (["1 ", "2", "3"], pa.string(), ["1 ", "2", "3"]),
    "nothing": (["", "", ""], pa.string(), ["", "", ""]),
}


@pytest.mark.parametrize("case", KINDS)
def test_columns_of_text_are_numbers_where_each_value_is_written_as_one(model, case):
    texts, kind, values = KINDS[case]
    path = model / "new.csv"
    path.write_text(lines_of(x=texts))
    table = predicted(model, path, ["x", "user"])
    assert table.schema.field("x").type == kind and table["user"].to_pylist() == ["a", "b", "c"]
    assert table["x"].to_pylist() == (texts if values is None else values)


def test_all_files_decide_the_type_of_a_column(model):
    for name, texts in (("a", ["1", "2", "3"]), ("b", ["4", "x", "5"])):
        (model / "new").mkdir(exist_ok=True)
        (model / "new" / f"{name}.csv").write_text(lines_of(x=texts))
    assert predicted(model, model / "new", ["x"])["x"].to_pylist() == ["1", "2", "3", "4", "x", "5"]


def test_bytes_that_are_no_utf8_stay_and_an_encoding_makes_them_text(model, capfd):
    path = model / "new.csv"
    path.write_bytes(lines_of(title=["Café", "b", "c"]).encode("latin-1"))
    table = predicted(model, path, ["title", "item"])
    assert table["title"].to_pylist() == [b"Caf\xe9", b"b", b"c"] and table["item"].to_pylist() == [1, 2, 4]
    assert "column title: not UTF-8, written as bytes: data.encoding=latin-1" in capfd.readouterr().out
    table = predicted(model, path, ["title"], "data.encoding=latin-1")
    assert table["title"].to_pylist() == ["Café", "b", "c"] and table.schema.field("title").type == pa.string()


def test_columns_of_parquet_keep_their_types(model):
    extra = {
        "dictionary": pa.array(["x", None, "y"]).dictionary_encode(),
        "zone": pa.array([datetime(2024, 5, 1, tzinfo=UTC)] * 3, pa.timestamp("ms", "Asia/Tokyo")),
        "decimal": pa.array([Decimal("1.10"), None, Decimal("2.20")], pa.decimal128(9, 2)),
        "lists": pa.array([[1, 2], [], None], pa.list_(pa.int32())),
        "bytes": pa.array([b"\xff", b"a", None]),
        "small": pa.array([1, None, 3], pa.uint8()),
        "vectors": pa.array([[1.5, 2.0]] * 3, pa.list_(pa.float32(), 2)),
        "structs": pa.array([{"a": 1}, None, {"a": 2}]),
    }
    table = pa.table({**ROWS, **extra})
    for rows in (3, 1):
        pq.write_table(table, model / "new.parquet", row_group_size=rows)
        assert predicted(model, model / "new.parquet", list(extra)).equals(table.select(list(extra)))


def test_keys_of_folders_are_typed_as_text(model):
    for day in (1, 2):
        path = model / "log" / f"day={day}" / "city=x y" / "0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table(ROWS), path)
    table = predicted(model, model / "log", ["day", "city"])
    assert table.to_pydict() == {"day": [1] * 3 + [2] * 3, "city": ["x y"] * 6}


def test_exported_values_of_text_are_numbers_where_each_is_written_as_one(model):
    found = export_values(model / "step-00000002", model / "out", {"data.path": str(model / "clicks.csv")})
    types = {path.stem: pq.read_schema(path).field(path.stem).type for path in found}
    assert types == {"user": pa.string(), "item": pa.int64()}


def test_kinds_of_parts_are_joined():
    parts = [pa.array(texts, pa.binary()) for texts in ([b"1", b""], [b"2.5"], [b""], [b"\xff"])]
    kinds = [kind_of(part) for part in parts]
    assert [str(sum(kinds[:n], TextKind()).type) for n in (0, 1, 2, 3, 4)] == [
        "string",
        "int64",
        *["double"] * 2,
        "binary",
    ]
    assert typed_as(parts[0], pa.float64()).to_pylist() == [1.0, None]
    rng = np.random.default_rng(0)
    floats = [*rng.normal(size=500), *10.0 ** rng.integers(-300, 300, 500), *rng.integers(-9, 9, 99).astype(float)]
    assert kind_of(pa.array([repr(float(x)).encode() for x in floats])).type == pa.float64()


def test_a_kept_name_may_have_commas_and_brackets(model):
    path = model / "new.csv"
    path.write_text(lines_of(**{'"a, b"': ["1", "2", "3"], "[x]": ["4", "5", "6"]}))
    table = predicted(model, path, ["'a, b'", "user", " [x]"])
    assert table.column_names == ["a, b", "user", "[x]"] and table["a, b"].to_pylist() == [1, 2, 3]


def test_a_bad_number_in_new_files_is_refused_without_settings_of_the_training(model):
    path = model / "new.csv"
    path.write_text(lines_of(price=["0.5", "none", "2"]))
    with pytest.raises(UserError, match="data.max_bad_rows=0: correct the rows") as refusal:
        predicted(model, path, ["user"])
    assert "'none' is no finite number" in str(refusal.value)
