"""Schedules, and Adam's places of eps and of rows left out; test_table.py compares all row rules with torch's."""

import numpy as np
import pytest
import torch

from hetmpi.schedule import Schedule
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.world import World


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


@pytest.mark.parametrize(
    "rule, floats",
    [("sgd", 0), ("adagrad", 6), ("rowwise_adagrad", 1), ("adam", 12), ("momentum", 6), ("ftrl", 12)],
)
def test_state_beside_a_row_is_what_the_rule_needs(rule, floats):
    assert RowOptimizer(rule).core(dim=6).state_dim == floats


def rows_after(grads, touched, lr, rule="adam", **settings):
    """The rows (n, dim) after the steps of a rule from zero: grads (steps, n, dim), touched (steps, n)."""
    num_rows, dim = grads.shape[1:]
    table, rows = EmbeddingTable(World(), num_rows, dim, RowOptimizer(rule, lr, **settings), init_std=0.0), []
    for grad, touch in zip(grads, touched):
        keys = np.flatnonzero(touch)
        table.write(torch.from_numpy(keys), torch.from_numpy(grad[keys]))
        table.flush()
        rows.append(table.shard.weight.copy())
    table.close()
    return np.array(rows)


def rows_of_torch(kind, grads, touched, lr):
    """As rows_after, by torch's optimizer of this kind; SparseAdam's gradients are those of the touched rows."""
    weight, rows = torch.nn.Parameter(torch.zeros(grads.shape[1:])), []
    optimizer = kind([weight], lr=lr)
    for grad, touch in zip(map(torch.from_numpy, grads), touched):
        ids = torch.from_numpy(np.flatnonzero(touch))
        sparse = torch.sparse_coo_tensor(ids[None], grad[ids], grad.shape, check_invariants=True)
        weight.grad = sparse if kind is torch.optim.SparseAdam else grad.clone()
        optimizer.step()
        rows.append(weight.detach().numpy().copy())
    return np.array(rows)


def test_adam_is_torchs_adam_and_not_sparse_adam_where_gradients_are_as_small_as_eps():
    grads, touched = np.full((5, 1, 3), 1e-7, np.float32), np.ones((5, 1), np.float32)
    ours = rows_after(grads, touched, lr=1.0)
    assert ours[0] == pytest.approx(-0.909, abs=1e-3)
    assert ours == pytest.approx(rows_of_torch(torch.optim.Adam, grads, touched, 1.0), rel=1e-4)
    assert rows_of_torch(torch.optim.SparseAdam, grads, touched, 1.0)[0] == pytest.approx(-0.240, abs=1e-3)


def test_adam_leaves_a_row_that_is_not_in_the_batch_as_sparse_adam_does():
    grads = np.random.default_rng(0).standard_normal((6, 2, 3)).astype(np.float32)
    touched = np.ones((6, 2), np.float32)
    touched[2:5, 1] = 0
    grads[touched == 0] = 0
    ours = rows_after(grads, touched, lr=0.1)
    assert ours == pytest.approx(rows_of_torch(torch.optim.SparseAdam, grads, touched, 0.1), abs=1e-5)
    assert (ours[4, 1] == ours[1, 1]).all()
    dense = rows_of_torch(torch.optim.Adam, grads, touched, 0.1)
    assert ours[:, 0] == pytest.approx(dense[:, 0], abs=1e-5) and abs(dense[4, 1] - dense[1, 1]).min() > 0.01


def ftrl_of_the_paper(grads, alpha, beta, l1, l2):
    """The rows (n, dim) after each step of Algorithm 1 of McMahan et al. (2013)."""
    z, n, rows = np.zeros(grads.shape[1:]), np.zeros(grads.shape[1:]), []

    def weight():
        return np.where(np.abs(z) <= l1, 0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2))

    for grad in grads.astype(float):
        sigma = (np.sqrt(n + grad**2) - np.sqrt(n)) / alpha
        z += grad - sigma * weight()
        n += grad**2
        rows.append(weight())
    return np.array(rows)


@pytest.mark.parametrize("beta", [1.0, 1e-10])
@pytest.mark.parametrize("l1, l2", [(0.0, 0.0), (1.0, 0.0), (1.0, 0.5), (0.0, 0.5)])
def test_ftrl_is_that_of_the_paper_to_the_zeros(l1, l2, beta):
    grads = np.random.default_rng(0).standard_normal((40, 20, 5)).astype(np.float32)
    ours = rows_after(grads, np.ones(grads.shape[:2]), 0.1, "ftrl", l1=l1, l2=l2, eps=beta)
    expected = ftrl_of_the_paper(grads, 0.1, beta, l1, l2)
    assert np.abs(ours - expected).max() < 1e-5 and ((ours == 0) == (expected == 0)).mean() > 0.999
    becomes_0, leaves_0 = (ours[:-1] != 0) & (ours[1:] == 0), (ours[:-1] == 0) & (ours[1:] != 0)
    assert (becomes_0.any() and leaves_0.any()) == (l1 > 0)


def test_l1_acts_on_first_rows_in_their_first_step_and_not_before():
    table = EmbeddingTable(World(), 2, 4, RowOptimizer("ftrl", 1.0, l1=0.5, eps=1.0))
    table.shard.assign(slice(None), weight=np.array([[0.25, -0.25, 2, -2]] * 2, np.float32), state=0.0)
    table.write(torch.tensor([0]), torch.zeros(1, 4))
    table.flush()
    assert table.shard.weight.tolist() == [[0, 0, 1.5, -1.5], [0.25, -0.25, 2, -2]]
    table.close()


def test_unknown_rules_and_schedules_and_impossible_numbers_are_refused():
    with pytest.raises(ValueError, match="optim.rows must be one of sgd, .*, got lion"):
        RowOptimizer("lion")
    for wrong in (1, -0.1, float("nan")):
        with pytest.raises(ValueError, match="optim.rows_momentum must be"):
            RowOptimizer("momentum", momentum=wrong)
    for name in ("l1", "l2"):
        with pytest.raises(ValueError, match=f"optim.rows_{name} must be a number of at least 0, got -0.1"):
            RowOptimizer("ftrl", **{name: -0.1})
    for name, value in (("lr", -0.1), ("weight_decay", -0.1), ("eps", -1e-9), ("beta1", 1.0), ("beta2", float("nan"))):
        with pytest.raises(ValueError, match=f"RowOptimizer: {name} must be"):
            RowOptimizer("adam", **{name: value})
    with pytest.raises(ValueError, match="optim.schedule must be one of constant, .*, got step"):
        Schedule("step")
