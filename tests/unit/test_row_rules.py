"""What each row rule makes of gradients, on an owner's rows and on lines, compared with formulas and with torch's
optimizers; and which lines a cache keeps."""

import random

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from reference import Cache, MergedRow
from row_rules import FTRL, L1, RULES, WITH_SQUARES, row_optimizer, second_moments

from hetmpi import _C
from hetmpi.owner.route import make_partition
from hetmpi.table.cache import POLICIES
from hetmpi.table.optim import RowOptimizer


@settings(max_examples=25, derandomize=True, deadline=None, phases=[Phase.generate])
@given(policy=st.sampled_from(POLICIES), capacity_rows=st.integers(1, 99), seed=st.integers(0, 1 << 30))
def test_the_cache_keeps_the_lines_that_the_reference_keeps(policy, capacity_rows, seed):
    cache = _C.HostLines(capacity_rows, RowOptimizer().core(1), policy)
    reference, draw = Cache(capacity_rows, policy), random.Random(seed)
    for _ in range(200):
        use_both(cache, reference, busy_keys(draw, capacity_rows))
        slots = np.empty(2000, np.int64)
        cache.look_up(np.arange(2000), slots)
        assert np.flatnonzero(slots >= 0).tolist() == sorted(reference.lines)


def busy_keys(draw, num):
    """About `num` keys that nearly every iteration uses, and occasionally some of many others."""
    often = [key for key in range(num) if draw.random() < 0.9]
    return often + draw.sample(range(num, 2000), draw.choice([0, 0, 0, 1, 3]))


def use_both(cache, reference, keys):
    """One iteration of find and insert on each."""
    num, array = len(keys), np.array(keys, np.int64)
    slots, clocks, row = np.empty(num, np.int64), np.zeros(num, np.int32), np.zeros((num, 1), np.float32)
    cache.look_up(array, slots)
    cache.use(slots, num)
    cache.insert_and_evict(array, np.ones(num, bool), row, np.empty((num, 0), np.float32), clocks, slots)
    found = reference.find(keys)
    for key in keys:
        if key not in found:
            reference.insert(key, [0], 0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_push_is_applied_by_the_formula_of_its_rule(rule, count, weight_decay):
    generator = np.random.default_rng(count)
    optimizer = row_optimizer(rule, weight_decay=weight_decay, l1=L1)
    core = optimizer.core(3)
    row, grads = generator.normal(size=(8, 3)), generator.normal(size=(count, 8, 3))
    row[::2] = 0
    state = generator.random((8, core.state_dim))
    expected = formula(optimizer, row, state, grads)
    found = row.astype(np.float32), state.astype(np.float32)
    owner = owner_of(core, *found)
    owner.set_step([0.01], 5)
    push(owner, core, sums_of(rule, grads), count, 5)
    assert all(np.abs(a - b).max(initial=0) < 1e-6 for a, b in zip(found, expected))
    assert rule != "ftrl" or 0 < (found[0] == 0).sum() < found[0][::2].size


def owner_of(core, weight, state, mean_square=None):
    """An owner of rows weight (n, dim) and state, to which no other rank sends anything."""
    num_rows = len(weight)
    if mean_square is None:
        mean_square = np.empty((num_rows, 0), np.float32)
    clocks, touched = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.uint8)
    rings, directory = np.zeros((0, 4096), np.uint8), _C.Directory(make_partition("range", num_rows, 1), 0)
    applied = np.zeros(8, np.int64)
    shard = _C.ShardArrays(weight, state, mean_square, clocks, applied, rings, directory, None, touched)
    owner = Owner(shard, core)
    owner.dim = weight.shape[1]
    return owner


class Owner(_C.PushApplier):
    """Knows the numbers of a row."""


def push(owner, core, sums, count, last_step):
    """Applies sums (n, sum_dim) of every row over `count` steps."""
    num = len(sums)
    counts = np.full(num, count, np.int32)
    steps = None if core.is_plain else np.tile(np.array([last_step - count + 1, last_step], np.int32), (num, 1))
    apply(owner, np.arange(num), sums, counts, counts, steps)


def apply(owner, rows, sums, clocks, counts, steps):
    """Applies sums (n, sum_dim) of rows (n,)."""
    has_squares = (counts > 1) & (sums.shape[1] > owner.dim)  # sums of several gradients alone
    squares = sums[has_squares, owner.dim :]
    owner.apply_record(rows, clocks, counts, steps, sums[:, : owner.dim].copy(), squares.copy())


