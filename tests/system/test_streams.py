"""Runs on a stream of files (data.follow=true)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from launch import environment, launcher_of, ranks_of, run, summary, train
from streams import clicks, put

from hetmpi.checkpoint.manifest import digest_of
from hetmpi.data.tabular.stream import END
from hetmpi.errors import UserError
from hetmpi.metrics import auc
from hetmpi.trained.saved_model import resumed_stream
from hetmpi.world.launch import LEFT_EARLY

SIZES = (500, 640, 30, 700)  # steps of 48: the last samples of a day wait for the next one
COLUMNS = (
    "data.columns=[{name: user, rows: open, max_rows: 60, min_count: 2, expire_steps: 15}, "
    "{name: hour, kind: id, rows: 24, hash: false}]"
)
SETTINGS = [
    "data=tabular", "data.follow=true", "data.label=click", COLUMNS, "table.dim=4", "seed=3", "optim.rows=adagrad",
    "optim.rows_lr=0.1", "optim.dense_lr=0.01", "table.maintain_steps=10", "checkpoint.keep=9", "log.every_steps=10",
]  # fmt: skip


def own(folder, ranks, *more):
    return [
        *SETTINGS, f"data.path={folder}/in", f"data.cache={folder}/prepared", f"run.dir={folder}/run",
        f"batch_size={48 // ranks}", *more,
    ]  # fmt: skip


def put_days(folder, days):
    for day in days:
        put(folder / "in", f"day{day}.csv", clicks(day, SIZES[day]))


def evaluations(folder):
    lines = [json.loads(line) for line in (folder / "run/evaluation.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "elapsed_s"} for line in lines]


def saved(folder, step):
    """File -> bytes of a checkpoint, without the manifest, which has times."""
    place = folder / f"run/checkpoints/step-{step:08d}"
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != "manifest.json"}


def hetmpi(*arguments):
    outcome = run([sys.executable, "-m", "hetmpi", *map(str, arguments)])
    assert outcome.code == 0, outcome.text


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a run on two ranks over files that were all there."""
    folder = tmp_path_factory.mktemp("whole")
    put_days(folder, range(4))
    (folder / "in" / END).touch()
    outcome = train(2, *own(folder, 2, "checkpoint.export_deltas=true"))
    assert outcome.code == 0, outcome.text
    assert "its last 46 samples, fewer than a step's, were not trained on: keep day3.csv" in outcome.text
    return folder


