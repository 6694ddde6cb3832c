"""Checkpoints: saved state is restored on any number of ranks; damaged checkpoints are not used; a resumed run equals
an uninterrupted one."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import counting_model
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from crafted import change_file, change_manifest, write_checkpoint
from launch import ROOT, SMALL, environment, losses, mpiexec, ranks_of, run, train
from saved_files import assert_same_bits, assert_same_rows, by_key

from hetmpi import export
from hetmpi.checkpoint import checkpoints as saving
from hetmpi.checkpoint import files, writer
from hetmpi.checkpoint.checkpoints import Checkpoints, Position
from hetmpi.checkpoint.manifest import ARRAYS
from hetmpi.data.batch import to_batch
from hetmpi.data.synthetic import Synthetic
from hetmpi.errors import UserError
from hetmpi.models.wdl import WDL
from hetmpi.table.cache import CacheSettings
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.world import World

SAVING = ["checkpoint.every_steps=2", "checkpoint.keep=9", "optim.rows=adagrad"]


def saved(folder, ranks=2, *more):
    """Trains with checkpoints after steps 2, 4 and 6. Returns their folder."""
    outcome = train(ranks, *SMALL, *SAVING, f"run.dir={folder}", *more)
    assert outcome.code == 0, outcome.text
    return Path(folder, "checkpoints")


@pytest.fixture(scope="module")
def run_of_6(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    "rows",
    [
        ["adam"],
        pytest.param(["momentum"], marks=pytest.mark.rare),
        pytest.param(["ftrl", "optim.rows_l1=1e-3"], marks=pytest.mark.rare),
    ],
)
def test_at_staleness_0_a_run_that_is_resumed_is_bitwise_the_one_never_stopped(tmp_path, rows):
    optimizers = [f"optim.rows={rows[0]}", *rows[1:], "optim.dense=adagrad", "optim.schedule=cosine"]
    whole = saved(tmp_path / "whole", 2, *optimizers)
    shutil.copytree(whole / "step-00000002", tmp_path / "resumed/checkpoints/step-00000002")
    resumed = saved(tmp_path / "resumed", 2, *optimizers, "resume=auto")
    assert_same_bits(whole / "step-00000006", resumed / "step-00000006")


@pytest.mark.long
def test_lines_of_the_log_stay_and_go_on(tmp_path, run_of_6):
    folder = tmp_path / "run"
    shutil.copytree(run_of_6.parent, folder)
    shutil.rmtree(folder / "checkpoints/step-00000006")
    before = losses(folder)
    outcome = train(2, *SMALL, *SAVING, f"run.dir={folder}", "resume=auto")
    assert outcome.code == 0 and f"resumed from {folder}/checkpoints/step-00000004" in outcome.text, outcome.text
    assert losses(folder) == before and set(before) == {2, 4, 6}
    assert_same_bits(run_of_6 / "step-00000006", folder / "checkpoints/step-00000006")


@pytest.fixture(scope="module")
def incremental(tmp_path_factory):
    """As run_of_6, but the checkpoints after steps 4 and 6 are incremental."""
    return saved(tmp_path_factory.mktemp("incremental"), 2, "checkpoint.full_every=3")


def test_incremental_checkpoints_have_the_rows_of_whole_ones_in_fewer_bytes(tmp_path, incremental, run_of_6):
    for step in (2, 4, 6):
        assert_same_rows(run_of_6 / f"step-0000000{step}", incremental / f"step-0000000{step}")
    manifests = [json.loads((path / "manifest.json").read_text()) for path in sorted(incremental.iterdir())]
    assert [manifest.get("base") for manifest in manifests] == [None, "step-00000002", "step-00000002"]
    sizes = [
        sum(file["bytes"] for name, file in manifest["files"].items() if "shard" in name) for manifest in manifests
    ]
    assert sizes[1] < sizes[2] < sizes[0] / 2
    export.main([str(incremental / "step-00000006"), str(tmp_path), "dense=none"])
    assert np.array_equal(np.load(tmp_path / "rows.npy"), by_key(run_of_6 / "step-00000006")["weight"])


@pytest.mark.long
def test_a_run_goes_on_from_an_incremental_checkpoint_to_the_same_bits(tmp_path, incremental, run_of_6):
    for name in ("step-00000002", "step-00000004"):
        shutil.copytree(incremental / name, tmp_path / "checkpoints" / name)
    resumed = saved(tmp_path, 2, "checkpoint.full_every=3", "resume=auto")
    assert "base" not in json.loads((resumed / "step-00000006/manifest.json").read_text())  # the first one of a process
    assert_same_bits(resumed / "step-00000006", run_of_6 / "step-00000006")


@pytest.mark.parametrize("damage, told", [
    ("flipped", "step-00000006 cannot be used: step-00000002/shard-00001.weight.npy, which it builds on, does not "
                "match its hash"),
    ("gone", "step-00000006 cannot be used: .*step-00000002 is not a complete checkpoint"),
    ("another", "step-00000006 cannot be used: .*step-00000006 builds on step-00000002, which has changed since"),
])  # fmt: skip
def test_an_incremental_checkpoint_is_no_better_than_what_it_builds_on(tmp_path, incremental, damage, told, capsys):
    base = tmp_path / "checkpoints/step-00000002"
    shutil.copytree(incremental, base.parent)
    if damage == "flipped":
        flip(base / "shard-00001.weight.npy")
    elif damage == "gone":
        shutil.rmtree(base)
    else:
        change_manifest(base, lambda said: said.update(samples=0))
    if damage == "another":
        assert Checkpoints(World(), base.parent).newest() == base
    else:
        with pytest.raises(UserError, match=r"none of the \d checkpoint\(s\) in .* can be used"):
            Checkpoints(World(), base.parent).newest()
        assert not list(base.parent.glob("*.damaged*"))
    assert re.search(told, capsys.readouterr().out)


@pytest.mark.parametrize(
    "keep, full_every, stay",
    [(1, 3, "1 3"), (1, 2, "3"), (2, 2, "1 3 4"), (2, 3, "1 4 5"), (2, 1, "4 5"), (3, 9, "1 3 4 5")],
)
def test_what_incremental_checkpoints_build_on_stays_and_of_several_not_all_build_on_one(
    tmp_path, keep, full_every, stay
):
    table = EmbeddingTable(World(), 100, 3, RowOptimizer("sgd"))
    checkpoints = Checkpoints(table.world, tmp_path, keep, full_every)
    for step in range(1, {"1 3": 3, "3": 3, "1 3 4": 4}.get(stay, 5) + 1):
        checkpoints.save(Position(step, 0), table)
        checkpoints.wait()
    assert [int(path.name[5:]) for path in sorted(tmp_path.glob("step-*"))] == [int(step) for step in stay.split()]
    table.close()


@pytest.mark.parametrize(
    "keep, full_every, best, stay",
    [
        (1, 1, [2], "2 6"), (1, 1, [2, 4], "4 6"), (2, 1, [], "5 6"), (2, 1, [5], "5 6"), (1, 3, [2], "1 2 4 6"),
        (1, 3, [2, 5], "4 5 6"), (2, 2, [2], "1 2 3 5 6"), (1, 9, [3], "1 3 6"),
    ],
)  # fmt: skip
def test_the_best_checkpoint_stays_with_what_it_builds_on_until_another_is_the_best(
    tmp_path, keep, full_every, best, stay
):
    table = EmbeddingTable(World(), 100, 3, RowOptimizer("sgd", 1.0))
    checkpoints, rows = Checkpoints(table.world, tmp_path, keep, full_every), {}
    for step in range(1, 7):
        table.write(torch.arange(step), torch.ones_like(table.read(torch.arange(step))))
        checkpoints.save(Position(step, 0), table, is_best=step in best)
        checkpoints.wait()
        rows[step] = table.peek(torch.arange(100)).numpy().copy()
        assert checkpoints.best() == next((checkpoints.path(b) for b in reversed(best) if b <= step), None)
    assert [int(path.name[5:]) for path in sorted(tmp_path.glob("step-*"))] == [int(step) for step in stay.split()]
    for step in {*best[-1:], 6}:
        assert checkpoints.damage(checkpoints.path(step)) == []
        assert np.array_equal(by_key(checkpoints.path(step))["weight"], rows[step])
    if best:
        assert np.array_equal(by_key(tmp_path / "best")["weight"], rows[best[-1]])  # as a path of its own
        assert checkpoints.damage(tmp_path / "best") == []
        checkpoints.load(tmp_path / "best", table)
        assert np.array_equal(table.peek(torch.arange(100)).numpy(), rows[best[-1]])
    table.close()


def test_a_link_to_a_checkpoint_that_is_gone_does_not_keep_a_later_one_of_its_name(tmp_path):
    table = EmbeddingTable(World(), 100, 3, RowOptimizer("sgd"))
    for target in ("step-00000002", "../elsewhere", "step-00000002/..", None):
        folder = tmp_path / str(target).replace("/", "-")
        folder.mkdir()
        (folder / "best").mkdir() if target is None else (folder / "best").symlink_to(target)
        checkpoints = Checkpoints(table.world, folder, keep=1)
        for step in range(1, 4):
            checkpoints.save(Position(step, 0), table)
            checkpoints.wait()
        others = {"best"} if target != "step-00000002" else set()  # whatever else has this name stays
        assert {path.name for path in folder.iterdir()} == {".lock", "step-00000003"} | others
    table.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_checkpoint_that_is_a_link_to_another_disk_leaves_as_a_link(tmp_path, capsys, is_killed):
    table, disk = EmbeddingTable(World(), 100, 3, RowOptimizer("sgd")), tmp_path / "disk"
    checkpoints = Checkpoints(table.world, tmp_path / "saved", keep=1)
    checkpoints.save(Position(1, 0), table)
    checkpoints.wait()
    checkpoints.path(1).rename(disk)
    (checkpoints.path(1).with_suffix(".part") if is_killed else checkpoints.path(1)).symlink_to(disk)
    for step in (2, 3):
        checkpoints.save(Position(step, 0), table)
        checkpoints.wait()
    assert {path.name for path in checkpoints.folder.iterdir()} == {".lock", "step-00000003"}
    assert (disk / "manifest.json").exists()
    assert f"step-00000001 was a link to {disk}: it is removed, its folder stays" in capsys.readouterr().out
    table.close()


@pytest.mark.mpi
def test_the_link_to_the_best_checkpoint_is_set_again(world, tmp_path_factory):
    folder = Path(world.comm.bcast(str(tmp_path_factory.mktemp("best"))))
    table = EmbeddingTable(world, 100, 3, RowOptimizer("sgd"))
    checkpoints = Checkpoints(world, folder, keep=9)
    for step in (1, 2):
        checkpoints.save(Position(step, 0), table, is_best=step == 1)
    checkpoints.wait()
    for step, found in ((2, 2), (2, 2), (1, 1), (3, None), (3, None), (2, 2)):
        checkpoints.mark_best(step)
        world.comm.Barrier()
        assert checkpoints.best() == (None if found is None else checkpoints.path(found))
        world.comm.Barrier()
    table.close()


@pytest.mark.mpi
@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("staleness", [0, 3])
def test_rows_of_late_updates_are_in_an_incremental_checkpoint(
    placed, tmp_path_factory, monkeypatch, staleness, has_memory
):
    """At s >= 1 an update may leave a row's clock unchanged."""
    folder = Path(placed.comm.bcast(str(tmp_path_factory.mktemp("late"))))
    model, random = torch.nn.Linear(2, 2), np.random.default_rng(placed.rank)
    table, other = (
        EmbeddingTable(
            placed,
            1000,
            3,
            RowOptimizer("adagrad"),
            name=name,
            staleness=Staleness(staleness),
            cache=CacheSettings(200 if staleness > 0 else 0, admit="all"),
        )
        for name in ("one", "other")
    )
    checkpoints = Checkpoints(placed, folder, full_every=9)
    if not has_memory:
        monkeypatch.setattr(saving, "available_memory", lambda: 1000)
    for step in range(1, 4):
        for _ in range(5):
            keys = torch.from_numpy(np.unique(random.integers(0, 300, 40)))
            table.write(keys, table.read(keys))
        checkpoints.save(Position(step, 0), table, model, torch.optim.SGD(model.parameters(), 0.1), {})
    checkpoints.wait()
    checkpoints.load(checkpoints.newest(), other)
    assert np.load(checkpoints.path(3) / f"shard-{placed.rank:05d}.rows.npy").size < len(table.shard.weight) / 2
    for name in ARRAYS:
        assert np.array_equal(getattr(table.shard, name), getattr(other.shard, name)), name
    assert table.shard.clock.max() > 1
    table.close()
    other.close()