@pytest.mark.parametrize("dim", [1, 5])
@pytest.mark.parametrize("rule", WITH_SQUARES)
def test_an_owner_keeps_the_mean_square_that_lines_fetch(rule, dim):
    generator = np.random.default_rng(0)
    core = RowOptimizer(rule).core(dim)
    weight, state = np.zeros((8, dim), np.float32), np.zeros((8, core.state_dim), np.float32)
    mean_square = np.zeros((8, 1), np.float32)
    owner = owner_of(core, weight, state, mean_square)
    owner.set_step([0.01] * 4, 1)
    for step in (1, 2):
        push(owner, core, sums_of(rule, generator.normal(size=(1, 8, dim))), 1, step)
    squares = second_moments(rule, state)
    assert squares.min() > 0 and np.abs(mean_square[:, 0] - squares.mean(1)).max() < 1e-6


def test_a_record_with_too_few_squares_is_refused():
    core, ones = RowOptimizer("adagrad").core(3), np.ones((4, 3), np.float32)
    owner, counts = owner_of(core, ones, np.zeros((4, 3), np.float32)), np.array([1, 2, 1, 2], np.int32)
    with pytest.raises(ValueError, match=r"squares must have shape \(2, 3\)"):
        owner.apply_record(np.arange(4), counts, counts, np.ones((4, 2), np.int32), ones, ones)


def lines_of(core, num, dim):
    """A cache with `num` lines of ones: cache, slots."""
    cache, slots = _C.HostLines(32, core, "lfu"), np.full(num, -1)
    cache.use(slots, num)
    fetched = np.ones((num, dim), np.float32), np.zeros((num, core.preview_dim), np.float32), np.zeros(num, np.int32)
    cache.insert_and_evict(np.arange(num), np.ones(num, bool), *fetched, slots)
    return cache, slots


def test_a_refresh_with_a_pending_sum_does_not_change_the_step_of_the_next_gradient():
    core, moves = RowOptimizer("adam").core(1), []
    for is_refreshed in (False, True):
        cache, slots = lines_of(core, 1, 1)
        cache.set_step(0.1, 1)
        rows, one = np.empty((1, 1), np.float32), np.ones((1, 1), np.float32)
        for _ in range(5):
            cache.update(slots, one, 1.0)
        if is_refreshed:
            cache.refresh(slots, np.ones(1, bool), one, np.zeros((1, 1), np.float32), np.zeros(1, np.int32), 1.0)
        cache.gather(slots, rows)
        before = float(rows[0, 0])
        cache.update(slots, one, 1.0)
        cache.gather(slots, rows)
        moves.append(before - float(rows[0, 0]))
    assert abs(moves[0] - moves[1]) < 0.02 * moves[0]


@pytest.mark.parametrize("rule, lr, drifts", [("sgd", 0.5, True), ("sgd", 0.1, False), ("adam", 0.1, False)])
def test_drift_counts_how_far_a_first_gradient_moves_a_line(rule, lr, drifts):
    """Adam's first step is lr, a tenth of what its gradient moves the row in the end: ten times lr."""
    core = RowOptimizer(rule, lr).core(4)
    cache, slots = lines_of(core, 2, 4)
    cache.set_drift(0.3, 1.0)
    cache.set_step(lr, 1)
    for slot in (0, 1):  # the first update determines the size of a row
        cache.update(slots[slot : slot + 1], np.ones((1, 4), np.float32), 1.0)
    clock = cache.clocks_within(slots, False, 100)[1]
    assert (clock == _C.NO_LINE) == drifts


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_line_alone_moves_as_its_owner_under_one_gradient(rule):
    core, num = RowOptimizer(rule).core(5), 8
    weight, state = np.ones((num, 5), np.float32), np.zeros((num, core.state_dim), np.float32)
    cache, slots = lines_of(core, num, 5)
    owner, grads = owner_of(core, weight, state), np.full((num, 5), 0.3, np.float32)
    for step in range(1, 12):
        owner.set_step([0.01], step)
        push(owner, core, sums_of(rule, grads[None]), 1, step)
        cache.set_step(0.01, step)
        cache.update(slots, grads, 1.0)
    line = np.empty((num, 5), np.float32)
    cache.gather(slots, line)
    assert weight.max() < 1 - 0.01 and np.abs(line - weight).max() < 1e-5


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("anticipate", [1, 3])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_line_moves_by_the_formula_of_a_preview(rule, count, anticipate, weight_decay):
    generator = np.random.default_rng(count)
    core = row_optimizer(rule, weight_decay=weight_decay, l1=L1).core(3)
    row, grads = generator.normal(size=(8, 3)), generator.normal(size=(count, 8, 3))
    states = generator.random((8, core.preview_dim))
    decay, total = weight_decay * row, grads.sum(0)
    scale = anticipate if rule == "adam" else anticipate**2
    squares = scale * (grads**2).sum(0) + 2 * decay * anticipate * total + count * decay**2
    squares, step, after = squares.mean(1, keepdims=True), 0.01, states
    moved = 1 - 0.9 * (1 - 0.9**count) / (1 - 0.9) / count  # the part that first moment or momentum has applied
    if rule in ("adagrad", "rowwise_adagrad", "ftrl"):
        after = states + squares
        step = 0.01 / (np.sqrt(after) + 1e-10)
    elif rule == "momentum":
        step = 0.01 / (1 - 0.9) * moved
    elif rule == "adam":
        after = 0.999**count * states + (1 - 0.999**count) / count * squares
        step = 0.01 / (1 - 0.9**5) / (np.sqrt(after / (1 - 0.999**5)) + 1e-8) * moved
    expected = row - step * (anticipate * total + count * decay), after
    found = row.astype(np.float32), states.astype(np.float32)
    clocks, counts = np.arange(8, dtype=np.int32), np.full(8, count, np.int32)
    core.set_step(0.01, 5)
    sums, none = sums_of(rule, grads), np.zeros_like(counts)
    _C.preview_sums(core, np.arange(8), *found, clocks, sums, counts, none, float(anticipate))
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected))
    assert (clocks == np.arange(8) + count).all()


