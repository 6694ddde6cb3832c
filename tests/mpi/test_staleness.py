"""Bounded staleness and the cache, compared with tests/support/reference.py and with their guarantees. Run at 1, 2 and
3 ranks."""

import contextlib
import functools
import os
import random
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from caches import CacheSettings
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference import Cluster
from row_rules import L1, RULES, WITH_SQUARES, row_optimizer, second_moments
from test_table import NUM_ROWS, all_rows, alone_world, loss_of, make_table, my_batch

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.owner.route import PARTITIONS, make_partition
from hetmpi.owner.store import table_seed
from hetmpi.schedule import Schedule
from hetmpi.table.cache import POLICIES
from hetmpi.table.client import MOST_AHEAD
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.mpi import MPI

pytestmark = pytest.mark.mpi
STALENESS = [0, 1, 2, 10, None]
ALL = 1 << 20  # more lines than any table here has rows
TIMES = int(os.environ.get("HETMPI_TEST_CASES", "1"))  # .ci/weekly tries more cases

CASES = {
    "num_rows": st.integers(40, 300),
    "dim": st.integers(1, 3),
    "capacity_rows": st.sampled_from([5, 0, 1, 32, 40, 64, ALL]),
    "policy": st.sampled_from(POLICIES),
    "admit": st.sampled_from(["all", "remote", "offnode"]),
    "partition": st.sampled_from(sorted(PARTITIONS)),
    "prefetch": st.booleans(),
    "seed": st.integers(0, 1 << 30),
}