def test_two_folders_of_one_table_and_rows_put_in_by_hand_are_saved_whole(tmp_path):
    world = World()
    table = EmbeddingTable(world, 100, 3, RowOptimizer("sgd", 1.0))
    latest, best = (Checkpoints(world, tmp_path / name, full_every=9) for name in ("latest", "best"))

    def train(keys):
        table.write(keys, torch.ones_like(table.read(keys)))

    def saved_last(checkpoints, step):
        checkpoints.save(Position(step, 0), table)
        checkpoints.wait()
        assert np.array_equal(by_key(checkpoints.path(step))["weight"], table.peek(torch.arange(100)).numpy())
        return json.loads((checkpoints.path(step) / "manifest.json").read_text()).get("base")

    assert saved_last(latest, 1) is None
    train(torch.arange(3))
    assert saved_last(latest, 2) == "step-00000001"
    assert saved_last(best, 2) is None
    train(torch.arange(5, 7))
    # neither knows the rows touched since its base
    assert saved_last(latest, 3) is None and saved_last(best, 3) is None
    train(torch.arange(8, 9))
    assert saved_last(best, 4) == "step-00000003"
    best.load(best.path(2), table)
    assert saved_last(best, 5) is None
    train(torch.arange(0, 100, 1))
    assert saved_last(best, 6) is None  # most rows have changed
    table.close()