def sums_of(rule, grads):
    """grads (count, n, dim) -> sums (n, sum_dim) float32."""
    of_rule = {"sgd": [], "momentum": [], "rowwise_adagrad": [(grads**2).mean(2).sum(0)[:, None]]}
    squares = of_rule.get(rule, [(grads**2).sum(0)])
    return np.concatenate([grads.sum(0), *squares], 1).astype(np.float32)


def formula(optimizer, row, state, grads, lr=0.01, step=5):
    """Rows and state after one sum of grads (count, n, dim), in float64: cpp/owner/row_optimizer.h in numpy."""
    count, decay = len(grads), optimizer.weight_decay * row
    total, squares = grads.sum(0) + count * decay, ((grads + decay) ** 2).sum(0)
    if optimizer.rule == "sgd":
        return row - lr * total, state
    if optimizer.rule == "momentum":
        moves = []
        for _ in range(count):  # each iteration with the mean gradient
            state = 0.9 * state + total / count
            moves.append(state)
        return row - lr * sum(moves), state
    if optimizer.rule == "ftrl":
        slope, before = np.split(state, 2, axis=1)
        after = before + squares
        old, new = ((np.sqrt(n) + 1e-10) / lr for n in (before, after))
        z = -(slope + row * old) + total - (new - old) * row
        row = np.where(np.abs(z) <= optimizer.l1, 0, (np.sign(z) * optimizer.l1 - z) / (new + optimizer.l2))
        return row, np.concatenate([-(z + row * new), after], 1)
    if optimizer.rule != "adam":
        state = state + (squares if optimizer.rule == "adagrad" else squares.mean(1, keepdims=True))
        return row - lr * total / (np.sqrt(state) + 1e-10), state
    mean, variance = np.split(state, 2, axis=1)
    moves = []
    for _ in range(count):  # each iteration with the mean gradient
        mean = 0.9 * mean + 0.1 * total / count
        moves.append(mean / (1 - 0.9**step))
    variance = 0.999**count * variance + (1 - 0.999**count) * squares / count
    return row - lr * sum(moves) / (np.sqrt(variance / (1 - 0.999**step)) + 1e-8), np.concatenate([mean, variance], 1)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_an_owner_merges_pushes_as_the_reference_does(rule, weight_decay):
    draw, dim, num_rows = np.random.default_rng(5), 3, 4
    core = row_optimizer(rule, weight_decay=weight_decay, l1=2.0).core(dim)
    weight, state = draw.normal(size=(num_rows, dim)).astype(np.float32), np.zeros((num_rows, core.state_dim), "f4")
    weight[0] = 0
    rows = [MergedRow(rule, row, weight_decay, l1=2.0, l2=FTRL["l2"]) for row in weight.tolist()]
    owner = owner_of(core, weight, state)
    owner.set_step([0.01] * 4, 1)
    for number in range(200):
        row, now = int(draw.integers(num_rows)), 5 + number // 4
        last = now - int(draw.integers(3))
        first = last - int(draw.integers(5))
        count = int(draw.integers(1, last - first + 2))
        grads = draw.normal(size=(count, 1, dim)).astype(np.float32)
        owner.set_step([0.01] * 4, now)
        arguments = [np.array([value], np.int32) for value in (now, count)]
        steps = None if core.is_plain else np.array([[first, last]], np.int32)
        apply(owner, np.array([row]), sums_of(rule, grads), *arguments, steps)
        rows[row].push(grads[:, 0].tolist(), first, last, 0.01)
    assert np.abs(weight - [row.weight for row in rows]).max() < 1e-4
    assert core.state_dim == 0 or np.abs(state - [row.state for row in rows]).max() < 1e-4


