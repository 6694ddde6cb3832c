"""Best values over evaluations: improvements, patience, and their way through a checkpoint's manifest."""

from pathlib import Path

import pytest
from crafted import change_manifest, write_checkpoint
from omegaconf import OmegaConf

from hetmpi.errors import UserError
from hetmpi.log.display import ending
from hetmpi.run.best import Best, MetricHistory, is_lower_better


class Task:
    """A task whose metrics are listed without samples."""

    def figures(self, columns):
        return dict.fromkeys(["auc", "log_loss", "teacher_auc"])


def make(world, patience=None, metric=None, best=None, every=2, num_valid=9, task=None, resumed=None, plateau=None):
    settings = {"eval": {"patience": patience, "metric": metric, "every_steps": every}, "checkpoint": {"best": best}}
    settings["optim"] = {"schedule": "plateau" if plateau else "constant", "plateau_evals": plateau}
    config = OmegaConf.create({**settings, "data_name": "clicks"})
    return MetricHistory(world, config, task or Task(), num_valid, resumed)


@pytest.mark.parametrize("lower, values, best, num_since", [
    (False, [0.5, 0.7, 0.6, 0.7], (0.7, 2), 2), (True, [0.5, 0.7, 0.4, 0.4, 0.45], (0.4, 3), 2),
    (False, [None, float("nan"), 0.1], (0.1, 3), 0), (False, [None, float("inf")], (None, 0), 2),
    (True, [0.3, float("-inf"), float("nan")], (0.3, 1), 2),
])  # fmt: skip
def test_only_a_better_number_is_an_improvement(lower, values, best, num_since):
    found = Best("metric", lower)
    for step, value in enumerate(values, 1):
        found.add(step, value)
    assert ((found.value, found.step), found.num_since) == (best, num_since)


def test_a_metric_with_a_best_value_improves_toward_it():
    found = Best("calibration", False, 1.0)
    for step, value in enumerate([1.5, 0.8, 1.3, 1.1, 0.9], 1):
        found.add(step, value)
    assert (found.value, found.step, found.num_since) == (1.1, 4, 0) or (found.value, found.step) == (0.9, 5)
    found.add(6, 0.7)
    assert "calibration has not come nearer than" in found.stagnation() and "to 1, of step" in found.stagnation()


def test_the_task_or_the_name_of_a_metric_says_which_direction_is_better():
    for name, lower in {
        "auc": False,
        "log_loss": True,
        "rmse": True,
        "test_error": True,
        "lossless": False,
        "normalised_entropy": True,
    }.items():
        assert is_lower_better(Task(), name) == lower, name
    task = Task()
    task.lower_is_better = ("perplexity",)
    assert is_lower_better(task, "perplexity") and not is_lower_better(task, "log_loss")
    task.lower_is_better = "rmse_total"  # not its letters one by one
    assert is_lower_better(task, "rmse_total") and not is_lower_better(task, "rmse")


def test_training_ends_after_as_many_evaluations_without_an_improvement(world):
    bests = make(world, patience=2, best="log_loss")
    for step, auc, loss in ((2, 0.5, 0.9), (4, 0.6, 0.8), (6, 0.6, 0.9), (6, 0.1, 0.1)):  # the last one is a repetition
        bests.add(step, {"auc": auc, "log_loss": loss})
        assert bests.reason is None
    assert bests.is_best(4) and not bests.is_best(6)
    bests.add(8, {"auc": 0.59, "log_loss": 0.7})
    assert bests.reason == "auc has not risen above 0.6000, of step 4, in 2 evaluations (eval.patience=2)"
    assert bests.is_best(8)
    assert bests.summary(lambda step: Path(f"step-{step}")) == {
        "best_log_loss": 0.7, "best_metric": "log_loss", "best_step": 8, "best_checkpoint": "step-8",
        "ended_early": bests.reason,
    }  # fmt: skip