def cases(max_examples, **more):
    """Runs a test on TIMES * max_examples cases, the same on every rank and in every run."""

    def decorate(test):
        failed = []  # (arguments, error)

        @functools.wraps(test)
        def test_once(**arguments):
            """Hypothesis runs a failed case again: only on this rank, as the others have continued."""
            if failed and failed[0][0] == arguments:
                raise failed[0][1]
            try:
                test(**{**arguments, "case": MPI.COMM_WORLD.bcast(arguments["case"])})
            except Exception as error:
                failed[:] = [(arguments, error)]
                raise

        rules = settings(
            max_examples=TIMES * max_examples, derandomize=True, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        return rules(given(case=st.fixed_dictionaries({**CASES, **more}))(test_once))

    return decorate


def open_table(world, case, staleness, anticipate=1.0, inbox_bytes=1 << 16):
    """A table under SGD with learning rate 1 whose rows are integers: row k begins as first_row(k)."""
    lines = {"capacity_rows": case["capacity_rows"], "dtype": case.get("dtype", "float32")}
    cache = CacheSettings(**({} if staleness == 0 else lines), policy=case["policy"], admit=case["admit"])
    table = EmbeddingTable(
        world, case["num_rows"], case["dim"], RowOptimizer("sgd", 1.0), case["partition"], inbox_bytes=inbox_bytes,
        staleness=Staleness(staleness, anticipate, 0.0), cache=cache, exchange=case.get("exchange", "windows"),
        batches_per_pull=case.get("batches_per_pull", 1),
    )  # fmt: skip
    first = np.array([first_row(key, case["dim"]) for key in table.keys().tolist()], np.float32)
    table.shard.assign(slice(None), weight=first.reshape(-1, case["dim"]))
    table.memory.fence()
    return table


def first_row(key, dim):
    return [1000 * d + key for d in range(dim)]


def batch_of(case, step, rank):
    """Keys of one rank in one step, an unordered list without duplicates, skewed; sometimes empty. Integer
    gradients."""
    draw = random.Random(f"{case['seed']} {step} {rank}")
    num = draw.choice([0, 1, 7, 20, 60])
    keys = list({int(case["num_rows"] * draw.random() ** 3) for _ in range(num)})
    draw.shuffle(keys)
    return keys, [[draw.randint(-3, 3) for _ in range(case["dim"])] for _ in keys]


def is_collective(case):
    """Whether ranks must make the same number of reads and writes, at any staleness."""
    return case.get("exchange", "windows") != "windows"


def tensors(case, keys, grads):
    return torch.tensor(keys, dtype=torch.int64), torch.tensor(grads, dtype=torch.float32).reshape(-1, case["dim"])


def line_clocks(table, keys):
    """c_c of the lines of keys (n,), -1 for keys without one."""
    slots = np.empty(len(keys), np.int64)
    table.cache.look_up(np.asarray(keys, np.int64), slots)
    return table.cache.clocks(slots)


# Comparison with the reference


def cluster_of(world, table, case, staleness, anticipate, kind=Cluster):
    """The reference of a table."""
    keys = range(case["num_rows"])
    owner = make_partition(case["partition"], len(keys), world.size).locate(np.arange(len(keys)))[0]
    node = dict(enumerate(world.comm.allgather(world.node_ranks)))  # rank -> ranks of its node
    admits = {"all": lambda rank: [], "remote": lambda rank: [rank], "offnode": node.get}[case["admit"]]
    admitted = [{key for key in keys if owner[key] not in admits(rank)} for rank in node]
    far = [{key for key in keys if owner[key] not in node[rank]} for rank in node]
    capacity_rows = min(case["capacity_rows"], len(keys) + 32) if staleness != 0 else 0
    capacities = [capacity_rows if mine else 0 for mine in admitted]
    rows = [first_row(key, case["dim"]) for key in keys]
    return kind(rows, capacities, case["policy"], admitted, far, staleness, anticipate)


def step_apart(world, table, keys, grads, later):
    """One step in which no phase overlaps with another on any rank; returns the rows read."""
    rows = table.read(keys)
    world.comm.Barrier()
    if later is not None:
        table.prefetch(later)
        world.comm.Barrier()
    if table.staleness.is_exact:
        table.write(keys, grads)
    else:
        write_apart(world, table, keys, grads)
    table.await_owners()
    world.comm.Barrier()
    return rows


def write_apart(world, table, keys, grads):
    """A write at s >= 1, if there are gradients, in which no phase overlaps with another on any rank."""
    if grads is None:
        return world.comm.Barrier()

    def meet(next_part):
        if table.spans.doing == "validate" and next_part:  # nothing is pushed yet
            world.comm.Barrier()

    table.spans.on_pause = meet
    table.write(keys, grads)
    table.spans.on_pause = None


def seen_by(table, rows, names):
    """What a rank shows of itself after a step: the rows it read, counters, clocks of its lines by key, and lags."""
    clocks = {key: clock for key, clock in enumerate(line_clocks(table, range(table.num_rows))) if clock >= 0}
    return rows.tolist(), {name: getattr(table.counters, name) for name in names}, clocks, table.cache.lags.tolist()


def expected_of(rank, rows):
    """The same of the reference's rank."""
    return rows, rank.counters, {key: line.clock for key, line in rank.cache.lines.items()}, rank.lags


@pytest.mark.parametrize("staleness", STALENESS)
@cases(
    10,
    anticipate=st.integers(0, 3),
    num_steps=st.integers(5, 40),
)
def test_ranks_in_lockstep_do_what_the_reference_does(placed, staleness, case):
    """Across nodes without announcements, which await_owners() would drop; with them: tests/mpi/test_exchange.py."""
    settings = staleness, case["anticipate"]
    case = {**case, "prefetch": case["prefetch"] and (placed.is_one_node or staleness == 0)}
    table = open_table(placed, case, *settings)
    cluster = cluster_of(placed, table, case, *settings)
    follow(placed, table, cluster, case)
    table.close()


def follow(world, table, cluster, case, step_apart=step_apart, may_rest=True):
    """Makes all steps of a case on the table and, on rank 0, on its reference, with which rank 0 compares what all
    ranks show. Collective. may_rest: whether some ranks do not write in some steps, where that is possible."""
    names, later = cluster.ranks[world.rank].counters, tensors(case, *batch_of(case, 0, world.rank))
    for step in range(case["num_steps"]):
        is_alone = may_rest and cluster.ranks[0].staleness != 0 and not is_collective(case)
        rests = [is_alone and (case["seed"] + step + rank) % 7 == 0 for rank in range(world.size)]
        (keys, grads), later = later, tensors(case, *batch_of(case, step + 1, world.rank))
        rows = step_apart(
            world, table, keys, None if rests[world.rank] else grads, later[0] if case["prefetch"] else None
        )
        seen = world.comm.gather(seen_by(table, rows, names))
        if world.rank == 0:
            for rank, (found, expected) in enumerate(zip(seen, step_of(cluster, case, step, rests))):
                assert found == expected, f"step {step}, rank {rank}: rows, counters, clocks of lines, lags"
    table.flush()
    owned = world.comm.gather((table.keys().tolist(), table.shard.weight.tolist(), table.shard.clock.tolist()))
    if world.rank == 0:
        cluster.flush()
        for keys, rows, clocks in owned:
            assert rows == [cluster.owners.rows[key] for key in keys]
            assert clocks == [cluster.owners.clocks[key] for key in keys]


def step_of(cluster, case, step, rests):
    """One step of the reference; what its ranks should show. rests: whether each rank does not write."""
    ranks = range(len(cluster.ranks))
    keys, grads = zip(*(batch_of(case, step, rank) for rank in ranks))
    rows = cluster.read(keys)
    if case["prefetch"]:
        cluster.prefetch([batch_of(case, step + 1, rank)[0] for rank in ranks])
    cluster.write(keys, [None if rest else of_rank for rest, of_rank in zip(rests, grads)])
    return [expected_of(rank, of_rank) for rank, of_rank in zip(cluster.ranks, rows)]


# No barriers between steps


def writes_of(case, step, rank):
    """Number of writes of a rank for its batch of a step; it must be one at s = 0, and the same on all ranks with
    messages."""
    rank = 0 if is_collective(case) else rank
    return (
        1 if case["staleness"] == 0 else random.Random(f"writes {case['seed']} {step} {rank}").choice([0, 1, 1, 1, 2])
    )


def step_freely(world, table, case, step, batch, later):
    """One step, not synchronised with other ranks; batch and later are keys and gradients. Returns the rows read."""
    keys, grads = batch
    rows = table.read(keys)
    is_late = case["staleness"] != 0 and step % 3 == 2  # prefetch after the write, which s = 0 does not allow
    if case["prefetch"] and not is_late:
        table.prefetch(later[0])
    for _ in range(writes_of(case, step, world.rank)):
        table.write(keys, grads)
        keys = keys.clone()  # for the second write, keys that no read has found
    if case["prefetch"] and is_late:
        table.prefetch(later[0])
    return rows


def run_freely(world, table, case, at_step=lambda step: None):
    """All steps of this rank at full speed; at_step is called before each."""
    later = tensors(case, *batch_of(case, 0, world.rank))
    for step in range(case["num_steps"]):
        at_step(step)
        batch, later = later, tensors(case, *batch_of(case, step + 1, world.rank))
        step_freely(world, table, case, step, batch, later)
    table.flush()


def total_change(world, case):
    """Change of the rows by all writes of all ranks: (num_rows, dim) float64. Collective."""
    change = np.zeros((case["num_rows"], case["dim"]))
    for step in range(case["num_steps"]):
        keys, grads = batch_of(case, step, world.rank)
        change[keys] -= writes_of(case, step, world.rank) * np.reshape(grads, (-1, case["dim"]))
    return world.comm.allreduce(change)


def changes(table, case):
    """Difference of the rows of this rank's shard from their initial values: (n, dim)."""
    return table.shard.weight - [first_row(key, case["dim"]) for key in table.keys().tolist()]


DTYPES = ["float32", "float16", "bfloat16"]


@cases(
    12,
    staleness=st.sampled_from(STALENESS),
    anticipate=st.sampled_from([1, 3]),
    num_steps=st.integers(5, 25),
    dtype=st.sampled_from(DTYPES),
)
def test_no_update_is_lost_or_applied_twice(placed, case):
    inbox_bytes = 1 if placed.is_one_node else 2048 * placed.size  # the minimum, which would be slow over MPI
    table = open_table(placed, case, case["staleness"], case["anticipate"], inbox_bytes)
    run_freely(placed, table, case, lambda step: table.flush() if step == 3 else None)
    assert np.array_equal(changes(table, case), total_change(placed, case)[table.keys()])
    table.close()


PLAIN = {
    "num_rows": 200, "dim": 2, "capacity_rows": 32, "policy": "lfu", "admit": "all", "partition": "round_robin",
    "prefetch": True, "staleness": 1, "num_steps": 30, "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize("staleness", [0, 1, 10])
def test_no_update_is_lost_while_an_owner_stands_still(placed, staleness):
    check_that_nothing_is_lost_while_an_owner_stands_still(placed, {**PLAIN, "staleness": staleness})


def check_that_nothing_is_lost_while_an_owner_stands_still(world, case):
    pids = pids_here(world)
    table = open_table(world, case, case["staleness"], inbox_bytes=2048 * world.size)
    with contextlib.ExitStack() as stack:

        def stop_the_last_rank(step):
            if step == 3 and world.rank == 0:
                stack.enter_context(stopped(pids[-1], wake_after_s=0.5))

        run_freely(world, table, case, stop_the_last_rank)
    assert np.array_equal(changes(table, case), total_change(world, case)[table.keys()])
    table.close()


def pids_here(world):
    """Process ids of all ranks, if rank 0 can stop the last one."""
    hosts, pids = zip(*world.comm.allgather((world.host, os.getpid())))
    if world.size == 1 or hosts[0] != hosts[-1]:
        pytest.skip("takes another rank on the machine of rank 0")
    return pids


@contextlib.contextmanager
def stopped(pid, wake_after_s):
    """Stops a process until the end of the block. A helper process resumes it in any case."""
    waker = subprocess.Popen(["sh", "-c", f"sleep {wake_after_s}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)
    while state_of(pid) != "T":
        time.sleep(0.001)
    yield
    os.kill(pid, signal.SIGCONT)
    waker.kill()
    waker.wait()


def state_of(pid):
    """R running, S sleeping, T stopped, ..."""
    with open(f"/proc/{pid}/stat") as text:
        return text.read().rsplit(")", 1)[1].split()[0]


def test_an_owner_that_has_written_nothing_yet_takes_in_what_comes(placed):
    table = open_table(placed, PLAIN, staleness=1)
    if placed.rank == placed.size - 1:
        table.write(torch.arange(200), torch.ones(200, 2))
    table.flush()
    assert (changes(table, PLAIN) == -1).all()
    table.close()


@cases(12, staleness=st.sampled_from(STALENESS), num_steps=st.integers(5, 25))
def test_a_rank_sees_its_own_updates_at_once(placed, case):
    table = open_table(placed, case, case["staleness"])
    rows = np.array([first_row(key, case["dim"]) for key in range(case["num_rows"])])  # with this rank's own updates
    later = own_batch_of(placed, case, 0)
    for step in range(case["num_steps"]):
        batch, later = later, own_batch_of(placed, case, step + 1)
        seen = step_freely(placed, table, case, step, batch, later)
        keys, mine = batch[0].numpy(), is_mine(placed, batch[0].numpy())
        assert np.array_equal(seen[mine], rows[keys[mine]])
        rows[keys] -= writes_of(case, step, placed.rank) * batch[1].numpy().astype(int)
    table.flush()
    table.close()


def is_mine(world, keys):
    """Mask of keys (n,) that only this rank changes, with owners on this node and on others: (n,) bool."""
    return keys // 2 % world.size == world.rank


def own_batch_of(world, case, step):
    """A batch whose gradients are 0 for keys of other ranks."""
    keys, grads = tensors(case, *batch_of(case, step, world.rank))
    return keys, grads * torch.from_numpy(is_mine(world, keys.numpy())[:, None])


def far_rows(world, **settings):
    """A table of zeros under SGD with learning rate 1 with lines for all rows, and the keys that the next rank owns,
    (100,)."""
    cache = CacheSettings(settings.pop("capacity_rows", 1000), admit="all")
    table = EmbeddingTable(
        world, 100 * world.size, 4, RowOptimizer("sgd", 1.0), "range", init_std=0.0, cache=cache, **settings
    )
    return table, torch.arange(100) + 100 * ((world.rank + 1) % world.size)


@pytest.mark.parametrize(
    "announced", ["another batch", "this batch, by another tensor", "this batch, and the one after"]
)
def test_a_read_of_what_was_not_announced_has_all_own_updates(placed, announced):
    table, keys = far_rows(placed, staleness=Staleness(1, 1.0))
    grads, others = torch.ones(100, 4), keys.flip(0)[:50].clone()
    for step in range(12):
        assert (table.read(keys) == -step).all(), step
        for later in {"another batch": [others], "this batch, by another tensor": [keys.clone()]}.get(
            announced, [keys, others]
        ):
            table.prefetch(later)
        table.write(keys, grads)
        if announced == "this batch, and the one after" and step % 3 == 2:
            assert (table.read(others) == -step - 1).all(), step
    table.flush()
    assert (table.shard.weight == -12).all()
    table.close()


@pytest.mark.parametrize("capacity_rows", [0, 1000])
def test_every_iteration_of_one_rank_counts_once_in_a_clock(placed, capacity_rows):
    table, keys = far_rows(placed, staleness=Staleness(1), capacity_rows=capacity_rows)
    for _ in range(40):
        table.read(keys)
        table.prefetch(keys)
        table.write(keys, torch.ones(100, 4))
    table.flush()
    assert (table.shard.clock == 40).all()
    table.close()


def next_announced(batches, step, depth):
    """The batches to announce after the read of a step, so that each is announced `depth` reads ahead."""
    return batches[1 : depth + 1] if step == 0 else batches[step + depth : step + depth + 1]


@pytest.mark.parametrize("depth", range(1, MOST_AHEAD + 1))
@pytest.mark.parametrize("staleness", [1, 10, None])
def test_no_update_is_lost_when_several_batches_are_announced(placed, staleness, depth):
    table, _ = far_rows(placed, staleness=Staleness(staleness), capacity_rows=64)
    draw = np.random.default_rng(placed.rank)
    batches = [torch.from_numpy(draw.choice(table.num_rows, 40, replace=False)) for _ in range(40)]
    for step, keys in enumerate(batches):
        table.read(keys)
        for later in next_announced(batches, step, depth):
            table.prefetch(later)
        table.write(keys, torch.ones(40, 4))
    table.flush()
    expected = np.zeros(table.num_rows)
    for written in placed.comm.allgather(batches):
        np.subtract.at(expected, np.concatenate(written), 1)
    assert np.array_equal(table.shard.weight, np.repeat(expected[table.keys(), None], 4, axis=1))
    table.close()


def test_a_large_push_is_whole_at_the_next_read(placed):
    table = EmbeddingTable(placed, 20_000, 64, RowOptimizer("sgd", 1.0), init_std=0.0, staleness=Staleness(1))
    keys = torch.arange(20_000)[is_mine(placed, np.arange(20_000))]
    for step in range(5):
        assert (table.read(keys) == -step).all()
        table.write(keys, torch.ones(len(keys), 64))
    table.flush()
    table.close()


def test_own_rows_are_read_whole_while_others_push_to_them(placed):
    table = EmbeddingTable(
        placed, 100 * placed.size, 1000, RowOptimizer("sgd", 1.0), init_std=0.0, staleness=Staleness(1)
    )
    keys = torch.arange(0, table.num_rows, placed.size)  # rows of rank 0
    for _ in range(100):
        if placed.rank == 0:
            rows = table.read(keys)
            assert (rows == rows[:, :1]).all()
        else:
            table.write(keys, torch.ones(len(keys), 1000))
    table.flush()
    table.close()


def test_a_batch_written_twice_counts_twice_in_the_clocks(world):
    table = open_table(world, {**PLAIN, "capacity_rows": 0}, staleness=1)
    keys = table.keys()
    table.read(keys)
    for _ in range(3):
        table.write(keys, torch.zeros(len(keys), 2))
    assert (table.shard.clock == 3).all()
    table.close()


def test_two_batches_read_before_both_are_written_count_twice_in_the_clocks(world):
    table = open_table(world, {**PLAIN, "capacity_rows": 0}, staleness=1)
    first, second = table.keys(), table.keys()
    table.read(first)
    table.read(second)
    for keys in (first, second, first):
        table.write(keys, torch.zeros(len(keys), 2))
    assert (table.shard.clock == 3).all()
    table.close()


def test_keys_filled_anew_through_numpy_are_read_as_they_are_now(world):
    table = open_table(world, {**PLAIN, "num_rows": 40 * world.size}, staleness=5)
    own = table.keys().numpy()
    buffer = own[:10].copy()
    keys = torch.from_numpy(buffer)
    table.read(keys)
    table.write(keys, torch.ones(10, 2))
    buffer[:] = own[20:30]
    assert (table.read(keys) == table.read(torch.from_numpy(own[20:30].copy()))).all()
    assert (table.read(keys) != table.read(torch.from_numpy(own[:10].copy()))).any()
    table.close()


# Guarantees of staleness and cache


@pytest.mark.parametrize("staleness", [1, 2, 10])
@cases(5, num_steps=st.integers(10, 40))
def test_clocks_of_a_row_on_two_ranks_that_read_it_differ_by_at_most_2s(placed, staleness, case):
    case = {**case, "staleness": staleness}
    table = open_table(placed, case, staleness)
    for step in range(case["num_steps"]):
        keys, grads = tensors(case, *batch_of(case, step, placed.rank))
        table.read(keys)
        for key, clocks in clocks_of_all(placed, table, keys).items():
            assert max(clocks) - min(clocks) <= 2 * staleness, f"step {step}, key {key}: {clocks}"
        if writes_of(case, step, placed.rank):
            table.write(keys, grads)
        table.await_owners()
        placed.comm.Barrier()
    table.close()


def clocks_of_all(world, table, keys):
    """Key -> c_c on the ranks that have just read it and have a line for it."""
    clocks = {}
    for mine in world.comm.allgather(dict(zip(keys.tolist(), line_clocks(table, keys).tolist()))):
        for key, clock in mine.items():
            clocks.setdefault(key, []).extend([clock] if clock >= 0 else [])
    return {key: of_ranks for key, of_ranks in clocks.items() if of_ranks}


@pytest.mark.parametrize("staleness", STALENESS[1:])
def test_first_rows_depend_on_seed_name_and_key_alone_through_a_cache(placed, staleness):
    expected = np.empty((NUM_ROWS, 5), np.float32)
    _C.init_rows(expected, np.arange(NUM_ROWS), table_seed(7, "other"), 0.1)
    cache = CacheSettings(64, admit="all")
    for partition in sorted(PARTITIONS):
        table = make_table(placed, name="other", partition=partition, staleness=Staleness(staleness), cache=cache)
        for keys in torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(placed.rank)).repeat(3).split(50):
            assert np.array_equal(table.read(keys), expected[keys])
        table.close()


@pytest.mark.parametrize("rule", sorted(RULES))
def test_one_rank_without_lines_trains_at_s_1_as_at_s_0_bit_for_bit(world, rule):
    alone = alone_world(world)
    expected, found = trained(alone, rule), trained(alone, rule, staleness=Staleness(1))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected))


def trained(world, rule, **settings):
    """Losses of this rank, all rows, state and clocks of its shard after 20 steps. A third of the rows is only read."""
    table = make_table(world, rule, **settings)
    losses = []
    for keys, index, target in (my_batch(world, step) for step in range(20)):
        rows = table.read(keys).requires_grad_()
        loss = loss_of(rows[index], target)
        loss.backward()
        learns = keys % 3 > 0
        table.write(keys[learns], rows.grad[learns] / world.size)
        losses.append(loss.item())
    table.flush()
    found = losses, all_rows(table, world), table.shard.state.copy(), table.shard.clock.copy()
    table.close()
    return found


# A rank that leaves


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_lines_of_16_bits_follow_those_of_32(world, rule, dtype):
    tables = [
        make_table(
            alone_world(world), rule, staleness=Staleness(None), cache=CacheSettings(ALL, admit="all", dtype=kept)
        )
        for kept in ("float32", dtype)
    ]
    lost, num_steps, digits = 0, 50, {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    keys, generator = torch.arange(200), torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        grads = 1e-3 * torch.randn(200, tables[0].dim, generator=generator) + 1e-3
        exact, near = (table.read(keys) for table in tables)
        lost = near - exact
        for table in tables:
            table.write(keys, grads)
    assert lost.abs().max() > 0
    assert lost.std() <= digits * exact.abs().max() * num_steps**0.5  # stochastic rounding: a random walk
    assert lost.mean().abs() <= 4 * lost.std() / lost.numel() ** 0.5
    for table in tables:
        table.flush()
    assert np.array_equal(tables[0].shard.weight, tables[1].shard.weight)
    for table in tables:
        table.close()


@pytest.mark.parametrize("size", [{"capacity_rows": 8}, {"capacity_fraction": 0.5}])
def test_a_cache_where_reads_are_exact_is_refused(world, size):
    [(name, value)] = size.items()
    with pytest.raises(UserError, match=f"table.cache.{name} must be 0 at table.staleness=0, .*, got {value}: leave"):
        make_table(world, cache=CacheSettings(**size))


def test_close_serves_ranks_that_still_write(placed):
    table = open_table(placed, PLAIN, staleness=1)
    if placed.rank == placed.size - 1:
        time.sleep(0.1)
        table.write(torch.arange(200), torch.ones(200, 2))
        table.await_owners()
    table.close()


# Drift


@pytest.mark.parametrize("staleness", [10, None])
@pytest.mark.parametrize("drift", [1e-6, 1e6])
def test_a_line_that_has_drifted_is_pushed_and_fetched_again(placed, drift, staleness):
    table = EmbeddingTable(
        placed, 50, 2, RowOptimizer("sgd", 0.125), staleness=Staleness(staleness, anticipate=1.0, drift=drift),
        cache=CacheSettings(ALL, admit="all"), init_std=0.5,
    )  # fmt: skip
    keys, drifts, first = torch.arange(50), placed.size > 1 and drift < 1, None
    for step in range(7):
        rows = step_apart(placed, table, keys, torch.ones(50, 2), None)
        first = rows if step == 0 else first
        # The size of a row is known from the second update on: then all ranks' updates are seen at the next read.
        seen = placed.size if drifts and step > 1 else 1
        assert torch.allclose(first - rows, torch.tensor(0.125 * step * seen), atol=1e-5)
        placed.comm.Barrier()
    assert table.counters.stale == (5 * 50 if drifts else 0)
    table.flush()
    table.close()


# Gradient sums at the owner


@pytest.mark.parametrize("rule", WITH_SQUARES)
def test_assigned_states_have_their_mean_squares(placed, rule):
    table = make_table(placed, rule, staleness=Staleness(1))
    shard, draw = table.shard, np.random.default_rng(placed.rank)
    shard.assign(slice(None), state=2.0)
    assert (shard.mean_square == 2).all() and shard.mean_square.shape == (len(shard), 1)
    rows, states = np.arange(0, len(shard), 3), draw.random((len(shard), shard.state.shape[1]), np.float32)
    shard.assign(rows, state=states[rows])
    assert np.allclose(shard.mean_square[rows, 0], second_moments(rule, states[rows]).mean(1))
    assert (shard.mean_square[1::3] == 2).all()
    table.close()


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad", "momentum", "ftrl"])
def test_only_sums_of_several_gradients_count_bytes_of_squares(placed, rule):
    table = EmbeddingTable(
        placed, 60, 3, RowOptimizer(rule), staleness=Staleness(1, drift=0.0), cache=CacheSettings(64, admit="all")
    )
    keys = torch.arange(60)
    elsewhere = int((table.partition.locate(keys.numpy())[0] != placed.rank).sum())
    squares = {"sgd": 0, "adagrad": 3, "rowwise_adagrad": 1, "momentum": 0, "ftrl": 3}[rule]
    steps = 0 if rule == "sgd" else 8
    table.read(keys)
    table.write(keys, torch.ones(60, 3))
    table.flush()  # sums of one gradient
    assert table.counters.push_bytes == elsewhere * (16 + steps + 4 * 3)
    before = table.counters.push_bytes
    for _ in range(2):
        table.read(keys)
        table.write(keys, torch.ones(60, 3))
    table.flush()
    assert table.counters.push_bytes - before == elsewhere * (16 + steps + 4 * (3 + squares))
    table.close()


def train_in_step(world, staleness, optimizer, draw, num_steps=12, **settings):
    """Steps of ranks that wait for each other's pushes. draw(step) -> keys (U,) and gradients (U, 3) of this rank.
    Returns this rank's rows, state and clocks."""
    table = EmbeddingTable(
        world, 60, 3, optimizer, staleness=Staleness(staleness), cache=CacheSettings(0), init_std=0.5, **settings
    )
    for step in range(num_steps):
        step_apart(world, table, *draw(step), None)
    table.flush()
    shard = [array.copy() for array in (table.shard.weight, table.shard.state, table.shard.clock)]
    table.close()
    return shard


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_same_gradients_on_all_ranks_make_the_same_rows_at_every_staleness(placed, rule, weight_decay):
    def draw(step):
        generator = torch.Generator().manual_seed(step)
        return torch.randperm(60, generator=generator)[:40], torch.randn(40, 3, generator=generator)

    schedule = Schedule("linear", warmup_steps=5, total_steps=20)
    optimizer = row_optimizer(rule, 0.05, weight_decay, schedule=schedule, l1=2 * L1 * placed.size)
    exact = train_in_step(placed, 0, optimizer, draw)
    assert rule != "ftrl" or 0 < (exact[0] == 0).mean() < 1
    for staleness in (1, 10):
        for one, other in zip(exact, train_in_step(placed, staleness, optimizer, draw)):
            assert np.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_different_gradients_in_one_step_make_the_same_rows_at_every_staleness(placed, rule):
    """Some rows are touched by all ranks, some by several, some by one. Gradients of one sign: where they cancel each
    other, the root of their sum squared is exact to fewer digits."""

    def draw(step):
        generator = torch.Generator().manual_seed(100 * step + placed.rank)
        return torch.randperm(60, generator=generator)[:25], (-1) ** step * torch.rand(25, 3, generator=generator)

    optimizer = row_optimizer(rule, 0.05, 0.1, l1=L1 * placed.size)
    exact, stale = (train_in_step(placed, staleness, optimizer, draw) for staleness in (0, 3))
    assert rule != "ftrl" or 0 < (exact[0] == 0).mean() < 1
    assert all(np.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in zip(exact, stale))
