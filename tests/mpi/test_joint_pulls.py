"""Rounds that serve several announced batches (table.batches_per_pull). Run at 1, 2 and 3 ranks."""

import random

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from test_exchange import ANNOUNCED, PLAIN_MESSAGES
from test_staleness import (
    DTYPES,
    batch_of,
    cases,
    changes,
    clocks_of_all,
    first_row,
    is_mine,
    next_announced,
    open_table,
    own_batch_of,
    tensors,
)  # fmt: skip

from hetmpi.errors import UserError
from hetmpi.table.cache import CacheSettings
from hetmpi.table.client import MOST_AHEAD
from hetmpi.table.group import TableGroup
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi

CASE = {
    **ANNOUNCED,
    "staleness": st.sampled_from([1, 2, 5, 10, None]),
    "batches_per_pull": st.integers(2, MOST_AHEAD),
    "num_steps": st.integers(5, 30),
    "depth": st.integers(1, MOST_AHEAD),
}


def run_ahead(table, case, batches, see=lambda step, rows: None):
    """Reads and writes all batches (keys, gradients), each announced `depth` batches before its read. Between steps it
    sometimes flushes, reads a batch again, reads one that was not announced, announces in vain, or writes twice; the
    same on all ranks. Returns how often each batch was written."""
    draw, announced, writes = random.Random(case["seed"]), 0, []
    for step, (keys, grads) in enumerate(batches):
        see(step, table.read(keys))
        announced = max(announced, step)
        while announced < min(step + case["depth"], len(batches) - 1):
            announced += 1
            table.prefetch(batches[announced][0])
        event = draw.choice(["", "", "", "", "flush", "again", "other", "twice", "none", "await"])
        if event == "again":
            see(step, table.read(keys))
        elif event == "other":
            table.read(batches[0][0].clone())
        num = {"twice": 2, "none": 0}.get(event, 1)
        for _ in range(num):
            table.write(keys, grads)
        writes.append(num)
        if event == "flush":
            table.flush()
        elif event == "await":
            table.await_owners()
    table.flush()
    return writes


def batches_of(case, rank):
    return [tensors(case, *batch_of(case, step, rank)) for step in range(case["num_steps"])]


@cases(20, **CASE, anticipate=st.sampled_from([1, 3]), dtype=st.sampled_from(DTYPES))
def test_no_update_is_lost_or_applied_twice(apart, case):
    table = open_table(apart, case, case["staleness"], case["anticipate"], inbox_bytes=1)
    batches = batches_of(case, apart.rank)
    writes = run_ahead(table, case, batches)
    change = np.zeros((case["num_rows"], case["dim"]))
    for num, (keys, grads) in zip(writes, batches):
        change[keys.numpy()] -= num * grads.numpy()
    assert np.array_equal(changes(table, case), apart.comm.allreduce(change)[table.keys()])
    table.close()


@cases(30, **CASE)
def test_a_rank_sees_its_own_updates_at_once(apart, case):
    table = open_table(apart, case, case["staleness"])
    batches = [own_batch_of(apart, case, step) for step in range(case["num_steps"])]
    first = np.array([first_row(key, case["dim"]) for key in range(case["num_rows"])])
    seen = []
    writes = run_ahead(table, case, batches, lambda step, rows: seen.append((step, rows.numpy().copy())))
    table.close()
    rows = [first]
    for num, (keys, grads) in zip(writes, batches):
        rows.append(rows[-1].copy())
        rows[-1][keys.numpy()] -= num * grads.numpy().astype(int)
    for step, found in seen:
        keys = batches[step][0].numpy()
        mine = is_mine(apart, keys)
        assert np.array_equal(found[mine], rows[step][keys[mine]]), step


@pytest.mark.parametrize("staleness", [1, 2, 3, 10])
@cases(5, **{**CASE, "staleness": st.none()})
def test_clocks_of_a_row_on_two_ranks_that_read_it_differ_by_at_most_2s(world, staleness, case):
    """On nodes of one rank: one that shares a node with an owner reads its clocks later than the others."""
    apart = World(world.comm, ranks_per_node=1)
    table = open_table(apart, case, staleness)
    batches, depth = batches_of(case, apart.rank), case["batches_per_pull"]
    k = min(staleness, case["batches_per_pull"])
    most = 2 * (staleness - k + 1) + k
    for step, (keys, grads) in enumerate(batches):
        table.read(keys)
        for key, clocks in clocks_of_all(apart, table, keys).items():
            assert max(clocks) - min(clocks) <= most, f"step {step}, key {key}: {clocks}"
        for later, _ in next_announced(batches, step, depth):
            table.prefetch(later)
        table.write(keys, grads)
        table.client.applier.drain()
        apart.comm.Barrier()
    table.close()