def test_each_file_is_evaluated_before_it_is_trained_on(whole, tmp_path):
    found = evaluations(whole)
    assert [(one["file"], one["step"]) for one in found] == [("day1.csv", 10), ("day2.csv", 23), ("day3.csv", 24)]
    for day, step in ((1, 10), (3, 24)):
        place, out = whole / f"run/checkpoints/step-{step:08d}", tmp_path / f"{day}.parquet"
        hetmpi("predict", place, f"data.path={whole}/in/day{day}.csv", "predict.keep=[click]", f"out={out}")
        told = pq.read_table(out)
        assert auc(
            told["click"].cast("string").cast("float32").to_numpy(), told["probability"].to_numpy()
        ) == pytest.approx(next(one["auc"] for one in found if one["file"] == f"day{day}.csv"), abs=1e-6)
    weights, values = [SIZES[day] for day in (1, 2, 3)], [one["auc"] for one in found]
    end = summary(whole / "run")
    assert end["progressive_auc"] == pytest.approx(np.average(values, weights=weights)) == found[-1]["progressive_auc"]
    assert (end["steps"], end["auc"]) == (sum(SIZES) // 48, values[-1])
    deltas = sorted(path.name for path in (whole / "run/deltas").iterdir())
    assert deltas == [f"step-{step:08d}" for step in (10, 23, 24, 38)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_number_of_ranks_changes_no_result(whole, tmp_path, ranks):
    shutil.copytree(whole / "in", tmp_path / "in")
    outcome = train(ranks, *own(tmp_path, ranks))
    assert outcome.code == 0, outcome.text
    for one, other in zip(evaluations(whole), evaluations(tmp_path), strict=True):
        assert (one["file"], one["samples"]) == (other["file"], other["samples"])
        assert one["auc"] == pytest.approx(other["auc"], abs=1e-4)
    for key in ("ids_admitted", "ids_waiting", "ids_evicted", "ids_expired"):
        assert summary(whole / "run")[key] == summary(tmp_path / "run")[key], key


class Running:
    """A run in the background, whose output goes to a file."""

    def __init__(self, folder, *more):
        self.folder, self.path = folder, folder / f"output-{time.monotonic_ns()}"
        command = [*launcher_of(2), sys.executable, "-m", "hetmpi.train", "device=cpu", *own(folder, 2, *more)]
        with self.path.open("w") as output:
            self.process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)

    @property
    def text(self):
        return self.path.read_text()

    def wait_for(self, said, times=1, limit_s=60):
        end = time.monotonic() + limit_s
        while self.text.count(said) < times:
            assert time.monotonic() < end and self.process.poll() is None, self.text
            time.sleep(0.1)

    def end(self, code):
        assert self.process.wait(60) == code, self.text


def test_files_that_come_late_and_a_run_that_is_left_and_resumed_change_no_bit(whole, tmp_path):
    put_days(tmp_path, [0])
    first = Running(tmp_path)
    first.wait_for("waiting for the next file")
    put_days(tmp_path, [1])
    first.wait_for("waiting for the next file", 2)
    os.kill(ranks_of(f"{tmp_path}/run")[0], signal.SIGUSR1)
    first.end(LEFT_EARLY)
    assert "stopped by a signal: saved" in first.text and "step-00000023" in first.text
    os.remove(tmp_path / "in/day0.csv")  # all of it was trained on, but not all of day1
    put_days(tmp_path, [2, 3])
    second = Running(tmp_path, "resume=auto", "steps=30")
    second.end(0)
    assert evaluations(tmp_path)[:3] == evaluations(whole)
    third = Running(tmp_path, "resume=auto", "checkpoint.every_steps=4")
    third.wait_for("step 38: waiting for the next file")
    for rank in ranks_of(f"{tmp_path}/run"):
        os.kill(rank, signal.SIGKILL)
    third.process.wait(60)
    (tmp_path / "in" / END).touch()
    last = Running(tmp_path, "resume=auto")
    last.end(0)
    assert evaluations(tmp_path) == evaluations(whole) and saved(tmp_path, 38) == saved(whole, 38)
    for key in ("auc", "log_loss", "progressive_auc"):  # the last run made no step
        assert summary(tmp_path / "run")[key] == summary(whole / "run")[key]
    prepared = [path.name[:8] for path in (tmp_path / "prepared").glob("*/*")]
    assert "day0.csv" not in prepared and "day3.csv" in prepared


def test_a_stream_of_one_file_cannot_be_trained_on_as_another_data_set(whole, tmp_path):
    place = whole / "run/checkpoints/step-00000038"
    outcome = run([sys.executable, "-m", "hetmpi", "predict", str(place), "split=valid", f"out={tmp_path}/x.parquet"])
    assert outcome.code == 1 and "the checkpoint is of a stream (data.follow=true)" in outcome.text, outcome.text
    assert "Traceback" not in outcome.text
    outcome = train(2, *own(whole, 2, f"run.dir={tmp_path}/other", "dry_run=true"))
    assert outcome.code == 0 and "10 steps of 48 samples" in outcome.text and "fits" in outcome.text, outcome.text


@pytest.mark.parametrize(
    "setting, said",
    [
        ("eval.every_steps=5", "eval.every_steps=5 cannot be used with data.follow=true"),
        ("optim.schedule=cosine", "optim.schedule=cosine cannot be used with data.follow=true"),
        ("epochs=2", "epochs=2"),
        ("data.path=in.csv", "needs data.path to be a folder"),
    ],
)
def test_settings_that_a_stream_excludes(whole, tmp_path, setting, said):
    outcome = train(1, *own(whole, 1, f"run.dir={tmp_path}/other", setting))
    assert outcome.code == 1 and said in outcome.text and "Traceback" not in outcome.text, outcome.text


def test_a_damaged_file_ends_all_ranks_and_its_repair_lets_the_run_go_on(whole, tmp_path):
    put_days(tmp_path, [0])
    put(tmp_path / "in", "day1.csv", "user,hour,price,click\nada,1,0.5,perhaps\n")
    outcome = train(2, *own(tmp_path, 2))
    assert outcome.code == 1 and "perhaps" in outcome.text and "Traceback" not in outcome.text, outcome.text
    assert not outcome.survivors
    put_days(tmp_path, [1])
    (tmp_path / "in" / END).touch()
    outcome = train(2, *own(tmp_path, 2, "resume=auto"))
    assert outcome.code == 0, outcome.text
    assert evaluations(tmp_path) == evaluations(whole)[:1]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"files": []}, "files must be a list of names of files, each with its bytes and samples"),
        ({"files": [["../day3.csv", 1, 700]]}, "files must be a list of names of files"),
        ({"files": [["day3.csv", 1, 10**400]]}, "files must be a list of names of files"),
        ({"files": [["day3.csv", 1, 700], ["day2.csv", 1, 30]]}, "files must be ascending"),
        ({"files": [["day3.csv", 1, 1]]}, "files must be ascending, with the samples from"),
        ({"samples": 3}, "samples must be an integer in"),
        ({"columns": "user"}, "columns must be a list of names"),
    ],
)
def test_an_invalid_state_of_a_stream_is_refused(whole, tmp_path, change, said):
    place = tmp_path / "step-00000038"
    shutil.copytree(whole / f"run/checkpoints/{place.name}", place)
    manifest = json.loads((place / "manifest.json").read_text())
    del manifest["xxh3_128"]
    manifest["stream"] |= change
    (place / "manifest.json").write_text(json.dumps({**manifest, "xxh3_128": digest_of(manifest)}))
    with pytest.raises(UserError, match=said):
        resumed_stream(place, manifest["samples"])