@pytest.fixture(scope="module")
def saved_on_three(tmp_path_factory):
    folder = saved(tmp_path_factory.mktemp("three"), 3, "table.partition=hash", "checkpoint.keep=1")
    assert [path.name for path in folder.iterdir()] == ["step-00000006"]
    return folder / "step-00000006"


@pytest.mark.long
@pytest.mark.parametrize("ranks, partition", [(1, "range"), (2, "hash"), (4, "round_robin")])
def test_rows_saved_on_three_ranks_come_back_on_any_number_in_any_partition(saved_on_three, ranks, partition):
    last = saved_on_three
    outcome = run(
        [
            mpiexec(),
            "-n",
            str(ranks),
            sys.executable,
            str(ROOT / "tests/support/checkpoint_check.py"),
            str(last),
            partition,
        ]
    )
    assert outcome.code == 0, outcome.text


@pytest.mark.rare
def test_a_run_goes_on_on_other_ranks_with_no_sample_lost_or_twice(tmp_path):
    settings = [
        *SMALL,
        "checkpoint.every_steps=2",
        f"run.dir={tmp_path}",
        "resume=auto",
        "table.staleness=3",
        "table.cache.admit=all",
    ]
    samples = 0
    for ranks, steps in ((2, 4), (3, 9), (1, 12)):
        before = 4 if steps == 9 else 9 if steps == 12 else 0
        outcome = train(ranks, *settings, *counting_model.settings(ranks), f"steps={steps}")
        assert outcome.code == 0, outcome.text
        samples += (steps - before) * ranks * 32
        end = tmp_path / f"checkpoints/step-{steps:08d}"
        manifest = json.loads((end / "manifest.json").read_text())
        assert (manifest["step"], manifest["samples"], manifest["size"]) == (steps, samples, ranks)
        counting_model.assert_counted(by_key(end)["weight"], samples, 0.0005)


