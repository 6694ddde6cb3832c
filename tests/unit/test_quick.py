"""When a run makes quick evaluations on a sample, and how many."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from hetmpi.checkpoint.checkpoints import Position
from hetmpi.run.build import log_steps
from hetmpi.run.quick import QuickEvaluations
from hetmpi.tasks.ctr import ClickThroughRate
from hetmpi.tasks.link import LinkPrediction
from hetmpi.world.world import World

SETTINGS = {
    "eval": {"every_steps": None, "patience": None, "max_samples": None},
    "checkpoint": {"best": None},
    "optim": {"schedule": "constant"},
    "table": {"staleness": 0},
    "log": {"every_steps": None},
    "steps": 1000,
    "epochs": None,
    "batch_size": 64,
}


def quick(total_steps=1000, num_valid=50_000, start=0, task=ClickThroughRate, **changed):
    config = OmegaConf.merge(SETTINGS, OmegaConf.from_dotlist([f"{key}={value}" for key, value in changed.items()]))
    source = SimpleNamespace(num_valid=num_valid)
    return QuickEvaluations.of(World(), config, source, object.__new__(task), total_steps, Position(start))


@pytest.mark.parametrize("total_steps", [100, 282, 1000, 12_345])
def test_nine_tenths_of_a_run_are_evaluated_before_its_end(total_steps):
    found = quick(total_steps)
    due = [step for step in range(1, total_steps + 1) if found.is_tenth(step)]
    assert len(due) == 9 and total_steps not in due
    assert all(abs(step - total_steps * (place + 1) / 10) <= 1 for place, step in enumerate(due))


def test_a_resumed_run_evaluates_at_the_same_steps():
    whole, rest = quick(1000), quick(1000, start=450)
    assert all(whole.is_tenth(step) == rest.is_tenth(step) for step in range(451, 1001))


@pytest.mark.parametrize("num_valid, total_steps, changed, num", [
    (50_000, 1000, {}, 2048), (500, 1000, {}, 500), (50_000, 100_000, {}, 50_000), (10**6, 100_000, {}, 80_000),
    (10**6, 100_000, {"eval.max_samples": 700}, 700), (10**8, 10**9, {}, 1 << 18),
])  # fmt: skip
def test_a_sample_is_small_beside_the_training(num_valid, total_steps, changed, num):
    assert quick(total_steps, num_valid, **changed).num_samples == num


@pytest.mark.parametrize("changed", [
    {"eval.every_steps": 0}, {"eval.every_steps": 50}, {"eval.patience": 3}, {"checkpoint.best": "auc"},
    {"optim.schedule": "plateau"}, {"table.staleness": 10}, {"table.staleness": "null"},
    {"steps": "null", "epochs": 10},
], ids=str)  # fmt: skip
def test_settings_that_say_when_to_evaluate_stay_as_they_are(changed):
    assert quick(**changed) is None


def test_short_runs_streams_runs_without_held_out_samples_and_own_evaluations_have_none():
    assert quick(99) is None and quick(None) is None and quick(num_valid=0) is None
    assert quick(task=LinkPrediction) is None


def test_evaluations_that_take_more_than_a_twentieth_of_the_time_are_left_out():
    found = quick()
    assert found.has_time(0.0)
    found.timed(lambda: sum(range(10**6)))
    assert not found.has_time(1e-6) and found.has_time(1e6)


@pytest.mark.parametrize("every, total_steps, expected", [
    (None, 300, 15), (None, 5, 1), (None, 20_000, 100), (None, None, 100), (7, 300, 7), (500, None, 500),
])  # fmt: skip
def test_a_short_run_has_twenty_log_lines(every, total_steps, expected):
    assert log_steps(OmegaConf.merge(SETTINGS, {"log": {"every_steps": every}}), total_steps) == expected
