"""Several tables in one checkpoint. Run at 1, 2 and 3 ranks."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from crafted import change_manifest

from hetmpi import export
from hetmpi.checkpoint import files, writer
from hetmpi.checkpoint.checkpoints import Checkpoints, Position
from hetmpi.errors import UserError
from hetmpi.table.bag import EmbeddingBag
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.table import EmbeddingTable

pytestmark = pytest.mark.mpi
ARRAYS = ("weight", "state", "clock")


class Killed(BaseException):
    """Stands for the end of a process."""


@pytest.fixture
def folder(world, tmp_path_factory):
    return Path(world.comm.bcast(str(tmp_path_factory.mktemp("tables"))))


def bags(world, seed=0):
    """Two bags with different rules, sizes and partitions."""
    return {
        "users": EmbeddingBag(200, 4, optimizer=RowOptimizer("adam", 0.1), mode="sum", world=world, seed=seed),
        "items.2": EmbeddingBag(100, 3, optimizer=RowOptimizer("sgd", 0.1), world=world, seed=seed, partition="hash"),
    }


def step(world, bags, number):
    """A training step, in which some rows of each bag change."""
    keys = torch.arange(number, number + 5).view(1, -1) + 7 * world.rank
    for bag in bags.values():
        bag(keys).sum().backward()
        bag.step()


def rows_of(bags):
    """All arrays of this rank's shards."""
    return {(name, array): getattr(bag.table.shard, array).copy() for name, bag in bags.items() for array in ARRAYS}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


def close(*several):
    for some in several:
        for bag in some.values():
            bag.table.close()


@pytest.mark.parametrize("full_every", [1, 9])
def test_tables_come_back_from_one_checkpoint(world, folder, full_every):
    mine, model = bags(world), torch.nn.Linear(2, 2)
    checkpoints = Checkpoints(world, folder, full_every=full_every)
    checkpoints.reserve(mine)
    for number in range(1, 4):
        step(world, mine, number)
        checkpoints.save(Position(number, 10 * number), mine, model, about={"note": {10: "two", 9: ()}})
    checkpoints.wait()
    others = bags(world, seed=5)
    assert checkpoints.load(checkpoints.newest(), {name: bag.table for name, bag in others.items()}, model) == Position(
        3, 30
    )
    assert_same(rows_of(others), rows_of(mine))
    assert [bag.table.step for bag in others.values()] == [3, 3]
    manifest = json.loads((checkpoints.path(3) / "manifest.json").read_text())
    assert (manifest["format"], list(manifest["tables"]), manifest["note"]) == (
        3,
        ["users", "items.2"],
        {"10": "two", "9": []},
    )
    assert manifest.get("base") == (None if full_every == 1 else "step-00000001")
    assert ("items.2.shard-00000.rows.npy" in manifest["files"]) == (full_every > 1)
    world.comm.Barrier()
    close(mine, others)