@pytest.mark.long
def test_a_checkpoint_is_evaluated_without_a_step(tmp_path, run_of_6):
    told = [json.loads((path / "summary.json").read_text())["auc"] for path in (
        run_of_6.parent, evaluated(tmp_path, run_of_6 / "step-00000006"),
    )]  # fmt: skip
    assert told[0] == pytest.approx(told[1], abs=1e-6)


def evaluated(folder, path):
    outcome = train(1, *SMALL, "steps=0", f"run.dir={folder}", f"resume={path}", "optim.rows=adagrad")
    assert outcome.code == 0, outcome.text
    return folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": (
        lambda path: flip(path / "shard-00001.weight.npy"),
        "shard-00001.weight.npy does not match its hash",
    ),
    "missing": (
        lambda path: (path / "shard-00000.clock.npy").unlink(),
        "shard-00000.clock.npy: No such file or directory",
    ),
    "truncated": (
        lambda path: (path / "dense.pt").write_bytes((path / "dense.pt").read_bytes()[:-1]),
        r"dense.pt has [\d,]+ bytes, expected [\d,]+",
    ),
    "no manifest": (
        lambda path: (path / "manifest.json").write_text("{"),
        "is not a complete checkpoint: manifest.json",
    ),
    "other format": (
        lambda path: (path / "manifest.json").write_text('{"format": 99}'),
        "has format 99, this hetmpi reads 1, 2 and 3",
    ),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(tmp_path, run_of_6, damage, capsys):
    folder = tmp_path / "checkpoints"
    shutil.copytree(run_of_6, folder)
    spoil, told = DAMAGES[damage]
    spoil(folder / "step-00000006")
    assert Checkpoints(World(), folder).newest() == folder / "step-00000004"
    assert re.search(f"step-00000006 cannot be used: .*{told}", capsys.readouterr().out)