def test_a_smaller_loss_is_the_better_one_and_undefined_values_count(world):
    bests = make(world, patience=1, metric="log_loss")
    bests.add(2, {"log_loss": 0.5})
    bests.add(4, {"log_loss": 0.6})
    assert bests.reason == "log_loss has not fallen below 0.5000, of step 2, in 1 evaluation (eval.patience=1)"
    bests = make(world, patience=2)
    bests.add(2, {"auc": None})
    bests.add(4, {"auc": None})
    assert bests.reason == "auc was undefined in 2 evaluations (eval.patience=2)"
    assert bests.summary(lambda step: None)["best_step"] is None


def test_nothing_is_followed_by_default(world):
    bests = make(world)
    bests.add(2, {})
    assert not bests.is_following and bests.reason is None and not bests.is_best(0) and not bests.lacks(2)
    assert bests.about() == {} and bests.summary(None) == {} and bests.notes() == []


def checkpoint(folder, about, step=4):
    """A small checkpoint with further entries in its manifest."""
    path = folder / f"step-{step:08d}"
    write_checkpoint(path, step, 1)
    change_manifest(path, lambda manifest: manifest.update(about))
    return path


def test_a_resumed_run_continues_with_the_values_of_its_checkpoint(world, tmp_path):
    settings = {"patience": 3, "best": "log_loss"}
    whole = make(world, **settings)
    evaluations = [(2, 0.1 + 0.2, 0.5), (4, 0.3, 0.4), (6, 0.2, None), (8, 0.30000000000000004, 0.6)]
    for number, (step, auc, loss) in enumerate(evaluations):
        resumed = make(world, **settings, resumed=checkpoint(tmp_path / str(number), whole.about(), step))
        assert resumed.about() == whole.about() and resumed.lacks(step) == (whole.step < step)
        for bests in (whole, resumed):
            bests.add(step, {"auc": auc, "log_loss": loss})
        assert resumed.about() == whole.about() and resumed.reason == whole.reason
    assert whole.reason is not None
    another = make(world, patience=1, metric="teacher_auc", resumed=checkpoint(tmp_path / "last", whole.about(), 8))
    assert another.reason is None and another.watched.value is None  # it was not followed before


def test_the_rates_drop_after_as_many_evaluations_without_an_improvement_also_when_resumed(world, tmp_path):
    whole, drops = make(world, plateau=2), []
    for step, auc in enumerate([0.5, 0.6, 0.6, 0.5, 0.4, 0.3, 0.7, 0.1, None], 1):
        resumed = make(world, plateau=2, resumed=checkpoint(tmp_path / str(step), whole.about(), step))
        for bests in (whole, resumed):
            bests.add(step, {"auc": auc, "log_loss": 0, "teacher_auc": 0})
        assert resumed.about() == whole.about() and whole.reason is None
        drops.append(whole.num_drops)
    assert drops == [0, 0, 0, 1, 1, 2, 2, 2, 3]


def test_best_values_that_were_measured_otherwise_start_anew(world, tmp_path):
    task = Task()
    bests = make(world, patience=3, task=task)
    bests.add(2, {"auc": 0.9})
    path = checkpoint(tmp_path, bests.about())
    assert make(world, patience=3, task=task, resumed=path).watched.value == 0.9
    task.measured = "among 5 entities of seed 0"
    other = make(world, patience=3, task=task, resumed=path)
    assert other.watched.value is None and other.notes()[0] == (
        "the best values of the checkpoint were measured among all, now they are among 5 entities of seed 0: they "
        "start anew"
    )
    other.add(6, {"auc": 0.1})
    assert other.is_best(6) is False and other.watched.value == 0.1
    again = make(world, patience=3, task=task, resumed=checkpoint(tmp_path / "again", other.about(), 6))
    assert again.watched.value == 0.1 and "anew" not in "".join(again.notes())


