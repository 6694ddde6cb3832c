"""Ranks that see other files than the first one are refused by file and host. Each rank has a folder of its own."""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest

from hetmpi.errors import UserError
from hetmpi.run.build import prepare_files
from hetmpi.world import same_files
from hetmpi.world.same_files import File, check_same_entries, check_same_files, described, difference
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def world():
    return World()


@pytest.fixture
def folder(tmp_path):
    for name, size in (("a.csv", 10_000), ("b.csv", 300)):
        (tmp_path / name).write_bytes(np.random.default_rng(size).bytes(size))
    return tmp_path


def check(world, folder):
    check_same_files(world, lambda: [os.path.join(folder, name) for name in sorted(os.listdir(folder))])


def test_copies_of_the_same_files_are_taken(world, folder):
    check(world, folder)
    check_same_files(world, lambda: [])


@pytest.mark.parametrize("kind", ["content", "size", "missing", "more", "unreadable"])
def test_another_file_of_the_last_rank_is_named_on_all_ranks(world, folder, kind):
    last, path = world.size - 1, folder / "b.csv"
    if world.rank == last and last > 0:
        if kind == "content":
            path.write_bytes(path.read_bytes()[::-1])
        elif kind == "size":
            path.write_bytes(b"more" + path.read_bytes())
        elif kind == "missing":
            path.unlink()
        elif kind == "more":
            (folder / "c.csv").write_text("x")
        else:
            (folder / "a.csv").unlink()
            (folder / "a.csv").mkdir()
    if last == 0:
        return check(world, folder)
    said = {
        "content": rf"b.csv has another content on rank {last} on \S+ than on rank 0 on ",
        "size": rf"b.csv has 300 bytes on rank 0 on \S+, 304 on rank {last} on ",
        "missing": rf"b.csv is missing on rank {last} on ",
        "more": "c.csv is missing on rank 0 on ",
        "unreadable": rf"a.csv has 10,000 bytes on rank 0 on \S+, -1 on rank {last} on ",
    }[kind]
    with pytest.raises(UserError, match=f"all ranks must read the same data: {said}"):
        check(world, folder)


def test_a_rank_that_cannot_list_its_files_is_one_without_them(world, folder):
    def listed():
        if world.rank > 0:
            raise UserError("there is no such folder")
        return [str(folder / "a.csv")]

    if world.size == 1:
        return check_same_files(world, listed)
    with pytest.raises(UserError, match=r"a.csv is missing on rank 1 on "):
        check_same_files(world, listed)


def test_a_source_of_ones_own_may_mean_something_else_by_files_and_times(world):
    source = SimpleNamespace(files=["a.csv"], times=[1.0], prepare=lambda rank, size, barrier: None)
    prepare_files(source, world)
    assert source.times == [1.0]


def test_ranks_of_a_node_that_see_the_same_files_read_none(world, folder):
    shared = world.comm.bcast(str(folder))
    assert not same_files.must_read(world, [os.path.join(shared, "a.csv")])


def test_what_was_read_is_compared(world):
    check_same_entries(world, [File("train triples", 0, "5")])
    if world.size > 1:
        with pytest.raises(UserError, match=r"train triples has another content on rank 1 on "):
            check_same_entries(world, [File("train triples", 0, str(world.rank))])


@pytest.mark.parametrize("where", [0, 5, 1 << 20, -1])
def test_a_sample_of_a_large_file_has_its_ends_and_places_between(folder, monkeypatch, where):
    monkeypatch.setattr(same_files, "WHOLE_BYTES", 1_000)
    data = np.zeros(1 << 24, np.uint8)
    paths = [str(folder / f"{name}.bin") for name in ("large",)]
    data.tofile(paths[0])
    before = described(paths)
    changed = data.copy()
    if where == 1 << 20:  # a change of a quarter of the file
        changed[where : where + (1 << 22)] = 1
    else:
        changed[where] = 1
    changed.tofile(paths[0])
    after = described(paths)
    assert before[0].size == after[0].size and before != after
    assert re.search("large.bin has another content", difference(before, after, "a", 1, "b"))