def test_a_named_checkpoint_that_is_damaged_ends_the_run(tmp_path, run_of_6):
    folder = tmp_path / "checkpoints"
    shutil.copytree(run_of_6, folder)
    flip(folder / "step-00000006/dense.pt")
    outcome = train(2, *SMALL, f"run.dir={tmp_path}", f"resume={folder}/step-00000006", "optim.rows=adagrad")
    assert (
        outcome.code != 0
        and "dense.pt does not match its hash: name another checkpoint, or resume=auto" in outcome.text
    )
    assert not outcome.survivors


@pytest.mark.rare
def test_a_checkpoint_of_another_table_is_refused(tmp_path, run_of_6):
    outcome = train(
        2, *SMALL, "table.dim=8", f"run.dir={tmp_path}", f"resume={run_of_6}/step-00000006", "optim.rows=adagrad"
    )
    assert outcome.code != 0 and "has a table with dim=4, the program's has 8" in outcome.text, outcome.text


@pytest.mark.rare
@pytest.mark.parametrize("resume", ["auto", "PATH"])
def test_a_trainer_refuses_a_checkpoint_that_is_whole_by_its_hashes_alone(tmp_path, run_of_6, resume):
    folder = tmp_path / "checkpoints"
    shutil.copytree(run_of_6, folder)
    last, shard = folder / "step-00000006", "shard-00001.weight.npy"
    change_file(last, shard, np.load(last / shard).astype(np.float64))
    outcome = train(
        2, *SMALL, f"run.dir={tmp_path}", f"resume={str(last) if resume == 'PATH' else resume}", "optim.rows=adagrad"
    )
    assert re.search(rf"{shard} must hold float32 of shape \(\d+, 4\), it holds float64", outcome.text), outcome.text
    assert "Traceback" not in outcome.text and not outcome.survivors
    if resume == "auto":
        assert outcome.code == 0 and f"resumed from {folder}/step-00000004" in outcome.text, outcome.text
    else:
        assert outcome.code != 0 and outcome.text.count("name another checkpoint, or resume=auto") == 1, outcome.text


@pytest.mark.long
@pytest.mark.parametrize("size, num_open", [(16, 64), pytest.param(1024, 256, marks=pytest.mark.rare)])
def test_a_checkpoint_of_many_ranks_is_loaded_and_exported_with_few_open_files(tmp_path, size, num_open):
    write_checkpoint(tmp_path / "step-00000001", 1, size)
    write_checkpoint(tmp_path / "step-00000002", 2, size, base=tmp_path / "step-00000001")
    path, limited = (
        str(tmp_path / "step-00000002"),
        ["bash", "-c", f'ulimit -n {num_open}; exec "$@"', "bash", sys.executable],
    )
    outcome = run([*limited, str(ROOT / "tests/support/checkpoint_check.py"), path, "range"])
    assert outcome.code == 0, outcome.text
    outcome = run([*limited, "-m", "hetmpi.export", path, str(tmp_path / "out"), "dense=none"])
    assert outcome.code == 0, outcome.text
    assert np.array_equal(np.load(tmp_path / "out/rows.npy"), by_key(Path(path))["weight"])


SPOILT = {
    "weight": lambda table, model: table.shard.assign(np.array([2]), weight=np.nan),
    "state": lambda table, model: table.shard.assign(np.array([2]), state=np.inf),
    "dense": lambda table, model: model.bias.data.fill_(np.nan),
}


