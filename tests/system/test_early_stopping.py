"""Early stopping and the best checkpoint: a run that is killed and resumed decides as one that nobody killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from launch import ROOT, SMALL, environment, losses, mpiexec, ranks_of, summary, train
from saved_files import assert_same_bits, by_key
from test_refusals import refusal

from hetmpi.log.headline import compared_rows
from hetmpi.log.record import Run

pytestmark = pytest.mark.long

FOLLOWING = [
    "data.scale=0.0005", "table.dim=4", "batch_size=64", "steps=400", "log.every_steps=1000", "eval.max_samples=1000",
    "eval.every_steps=6", "eval.patience=3", "checkpoint.best=auc", "optim.rows_lr=0.3", "checkpoint.every_steps=4",
    "checkpoint.full_every=3",
]  # fmt: skip

NOTHING_HELD_OUT = ["data._target_=broken_data.Sized", "data.num_valid=0", "~data.scale", "~data.zipf"]


def evaluations(folder):
    """[(step, AUC), ...] of a run."""
    lines = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    return [(line["step"], line["auc"]) for line in lines]


def best_of(folder):
    """The decisions of a run: its end, the best evaluation, and the name of the checkpoint that `best` leads to."""
    found = summary(folder)
    kept = {key: found[key] for key in ("steps", "best_step", "best_auc", "ended_early")}
    return {**kept, "link": os.readlink(folder / "checkpoints/best")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that ended early."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = train(2, *FOLLOWING, "checkpoint.keep=99", f"run.dir={folder}")
    assert outcome.code == 0, outcome.text
    return folder, outcome.text


def test_training_ends_after_evaluations_without_an_improvement(whole):
    folder, text = whole
    found, seen = summary(folder), evaluations(folder)
    best_step, best_auc = max(seen, key=lambda pair: pair[1])
    assert (found["best_step"], found["best_auc"]) == (best_step, best_auc)
    assert found["steps"] == best_step + 18 < 400 and [step for step, _ in seen] == [*range(6, best_step + 19, 6)]
    for step in range(18, best_step, 6):  # it did not end before, nor after a smaller number of evaluations
        before = [auc for at, auc in seen if at <= step]
        assert max(before[-3:]) > max(before[:-3], default=0)
    said = f"auc has not risen above {best_auc:.4f}, of step {best_step}, in 3 evaluations (eval.patience=3)"
    best = f"{folder}/checkpoints/step-{best_step:08d}"
    assert found["ended_early"] == said and found["best_checkpoint"] == best
    assert f"end     after step {found['steps']}: {said}\n" in text
    assert f"best    AUC {best_auc:.4f} at step {best_step}, in {best}\n" in text
    assert max(losses(folder)) == found["steps"]  # the last steps are logged as well


def test_a_run_that_ended_early_is_finished(whole):
    folder, _ = whole
    run = Run(folder, "run", 0)
    state = run.state(time.time())
    assert state.startswith(f"finished after {summary(folder)['steps']} steps, early: auc has not risen above ")
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    rows = {name: cells[0].text for name, cells in compared_rows([run], time.time())}
    assert rows["best checkpoint"] == summary(folder)["best_checkpoint"]
    assert rows["best AUC on held-out data"] == f"{summary(folder)['best_auc']:.4f}"


def test_the_best_checkpoint_has_the_figures_of_its_evaluation(whole, tmp_path):
    folder, _ = whole
    own = [setting for setting in FOLLOWING if not setting.startswith(("steps", "checkpoint", "eval.patience"))]
    outcome = train(2, *own, "steps=0", f"resume={folder}/checkpoints/best", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    assert summary(tmp_path)["auc"] == summary(folder)["best_auc"]


@pytest.mark.rare
def test_a_run_that_is_killed_and_resumed_ends_where_the_other_ended(whole, tmp_path):
    """A rank is killed at three moments; checkpoint.keep=1 leaves little beside the best one."""
    folder, _ = whole
    command = [mpiexec(), "-n", "2", sys.executable, "-m", "hetmpi.train", "device=cpu", *FOLLOWING]
    command += ["checkpoint.keep=1", f"run.dir={tmp_path}", "resume=auto"]
    num_killed = 0
    for moment in (7, 31, summary(folder)["best_step"] + 7):
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while newest(tmp_path) < moment and process.poll() is None:
            time.sleep(0.002)
        found = ranks_of(tmp_path)[-1:]
        for rank in found:
            os.kill(rank, signal.SIGKILL)
        process.wait(60)
        num_killed += len(found)
    outcome = train(2, *command[7:])
    assert outcome.code == 0 and num_killed > 0, outcome.text
    assert best_of(tmp_path) == best_of(folder) and evaluations(tmp_path) == evaluations(folder)
    for step in (summary(folder)["best_step"], summary(folder)["steps"]):
        assert_same_bits(*(run / f"checkpoints/step-{step:08d}" for run in (tmp_path, folder)))


def newest(folder):
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-????????")), default=0)


def resumed_at(whole, folder, step):
    """A copy of a run as a kill after the checkpoint of `step` would have left it, and the best checkpoint until
    then."""
    for path in (whole / "checkpoints").glob("step-*"):
        if int(path.name[5:]) <= step:
            shutil.copytree(path, folder / "checkpoints" / path.name)
    shutil.copy(whole / "evaluation.jsonl", folder)


def test_a_run_resumed_between_evaluations_keeps_counting(whole, tmp_path):
    """Two evaluations without an improvement before the checkpoint, one after it."""
    folder, _ = whole
    resumed_at(folder, tmp_path, summary(folder)["steps"] - 2)
    outcome = train(2, *FOLLOWING, f"run.dir={tmp_path}", "resume=auto")
    assert outcome.code == 0 and f"resumed from {tmp_path}" in outcome.text, outcome.text
    assert best_of(tmp_path) == best_of(folder) and evaluations(tmp_path) == evaluations(folder)


@pytest.mark.rare
def test_a_run_that_ended_early_makes_no_further_step(whole, tmp_path):
    folder, _ = whole
    resumed_at(folder, tmp_path, summary(folder)["steps"])
    outcome = train(2, *FOLLOWING, f"run.dir={tmp_path}", "resume=auto", "steps=500")
    assert outcome.code == 0, outcome.text
    assert best_of(tmp_path) == best_of(folder) and summary(tmp_path)["first_step"] == summary(tmp_path)["steps"]
    outcome = train(2, *FOLLOWING, f"run.dir={tmp_path}", "resume=auto", "eval.patience=6")
    assert outcome.code == 0 and summary(tmp_path)["steps"] > summary(folder)["steps"], outcome.text


@pytest.mark.rare
def test_a_signal_at_an_evaluation_leaves_it_to_the_resumed_run(tmp_path):
    """The step at which the ranks agree to leave is saved without an evaluation, which could take too long."""
    settings = [*SMALL, "eval.every_steps=1", "eval.patience=90", "checkpoint.best=auc", f"run.dir={tmp_path}"]
    settings += ["resume=auto", "log.every_steps=10000"]
    process = subprocess.Popen(
        [mpiexec(), "-n", "2", sys.executable, "-m", "hetmpi.train", *settings, "steps=100000"], cwd=ROOT,
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while newest(tmp_path) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    os.kill(ranks_of(tmp_path)[-1], signal.SIGUSR1)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 85, (process.returncode, text)
    last = int(re.search(r"stopped by a signal: saved \S+/step-(\d+)", text)[1])
    assert [step for step, _ in evaluations(tmp_path)] == [*range(1, last)]
    outcome = train(2, *settings, f"steps={last + 2}")
    assert outcome.code == 0, outcome.text
    seen = evaluations(tmp_path)
    assert [step for step, _ in seen] == [*range(1, last + 3)]
    assert (summary(tmp_path)["best_step"], summary(tmp_path)["best_auc"]) == max(seen, key=lambda pair: pair[1])
    assert os.readlink(tmp_path / "checkpoints/best") == f"step-{summary(tmp_path)['best_step']:08d}"


@pytest.mark.rare
@pytest.mark.parametrize("ranks, how", [
    (1, []), (3, ["table.staleness=10", "table.cache.admit=all"]),
    (3, ["table.staleness=10", "table.exchange=messages", "table.ranks_per_node=1", "table.cache.admit=all"]),
])  # fmt: skip
def test_all_ranks_end_at_one_step_at_any_staleness_and_exchange(tmp_path, ranks, how):
    settings = [*FOLLOWING, *how, f"batch_size={128 // ranks}", "eval.patience=1", f"run.dir={tmp_path}"]
    outcome = train(ranks, *settings, "checkpoint.every_steps=0", "checkpoint.at_end=false")
    assert outcome.code == 0, outcome.text
    found, seen = summary(tmp_path), evaluations(tmp_path)
    assert found["steps"] == seen[-1][0] < 400 and seen[-1][1] <= seen[-2][1] == found["best_auc"]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[0] == "best" and f"step-{found['best_step']:08d}" in names and found["checkpoint"] is None


def test_a_run_that_improves_to_its_end_keeps_its_last_checkpoint(tmp_path):
    settings = [*SMALL, "eval.every_steps=4", "checkpoint.best=log_loss", "checkpoint.at_end=false"]
    outcome = train(2, *settings, f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    step, loss = min(((line["step"], line["log_loss"]) for line in lines), key=lambda pair: pair[1])
    found = summary(tmp_path)
    assert [line["step"] for line in lines] == [4, 6] and "ended_early" not in found
    assert (found["best_step"], found["best_log_loss"]) == (step, loss)
    assert os.readlink(tmp_path / "checkpoints/best") == f"step-{step:08d}"


@pytest.mark.parametrize("every, steps", [("null", [4, 8, 12]), ("0", [12])])
def test_each_epoch_is_evaluated_and_the_best_step_named_if_it_was_not_the_last(tmp_path, every, steps):
    settings = ["steps=null", "epochs=3", "data.num_train=256", "optim.dense_lr=1", f"eval.every_steps={every}"]
    outcome = train(2, *SMALL, *settings, f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    seen = evaluations(tmp_path)
    assert [step for step, _ in seen] == steps
    best_step, best_auc = max(seen, key=lambda pair: pair[1])
    named = f"best    AUC {best_auc:.4f} at step {best_step}; checkpoint.best=auc keeps such a checkpoint\n"
    assert (named in outcome.text) == (best_step < 12) and ("best_auc" in summary(tmp_path)) == (best_step < 12)


@pytest.mark.rare
def test_following_a_metric_does_not_change_the_training(tmp_path):
    for name, more in (("plain", []), ("following", ["eval.patience=9", "checkpoint.best=auc"])):
        outcome = train(2, *SMALL, "eval.every_steps=2", *more, f"run.dir={tmp_path / name}")
        assert outcome.code == 0, outcome.text
    assert losses(tmp_path / "plain") == losses(tmp_path / "following")
    assert evaluations(tmp_path / "plain") == evaluations(tmp_path / "following")
    ends = [by_key(tmp_path / name / "checkpoints/step-00000006") for name in ("plain", "following")]
    assert all(np.array_equal(ends[0][array], ends[1][array]) for array in ends[0])


def test_a_task_of_one_s_own_follows_its_own_metric(tmp_path):
    own = ["data._target_=ratings.Ratings", "~data.scale", "~data.zipf", "~data.num_train", "~data.num_valid"]
    own += ["task._target_=ratings.Rating", "model._target_=ratings.Factors", "~model.hidden", "table.init_std=0.5"]
    own += ["loss._target_=torch.nn.MSELoss", "eval.every_steps=3", "eval.patience=2", "checkpoint.best=rmse"]
    outcome = train(2, *SMALL[1:], *own, "eval.max_samples=null", "steps=12", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    assert "training ends after 2 evaluation(s) in a row without a smaller rmse\n" in outcome.text
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert summary(tmp_path)["best_rmse"] == min(line["rmse"] for line in lines)


@pytest.mark.parametrize("settings, said", [
    (["eval.patience=2"], "eval.patience=2 needs evaluations during training: set eval.every_steps, now null"),
    (["checkpoint.best=auc"], "checkpoint.best=auc needs evaluations during training: set eval.every_steps, now null"),
    (["checkpoint.best=acc", "eval.every_steps=2"], "checkpoint.best=acc must be a metric of the task: auc, log_loss"),
    (["eval.patience=2", "eval.every_steps=2", *NOTHING_HELD_OUT], "eval.patience cannot be used with it"),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused(settings, said):
    assert refusal(*SMALL[1:], *settings).count(said) == 1
