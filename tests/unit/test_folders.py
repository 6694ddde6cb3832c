"""Files in folders named KEY=VALUE: the key is a column."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from streams import put
from test_stream import ALONE
from test_tabular import blocks_of, equal, samples_of, source_of, text_of, write

from hetmpi.data.files import DataError
from hetmpi.data.tabular import Reader, Tabular
from hetmpi.data.tabular.folders import keys_of
from hetmpi.inspect import inspected


def rows_of(day, num=60):
    rng = np.random.default_rng(day)
    return pa.table({"user": rng.integers(0, 9, num), "price": rng.random(num).round(3), "click": np.arange(num) % 2})


def put_file(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        write(path, text_of(table))


def log_of(folder, form="parquet", days=(1, 2, 3, 4)):
    """A log in folders, and the same rows as files with a column day."""
    for day in days:
        table = rows_of(day)
        put_file(folder / "log" / f"day=2024-05-0{day}" / f"part-0.{form}", table)
        put_file(folder / "flat" / f"{day}.{form}", table.append_column("day", pa.array([f"2024-05-0{day}"] * 60)))
    (folder / "log" / "_SUCCESS").touch()
    (folder / "log" / "day=2024-05-01" / f".part-0.{form}.crc").touch()
    return folder / "log", folder / "flat"


def columns_of(source):
    return [(column.name, column.kind) for column in source.encoder.columns]


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_key_of_folders_is_as_a_column_of_the_files(tmp_path, form):
    log, flat = log_of(tmp_path, form)
    one, other = (source_of(path, tmp_path / "cache") for path in (log, flat))
    assert columns_of(one) == columns_of(other) and ("day", "id") in columns_of(one)
    assert all(map(equal, samples_of(one), samples_of(other)))
    glob = source_of(log / "day=*" / f"*.{form}", tmp_path / "cache")
    assert all(map(equal, samples_of(one), samples_of(glob)))


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_the_last_folder_is_held_out(tmp_path, form):
    log, _ = log_of(tmp_path, form)
    source = source_of(log, tmp_path / "cache", valid={"column": "day", "last": 1}, size=2)
    assert (source.num_train, source.num_valid) == (180, 60)
    source = source_of(log, tmp_path / "cache", valid={"column": "day", "last": "2d"})
    assert (source.num_train, source.num_valid) == (120, 120) and len(source.encoder.columns) == 2
    source = source_of(log, tmp_path / "cache", valid=str(log / "day=2024-05-04"))
    assert (source.num_train, source.num_valid) == (180, 60)
    put_file(tmp_path / "lang=de" / "day=2024-05-09" / f"0.{form}", rows_of(9))
    source = source_of(log, tmp_path / "cache", valid=str(tmp_path / "lang=de" / "day=*" / "*"))
    assert (source.num_train, source.num_valid) == (240, 60) and len(source.encoder.columns) == 3


def test_nested_keys_have_the_types_of_their_values(tmp_path):
    for hour, share in ((7, "0.5"), (10, "__HIVE_DEFAULT_PARTITION__"), (12, "2")):
        for city in ("New%20York", "a%2Fb"):
            put_file(tmp_path / "log" / f"hour={hour}" / f"share={share}" / f"city={city}" / "0.csv", rows_of(hour))
    source = source_of(tmp_path / "log", tmp_path / "cache")
    assert dict(columns_of(source)) == {"user": "id", "price": "number", "hour": "id", "share": "number", "city": "id"}
    assert source.encoder.coders["city"].rows == source.encoder.coders["hour"].rows - 1 == 4
    reader = Reader(str(tmp_path / "log"), source.encoder.reading, ("city", "share"))
    found = pa.concat_tables(table for unit in reader.units for table in reader.blocks(unit))
    assert set(found["kept city"].to_pylist()) == {b"New York", b"a/b"}
    assert found["kept share"].null_count == 120 and np.isnan(found["c3"].to_numpy()).sum() == 120
    number = source_of(tmp_path / "log", tmp_path / "cache2", columns=[{"name": "hour", "kind": "number"}])
    assert dict(columns_of(number))["hour"] == "number"


def test_one_folder_of_a_log_is_predicted_as_in_training(tmp_path):
    log, flat = log_of(tmp_path)
    encoder = source_of(log, tmp_path / "cache").encoder
    for path in (log / "day=2024-05-03", log / "day=2024-05-03" / "part-0.parquet", log / "day=*3" / "*"):
        assert blocks_of(path, encoder) == blocks_of(flat / "3.parquet", encoder)
    with pytest.raises(DataError, match="1.parquet has no column day, which is needed"):
        put_file(tmp_path / "bare" / "1.parquet", rows_of(1))
        blocks_of(tmp_path / "bare", encoder)


def test_a_key_that_the_file_holds_too_must_be_the_same(tmp_path):
    for hour in (1, 2):
        for form in ("csv", "parquet"):
            table = rows_of(hour).append_column("hour", pa.array([float(hour)] * 60))
            put_file(tmp_path / form / f"hour=0{hour}".replace("0", "") / f"0.{form}", table)
    for form in ("csv", "parquet"):
        assert source_of(tmp_path / form, tmp_path / "cache").encoder.columns[-1].name == "hour"
        table = rows_of(3).append_column("hour", pa.array([3] * 50 + [4] * 10))
        put_file(tmp_path / form / "hour=3" / f"0.{form}", table)
        with pytest.raises(
            DataError, match=r"hour=3/0.\w+: column hour holds '4(.0)?', another value than its folder's"
        ):
            source_of(tmp_path / form, tmp_path / "cache")
    put_file(tmp_path / "hour=7" / "0.csv", rows_of(1).append_column("hour", pa.array(range(60))))
    assert source_of(tmp_path / "hour=7" / "0.csv", tmp_path / "cache").encoder.columns  # no key of this source


def test_files_with_other_keys_are_refused(tmp_path):
    log, _ = log_of(tmp_path)
    put_file(log / "part.parquet", rows_of(9))
    with pytest.raises(DataError, match="of the keys day, .*/log/part.parquet of none: all files need the same"):
        source_of(log, tmp_path / "cache")


def test_a_stream_of_folders(tmp_path):
    for day in (1, 2):
        (tmp_path / "in").mkdir(exist_ok=True)
        put(tmp_path / "in" / f"day=2024-05-0{day}", "0.csv", rows_of(day))
    columns = [{"name": ["user", "day"], "rows": "open", "max_rows": 99}]
    source = Tabular(str(tmp_path / "in"), 3, "click", columns=columns, cache=str(tmp_path / "cache"), follow=True)
    stream = source.stream
    stream.open(ALONE, None)
    assert stream.file == "day=2024-05-01/0.csv" and stream.look() == "day=2024-05-02/0.csv"
    assert stream.add("day=2024-05-02/0.csv", ALONE)
    names = [feature.name for feature in source.features]
    days = stream.train(0, 120).ids[:, names.index("day")]
    assert names == ["user", "day"] and len(set(days[:60])) == len(set(days[60:])) == 1 and days[0] != days[60]
    again = Tabular(str(tmp_path / "in"), 3, "click", columns=columns, cache=str(tmp_path / "cache"), follow=True)
    again.stream.open(ALONE, (source.encoder, stream.state(), 70))
    assert equal(again.stream.train(70, 120), stream.train(70, 120))


def test_inspect_shows_keys(tmp_path):
    log, _ = log_of(tmp_path)
    text = inspected(str(log))
    assert '- {name: "day", kind: id}  # 4 distinct values in names of folders, as 2024-05-01' in text, text


def test_keys_of_a_path():
    assert keys_of("/a/x=1/b/y=%2F/z=__HIVE_DEFAULT_PARTITION__/c=d.csv") == {"x": "1", "y": "/", "z": None}
    assert keys_of("/a/=1/plain/c.csv") == {}
