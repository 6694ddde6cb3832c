"""Replicated fields: at s = 0 equal to a table without replicas, at s >= 1 exact replicas. Run at 1, 2 and 3 ranks."""

import numpy as np
import pytest
import torch
from test_table import (
    DIM,
    NUM_ROWS,
    RULES,
    SCHEDULE,
    all_rows,
    integer_message,
    make_table,
    my_batch,
    train,
    train_step,
)  # fmt: skip

from hetmpi.comm import memory
from hetmpi.errors import UserError
from hetmpi.table import replicas
from hetmpi.table.cache import CacheSettings, Staleness
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.replicas import small_fields
from hetmpi.table.table import EmbeddingTable

pytestmark = pytest.mark.mpi
FIELD_ROWS = [7, 60, 3, 90, 11, 40]
SMALL, ALL, FIRST = small_fields(FIELD_ROWS, 20), small_fields(FIELD_ROWS, 1000), [range(7)]
SMALL_KEYS = np.concatenate([np.arange(keys.start, keys.stop) for keys in SMALL])
EVERY = torch.arange(NUM_ROWS)


def make_replicated(world, rule="sgd", weight_decay=0.0, fields=SMALL, **settings):
    optimizer = RowOptimizer(rule, RULES[rule], weight_decay, schedule=SCHEDULE)
    return EmbeddingTable(
        world, NUM_ROWS, DIM, optimizer, replicated=fields, **{"init_std": 0.1, "seed": 7, **settings}
    )


def make_plain_sgd(world, fields=SMALL, **settings):
    """A table of zeros whose rows change by exactly the gradients."""
    return EmbeddingTable(world, NUM_ROWS, DIM, RowOptimizer("sgd", 1.0), replicated=fields, init_std=0.0, **settings)


def everything(table):
    """This rank's shard: weight, state, clock."""
    return [table.shard.weight.copy(), table.shard.state.copy(), table.shard.clock.copy()]


def check_same_replicas(table, world):
    for array in (table.client.replica.weight, table.client.replica.state, table.client.replica.clock):
        assert all(np.array_equal(array, other) for other in world.comm.allgather(array.copy()))


def test_small_fields_are_those_of_fewer_rows():
    assert [range(0, 7), range(67, 70), range(160, 171)] == SMALL
    assert small_fields(FIELD_ROWS, 3) == [] and sum(map(len, ALL)) == NUM_ROWS


@pytest.mark.parametrize("weight_decay, prefetch", [(0.0, False), (0.02, True)])
@pytest.mark.parametrize("fields", [SMALL, ALL], ids=["small", "all"])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_rows_state_and_clocks_are_those_of_a_table_without_replicas(placed, rule, weight_decay, fields, prefetch):
    results = []
    for make in (make_table, lambda *args: make_replicated(*args, fields=fields)):
        table = make(placed, rule, weight_decay)
        losses = train(table, placed, prefetch=prefetch)
        results.append([np.array(losses), *everything(table)])
        if make is not make_table:
            check_same_replicas(table, placed)
        table.close()
    for expected, found in zip(*results):
        if placed.size <= 2:  # with three ranks an allreduce may add in another order than the owners
            assert np.array_equal(found, expected)
        assert np.abs(found - expected).max(initial=0) < 1e-4


@pytest.mark.parametrize("partition", ["range", "hash"])
def test_every_partition_gives_the_same_rows(placed, partition):
    table, other = make_replicated(placed, "adam", partition=partition), make_replicated(placed, "adam", name="table")
    train(table, placed, steps=5)
    train(other, placed, steps=5)
    assert np.array_equal(all_rows(table, placed), all_rows(other, placed))
    table.close(), other.close()


def test_two_runs_are_bitwise_equal(placed):
    runs = []
    for _ in range(2):
        table = make_replicated(placed, "adagrad")
        runs.append([train(table, placed), *everything(table)])
        table.close()
    assert all(np.array_equal(a, b) for a, b in zip(*runs))


