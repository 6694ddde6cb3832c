"""dry_run: predicted memory, bytes and hit rate, compared with those of the run."""

import gc

import numpy as np
import pytest
import torch

from hetmpi.comm.world import World
from hetmpi.run import build
from hetmpi.run.config import compose
from hetmpi.run.plan import Plan, lines_of
from hetmpi.spans import Spans
from hetmpi.table.optim import Schedule
from hetmpi.train import Training

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
        [*STALE, "table.ranks_per_node=1", "optim.rows=adam", "table.drift=0"],
        ["table.replicate_below_rows=100"],
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
    training.log and training.log.close()
    counted = np.zeros(10, np.int64)
    world.comm.Allreduce(training.tables.counters.as_array(), counted)
    sums = type(training.tables.counters).of_array(counted)
    training.close()
    assert found.steps == config.steps
    moved = found.pulled_bytes + found.pushed_bytes + found.reduced_bytes
    assert moved == pytest.approx((sums.pulled_bytes + sums.push_bytes + sums.reduced_bytes) / config.steps, rel=0.2)
    assert found.hit_rate == pytest.approx(sums.hit_rate, rel=0.1)
    if config.table.staleness == 0:  # nothing depends on the rows' values
        assert found.pulled_bytes == pytest.approx(sums.pulled_bytes / config.steps)
        assert found.pushed_bytes == pytest.approx(sums.push_bytes / config.steps)


def resident_bytes(world) -> int:
    """Memory of all ranks; pages that ranks share count once."""
    gc.collect()
    with open("/proc/self/smaps_rollup") as lines:
        mine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return world.comm.allreduce(mine)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_memory_is_what_the_tables_take(rule, tmp_path):
    world = World()
    bound = ["table.staleness=5", "table.cache.capacity_fraction=0.3", "table.cache.admit=all", "table.inbox_mb=1"]
    large = ["data.scale=0.02", "table.dim=32", f"optim.rows={rule}"]
    plan = Plan(world, composed(world, tmp_path, *bound, *large), CPU)
    predicted = world.comm.allreduce(plan.memory().tables)
    before = resident_bytes(world)
    tables = build.make_tables(plan.config, world, plan.specs, plan.replicated, Schedule(), CPU, Spans())
    (table,) = tables.values()
    for keys in torch.arange(table.num_rows).split(2_000):  # touches every line of the cache
        table.write(keys, torch.zeros_like(table.read(keys)))
    table.flush()
    grown = resident_bytes(world) - before
    tables.close()
    assert grown == pytest.approx(predicted, rel=0.05)


def test_the_text_says_whether_it_fits(tmp_path):
    world = World()
    plan = Plan(world, composed(world, tmp_path, *STALE), CPU)
    memory, traffic = plan.memory(), plan.traffic(10)
    for free, verdict in ((memory.total, "fits"), (memory.total - 1, "DOES NOT FIT: use more nodes")):
        text = lines_of(plan, [("a", memory, memory.total, 1, "memory", free)], traffic)
        assert verdict in text[2] and text[2].startswith("a, 1 rank(s): ")
    assert "mean of 10 steps tried" in text[3] and "hit rate: " in text[4] and "table.drift=0.5" in text[5]