@pytest.mark.parametrize("number", [1, 3, 4, 6, 8])
def test_bags_resume_at_one_step_after_a_kill_between_them(world, folder, monkeypatch, number):
    """The process ends before a rank writes its `number`-th file: of the first bag, of the second, or rank 0 after
    both."""
    mine = bags(world)
    checkpoints = Checkpoints(world, folder)
    step(world, mine, 1)
    checkpoints.save(Position(1, 10), mine)
    checkpoints.wait()
    saved = rows_of(mine)
    step(world, mine, 2)
    left = [number]
    write = files.write_bytes

    def until_killed(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return write(*arguments)

    for module in (files, writer):
        monkeypatch.setattr(module, "write_bytes", until_killed)
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    checkpoints.save(Position(2, 20), mine)
    checkpoints._writer.is_given_up = True  # no rank waits for the ended one
    checkpoints._writer.join()
    world.comm.Barrier()
    monkeypatch.undo()
    others = bags(world, seed=5)
    checkpoints = Checkpoints(world, folder)
    assert checkpoints.load(checkpoints.newest(), others) == Position(1, 10)
    assert {bag.table.step for bag in others.values()} == {1}
    assert_same(rows_of(others), saved)
    close(mine, others)


def test_each_table_goes_on_from_its_own_step(world, folder):
    mine = bags(world)
    step(world, mine, 1)
    step(world, {"users": mine["users"]}, 2)
    checkpoints = Checkpoints(world, folder)
    checkpoints.save(Position(2, 0), mine)
    checkpoints.wait()
    others = bags(world, seed=5)
    checkpoints.load(checkpoints.path(2), others)
    assert [bag.table.step for bag in others.values()] == [2, 1]
    close(mine, others)


def test_an_incremental_checkpoint_is_of_the_tables_of_its_base(world, folder):
    mine = bags(world)
    checkpoints = Checkpoints(world, folder, full_every=9)

    def base_of(number, tables):
        checkpoints.save(Position(number, 0), tables)
        checkpoints.wait()
        return json.loads((checkpoints.path(number) / "manifest.json").read_text()).get("base")

    assert base_of(1, mine) is None
    assert base_of(2, mine) == "step-00000001"
    assert base_of(3, {"users": mine["users"]}) is None
    assert base_of(4, mine) is None  # the changes of the other table since a base of both are unknown
    assert base_of(5, mine) == "step-00000004"
    assert base_of(6, {"people": mine["users"], "items.2": mine["items.2"]}) is None
    assert base_of(7, mine["users"]) is None
    world.comm.Barrier()
    close(mine)


def test_one_table_is_saved_in_the_format_without_names(world, folder):
    """Byte for byte as in versions that supported only one table."""
    table = EmbeddingTable(world, 100, 3, RowOptimizer("adagrad"), name="words")
    checkpoints = Checkpoints(world, folder, full_every=2)
    for number in (1, 2):
        checkpoints.save(Position(number, 7), table, about={"note": "one"})
    checkpoints.wait()
    said = ["format", "step", "samples", "size", "num_rows", "dim", "partition", "rule", "state_dim"]
    for number, base in ((1, []), (2, ["base", "base_xxh3_128"])):
        text = (checkpoints.path(number) / "manifest.json").read_text()
        manifest = json.loads(text)
        assert list(manifest) == [*said, *base, "note", "files", "xxh3_128"] and text == json.dumps(manifest, indent=1)
        known = [1 if not base else 2, number, 7, world.size, 100, 3, "round_robin", "adagrad", 3]
        assert [manifest[name] for name in said] == known
        arrays = ("weight", "state", "clock", *(["rows"] if base else []))
        files = [f"shard-{rank:05d}.{array}.npy" for rank in range(world.size) for array in arrays]
        files.insert(len(arrays), "dense.pt")
        assert list(manifest["files"]) == files
    world.comm.Barrier()
    table.close()


def saved_named_and_unnamed(world, folder):
    """Bags, and their checkpoints: 1 of both by name, 2 of the users without a name."""
    mine, checkpoints = bags(world), Checkpoints(world, folder)
    checkpoints.save(Position(1, 0), mine)
    checkpoints.save(Position(2, 0), mine["users"])
    checkpoints.wait()
    return mine, checkpoints


def test_tables_are_loaded_by_the_names_they_were_saved_by(world, folder):
    mine, checkpoints = saved_named_and_unnamed(world, folder)
    swapped = {"users": mine["items.2"], "items.2": mine["users"]}
    for number, tables, told in [
        (1, mine["users"], "has the tables users, items.2, the program loads one table without a name"),
        (1, {"users": mine["users"]}, "has the tables users, items.2, the program loads the tables users:"),
        (2, {"users": mine["users"]}, "has one table without a name, the program loads the tables users:"),
        (1, swapped, "has table users with num_rows=200, the program's has 100"),
    ]:
        with pytest.raises(UserError, match=told):
            checkpoints.load(checkpoints.path(number), tables)
    close(mine)


@pytest.mark.parametrize("name", ["", ".x", "a/b", "..", "a b", "a\n", "ä", 3, "x" * 101])
def test_names_that_no_file_can_have_are_refused(world, folder, name):
    table = EmbeddingTable(world, 10, 2, RowOptimizer())
    with pytest.raises(
        UserError, match="a table's name must be at most 100 letters, digits, _, - and ., which is not the first, got"
    ):
        Checkpoints(world, folder).save(Position(1, 0), {name: table})
    assert not list(folder.iterdir())
    table.close()


def test_what_is_no_table_or_cannot_be_said_is_refused(world, folder):
    table, other = (EmbeddingTable(world, 10, 2, RowOptimizer(), name=name) for name in ("one", "other"))
    checkpoints = Checkpoints(world, folder)
    for position, tables, about, told in [
        (
            Position(1),
            torch.nn.Linear(2, 2),
            {},
            "tables must be an EmbeddingTable, an EmbeddingBag or a dict of these by name, got Linear",
        ),
        (Position(1), {"a": 3}, {}, "got int by the name a"),
        (Position(1), {}, {}, r"tables must be one or more, each once, got \[\]"),
        (Position(1), {"a": table, "b": table}, {}, r"each once, got \['a', 'b'\]"),
        (Position(1), {"a": table, "A": other}, {}, r"each once, got \['a', 'A'\]"),
        (Position(-1), table, {}, "step must be an integer of at least 0, got -1"),
        (Position("1"), table, {}, "step must be an integer of at least 0, got '1'"),
        (Position(1, 1.5), table, {}, "samples must be an integer of at least 0, got 1.5"),
        (Position(1), table, {"files": {}}, "about must not have the key files"),
        (Position(1), table, {"note": table}, "about must be a dict that JSON can hold: .*EmbeddingTable"),
    ]:
        with pytest.raises(UserError, match=told):
            checkpoints.save(position, tables, about=about)
    assert not list(folder.iterdir())
    table.close()
    other.close()


def test_a_crafted_manifest_of_several_tables_is_refused(world, folder):
    mine = bags(world)
    checkpoints = Checkpoints(world, folder, keep=9)
    checkpoints.save(Position(1, 0), mine)
    checkpoints.wait()
    changes = {
        "lacks items.2.shard-00000.weight.npy": lambda said: said["files"].update(
            {"../items.2.shard-00000.weight.npy": said["files"].pop("items.2.shard-00000.weight.npy")}
        ),
        "files must list": lambda said: said["tables"].pop("users"),
        "step must be an integer in .* got None": lambda said: said["tables"]["users"].update(step=None),
        "tables must be an object, got 3": lambda said: said.update(tables=3),
        "lacks base_xxh3_128": lambda said: said.update(base="step-00000000"),
    }
    whole = (checkpoints.path(1) / "manifest.json").read_bytes()
    for told, change in changes.items():
        world.comm.Barrier()
        if world.rank == 0:
            (checkpoints.path(1) / "manifest.json").write_bytes(whole)
            change_manifest(checkpoints.path(1), change)
        world.comm.Barrier()
        with pytest.raises(UserError, match=told):
            checkpoints.load(checkpoints.path(1), mine)
        assert re.search(told, checkpoints.damage(checkpoints.path(1))[0])
    close(mine)


def test_an_export_takes_one_of_several_tables(world, folder):
    mine, checkpoints = saved_named_and_unnamed(world, folder)
    expected = mine["items.2"].table.peek(torch.arange(100)).numpy()
    world.comm.Barrier()
    if world.rank == 0:
        one, two, out = str(checkpoints.path(1)), str(checkpoints.path(2)), str(folder / "out")
        export.main([one, out, "dense=none", "table=items.2"])
        assert np.array_equal(np.load(folder / "out/rows.npy"), expected)
        for arguments, told in [
            ([one, out], "has the tables users, items.2: choose one by table=NAME, got None"),
            ([one, out, "table=words"], "has the tables users, items.2: choose one by table=NAME, got 'words'"),
            ([two, out, "table=users"], "has one table without a name: leave out table=users"),
        ]:
            with pytest.raises(SystemExit, match=told):
                export.main([*arguments, "dense=none"])
    close(mine)
