"""hetmpi inspect: the yaml that it prints has the names of the file, whatever they are."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from hetmpi.data.tabular import DataError
from hetmpi.errors import UserError
from hetmpi.inspect import inspected, main, quoted

ODD_NAMES = [
    "a\u2028label: evil", "a\u0085b: 1", "a\rlabel: evil", "a\nlabel: evil", "tab\t", "\x00", "\x1b[31mred", "\x7f",
    "${seed}", r"\${seed}", "\\\\${oc.env:HOME}", "$${x}", "${", "a\\", "\\n", 'a"b', "a'b", "# a", "a: b", "{a}",
    "???", "1", "1e5", "yes", "~", " a ", "ü", "😀", "\u202eabc", "\ud7ff", "\U000e0001", "*", "a*", "[ab]", "%", "&a",
    "- a", "null", "!!int", "\ufeff",
]  # fmt: skip


def inspected_table(folder, columns):
    """What inspect makes of a Parquet file with these columns, as OmegaConf reads it."""
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return OmegaConf.to_container(
        OmegaConf.create(inspected(str(folder / "a.parquet")).replace("${seed}\n", "0\n")), resolve=True
    )


def test_names_and_values_are_read_back_as_they_are(tmp_path):
    columns = {name: [f"{name}{i % 3}" for i in range(30)] for name in ODD_NAMES}
    found = inspected_table(tmp_path, {**columns, "click": [0, 1] * 15})
    assert list(found) == ["_target_", "seed", "path", "label", "valid", "columns"] and found["label"] == "click"
    names = [rule["name"] for rule in found["columns"]]
    escaped = {"???": "[?][?][?]", "*": "[*]", "a*": "a[*]"}  # missing to OmegaConf, and globs of other names
    assert names == [escaped.get(name, name) for name in ODD_NAMES]


def test_a_label_and_its_texts_are_read_back_as_they_are(tmp_path):
    for name in ("a\u2028b: 1", "${x}", r"\${x}"):
        found = inspected_table(tmp_path, {"x": range(4), name: ["yes\n${y}", "no"] * 2})
        assert (found["label"], found["positive"]) == (name, ["yes\n${y}"])


def test_any_text_is_quoted_so_that_omegaconf_reads_it_back():
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("$${{}}\\\\:a\"'\n\x85\u2028 ") for _ in range(rng.randrange(1, 9)))
        config = OmegaConf.create(f"x: {quoted(text)}\ny: [{quoted(text)}]  # z")
        assert OmegaConf.to_container(config, resolve=True) == {"x": text, "y": [text]}


def test_a_path_with_line_ends_makes_no_keys(tmp_path):
    folder = tmp_path / "a\nseed: 7"
    folder.mkdir()
    found = inspected_table(folder, {"x": [1, 2], "click": [0, 1]})
    assert found["seed"] == 0 and found["path"] == str(folder / "a.parquet")


def test_a_path_may_have_folders_named_by_key_and_value(tmp_path, capsys):
    folder = tmp_path / "day=1"
    folder.mkdir()
    pq.write_table(pa.table({"x": [1, 2], "click": [0, 1]}), folder / "a.parquet")
    main([str(folder / "a.parquet"), "label=click"])
    assert "label: 'click'" in capsys.readouterr().out.replace('"', "'")


def test_long_values_are_cut_in_remarks(tmp_path):
    pq.write_table(pa.table({"x": ["a" * 10_000, "b"], "click": [0, 1]}), tmp_path / "a.parquet")
    assert max(map(len, inspected(str(tmp_path / "a.parquet")).splitlines())) < 300


def test_times_and_ids_of_their_own_are_dropped(tmp_path):
    rows = "".join(
        f"{i % 2},2024-01-{1 + i % 28:02} 10:{i // 60:02}:{i % 60:02},u{i},2024-01-{1 + i % 9}\n" for i in range(900)
    )
    (tmp_path / "a.csv").write_text("click,when,order,day\n" + rows)
    when, order, day = inspected(str(tmp_path / "a.csv")).splitlines()[-3:]
    assert 'name: "when", kind: drop' in when and "valid: {column, last}" in when
    assert 'name: "order", kind: drop' in order and "most rows have a value of their own: kind: id keeps it" in order
    assert 'name: "day", kind: id' in day and "own" not in day


def test_only_times_that_data_valid_reads_are_said_to_be_times(tmp_path):
    days = [f"{month:02}-{day:02}" for month in range(1, 10) for day in range(1, 29)]
    times = {
        "long": [f"2024-{day}" for day in days],
        "short": [f"2024-{day[1:]}" for day in days],
        "impossible": ["2024-02-30", *(f"2024-{day}" for day in days[1:])],
        "user": ["a", "b"] * (len(days) // 2),
    }
    pq.write_table(pa.table({**times, "click": [0, 1] * (len(days) // 2)}), tmp_path / "a.parquet")
    advised = [rule for rule in inspected(str(tmp_path / "a.parquet")).splitlines() if "valid: {column, last}" in rule]
    assert len(advised) == 1 and '"long"' in advised[0]


def test_columns_without_values_are_dropped(tmp_path):
    columns = {"none": pa.nulls(9), "nan": [float("nan")] * 9, "lists": [["a"]] * 9, "click": [0, 1, 1] * 3}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    none, nan, lists = inspected(str(tmp_path / "a.parquet")).splitlines()[-3:]
    assert none.endswith('{name: "none", kind: drop}  # no value in 9 rows') and "kind: drop" in nan
    assert "kind: id" in lists


def table(*names, rows=2):
    return pa.table([pa.array([0, 1][:rows], pa.int64())] * len(names), names=list(names))


@pytest.mark.parametrize(
    "found, refusal",
    [
        (table("a", "click", rows=0), "a.parquet has no rows"),
        (table("a", "a", "click"), "two columns are named a"),
        (table("a", "", "click"), "column 2 has no name"),
        (table("\x1b]0;x\x07", "\x1b]0;x\x07"), r"two columns are named \x1b]0;x\x07"),
    ],
)
def test_refused_in_one_line(tmp_path, found, refusal):
    pq.write_table(found, tmp_path / "a.parquet")
    with pytest.raises(UserError) as error:
        inspected(str(tmp_path / "a.parquet"))
    assert refusal in str(error.value) and str(error.value).isprintable()


def test_equal_names_and_labels_without_values_of_text(tmp_path):
    (tmp_path / "a.csv").write_text("a,a,click\nx,y,0\n")
    with pytest.raises(DataError, match="two columns are named a"):
        inspected(str(tmp_path / "a.csv"))
    (tmp_path / "b.csv").write_text("a,click\nx,\ny,NA\n")
    assert "positive: ???" in inspected(str(tmp_path / "b.csv"), label="click")


def test_the_first_file_with_rows_is_inspected(tmp_path):
    pq.write_table(table("a", "click", rows=0), tmp_path / "a.parquet")
    pq.write_table(table("a", "click"), tmp_path / "b.parquet")
    assert "2 distinct values in 2 rows" in inspected(str(tmp_path))


def test_a_file_of_which_no_row_can_be_read_has_its_columns(tmp_path):
    pq.write_table(pa.table({"a": [0.5] * 9, "click": [0, 1, 1] * 3}), tmp_path / "a.parquet", compression="none")
    text = bytearray((tmp_path / "a.parquet").read_bytes())
    text[4:40] = bytes(36)  # the first page's header
    (tmp_path / "a.parquet").write_bytes(text)
    assert 'name: "a", kind: number' in inspected(str(tmp_path / "a.parquet"), "click")


def test_names_that_are_numbers_are_names_in_parquet(tmp_path):
    pq.write_table(table("0", "1", "click"), tmp_path / "a.parquet")
    assert "names:" not in inspected(str(tmp_path / "a.parquet"))