def test_first_rows_are_the_owners(placed):
    table, expected = make_replicated(placed), make_table(placed)
    assert np.array_equal(table.client.replica.weight, all_rows(expected, placed)[SMALL_KEYS])
    table.close(), expected.close()


@pytest.mark.parametrize("admit", ["all", "offnode"])
@pytest.mark.parametrize("fields", [SMALL, ALL], ids=["small", "all"])
@pytest.mark.parametrize("bound", [0, 3, None])
def test_no_update_is_lost_or_applied_twice_and_replicas_are_exact(placed, bound, fields, admit):
    cache = CacheSettings(capacity_rows=40, admit=admit)
    table = make_plain_sgd(placed, fields, staleness=Staleness(bound), cache=cache, inbox_bytes=1)
    total, small = np.zeros((NUM_ROWS, DIM), np.int64), torch.from_numpy(SMALL_KEYS)
    for step in range(8):
        keys = torch.from_numpy(integer_message(step, placed.rank)[0])
        table.read(keys)
        table.prefetch(small)
        for rank in range(placed.size):
            np.add.at(total, *integer_message(step, rank))
        table.write(keys, torch.from_numpy(integer_message(step, placed.rank)[1].astype(np.float32)))
        assert np.array_equal(table.read(small).numpy(), -total[SMALL_KEYS])
    table.flush()
    placed.comm.Barrier()
    assert np.array_equal(all_rows(table, placed), -total)
    assert np.array_equal(table.peek(EVERY).numpy(), -total)
    check_same_replicas(table, placed)
    placed.comm.Barrier()
    table.close()


def test_writes_may_follow_each_other_where_the_table_admits_it(placed):
    table = make_plain_sgd(placed, staleness=Staleness(2))
    for _ in range(3):
        table.write(EVERY, torch.ones(NUM_ROWS, DIM))
    table.flush()
    assert (table.peek(EVERY) == -3 * placed.size).all()
    placed.comm.Barrier()
    table.close()


def test_clocks_count_the_steps_in_which_any_rank_touched_a_row(placed):
    table = make_replicated(placed, "adam")
    for _ in range(5):  # only rank 0 touches key 3, with a gradient of 0
        keys = torch.tensor([3, 100] if placed.rank == 0 else [100])
        table.read(keys)
        table.write(keys, torch.zeros(len(keys), DIM))
    table.flush()
    assert table.client.replica.clock.tolist() == [0, 0, 0, 5] + [0] * 17
    table.close()


def test_a_batch_may_have_keys_of_one_part_only_or_none(placed):
    table = make_plain_sgd(placed)
    for keys in ([1, 2], [20, 21], []):
        keys = torch.tensor(keys, dtype=torch.int64)
        assert table.read(keys).shape == (len(keys), DIM)
        table.write(keys, torch.ones(len(keys), DIM))
    table.flush()
    assert table.peek(torch.tensor([1, 2, 3, 20, 21, 22]))[:, 0].tolist() == [-placed.size, -placed.size, 0] * 2
    table.close()


def test_gradients_and_keys_may_be_overwritten_after_write(placed):
    table = make_plain_sgd(placed)
    keys, grads = torch.arange(10), torch.ones(10, DIM)
    table.read(keys)
    table.write(keys, grads)
    grads.zero_()
    keys += 60
    assert torch.equal(table.read(keys), torch.zeros(10, DIM))
    table.flush()
    assert (table.peek(torch.arange(10)) == -placed.size).all()
    table.close()


def test_rows_put_into_the_shards_are_loaded(placed):
    table = make_replicated(placed, "adam")
    values = np.random.default_rng(1).normal(size=(NUM_ROWS, DIM)).astype(np.float32)
    mine = table.keys().numpy()
    table.shard.weight[:], table.shard.state[:, 0], table.shard.clock[:] = values[mine], mine, mine
    table.window.fence()
    table.resume_at(0)
    assert np.array_equal(table.read(EVERY).numpy(), values)
    assert np.array_equal(table.client.replica.state[:, 0], SMALL_KEYS) and np.array_equal(
        table.client.replica.clock, SMALL_KEYS
    )
    table.close()