def test_a_pull_of_k_batches_takes_a_message_where_k_pulls_take_k(apart):
    if apart.is_one_node:
        pytest.skip("takes two nodes")
    num = {
        k: messages_of(open_table(apart, {**PLAIN_MESSAGES, "batches_per_pull": k}, staleness=100), k) for k in (1, 4)
    }
    assert num[1] == 4 * num[4] > 0


def messages_of(table, k):
    """Messages of steps 4 to 39."""
    rounds, counts = table.client.channel.exchange, []
    batches = batches_of({**PLAIN_MESSAGES, "num_steps": 44}, table.world.rank)
    for step, (keys, grads) in enumerate(batches):
        counts.append(rounds.num_messages)
        table.read(keys)
        for later, _ in next_announced(batches, step, k):
            table.prefetch(later)
        table.write(keys, grads)
    table.close()
    return counts[40] - counts[4]


def test_rows_are_requested_anew_after_a_write_that_was_not_foreseen(apart):
    if apart.is_one_node:
        pytest.skip("takes two nodes")
    table = open_table(apart, {**PLAIN_MESSAGES, "batches_per_pull": 4}, staleness=100)
    rounds, counts = table.client.channel.exchange, []
    batches = batches_of({**PLAIN_MESSAGES, "num_steps": 5}, apart.rank)
    for step, (keys, grads) in enumerate(batches):
        counts.append(rounds.num_messages)
        table.read(keys)
        for later, _ in batches[1:] if step == 0 else ():
            table.prefetch(later)
        for _ in range(2 if step == 2 else 1):
            table.write(keys, grads)
    before_fourth = counts[3]
    assert counts[1] == counts[2] == before_fourth < counts[4]
    table.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_several_tables_share_the_rounds_of_several_batches(apart, depth):
    """Also if fewer batches are announced than a pull serves, and beside a table without a cache."""
    names = {"a": 4, "b": 8, "uncached": 2}
    group = TableGroup(
        {
            name: EmbeddingTable(
                apart, 200, dim, RowOptimizer("sgd", 1.0), name=name, staleness=Staleness(20), exchange="messages",
                cache=CacheSettings(0 if name == "uncached" else 32, admit="all"), init_std=0.0, batches_per_pull=3,
            )
            for name, dim in names.items()
        }
    )  # fmt: skip
    draw = np.random.default_rng(apart.rank)
    batches = [{name: torch.from_numpy(draw.choice(200, 30, replace=False)) for name in group} for _ in range(20)]
    for step, keys in enumerate(batches):
        rows = group.read(keys)
        for later in next_announced(batches, step, depth):
            group.prefetch(later)
        group.write(keys, {name: torch.ones_like(found) for name, found in rows.items()})
    shared = {table.client.channel.exchange for table in group.values()}
    assert len([one for one in shared if one.num_messages]) <= 1
    group.flush()
    for name, table in group.items():
        expected = np.zeros(200)
        for written in apart.comm.allgather([keys[name] for keys in batches]):
            np.subtract.at(expected, np.concatenate(written), 1)
        assert np.array_equal(table.shard.weight[:, 0], expected[table.keys()])
    group.close()


@pytest.mark.parametrize("rule", ["adagrad", "adam"])
def test_a_rank_alone_trains_as_with_a_round_per_step(apart, rule):
    """Only rank 0 has keys, and every row keeps its line: what it reads does not depend on when rounds are made."""
    found = {}
    for k in (1, 4):
        table = EmbeddingTable(
            apart, 300, 4, RowOptimizer(rule, 0.1), staleness=Staleness(1000, 1.0, 0.0), exchange="messages",
            cache=CacheSettings(400, admit="all"), batches_per_pull=k,
        )  # fmt: skip
        draw, seen = np.random.default_rng(0), []
        num = 40 if apart.rank == 0 else 0
        batches = [torch.from_numpy(draw.choice(300, num, replace=False)) for _ in range(20)]
        for step, keys in enumerate(batches):
            seen.append(table.read(keys).clone())
            for later in next_announced(batches, step, k):
                table.prefetch(later)
            table.write(keys, seen[-1] + 1)
        table.flush()
        found[k] = seen
        table.close()
    for one, other in zip(found[1], found[4]):
        assert torch.equal(one, other)


def test_a_number_of_steps_that_cannot_be_announced_is_refused(apart):
    for wrong in (0, MOST_AHEAD + 1):
        with pytest.raises(UserError, match="table.batches_per_pull must be"):
            EmbeddingTable(apart, 10, 1, RowOptimizer(), staleness=Staleness(10), batches_per_pull=wrong)
