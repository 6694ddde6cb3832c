"""dry_run: predicted bytes and hit rate, compared with those of the run. Memory: tests/system/test_dry_run.py."""

import numpy as np
import pytest
import torch
from launch import summary

from hetmpi.run import build
from hetmpi.run.config import compose
from hetmpi.run.plan import Plan, memory_lines, traffic_lines
from hetmpi.spans import Spans
from hetmpi.table.optim import RowOptimizer
from hetmpi.train import Training
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi
CPU = torch.device("cpu")
STALE = ["table.staleness=20", "table.cache.admit=all"]


def composed(world, tmp_path, *overrides):
    small = ["data.scale=0.002", "table.dim=8", "batch_size=32", "steps=60", "log.every_steps=60", "device=cpu"]
    kept = ["checkpoint.at_end=false", "eval.max_samples=100", f"run.dir={tmp_path}"]
    return compose(world, [*small, *kept, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [*STALE, "steps=300", "log.every_steps=300"],  # in few steps drift, which is not predicted, adds more
        [*STALE, "table.ranks_per_node=1", "table.exchange=messages", "optim.rows=adam", "table.drift=0"],
        [*STALE, "table.ranks_per_node=1", "table.exchange=windows", "table.drift=0"],
        [
            "data._target_=click_features.Clicks",
            "~data.scale",
            "~data.zipf",
            "~data.num_train",
            "~data.num_valid",
            *STALE,
        ],
    ],
)
def test_bytes_and_hit_rate_are_those_of_the_run(overrides, tmp_path):
    world = World()
    config = composed(world, tmp_path, *overrides)
    found = Plan(world, config, CPU).traffic()
    training = Training(world, config, CPU, Spans())
    training.run()
    if training.log:
        training.log.close()
        told = summary(config.run.dir)
        assert told["batches_per_pull"] == (2 if told["exchange"] == "messages" else 1)  # a tenth of 20
    counted = np.zeros(len(training.tables.counters.as_array()), np.int64)
    world.comm.Allreduce(training.tables.counters.as_array(), counted)
    sums = type(training.tables.counters).of_array(counted)
    training.close()
    assert found.steps == found.tried == config.steps
    moved = found.pulled_bytes + found.pushed_bytes
    assert moved == pytest.approx((sums.pulled_bytes + sums.push_bytes) / config.steps, rel=0.2)
    if sums.hit_rate is None:
        assert found.hit_rate is None
    else:
        assert found.hit_rate == pytest.approx(sums.hit_rate, rel=0.1)
    if config.table.staleness == 0:  # nothing depends on the rows' values
        assert found.pulled_bytes == pytest.approx(sums.pulled_bytes / config.steps)
        assert found.pushed_bytes == pytest.approx(sums.push_bytes / config.steps)


def test_the_text_says_whether_it_fits(tmp_path):
    world = World()
    plan = Plan(world, composed(world, tmp_path, *STALE), CPU)
    memory, traffic = plan.memory(), plan.traffic(10)
    for free, verdict in ((memory.total, "fits"), (memory.total - 1, "DOES NOT FIT: use more nodes")):
        text = memory_lines(plan, [("a", memory, memory.total, 1, "memory", free)])
        assert verdict in text[2] and text[2].startswith("a, 1 rank(s): ")
    text = traffic_lines(plan.config, traffic)
    assert (
        "mean of 60 steps, of which the first 10 were tried" in text[0]
        and "hit rate: " in text[1]
        and "during a flush" in text[2]
        and "table.drift=0.5" in text[3]
    )


def test_memory_of_rounds_grows_with_the_steps_that_they_serve(tmp_path):
    world, far = World(), World(ranks_per_node=1)
    late, dim, state = ["table.staleness=100", "table.cache.admit=all"], 8, 1

    def rounds(world, *overrides):
        return Plan(world, composed(world, tmp_path, *late, *overrides), CPU).memory().rounds

    most_keys = 32 * 26  # of a batch
    for given, k in (
        (["table.batches_per_pull=1"], 1), (["table.batches_per_pull=3"], 3), ([], 4), (["table.staleness=30"], 3),
        (["table.batches_per_pull=4", "table.staleness=2"], 2),
        (["table.batches_per_pull=3", "table.cache.capacity_fraction=0"], 1),
    ):  # fmt: skip
        expected = 5 * 4 * (dim + state) * k * most_keys if world.size > 1 else 0
        assert rounds(far, "table.exchange=messages", *given) == rounds(far, *given) == expected
    assert rounds(world, "table.exchange=messages") == 0