@pytest.mark.mpi
@pytest.mark.parametrize("spoilt, is_incremental, has_memory", [
    *itertools.product(SPOILT, [False, True], [True]), ("weight", False, False), ("weight", True, False),
])  # fmt: skip
def test_what_is_not_finite_is_not_saved_and_all_ranks_hear_of_it(
    world, tmp_path_factory, monkeypatch, spoilt, is_incremental, has_memory
):
    folder = Path(world.comm.bcast(str(tmp_path_factory.mktemp("finite"))))
    if not has_memory:
        monkeypatch.setattr(saving, "available_memory", lambda: 1000)
    model, last = torch.nn.Linear(2, 2), world.size - 1
    table = EmbeddingTable(world, 1000, 3, RowOptimizer("adagrad"), name="words")
    checkpoints = Checkpoints(world, folder, full_every=2 if is_incremental else 1)
    checkpoints.save(Position(1, 0), table, model)
    if world.rank == (0 if spoilt == "dense" else last):
        SPOILT[spoilt](table, model)
        table.shard.touched[2] = 1
    checkpoints.save(Position(2, 0), table, model)
    told = {
        "dense": "parameter bias of the dense layers is not finite",
        "weight": rf"table 'words': weight of 1 row\(s\) of rank {last} is not finite, "
        rf"for example of key {2 * world.size + last}",
        "state": rf"table 'words': state of 1 row\(s\) of rank {last} is not finite, "
        rf"for example of key {2 * world.size + last}",
    }[spoilt]
    with pytest.raises(
        UserError, match=f"step-00000002 is not written in {folder}: {told}: earlier checkpoints are kept"
    ):
        checkpoints.wait()
    assert checkpoints.newest() == checkpoints.path(1)
    world.comm.Barrier()
    if world.rank == last:
        table.shard.assign(np.array([2]), weight=1, state=1)
    model.bias.data.fill_(0)
    checkpoints.save(Position(2, 0), table, model)
    checkpoints.wait()
    assert checkpoints.newest() == checkpoints.path(2)
    table.close()


def test_an_export_builds_models_alone(tmp_path, run_of_6):
    path, wdl = tmp_path / "step-00000006", {"_target_": "hetmpi.models.wdl.WDL"}
    shutil.copytree(run_of_6 / "step-00000006", path)
    for config, told in [
        (
            {"_target_": "os.mkdir", "_args_": [str(tmp_path / "made")]},
            " is of the model os.mkdir, whose code would run",
        ),
        ({**wdl, "hidden": {"_target_": "os.mkdir", "path": "x"}}, " is of the model os.mkdir, whose code would run"),
        ({**wdl, "hidden": "${oc.create:{_target_:os.abort}}"}, ": manifest.json: model_config: values must be plain"),
        ({**wdl, "hidden": [7]}, ": the model in its manifest does not fit: "),
        ({"_target_": 3}, ": manifest.json: model_config: _target_ must be package.module.Class, got 3"),
        ({}, ": the model in its manifest does not fit: "),
    ]:
        change_manifest(path, lambda said, config=config: said.update(model_config=config))
        with pytest.raises(SystemExit, match=f"hetmpi: .*step-00000006{told}"):
            export.main([str(path), str(tmp_path / "out"), "rows=none"])
    assert not (tmp_path / "made").exists()


@pytest.mark.long
def test_where_nothing_was_saved_a_run_that_would_resume_begins(tmp_path):
    outcome = train(2, *SMALL, f"run.dir={tmp_path}", "resume=auto")
    assert outcome.code == 0 and "resumed" not in outcome.text, outcome.text
    assert f"resume=auto: there is no checkpoint in {tmp_path}/checkpoints" in outcome.text


@pytest.mark.long
@pytest.mark.parametrize("changed, told", [
    (["seed=5", "resume=auto"], "was saved with seed=0, now it is 5"),
    (["optim.dense=sgd", "resume=auto"], "was saved with optim.dense=adam, now it is sgd"),
    (["data.zipf=1.2", "resume=auto"], "was saved with data.zipf=1.05, now it is 1.2"),
    ([], "holds step-00000006 of an earlier run, and this one begins at step 0"),
])  # fmt: skip
def test_a_run_that_would_not_go_on_as_it_began_is_refused(tmp_path, run_of_6, changed, told):
    shutil.copytree(run_of_6, tmp_path / "checkpoints")
    outcome = train(1, *SMALL, *SAVING, f"run.dir={tmp_path}", *changed)
    assert outcome.code != 0 and told in outcome.text, outcome.text


