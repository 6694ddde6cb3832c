"""Schedules; the row rules are compared with torch's in test_table.py."""

import pytest
import torch

from hetmpi.table.optim import RowOptimizer, Schedule


def test_warm_up_rises_to_the_full_rate_and_no_further():
    schedule = Schedule("constant", warmup_steps=4)
    assert [schedule.factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_falling_schedule_ends_at_its_floor(kind):
    schedule = Schedule(kind, warmup_steps=10, total_steps=110, floor=0.1)
    factors = [schedule.factor(step) for step in range(10, 200)]
    assert factors[0] == 1.0 and factors == sorted(factors, reverse=True)
    assert factors[50] == pytest.approx(0.55) and factors[100] == factors[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_schedules_agree_with_torch(kind):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = torch.optim.lr_scheduler
    theirs = (
        schedulers.CosineAnnealingLR(optimizer, 50)
        if kind == "cosine"
        else schedulers.LinearLR(optimizer, 1.0, 0.0, 50)
    )
    ours = Schedule(kind, total_steps=50)
    for step in range(50):
        assert ours.factor(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("rule, floats", [("sgd", 0), ("adagrad", 6), ("rowwise_adagrad", 1), ("adam", 12)])
def test_state_beside_a_row_is_what_the_rule_needs(rule, floats):
    assert RowOptimizer(rule).core(dim=6).state_dim == floats


def test_unknown_rules_and_schedules_are_refused():
    with pytest.raises(ValueError, match="optim.rows must be one of sgd, .*, got lion"):
        RowOptimizer("lion")
    with pytest.raises(ValueError, match="optim.schedule must be one of constant, .*, got step"):
        Schedule("step")
