"""Exports of somebody else, or damaged ones, that predict, export and table.init_from read: one line, and no wait."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign import write_open

from hetmpi import export, predict
from hetmpi.errors import UserError
from hetmpi.log.runlog import RunLog
from hetmpi.run import pretrained
from hetmpi.run.id_rows import (
    ABOUT,
    GROUP_ROWS,
    IDS,
    OF_REMOVED,
    REMOVED,
    SCHEMA,
    About,
    IdRows,
    applied,
    read_changed,
    read_removed,
    read_rows,
    write_removed,
    write_rows,
)
from hetmpi.trained.item_files import read_items
from hetmpi.world.world import World

LATER = About(5, 3)


@pytest.fixture
def folder(tmp_path):
    """An export of what changed between the steps 3 and 5."""
    write_rows(tmp_path, rows(), LATER)
    write_removed(tmp_path, [("user", np.arange(3))], LATER)
    return tmp_path


def rows(ids=(3, 5, 9)):
    ids = np.array(ids)
    weight = np.arange(2.0 * len(ids), dtype=np.float32).reshape(-1, 2)
    return [IdRows("user", 4, ids, weight, ids + 1, ids * 0 + 2, np.ones((1, 2), np.float32))]


def refused(call):
    with pytest.raises((UserError, SystemExit)) as problem:
        call()
    text = str(problem.value)
    assert len(text.splitlines()) == 1 and len(text) < 600 and text.isprintable(), text
    return text


def pipe_at(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def saved_items():
    """What read_items needs of a model of queries and items."""
    return SimpleNamespace(digest="d", columns=SimpleNamespace(item=SimpleNamespace(name="item")))


def rewritten(path, change, metadata=None):
    """Writes a file of an export again, with a changed table."""
    table = pq.read_table(path)
    before = table.schema.metadata
    pq.write_table(change(table).replace_schema_metadata(before if metadata is None else metadata), path)


@pytest.mark.parametrize("name", [IDS, REMOVED])
def test_a_pipe_in_the_place_of_an_export_by_ids_is_refused_at_once(folder, name):
    write_rows(folder / "full", rows((1, 3)), About(3))
    pipe_at(folder / name)
    arguments = [str(folder / "full"), str(folder / "out"), f"deltas={folder}"]
    assert refused(lambda: export.main(arguments)).endswith(f"{name} cannot be read: it is not a regular file")


def test_predict_refuses_a_pipe_in_the_place_of_ids(tmp_path):
    write_open(tmp_path / "step-00000002", tmp_path)
    (tmp_path / "ids").mkdir()
    pipe_at(tmp_path / "ids" / IDS)
    given = [str(tmp_path / "step-00000002"), f"data.path={tmp_path}/clicks.csv", f"ids={tmp_path}/ids"]
    text = refused(lambda: predict.main(World(), [*given, f"out={tmp_path}/out.parquet"]))
    assert text.endswith("ids.parquet cannot be read: it is not a regular file")


def test_a_pipe_among_the_files_of_init_from_is_refused_at_once(tmp_path):
    path = pipe_at(tmp_path / "a.parquet")
    assert "not a regular file" in refused(lambda: pretrained.column_of(path, None, {}, {}))


def test_a_pipe_in_the_place_of_items_is_refused_at_once(tmp_path):
    path = pipe_at(tmp_path / "items.parquet")
    assert "not a regular file: write it by" in refused(lambda: read_items(path, saved_items()))


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluation.jsonl"])
def test_a_resumed_run_refuses_a_pipe_in_the_place_of_its_lines(tmp_path, name):
    pipe_at(tmp_path / name)
    assert f"{name} cannot be read: it is not a regular file" in refused(lambda: RunLog(tmp_path, "", 9, resumed_at=4))


@pytest.mark.parametrize("line", ["[" * 100_000, '{"step": 3, "elapsed_s": "long"}', '{"step": 3, "elapsed_s": [1]}'])
def test_a_resumed_run_passes_over_lines_that_no_run_wrote(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 2, "elapsed_s": 7.0}}\n{line}\n')
    log = RunLog(tmp_path, "", 9, resumed_at=4)
    log.close()
    assert log.earlier_s in (0.0, 7.0)


def test_a_resumed_run_does_not_write_through_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    other = tmp_path / "other"
    other.write_text('{"step": 9}\n')
    (tmp_path / "run/metrics.jsonl").symlink_to(other)
    RunLog(tmp_path / "run", "", 9, resumed_at=4).close()
    assert other.read_text() == '{"step": 9}\n'


@pytest.mark.parametrize("name", [IDS, REMOVED])
def test_each_flipped_byte_of_an_export_by_ids_is_refused_or_changes_nothing(folder, name):
    path, num_refused = folder / name, 0
    whole = path.read_bytes()
    for place in range(0, len(whole), 23):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x14]) + whole[place + 1 :])
        try:
            [found], about = read_rows(folder)
            removed = read_removed(folder, about)
        except UserError as error:
            num_refused += 1
            assert len(str(error).splitlines()) == 1 and str(path) in str(error)
            continue
        assert about == LATER and list(removed) == ["user"] and removed["user"].tolist() == [0, 1, 2]
        assert found.weight.tolist() == rows()[0].weight.tolist() and found.ids.tolist() == [3, 5, 9]
    assert num_refused > 9


@pytest.mark.parametrize("name, schema, read", [(IDS, SCHEMA, read_rows), (REMOVED, OF_REMOVED, None)])
def test_a_row_group_larger_than_that_of_an_export_is_refused_before_it_is_read(folder, name, schema, read):
    def grown(table):
        return table.slice(1, 1).take(pa.array(np.zeros(GROUP_ROWS + 1, np.int64)))

    rewritten(folder / name, grown)
    read = read or (lambda place: read_removed(place, LATER))
    text = refused(lambda: read(folder))
    assert "row group 1 has 262,145 rows" in text and "an export has at most 262,144" in text


@pytest.mark.parametrize("said", [
    {"step": "5"}, {"step": 5.0}, {"step": None}, {"step": -1}, {"step": True}, {"since": "3"}, {"since": [3]},
    {"since": 2.5}, {"seeds": {"user": "4"}}, {"seeds": 4}, {"xxh3_128": 4}, {"xxh3_128": None},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", [IDS, REMOVED])
def test_metadata_of_other_types_are_refused_in_one_line(folder, name, said):
    about = json.loads(pq.read_schema(folder / name).metadata[ABOUT])
    rewritten(folder / name, lambda table: table, {ABOUT: json.dumps({**about, **said}).encode()})
    assert f"{folder / name}: its metadata" in refused(lambda: read_removed(folder, read_rows(folder)[1]))


@pytest.mark.parametrize("name", [IDS, REMOVED])
@pytest.mark.parametrize("about", [b"[" * 100_000, b'{"a":' * 100_000, b"", b"\xff", b"[]", b"{}"])
def test_metadata_that_are_no_objects_are_refused_in_one_line(folder, name, about):
    rewritten(folder / name, lambda table: table, {ABOUT: about})
    assert f"{folder / name}: its metadata" in refused(lambda: read_removed(folder, read_rows(folder)[1]))


@pytest.mark.parametrize("name", ["column", "weight", "count", "step"])
def test_a_null_in_an_export_by_ids_is_refused(folder, name):
    def with_null(table):
        place = table.schema.get_field_index(name)
        values = [None, *table[name].to_pylist()[1:]]
        return table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))

    rewritten(folder / IDS, with_null)
    assert f"column {name} has rows without a value" in refused(lambda: read_rows(folder))


def test_a_file_of_removed_ids_of_other_steps_is_refused(folder):
    write_removed(folder, [("user", np.arange(3))], About(6, 3))
    write_rows(folder / "full", rows((1, 3)), About(3))
    assert "is of other steps than ids.parquet beside it" in refused(lambda: read_changed([folder / "full", folder]))


def test_changes_are_applied_to_an_export(folder):
    write_rows(folder / "full", rows((1, 3)), About(3))
    [found], about = read_changed([folder / "full", folder])
    assert found.ids.tolist() == [3, 5, 9] and about == About(5)
    assert applied(*read_rows(folder / "full"), rows(), LATER, {})[0][0].ids.tolist() == [1, 3, 5, 9]


@pytest.mark.parametrize("vector", [
    pa.array([1.0, 2.0], pa.float32()), pa.array(["a", "b"]), pa.array([[1.0], [2.0]], pa.list_(pa.float32())),
    pa.array([[1.0], [2.0]], pa.list_(pa.float64(), 1)), pa.array([[1.0], None], pa.list_(pa.float32(), 1)),
], ids=lambda vector: str(vector.type))  # fmt: skip
def test_a_column_of_vectors_that_holds_none_is_refused(tmp_path, vector):
    table = pa.table({"item": [1, 2], "vector": vector}).replace_schema_metadata({b"hetmpi.checkpoint": b"d"})
    pq.write_table(table, tmp_path / "items.parquet")
    text = refused(lambda: read_items(tmp_path / "items.parquet", saved_items()))
    assert "must have the columns item and vector" in text or "rows without a vector" in text


def test_rows_of_more_numbers_than_the_table_are_refused_before_they_are_read(tmp_path):
    weight = pa.ListArray.from_arrays([0, 1 << 20], pa.array(np.zeros(1 << 20, np.float32)))
    pq.write_table(pa.table({"key": [0], "weight": weight}), tmp_path / "a.parquet")
    text = refused(lambda: next(pretrained.parts_of(tmp_path / "a.parquet", "key", 4)))
    assert "rows must have 4 numbers, as those of the table, got 1048576" in text


def test_a_flipped_byte_of_rows_by_key_is_refused(tmp_path):
    from hetmpi.trained.saved_model import write_rows as write_by_key

    path, weight = tmp_path / "rows.parquet", np.random.default_rng(1).normal(size=(300, 4)).astype(np.float32)
    write_by_key(path, "key", pa.int64(), 4, [(pa.array(np.arange(300)), weight)])
    whole = path.read_bytes()
    begin = whole.index(weight[7].tobytes())
    for place in (begin, begin + 2, begin + 700):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert f"{Path(path)} cannot be read: " in refused(lambda: list(pretrained.parts_of(path, "key", 4)))