class Killed(BaseException):
    """Stands for the end of a process."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("full_every, is_best", [(1, False), (2, False), (3, False), (1, True), (3, True)])
def test_a_kill_at_any_write_or_name_leaves_one_that_is_whole(tmp_path, monkeypatch, full_every, is_best):
    world, model = World(), torch.nn.Linear(2, 2)
    table = EmbeddingTable(world, 100, 3, RowOptimizer("adagrad"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls, limit = [], 1000

    def until_killed(function):
        def call(*arguments, **settings):
            calls.append(function.__name__)
            if len(calls) >= limit:
                raise Killed
            return function(*arguments, **settings)

        return call

    for module in (files, writer):
        monkeypatch.setattr(module, "write_bytes", until_killed(files.write_bytes))
    for module, name in ((os, "rename"), (os, "open"), (os, "symlink"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, until_killed(getattr(module, name)))
    num_calls = 0
    for number in [None, *range(40)]:
        if number is not None and number > num_calls:
            break
        limit = 1000
        checkpoints = Checkpoints(world, tmp_path / str(number), keep=1, full_every=full_every)
        checkpoints.save(Position(0, 0), table, model, optimizer, {})
        checkpoints.save(Position(1, 10), table, model, optimizer, {}, is_best=is_best)
        checkpoints.wait()
        calls.clear()
        limit = 1000 if number is None else number + 1
        try:
            checkpoints.save(Position(2, 20), table, model, optimizer, {}, is_best=is_best)
            checkpoints.wait()
        except Killed:
            pass  # in the main thread
        num_calls = len(calls) if number is None else num_calls
        limit = 1000
        found = Checkpoints(world, tmp_path / str(number)).newest()
        assert found is not None and found.name in ("step-00000001", "step-00000002"), (number, calls)
        best = checkpoints.best()
        assert (best is not None) == is_best and (best is None or not checkpoints.damage(best)), (number, calls)
    assert num_calls > 8
    table.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is made by mount, which needs root")
def test_a_full_disk_ends_the_run_with_the_reason_and_keeps_what_was_whole(tmp_path, run_of_6):
    small, size = tmp_path / "small", sum(file.stat().st_size for file in (run_of_6 / "step-00000006").iterdir())
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={5 * size // 2}", "none", str(small)]).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        outcome = train(2, *SMALL, *SAVING, f"run.dir={tmp_path}", f"checkpoint.dir={small}")
        assert (
            outcome.code != 0 and "cannot be written in" in outcome.text and "No space left on device" in outcome.text
        ), outcome.text
        assert not outcome.survivors
        whole = [path for path in small.glob("step-*") if path.suffix != ".part"]
        assert whole and not any(Checkpoints(World(), small).damage(path) for path in whole)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.long
def test_a_rank_killed_at_any_moment_leaves_a_checkpoint_to_go_on_from(tmp_path, run_of_6):
    """The folder then contains only complete checkpoints, which lead to the same rows."""
    random, longest_s, num_killed = np.random.default_rng(0), 3.0, 0
    ranks = [mpiexec(), "-n", "2", sys.executable, "-m", "hetmpi.train"]
    command = [*ranks, *SMALL, *SAVING, f"run.dir={tmp_path}", "resume=auto"]
    while num_killed < 2:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while len(ranks_of(tmp_path)) < 2:
            time.sleep(0.01)
        time.sleep(longest_s * random.random())
        found = random.permutation(ranks_of(tmp_path))[:1].tolist()
        for rank in found:
            os.kill(rank, signal.SIGKILL)
        process.wait(60)
        num_killed += len(found)
        longest_s *= 1 if found else 0.7  # the run had ended already, on a fast machine
    outcome = run(command)
    assert outcome.code == 0, outcome.text
    assert_same_bits(tmp_path / "checkpoints/step-00000006", run_of_6 / "step-00000006")


@pytest.mark.long
def test_a_signal_saves_and_leaves_and_the_run_goes_on_bitwise(tmp_path):
    """The signal is sent to one rank during a step."""
    settings = [*SMALL, *SAVING, f"run.dir={tmp_path}", "steps=100000", "resume=auto"]
    process = subprocess.Popen(
        [mpiexec(), "-n", "2", sys.executable, "-m", "hetmpi.train", *settings], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None, process.stdout.read()
    os.kill(ranks_of(tmp_path)[-1], signal.SIGUSR1)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 85, (process.returncode, text)
    again = r"continue with the same command and run\.dir=\S+ resume=auto"
    [saved_at] = re.findall(rf"stopped by a signal: saved \S+/step-(\d+), {again}", text)
    last, more = int(saved_at), [f"steps={int(saved_at) + 3}", "log.every_steps=1000000"]
    assert Checkpoints(World(), tmp_path / "checkpoints").steps()[0] == last
    outcome = train(2, *settings, *more, "checkpoint.every_steps=1000000")
    assert outcome.code == 0 and f"resumed from {tmp_path}/checkpoints/step-{saved_at}" in outcome.text, outcome.text
    whole = tmp_path / "whole"
    outcome = train(2, *SMALL, *SAVING, f"run.dir={whole}", *more, "checkpoint.every_steps=1000000")
    assert outcome.code == 0, outcome.text
    assert_same_bits(tmp_path / f"checkpoints/step-{last + 3:08d}", whole / f"checkpoints/step-{last + 3:08d}")


def test_a_second_signal_ends_a_rank_that_waits_for_others(tmp_path):
    """The other rank is stopped, so that no step ends."""
    settings = [*SMALL, f"run.dir={tmp_path}", "steps=100000"]
    process = subprocess.Popen(
        [mpiexec(), "-n", "2", sys.executable, "-m", "hetmpi.train", *settings],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    stopped, waiting = ranks_of(tmp_path)
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(0.3)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(waiting, number)
        time.sleep(0.2)
    assert waiting not in ranks_of(tmp_path)
    with contextlib.suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGKILL)
    assert process.wait(60) != 0


@pytest.mark.filterwarnings("ignore:.torch.jit.load:DeprecationWarning")
def test_rows_by_key_and_the_dense_layers_come_out(tmp_path, run_of_6):
    path = run_of_6 / "step-00000006"
    manifest = json.loads((path / "manifest.json").read_text())
    export.main([str(path), str(tmp_path)])
    export.main([str(path), str(tmp_path), "rows=parquet", "dense=none"])
    rows, table = np.load(tmp_path / "rows.npy"), pq.read_table(tmp_path / "rows.parquet")
    assert np.array_equal(rows[0::2], np.load(path / "shard-00000.weight.npy"))
    assert np.array_equal(rows[1::2], np.load(path / "shard-00001.weight.npy"))
    assert np.array_equal(table["key"].to_numpy(), np.arange(manifest["num_rows"]))
    assert np.array_equal(np.stack(table["weight"].to_numpy()), rows)
    model, known, batch = trained(path)
    dense = torch.jit.load(str(tmp_path / "dense.torchscript"))
    assert torch.equal(dense(known, batch.index, batch.dense), model(known, batch).detach())


def trained(path):
    """The model of a checkpoint, the rows of some samples, and these samples."""
    manifest, data = json.loads((path / "manifest.json").read_text()), Synthetic(0, scale=0.0005)
    model = WDL(
        data.num_fields,
        data.num_dense,
        manifest["dim"],
        **{k: v for k, v in manifest["model_config"].items() if k != "_target_"},
    )
    model.load_state_dict(torch.load(path / "dense.pt", weights_only=True)["model"])
    batch = to_batch(data.valid(0, 50))
    return (
        model.eval(),
        torch.randn(len(batch.keys["table"]), manifest["dim"], generator=torch.Generator().manual_seed(0)),
        batch,
    )


def test_the_dense_layers_come_out_for_other_programs(tmp_path, run_of_6):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    path = run_of_6 / "step-00000006"
    export.main([str(path), str(tmp_path), "rows=none", "dense=onnx"])
    model, known, batch = trained(path)
    inputs = {"rows": known, "index": batch.index, "dense": batch.dense}
    (found,) = reference.ReferenceEvaluator(str(tmp_path / "dense.onnx")).run(
        None, {name: value.numpy() for name, value in inputs.items()}
    )
    assert np.allclose(found, model(known, batch).detach().numpy(), atol=1e-5)


def test_an_export_says_what_it_cannot_take(tmp_path):
    with pytest.raises(SystemExit, match="unknown argument rows=csv; known are rows=npy|parquet|none"):
        export.main(["a", "b", "rows=csv"])
    with pytest.raises(SystemExit, match="hetmpi: .* is not a complete checkpoint"):
        export.main([str(tmp_path), str(tmp_path / "out")])


def test_an_export_to_onnx_names_the_packages_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install onnx onnxscript"):
        export.main([str(tmp_path), str(tmp_path / "out"), "dense=onnx"])