def test_a_resumed_run_with_fewer_evaluations_before_a_drop_drops_at_once(world, tmp_path):
    bests = make(world, plateau=10)
    for step, auc in enumerate([0.5, 0.4, 0.4, 0.4, 0.4], 1):
        bests.add(step, {"auc": auc, "log_loss": 0, "teacher_auc": 0})
    resumed = make(world, plateau=2, resumed=checkpoint(tmp_path, bests.about(), 5))
    resumed.add(6, {"auc": 0.4, "log_loss": 0, "teacher_auc": 0})
    assert resumed.num_drops == 1


def test_a_checkpoint_of_a_run_that_followed_nothing_has_no_evaluation_overdue(world, tmp_path):
    assert not make(world, patience=3, resumed=checkpoint(tmp_path, {})).lacks(4)


@pytest.mark.parametrize("entry, said", [
    ([], "evaluations must be an object"), ({"step": 5, "best": {}}, r"step must be an integer in \[0, 4\], got 5"),
    ({"step": 4}, "lacks best"), ({"step": 4, "best": {"auc": 1}}, "auc must be an object"),
    ({"step": 4, "best": {"auc": {"value": "x", "step": 1, "num_since": 0}}}, "value must be a finite float or null"),
    ({"step": 4, "best": {"auc": {"value": 0.5, "step": 9, "num_since": 0}}}, r"step must be an integer in \[0, 4\]"),
    ({"step": 4, "best": {"auc": {"value": 0.5, "step": 1}}}, "lacks num_since"),
])  # fmt: skip
def test_impossible_values_in_a_manifest_are_refused(world, tmp_path, entry, said):
    with pytest.raises(UserError, match=said):
        make(world, patience=3, resumed=checkpoint(tmp_path, {"evaluations": entry}))


class Unlisted(Task):
    def figures(self, columns):
        return {"rmse": 1.0} if columns else {}


@pytest.mark.parametrize("settings, said", [
    ({"patience": 3, "metric": "acc"}, "eval.metric=acc must be a metric of the task: auc, log_loss, teacher_auc"),
    ({"best": "acc"}, "checkpoint.best=acc must be a metric of the task: auc, log_loss, teacher_auc"),
    ({"best": "auc", "num_valid": 0}, "data=clicks has no held-out samples: checkpoint.best cannot be used with it"),
    ({"patience": 1, "num_valid": 0}, "data=clicks has no held-out samples: eval.patience cannot be used with it"),
    ({"plateau": 1, "num_valid": 0}, "data=clicks has no held-out samples: optim.schedule=plateau cannot be used with"),
    ({"patience": 1, "task": Unlisted()}, "eval.metric must name a metric: this task does not list its metrics"),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused_at_the_start(world, settings, said):
    with pytest.raises(UserError, match=said):
        make(world, **settings)


def test_a_metric_that_does_not_come_is_refused(world):
    bests = make(world, patience=1, metric="mse", task=Unlisted())
    with pytest.raises(UserError, match=r"figures\(\) must have mse, got rmse"):
        bests.add(2, {"rmse": 1.0})
    with pytest.raises(UserError, match=r"mse must be a number or None, got str"):
        bests.add(2, {"mse": "low"})


def test_the_last_lines_name_the_best_evaluation_and_why_training_ended():
    summary = {
        "steps": 8, "first_step": 0, "auc": 0.5, "best_auc": 0.61, "best_metric": "auc", "best_step": 4,
        "best_checkpoint": "runs/a/checkpoints/step-00000004", "ended_early": "auc has not risen", "world_size": 1,
        "is_one_node": True, "samples_per_s": 10.0, "seconds": 1.0, "pulled_bytes": 0, "run_dir": "runs/a",
    }  # fmt: skip
    lines = ending(summary)
    assert lines[0] == "end     after step 8: auc has not risen" and lines[1] == "quality AUC 0.5000"
    assert lines[2] == "best    AUC 0.6100 at step 4, in runs/a/checkpoints/step-00000004"
    assert "best    AUC was undefined in every evaluation" in ending({**summary, "best_step": None, "best_auc": None})
