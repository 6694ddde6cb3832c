"""A stream of files: their order, when they are complete, samples by position, and what cannot be."""

import os
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from streams import clicks, put

from hetmpi.data.files import DataError
from hetmpi.data.tabular import Tabular, stream
from hetmpi.data.tabular.stream import END, Ranks
from hetmpi.errors import UserError

ALONE = Ranks(0, 1, lambda: None, lambda call: call())
COLUMNS = [{"name": "user", "rows": "open", "max_rows": 100}, {"name": "hour", "rows": 24, "hash": False}]
HEADER = "user,hour,price,click\n"


def tabular(folder, **settings):
    settings = {"label": "click", "columns": COLUMNS, "cache": str(folder / "prepared"), "follow": True} | settings
    return Tabular(str(folder / "in"), 3, **settings)


def opened(folder, sizes=(300,), resumed=None, **settings):
    for day, size in enumerate(sizes):
        put(folder / "in", f"day{day}.csv", clicks(day, size))
    source = tabular(folder, **settings)
    source.stream.open(ALONE, resumed)
    return source


def ids(samples):
    return sorted(zip(samples.ids[:, 0].tolist(), samples.dense[:, 0].tolist(), samples.label.tolist()))


def test_the_next_file_is_the_first_by_name_that_is_complete(tmp_path, capsys, monkeypatch):
    source = opened(tmp_path)
    found = source.stream
    assert (found.file, found.num_samples, source.num_train, source.num_valid) == ("day0.csv", 300, None, 300)
    assert found.look() is None
    put(tmp_path / "in", "day2.csv", clicks(2, 50))
    put(tmp_path / "in", "day1.csv", clicks(1, 50), age_s=0)
    assert found.look() is None  # day1 may still be written, and comes first
    monkeypatch.setattr(stream, "SETTLE_S", 0.2)
    time.sleep(0.3)
    assert found.look() == "day1.csv" and found.add("day1.csv", ALONE) and found.look() == "day2.csv"
    (tmp_path / "in" / END).touch()
    assert found.look() == "day2.csv" and found.add("day2.csv", ALONE) and found.look() == END
    assert "not read" not in capsys.readouterr().out
    put(tmp_path / "in", "day0b.csv", clicks(1, 50))
    put(tmp_path / "in", "day2.csv", clicks(2, 60), age_s=30)
    found.look()
    found.look()
    said = capsys.readouterr().out
    late = f"day0b.csv in {tmp_path}/in: not read, as day2.csv, which comes later by name, was read already"
    assert said.count(late) == 1, said
    assert said.count(f"day2.csv in {tmp_path}/in: changed after it was read") == 1, said
    put(tmp_path / "in", "day1.csv", clicks(1, 60))
    again = tabular(tmp_path)
    again.stream.open(ALONE, (source.encoder, found.state(), 400))
    again.stream.look()
    said = capsys.readouterr().out
    assert "day0b.csv in" in said and "day1.csv, day2.csv in" in said, said


def test_each_file_is_compared_over_the_ranks(tmp_path):
    compared = []
    ranks = replace(ALONE, check_files=lambda files: compared.append(files()))
    found = opened(tmp_path).stream
    put(tmp_path / "in", "day1.csv", clicks(1, 50))
    assert found.look() == "day1.csv" and found.add("day1.csv", ranks)
    assert compared == [[str(tmp_path / "in/day1.csv")]]


def test_a_file_with_a_time_in_the_future_is_complete_when_it_rests(tmp_path, monkeypatch):
    found = opened(tmp_path).stream
    put(tmp_path / "in", "day1.csv", clicks(1, 50), age_s=-1e6)
    monkeypatch.setattr(stream, "SETTLE_S", 0.2)
    assert found.look() is None
    time.sleep(0.3)
    assert found.look() == "day1.csv"


def test_samples_by_position(tmp_path):
    source = opened(tmp_path, (300, 40, 20_000))
    found = source.stream
    assert found.add("day1.csv", ALONE) and found.add("day2.csv", ALONE) and found.num_samples == 20_340
    whole = source.train(0, 20_340)
    parts = [source.train(start, min(start + 77, 20_340)) for start in range(0, 20_340, 77)]
    assert np.array_equal(np.concatenate([part.ids for part in parts]), whole.ids)
    again = opened(tmp_path).stream
    assert again.add("day1.csv", ALONE) and np.array_equal(again.train(0, 340).ids, whole.ids[:340])
    assert ids(source.train(340, 20_340)) == ids(source.valid(0, 20_000))
    assert not np.array_equal(source.train(340, 20_340).ids, source.valid(0, 20_000).ids)
    with pytest.raises(IndexError):
        source.train(20_000, 20_341)
    found.forget(340, ALONE)
    assert np.array_equal(source.train(340, 400).ids, whole.ids[340:400])


def test_files_without_rows_are_passed(tmp_path, capsys):
    put(tmp_path / "in", "a.csv", "")
    put(tmp_path / "in", "b.csv", HEADER)
    source = opened(tmp_path, (300,))
    found = source.stream
    put(tmp_path / "in", "day1.csv", HEADER)
    assert found.look() == "day1.csv" and not found.add("day1.csv", ALONE)
    assert found.num_samples == 300 and len(source.valid(0, 300)) == 300
    assert capsys.readouterr().out.count("has no rows") == 3
    put(tmp_path / "in", "day2.csv", "")
    assert found.look() is None and "day2.csv is complete: not empty" in found.waiting()  # it may still be filled
    put(tmp_path / "in", "day3.csv", clicks(3, 50))
    assert found.look() == "day2.csv"
    os.remove(tmp_path / "in/day3.csv")
    (tmp_path / "in" / END).touch()
    assert found.look() == "day2.csv" and not found.add("day2.csv", ALONE) and found.look() == END