def test_steps_that_are_not_tried_count_as_the_last_half_of_those_tried(tmp_path):
    plan = Plan(World(), composed(World(), tmp_path, *STALE, "table.drift=0", "steps=300"), CPU)
    whole, found = plan.traffic(), plan.traffic(100)
    assert (found.steps, found.tried) == (300, 100) and (whole.steps, whole.tried) == (300, 300)
    moved, expected = (one.pulled_bytes + one.pushed_bytes for one in (found, whole))
    assert moved == pytest.approx(expected, rel=0.2) and found.hit_rate == pytest.approx(whole.hit_rate, rel=0.1)


@pytest.mark.parametrize("rule", ["adagrad", "adam"])
def test_memory_of_what_owners_keep_of_pushes_is_that_of_the_run(rule, tmp_path):
    world = World()
    some = ["steps=150", "log.every_steps=10", "table.cache.capacity_fraction=0.1", f"optim.rows={rule}"]
    config = composed(world, tmp_path, *STALE, *some, "table.drift=0")
    plan, seen = Plan(world, config, CPU), []
    told = plan.traffic()

    def look():
        (table,) = training.tables.values()
        seen.append(world.comm.allreduce(table.client.num_histories, MPI.MAX))

    training = Training(world, config, CPU, Spans(), after_report=look)
    training.run()
    if training.log:
        training.log.close()
    training.close()
    (spec,) = plan.specs.values()
    row_bytes = RowOptimizer(rule).core(spec.dim).history_bytes
    assert row_bytes >= 132 + 4 * spec.dim * (2 if rule == "adam" else 1)
    most = row_bytes * max(seen)  # in a sawtooth: those that have ended are dropped when the number has doubled
    assert most / 2 <= told.kept_bytes <= 2 * most <= told.most_kept_bytes
    assert any("what owners keep of pushes, " in line for line in traffic_lines(config, told))


def test_an_owner_keeps_nothing_of_pushes_of_plain_sgd_or_of_staleness_0(tmp_path):
    world = World()
    for how in ([*STALE, "optim.rows=sgd"], ["optim.rows=adam"]):
        told = Plan(world, composed(world, tmp_path, *how), CPU).traffic(10)
        assert told.kept_bytes == told.most_kept_bytes == 0


@pytest.mark.parametrize(
    "overrides, num",
    [
        ([], 1 + 2), ([*STALE, "table.look_ahead=false"], 1 + 2), (["loader.prefetch=5"], 1 + 5),
        (["steps=2"], 2),
        ([*STALE, "table.staleness=100", "table.batches_per_pull=3"], 1 + 3 + 2),
    ],
)  # fmt: skip
def test_batches_that_are_announced_or_loaded_count(overrides, num, tmp_path):
    world = World()
    plan = Plan(world, composed(world, tmp_path, *overrides), CPU)
    assert build.num_batches(plan.config, world, plan.task, plan.specs, plan.config.steps, CPU) == num
    of_one = plan.task.sample_bytes * plan.config.batch_size
    (spec,) = plan.specs.values()
    assert plan.memory().batches == num * of_one + 8 * spec.dim * min(32 * 26, spec.num_rows)


@pytest.mark.parametrize("look_ahead, ahead", [("null", 2), ("true", 2), ("false", 0)])
def test_batches_whose_rows_come_from_disk_are_announced_and_count(look_ahead, ahead, tmp_path):
    world = World()
    store = ["table.store=file", f"table.store_dir={world.comm.bcast(tmp_path)}", "table.store_memory_gb=0.01"]
    config = composed(world, tmp_path, *store, f"table.look_ahead={look_ahead}")
    plan = Plan(world, config, CPU)
    assert build.num_batches(config, world, plan.task, plan.specs, config.steps, CPU) == 1 + ahead + 2
    training = Training(world, config, CPU, Spans())
    assert build.batches_ahead(config, training.tables) == ahead
    if training.log:
        training.log.close()
    training.close()


@pytest.mark.parametrize("prefetch", [1, 24])
def test_the_keys_of_a_batch_are_checked_once_however_many_are_prefetched(tmp_path, prefetch):
    world = World()
    training = Training(world, composed(world, tmp_path, "steps=40", f"loader.prefetch={prefetch}"), CPU, Spans())
    space = training.tables["table"].key_space
    training.run()
    if training.log:
        training.log.close()
    training.close()
    assert space.num_checked == 40