def test_bytes_are_counted_by_what_moves_them(placed):
    table, size = make_replicated(placed), placed.size
    table.read(EVERY)
    table.write(EVERY, torch.zeros(NUM_ROWS, DIM))
    table.flush()
    elsewhere = len(set(range(NUM_ROWS)) - set(SMALL_KEYS) - set(table.keys().tolist()))
    assert (table.counters.pulled_bytes, table.counters.push_bytes) == (elsewhere * DIM * 4, elsewhere * (8 + DIM * 4))
    assert table.counters.reduced_bytes == 2 * (size - 1) * len(SMALL_KEYS) * (DIM + 1) * 4 // size
    table.close()


def test_two_tables_of_one_world_do_not_mix(placed):
    wide, narrow = (make_replicated(placed, "adagrad", name=name) for name in ("wide", "narrow"))
    expected = train(narrow, placed, steps=5)
    narrow.close()
    narrow = make_replicated(placed, "adagrad", name="narrow", fields=FIRST)
    losses = []
    for step in range(5):
        wide.read(EVERY)
        losses.append(train_step(narrow, placed, my_batch(placed, step)))
        wide.write(EVERY, torch.ones(NUM_ROWS, DIM))
    assert np.abs(np.array(losses) - expected).max() < (1e-5 if placed.size > 2 else 1e-30)
    for table in (wide, narrow):
        table.flush()
        table.close()


def test_a_table_closed_after_a_write_leaves_nothing_for_the_next(world):
    for _ in range(2):
        table = make_plain_sgd(world, staleness=Staleness(1))
        table.write(EVERY, torch.ones(NUM_ROWS, DIM))
        table.close()
        table.close()
        with pytest.raises(RuntimeError, match="the table is closed"):
            table.read(EVERY)


@pytest.mark.parametrize("bound", [0, 1])
def test_a_write_not_settled_is_not_shown(world, bound):
    table = make_replicated(world, staleness=Staleness(bound))
    table.write(EVERY, torch.zeros(NUM_ROWS, DIM))
    with pytest.raises(RuntimeError, match="not settled yet"):
        table.peek(EVERY)
    if bound == 0:
        with pytest.raises(RuntimeError, match="written already"):
            table.write(EVERY, torch.zeros(NUM_ROWS, DIM))
    table.flush()
    table.close()


@pytest.mark.parametrize("wrong", [[range(5, 9), range(8, 12)], [range(5, 9), range(0, 3)], [range(200, NUM_ROWS + 1)]])
def test_fields_that_cannot_be_are_refused(world, wrong):
    with pytest.raises(UserError, match=rf"ascending ranges within \[0, {NUM_ROWS}\)"):
        make_replicated(world, fields=wrong)


def test_keys_and_grads_of_a_wrong_kind_are_refused(world):
    table = make_replicated(world)
    with pytest.raises(UserError, match=rf"read: keys must lie in \[0, {NUM_ROWS}\), got {NUM_ROWS}"):
        table.read(torch.tensor([0, NUM_ROWS]))
    with pytest.raises(UserError, match=r"grads must be float32 of shape \(2, 5\) on cpu, got torch.float32 \(2, 4\)"):
        table.write(torch.tensor([0, 1]), torch.zeros(2, 4))
    table.close()


def test_replicas_larger_than_memory_or_than_one_allreduce_are_refused(world, monkeypatch):
    free = iter([1 << 40, 1 << 40, 100])  # for the checks of shards, cache and replica
    monkeypatch.setattr(memory, "free_memory", lambda shared: ("memory", next(free)))
    with pytest.raises(
        UserError, match=r"21 rows of dim 5 on each rank need .* MiB .* are free in memory: lower table.replicate"
    ):
        make_replicated(world)
    monkeypatch.undo()
    monkeypatch.setattr(replicas, "LARGEST_COUNT", 100)
    with pytest.raises(UserError, match="21 rows of dim 5 are more than one allreduce takes: lower table.replicate"):
        make_replicated(world)