def test_a_checkpoint_inside_a_file_needs_it_and_no_earlier_one(tmp_path):
    source = opened(tmp_path, (300, 200, 0, 7))
    for day in (1, 2, 3):
        source.stream.add(f"day{day}.csv", ALONE)
    wanted = source.train(340, 507)
    os.remove(tmp_path / "in/day0.csv")
    assert [file[0] for file in source.stream.state()["files"]] == [f"day{day}.csv" for day in range(4)]
    source.stream.forget(340, ALONE)
    state = source.stream.state()
    assert [[file[0], file[2]] for file in state["files"]] == [["day1.csv", 200], ["day2.csv", 0], ["day3.csv", 7]]
    again = tabular(tmp_path)
    again.stream.open(ALONE, (source.encoder, state, 340))
    assert np.array_equal(again.train(340, 507).ids, wanted.ids) and again.stream.file == "day3.csv"
    assert again.stream.state() == state
    assert not os.path.exists(again.stream._folder("day0.csv"))
    name, size, num = state["files"][0]
    for entry, said in (((name, size, num - 1), "199 rows"), ((name, size - 1, num), f"{size - 1:,} bytes")):
        wrong = {**state, "files": [entry, *state["files"][1:]]}
        with pytest.raises(DataError, match=f"day1.csv had {said} when the checkpoint was saved, before all of it"):
            tabular(tmp_path).stream.open(ALONE, (source.encoder, wrong, 340))
    os.remove(tmp_path / "in/day1.csv")
    with pytest.raises(DataError, match="day1.csv is missing: the checkpoint was saved before all of it"):
        tabular(tmp_path).stream.open(ALONE, (source.encoder, state, 340))
    behind = tabular(tmp_path)
    behind.stream.open(ALONE, (source.encoder, state, 507))
    assert (behind.stream.num_samples, behind.num_valid, behind.stream.file) == (507, 0, "day3.csv")
    put(tmp_path / "in", "day4.csv", clicks(2, 90))
    assert behind.stream.add("day4.csv", ALONE) and len(behind.train(507, 597)) == 90
    assert behind.stream.state()["files"][-1][0] == "day4.csv"


@pytest.mark.parametrize(
    "text, said",
    [
        ("hour,price,click\n1,.5,1\n", "day1.csv"),
        ("user,hour,price,click,more\na,1,.5,1,2\n", "day1.csv has more, which {first} has not"),
        ("PAR1", "is parquet, the files before it were text|no complete Parquet file"),
        (HEADER + "a,1,.5,perhaps\n", "perhaps"),
    ],
)
def test_later_files_that_do_not_fit_are_refused(tmp_path, text, said):
    source = opened(tmp_path)
    put(tmp_path / "in", "day1.csv", text)
    said = said.replace("{first}", re.escape(f"{tmp_path}/in/day0.csv"))
    with pytest.raises(DataError, match=said):
        source.stream.add(source.stream.look(), ALONE)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"columns": None}, "the values of user, hour are not known in advance: give rows: open with max_rows"),
        ({"valid": 0.2}, "data.valid=0.2 cannot be used with data.follow=true"),
        ({"follow": "yes"}, "data.follow must be true or false, got yes"),
        ({"label": None}, "give data.label=COLUMN"),
        ({"label": "clack"}, "no such column"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, settings, said):
    with pytest.raises(UserError, match=said):
        opened(tmp_path, **settings)


def test_the_first_file_is_not_awaited_for_ever(tmp_path, monkeypatch):
    put(tmp_path / "in", "day0.csv", "")
    monkeypatch.setattr(stream, "FIRST_S", 0.1)
    with pytest.raises(DataError, match="day0.csv is empty or still being written after 0.1 s"):
        tabular(tmp_path).stream.open(ALONE, None)


def test_at_the_end_all_files_are_compared(tmp_path, capsys):
    found = opened(tmp_path, (300, 40)).stream
    assert found.add("day1.csv", ALONE) and found.look() is None
    put(tmp_path / "in", "day0.csv", clicks(0, 310))
    assert found.look() is None and "changed" not in capsys.readouterr().out
    (tmp_path / "in" / END).touch()
    assert found.look() == END and f"day0.csv in {tmp_path}/in: changed" in capsys.readouterr().out
    assert found.begun(300) == ["day1.csv"] and found.begun(340) == []


def test_a_folder_with_files_is_needed(tmp_path):
    (tmp_path / "in").mkdir()
    for name in (".hidden", "_x", END):
        (tmp_path / "in" / name).touch()
    with pytest.raises(DataError, match="no file in the folder has rows: with data.follow the first one"):
        tabular(tmp_path).stream.open(ALONE, None)
    with pytest.raises(UserError, match="needs data.path to be a folder, to which files are added"):
        Tabular(str(tmp_path / "none"), 3, follow=True)
