"""How text is written: delimiters of several characters, decimal commas, encodings; values have the same ids."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from streams import put
from test_stream import ALONE
from test_tabular import equal, samples_of, source_of, write

from hetmpi.data.batch import concatenate
from hetmpi.data.files import DataError
from hetmpi.data.tabular import Reader, Tabular
from hetmpi.data.tabular.dialect import Dialect
from hetmpi.data.tabular.text import encoding_doubt
from hetmpi.errors import UserError
from hetmpi.inspect import inspected

NUM = 400
TABLE = pa.table({
    "user": [i % 11 for i in range(NUM)],
    "title": [f"Café {i % 7}" for i in range(NUM)],
    "price": [None if i % 9 == 0 else (i * 37 % 400) / 8 for i in range(NUM)],
    "click": [i % 3 % 2 for i in range(NUM)],
})  # fmt: skip


def text_of(delimiter=",", decimal=".", quoted=False, header=True):
    lines = [delimiter.join(TABLE.column_names)] if header else []
    for row in TABLE.to_pylist():
        row["price"] = "" if row["price"] is None else str(row["price"]).replace(".", decimal)
        cells = [f'"{value}"' if quoted and isinstance(value, str) else str(value) for value in row.values()]
        lines.append(delimiter.join(cells))
    return "\n".join(lines) + "\n"


def read(path, encoder, **dialect):
    """The samples of a file to predict."""
    reader = Reader(str(path), encoder.reading, **dialect)
    return concatenate([encoder.samples(block) for unit in reader.units for block in reader.blocks(unit)])


@pytest.fixture
def expected(tmp_path):
    """The samples of the table in Parquet."""
    pq.write_table(TABLE, tmp_path / "a.parquet")
    return source_of(tmp_path / "a.parquet", tmp_path / "expected")


SAME = {
    "two colons": (text_of("::"), {"delimiter": "::"}),
    "two colons, guessed": (text_of("::"), {}),
    "two colons, quoted": (text_of("::", quoted=True), {}),
    "a bar between spaces": (text_of(" | "), {"delimiter": " | "}),
    "two bars": (text_of("||"), {"delimiter": "||"}),
    "decimal commas": (text_of(";", ","), {"decimal": ","}),
    "decimal commas, guessed": (text_of(";", ","), {}),
    "decimal commas, tabs": (text_of("\t", ","), {"delimiter": "\t", "decimal": ","}),
    "Latin-1": (text_of().encode("latin-1"), {"encoding": "latin-1"}),
    "UTF-16": (text_of().encode("utf-16"), {"encoding": "utf-16"}),
    "UTF-16 without a mark": (text_of("::", ",").encode("utf-16-be"), {"encoding": "utf-16-be", "decimal": ","}),
    "GB 18030": (text_of(";").encode("gb18030"), {"encoding": "gb18030"}),
    "UTF-8 with a mark": (text_of().encode("utf-8-sig"), {"encoding": "utf-8"}),
}


@pytest.mark.parametrize("case", SAME)
def test_text_has_the_samples_of_parquet_however_it_is_written(tmp_path, expected, case, monkeypatch):
    monkeypatch.setattr("hetmpi.data.tabular.text.BLOCK_BYTES", 700)
    text, settings = SAME[case]
    source = source_of(write(tmp_path / "a.csv", text), tmp_path / "cache", size=2, **settings)
    assert all(map(equal, samples_of(source), samples_of(expected)))
    path = write(tmp_path / "b.csv.gz", gzip.compress(text if isinstance(text, bytes) else text.encode()))
    assert equal(read(path, source.encoder), read(tmp_path / "a.parquet", source.encoder))


def test_a_large_file_of_another_encoding_is_cut_after_lines_that_keep_their_ends(tmp_path, expected, monkeypatch):
    monkeypatch.setattr("hetmpi.data.tabular.source.UNIT_BYTES", 3_000)
    for encoding, units in (("cp1252", 3), ("utf-16", 1)):
        path = write(tmp_path / f"{encoding}.csv", text_of().encode(encoding))
        source = source_of(path, tmp_path / "cache", encoding=encoding)
        assert len(list((tmp_path / "cache").glob(f"{encoding}*/0*"))) == units
        whole = np.concatenate([part.ids for part in samples_of(source)])
        assert sorted(map(tuple, whole)) == sorted(map(tuple, np.concatenate([s.ids for s in samples_of(expected)])))


def test_a_delimiter_within_quotes_is_a_part_of_the_value(tmp_path):
    text = 'a::b::click\n"x::y"::1::0\nz::2::1\n' + '"x::y"::1::0\nz::2::1\n' * 50
    encoder = source_of(write(tmp_path / "a.csv", text), tmp_path / "cache").encoder
    reader = Reader(str(tmp_path / "a.csv"), encoder.reading, ("a",))
    [block] = reader.blocks(reader.units[0])
    assert block["kept a"].to_pylist()[:2] == [b"x::y", b"z"]
    pq.write_table(pa.table({"a": ["x::y", "z"] * 51, "b": [1, 2] * 51}), tmp_path / "a.parquet")
    assert equal(read(tmp_path / "a.csv", encoder), read(tmp_path / "a.parquet", encoder))


def test_a_file_without_a_header_and_with_two_colons(tmp_path, expected):
    names = TABLE.column_names
    source = source_of(write(tmp_path / "a.dat", text_of("::", header=False)), tmp_path / "cache", names=names)
    assert all(map(equal, samples_of(source), samples_of(expected)))
    assert "names: [" in inspected(str(tmp_path / "a.dat")) and 'delimiter: "::"' in inspected(str(tmp_path / "a.dat"))


def test_a_decimal_comma_is_guessed_with_a_line_and_only_where_it_is_none_of_thousands(tmp_path):
    lines = []
    source_of(write(tmp_path / "a.csv", text_of(";", ",")), tmp_path / "cache", lines.append)
    assert sum("are read with a decimal comma" in line for line in lines) == 1
    assert 'decimal: ","' in inspected(str(tmp_path / "a.csv"))
    for name, cells in (("b", ["1,234", "12,500"]), ("c", ["1,5", "2.5"]), ("d", ["1,5", "x,5"])):
        text = "a;x;click\n" + "".join(f"u;{cells[i % 2]};{i % 2}\n" for i in range(100))
        source = source_of(write(tmp_path / f"{name}.csv", text), tmp_path / "cache", lines.append)
        assert source.encoder.reading.decimal == "."
    assert sum("are read with a decimal comma" in line for line in lines) == 1
    kept = source_of(tmp_path / "a.csv", tmp_path / "cache", lines.append, decimal=".")
    assert "price" not in [c.name for c in kept.encoder.columns]  # a text of its own in most rows


def test_a_point_among_decimal_commas_is_no_number(tmp_path):
    path = write(tmp_path / "a.csv", text_of(";", ",") + "1;x;1.234;0\n")
    with pytest.raises(DataError, match="line 402, column price: '1.234' is no finite number"):
        source_of(path, tmp_path / "cache", decimal=",", columns=[{"name": "price", "kind": "number"}])


def test_labels_may_have_decimal_commas(tmp_path):
    text = "a;y\n" + "".join(f"u{i % 3};{i},5\n" for i in range(100))
    source = source_of(write(tmp_path / "a.csv", text), tmp_path / "cache", label="y", label_kind="number")
    assert sorted(np.concatenate([part.label for part in samples_of(source)])) == [i + 0.5 for i in range(100)]


def test_a_file_that_ends_within_a_character_is_refused(tmp_path):
    path = write(tmp_path / "a.csv", text_of().encode("utf-16")[:-1])
    with pytest.raises(DataError, match="a.csv is no text in data.encoding=utf-16"):
        source_of(path, tmp_path / "cache", encoding="utf-16")


def test_bytes_that_an_encoding_has_not_are_refused(tmp_path):
    path = write(tmp_path / "a.csv", text_of().encode() + b"1,Caf\xe9 x,1.5,0\n")
    with pytest.raises(DataError, match=r"no text in data.encoding=utf-8: .* byte 0xe9 in .*Caf.*: give another"):
        source_of(path, tmp_path / "cache", encoding="utf-8")
    lines = []
    assert source_of(path, tmp_path / "cache", lines.append).num_train > 300
    assert sum("bytes that are not UTF-8 are ids as they are: data.encoding=" in line for line in lines) == 1


def test_another_dialect_can_be_given_to_predict(tmp_path, expected):
    write(tmp_path / "b.csv", text_of("::", ",").encode("latin-1"))
    found = read(tmp_path / "b.csv", expected.encoder, delimiter="::", encoding="latin-1", decimal=",")
    assert equal(found, read(tmp_path / "a.parquet", expected.encoder))


def test_a_stream_in_another_dialect(tmp_path):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / ".0", text_of("::", ",").encode("utf-16"))
    put(tmp_path / "in", "1.csv", "x")
    (tmp_path / "in" / ".0").rename(tmp_path / "in" / "0.csv")
    columns = [{"name": ["user", "title"], "rows": 99}]
    settings = {"columns": columns, "cache": str(tmp_path / "cache"), "encoding": "utf-16", "decimal": ","}
    source = Tabular(str(tmp_path / "in"), 3, "click", follow=True, **settings)
    source.stream.open(ALONE, None)
    assert source.dense_names == ["price"] and source.stream.num_samples == NUM


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"delimiter": ""}, "1 to 16 characters"), ({"delimiter": ";\n"}, "1 to 16 characters"),
        ({"delimiter": "é"}, "1 to 16 characters"), ({"quote": "''"}, "data.quote must be one character"),
        ({"encoding": "klingon"}, "data.encoding must be"),
        ({"encoding": "hex"}, "data.encoding must be"), ({"encoding": 8}, "data.encoding must be"),
        ({"encoding": "utf-9"}, "data.encoding must be"),
        ({"decimal": ";"}, "data.decimal must be"), ({"decimal": ",", "delimiter": ","}, "cannot be the delimiter too"),
    ],
)  # fmt: skip
def test_impossible_dialects_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        Dialect(**settings).check()


def test_the_byte_that_stands_for_a_long_delimiter_is_refused(tmp_path):
    path = write(tmp_path / "a.csv", text_of("::") + "1::a\x1fb::1.5::0\n")
    with pytest.raises(DataError, match="holds the byte 0x1f"):
        source_of(path, tmp_path / "cache")


@pytest.mark.parametrize("last", [1, "30m"])
def test_the_last_numbers_with_decimal_commas_are_held_out(tmp_path, last):
    days = [86_400 * 400 + 0.5, 86_400 * 3000 + 0.5]  # of two years; as texts the first is the last
    text = "u;t;click\n" + "".join(f"u{i % 7};{days[i % 3 % 2]:.1f};{i % 2}\n".replace(".", ",") for i in range(120))
    rules = [{"name": "t", "transform": "none"}]
    source = source_of(write(tmp_path / "a.csv", text), tmp_path / "c", valid={"column": "t", "last": last},
                       columns=rules, decimal=",", delimiter=";")  # fmt: skip
    assert (source.num_train, source.num_valid) == (80, 40)
    assert (source.valid(0, 40).dense == np.float32(days[1])).all()


def test_files_in_another_encoding_than_they_are_read_with_are_said(tmp_path):
    parts = {
        "a.csv": text_of().encode(),
        "b.csv": text_of().encode("latin-1"),
        "c.csv.gz": gzip.compress(text_of().encode()),
    }
    for name, part in parts.items():
        (tmp_path / "log").mkdir(exist_ok=True)
        (tmp_path / "log" / name).write_bytes(part)
    lines = []
    source = source_of(tmp_path / "log", tmp_path / "c", lines.append)
    assert sum("b.csv: bytes that are not UTF-8 are ids as they are" in line for line in lines) == 1
    assert "b.csv" in Reader(str(tmp_path / "log"), source.encoder.reading).doubt
    assert Reader(str(tmp_path / "log" / "[ac]*"), source.encoder.reading).doubt is None
    latin = source_of(tmp_path / "log" / "b.csv", tmp_path / "c", encoding="latin-1").encoder.reading
    assert "a.csv is UTF-8 and read by data.encoding=latin-1" in Reader(str(tmp_path / "log" / "a.csv"), latin).doubt
    assert Reader(str(tmp_path / "log" / "b.csv"), latin).doubt is None
    assert Reader(str(tmp_path / "log" / "a.csv"), latin, encoding="utf-8").doubt is None


def test_a_compressed_file_whose_begin_ends_in_a_character_is_utf8(tmp_path):
    lines = "".join(f"é{'é' * (i % 7)},{i % 2}\n" for i in range(4 << 17))
    for shift in ("", "x"):
        path = tmp_path / f"a{shift}.csv.gz"
        path.write_bytes(gzip.compress(f"{shift}u,click\n{lines}".encode(), 1))
        assert encoding_doubt([str(path)], None) is None


def test_numbers_with_decimal_commas_that_are_predicted_are_refused_with_the_setting_that_reads_them(
    tmp_path, expected
):
    path = write(tmp_path / "b.csv", text_of(";", ","))
    with pytest.raises(DataError, match='give data.decimal=","'):
        read(path, expected.encoder, delimiter=";")
    assert len(read(path, expected.encoder, delimiter=";", decimal=",")) == NUM