@pytest.mark.parametrize("rule", WITH_SQUARES)
def test_gradients_that_nearly_cancel_make_no_large_step(rule):
    num_rows, core = 20000, RowOptimizer(rule).core(1)
    weight, state = np.zeros((num_rows, 1), np.float32), np.zeros((num_rows, core.state_dim), np.float32)
    owner = owner_of(core, weight, state)
    owner.set_step([0.01], 1)
    rows, ones = np.arange(num_rows), np.ones(num_rows, np.int32)
    grads = np.random.default_rng(0).uniform(1e-4, 1e-3, (num_rows, 1)).astype(np.float32)
    for pushed in (grads, -grads * np.float32(1 + 1e-5)):
        apply(owner, rows, sums_of(rule, pushed[None]), ones, ones, np.ones((num_rows, 2), np.int32))
    assert np.abs(weight).max() <= 0.0101


@pytest.mark.parametrize("rule", WITH_SQUARES)
def test_the_state_is_that_of_s_0_on_average_for_gradients_with_a_common_part(rule):
    """Four ranks push sums over ten steps each, at times of their own."""
    draw, dim, num_rows, num_ranks, num_steps = np.random.default_rng(1), 1, 4000, 4, 40
    for common in (0.0, 0.5, 5.0):
        grads = draw.normal(size=(num_ranks, num_steps, num_rows, dim)) + common * draw.normal(size=(num_rows, dim))
        core = RowOptimizer(rule).core(dim)
        weight, state = np.zeros((num_rows, dim), np.float32), np.zeros((num_rows, core.state_dim), np.float32)
        rows, ones, begin = np.arange(num_rows), np.ones(num_rows, np.int32), [0] * num_ranks
        exact = weight.copy(), state.copy()
        owner = owner_of(core, *exact)
        for step in range(1, num_steps + 1):
            owner.set_step([0.01], step)
            sums, steps = sums_of(rule, grads[:, step - 1].sum(0)[None]), np.full((num_rows, 2), step, "i4")
            apply(owner, rows, sums, step * ones, ones, steps)
        owner = owner_of(core, weight, state)
        for end in range(1, num_steps + 1):
            for rank in range(num_ranks):
                if (end + 3 * rank) % 10 and end < num_steps:
                    continue
                part = grads[rank, begin[rank] : end]
                owner.set_step([0.01] * 4, end)
                clocks, counts = np.full(num_rows, end, np.int32), np.full(num_rows, len(part), np.int32)
                steps = np.tile(np.array([begin[rank] + 1, end], np.int32), (num_rows, 1))
                apply(owner, rows, sums_of(rule, part), clocks, counts, steps)
                begin[rank] = end
        second = slice(-dim, None)  # moment
        assert state[:, second].mean() == pytest.approx(exact[1][:, second].mean(), rel=0.05 if common < 5 else 0.15)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    "rule, torch_rule, own",
    [("sgd", "SGD", {}), ("adagrad", "Adagrad", {}), ("adam", "Adam", {}), ("momentum", "SGD", {"momentum": 0.8})],
)
def test_pushes_of_one_iteration_make_the_steps_of_torch(rule, torch_rule, own, weight_decay):
    generator = torch.Generator().manual_seed(0)
    expected = torch.nn.Parameter(torch.randn(8, 3, generator=generator))
    optimizer = getattr(torch.optim, torch_rule)([expected], lr=0.1, weight_decay=weight_decay, **own)
    core = RowOptimizer(rule, weight_decay=weight_decay, **own).core(3)
    row, state = expected.detach().numpy().copy(), np.zeros((8, core.state_dim), np.float32)
    owner = owner_of(core, row, state)
    for step in range(1, 6):
        expected.grad = torch.randn(8, 3, generator=generator)
        optimizer.step()
        owner.set_step([0.1], step)
        push(owner, core, sums_of(rule, expected.grad.numpy()[None]), 1, step)
    assert np.abs(row - expected.detach().numpy()).max() < 1e-6
