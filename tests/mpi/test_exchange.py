"""Rows and gradients sent by messages instead of one-sided calls: the same numbers. Run at 1, 2 and 3 ranks."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from reference import Rounds, Turns
from row_rules import RULES
from test_staleness import (
    ALL,
    PLAIN,
    STALENESS,
    batch_of,
    cases,
    changes,
    check_that_nothing_is_lost_while_an_owner_stands_still,
    clocks_of_all,
    cluster_of,
    first_row,
    follow,
    is_mine,
    open_table,
    own_batch_of,
    run_freely,
    step_freely,
    tensors,
    total_change,
    write_apart,
    writes_of,
)  # fmt: skip
from test_table import all_rows, check_same_bits, make_table, train

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.owner.route import PARTITIONS
from hetmpi.table.cache import CacheSettings
from hetmpi.table.group import TableGroup
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_rows_are_those_of_windows_bit_for_bit(apart, rule, partition):
    results = []
    for exchange, prefetch in [("windows", False), ("messages", False), ("messages", True)]:
        table = make_table(apart, rule, 0.02, partition=partition, exchange=exchange)
        assert table.client.channel.name == (None if apart.is_one_node else exchange)
        results.append((train(table, apart, steps=10, prefetch=prefetch), all_rows(table, apart)))
        table.close()
    check_same_bits(results)


def test_rows_are_those_of_one_node_where_ranks_of_a_node_are_not_consecutive(world, interleaved):
    results = []
    for placed in (world, interleaved):
        table = make_table(placed, "adagrad", 0.02, exchange="messages")
        results.append((train(table, placed, steps=10), all_rows(table, placed)))
        table.close()
    check_same_bits(results)


def test_tables_read_one_by_one_or_together_match_on_nodes_of_one_rank_and_of_several(apart):
    """A flush of one table alone shifts the calls of the others: equally on all nodes."""
    group = TableGroup({name: make_table(apart, exchange="messages", name=name) for name in ("a", "b")})
    keys = {name: torch.arange(10) for name in group}
    for flushed in ("a", "b", "a"):
        rows = group.read(keys)
        group.write(keys, {name: torch.ones_like(rows[name]) for name in group})
        group[flushed].flush()
    group.close()


# Bounded staleness: the tests of windows in tests/mpi/test_staleness.py that apply if all ranks step together.


MESSAGES = {"exchange": st.just("messages")}
ANNOUNCED = {**MESSAGES, "prefetch": st.just(True), "capacity_rows": st.sampled_from([5, 1, 32, 40, 64, ALL])}
PLAIN_MESSAGES = {**PLAIN, "exchange": "messages"}


@pytest.mark.parametrize("staleness", STALENESS)
@cases(
    5,
    **MESSAGES,
    prefetch=st.just(False),
    anticipate=st.integers(0, 3),
    num_steps=st.integers(5, 40),
)
def test_ranks_in_lockstep_do_what_the_reference_does(apart, staleness, case):
    settings = staleness, case["anticipate"]
    table = open_table(apart, case, *settings)
    follow(apart, table, cluster_of(apart, table, case, *settings), case)
    table.close()


@pytest.mark.parametrize("staleness", STALENESS[1:])
@cases(
    10,
    **ANNOUNCED,
    anticipate=st.integers(0, 3),
    num_steps=st.integers(5, 40),
)
def test_ranks_that_announce_their_batches_do_what_the_reference_does(world, staleness, case):
    follow_announced(world, staleness, case, Rounds, step_in_rounds)


@pytest.mark.parametrize("staleness", STALENESS[1:])
@cases(
    10,
    **{**ANNOUNCED, "exchange": st.just("windows")},
    anticipate=st.integers(0, 3),
    num_steps=st.integers(5, 40),
)
def test_ranks_that_are_answered_at_once_do_what_the_reference_does(world, staleness, case):
    follow_announced(world, staleness, case, Turns, step_in_turns)


@pytest.mark.parametrize("staleness", [1, 10])
@cases(
    3,
    **{**ANNOUNCED, "exchange": st.just("toy_wire.Pickled")},
    anticipate=st.just(3),
    num_steps=st.integers(5, 25),
)
def test_a_wire_of_ones_own_takes_one_file(world, staleness, case):
    assert follow_announced(world, staleness, case, Rounds, step_in_rounds) == (
        None if world.size == 1 else "toy_wire.Pickled"
    )


def follow_announced(world, staleness, case, kind, step):
    """Makes the steps of a case, on nodes of one rank, and compares them with a reference of this kind. Returns the
    name of the transport."""
    apart, settings = World(world.comm, ranks_per_node=1), (staleness, case["anticipate"])
    table = open_table(apart, case, *settings)
    name = table.client.channel.name
    follow(apart, table, cluster_of(apart, table, case, *settings, kind=kind), case, step, may_rest=False)
    table.close()
    return name


@pytest.mark.parametrize("path", ["nowhere.Wire", "toy_wire.Missing"])
def test_a_wire_that_is_not_there_is_refused(world, path):
    if world.size == 1:
        pytest.skip("one rank needs no transport")
    with pytest.raises(UserError, match=f"table.exchange={path}: there is no such class"):
        make_table(World(world.comm, ranks_per_node=1), exchange=path)


def step_in_turns(world, table, keys, grads, later):
    """As step_in_rounds; the ranks announce one after the other, and receive the rows at once."""
    rows = table.read(keys)
    for rank in range(world.size):
        world.comm.Barrier()
        if rank == world.rank:
            table.prefetch(later)
            table.client.channel.exchange.receive_all()
    world.comm.Barrier()
    write_apart(world, table, keys, grads)
    world.comm.Barrier()
    return rows


def step_in_rounds(world, table, keys, grads, later):
    """One step in which no phase overlaps with another on any rank; returns the rows read."""
    rows = table.read(keys)
    world.comm.Barrier()
    table.prefetch(later)
    world.comm.Barrier()
    write_apart(world, table, keys, grads)
    world.comm.Barrier()
    return rows


@cases(
    12,
    **MESSAGES,
    staleness=st.sampled_from(STALENESS),
    anticipate=st.sampled_from([1, 3]),
    num_steps=st.integers(5, 25),
)
def test_no_update_is_lost_or_applied_twice(apart, case):
    table = open_table(apart, case, case["staleness"], case["anticipate"], inbox_bytes=1)
    run_freely(apart, table, case, lambda step: table.flush() if step == 3 else None)
    assert np.array_equal(changes(table, case), total_change(apart, case)[table.keys()])
    table.close()


@pytest.mark.parametrize("staleness", [0, 1, 10])
def test_no_update_is_lost_while_an_owner_stands_still(apart, staleness):
    check_that_nothing_is_lost_while_an_owner_stands_still(apart, {**PLAIN_MESSAGES, "staleness": staleness})


@cases(12, **MESSAGES, staleness=st.sampled_from(STALENESS), num_steps=st.integers(5, 25))
def test_a_rank_sees_its_own_updates_at_once(apart, case):
    table = open_table(apart, case, case["staleness"])
    rows = np.array([first_row(key, case["dim"]) for key in range(case["num_rows"])])  # with this rank's own updates
    later = own_batch_of(apart, case, 0)
    for step in range(case["num_steps"]):
        batch, later = later, own_batch_of(apart, case, step + 1)
        seen = step_freely(apart, table, case, step, batch, later)
        keys, mine = batch[0].numpy(), is_mine(apart, batch[0].numpy())
        assert np.array_equal(seen[mine], rows[keys[mine]])
        rows[keys] -= writes_of(case, step, apart.rank) * batch[1].numpy().astype(int)
    table.flush()
    table.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_push_larger_than_the_inbox_is_whole_at_the_next_read(apart, staleness):
    table = EmbeddingTable(
        apart, 20_000, 64, RowOptimizer("sgd", 1.0), init_std=0.0, staleness=Staleness(staleness), inbox_bytes=1 << 20,
        exchange="messages",
    )  # fmt: skip
    keys = torch.arange(20_000)[is_mine(apart, np.arange(20_000))]
    for step in range(5):
        assert (table.read(keys) == -step).all()
        table.write(keys, torch.ones(len(keys), 64))
    table.flush()
    table.close()


@pytest.mark.parametrize("staleness", [1, 10])
@cases(5, **MESSAGES, num_steps=st.integers(10, 40))
def test_clocks_of_a_row_on_two_ranks_that_read_it_differ_by_at_most_2s(apart, staleness, case):
    case = {**case, "staleness": staleness}
    table = open_table(apart, case, staleness)
    for step in range(case["num_steps"]):
        keys, grads = tensors(case, *batch_of(case, step, apart.rank))
        table.read(keys)
        for key, clocks in clocks_of_all(apart, table, keys).items():
            assert max(clocks) - min(clocks) <= 2 * staleness, f"step {step}, key {key}: {clocks}"
        if writes_of(case, step, apart.rank):
            table.write(keys, grads)
        table.await_owners()
        apart.comm.Barrier()
    table.close()


@pytest.mark.parametrize("capacity_rows", [0, 32])
def test_one_rank_may_write_keys_that_it_has_not_read(apart, capacity_rows):
    table = open_table(apart, {**PLAIN_MESSAGES, "capacity_rows": capacity_rows}, staleness=1)
    keys, nothing = torch.arange(200), torch.arange(0)
    for _ in range(3):
        table.read(keys)
        if apart.rank == apart.size - 1:
            table.write(keys.clone(), torch.ones(200, 2))
        else:
            table.write(nothing, torch.ones(0, 2))
    table.flush()
    assert (changes(table, PLAIN) == -3).all()
    assert (table.shard.clock == 3).all()
    table.close()


def test_lines_that_go_in_reads_without_writes_lose_nothing(apart):
    table = open_table(apart, {**PLAIN_MESSAGES, "capacity_rows": 32}, staleness=10)
    for keys in torch.arange(200).split(20):
        table.read(keys)
        table.read(keys)
        table.write(keys, torch.ones(20, 2))
        table.read(torch.randperm(200)[:32])
        assert (table.read(keys)[:, 1] <= 1000 + keys - 1).all()
    table.flush()
    assert (changes(table, PLAIN) == -apart.size).all()
    table.close()


def test_what_was_sent_can_be_awaited_although_a_batch_is_announced(apart):
    table = open_table(apart, PLAIN_MESSAGES, staleness=1)
    keys, grads = torch.arange(200), torch.ones(200, 2)
    for _ in range(3):
        table.read(keys)
        table.prefetch(keys)
        table.write(keys, grads)
        table.await_owners()
    table.flush()
    assert (changes(table, PLAIN) == -3 * apart.size).all()
    table.close()


# Calls


@pytest.mark.parametrize("announces", [False, True])
def test_ranks_that_do_not_make_the_same_calls_are_told(apart, announces):
    if apart.is_one_node:
        pytest.skip("takes two nodes")
    table = open_table(World(apart.comm, ranks_per_node=1), PLAIN_MESSAGES, staleness=1)
    keys, grads = torch.arange(200), torch.ones(200, 2)
    table.read(keys)
    with pytest.raises(RuntimeError, match="all ranks must read, announce, write and flush alike"):
        if apart.rank > 0:
            table.read(keys)
        elif announces:
            table.prefetch(keys)
            table.write(keys, grads)
        else:
            table.flush()
    table.close()


def test_what_is_written_without_a_read_is_not_held_for_ever(apart):
    table = open_table(apart, {**PLAIN_MESSAGES, "capacity_rows": 0}, staleness=1)
    keys, grads, most_idle = torch.arange(200), torch.ones(200, 2), 8  # cpp/client/sums.h
    for _ in range(40):
        table.write(keys, grads)
        assert apart.is_one_node or table.client.num_held <= most_idle
    table.flush()
    assert (changes(table, PLAIN) == -40 * apart.size).all()
    table.close()


def test_sums_on_their_way_are_applied_to_the_rows_they_belong_to():
    rows, states, clocks = np.zeros((5, 3), np.float32), np.zeros((5, 0), np.float32), np.arange(5, dtype=np.int32)
    rule = RowOptimizer("sgd").core(3)
    rule.set_step(1, 1)
    sums, counts = np.array([[1, 2, 3], [9, 9, 9], [4, 5, 6]], np.float32), np.array([3, 9, 7], np.int32)
    sum_clocks = np.zeros(3, np.int32)
    _C.preview_sums(rule, np.array([4, -1, 1]), rows, states, clocks, sums, counts, sum_clocks, 2.0)
    assert rows[[4, 1]].tolist() == (-2 * sums[[0, 2]]).tolist() and not rows[[0, 2, 3]].any()
    assert clocks.tolist() == [0, 1 + 7, 2, 3, 4 + 3] and sum_clocks.tolist() == [4 + 3, 0, 1 + 7]


@pytest.mark.parametrize("exchange", ["windows", "messages"])
@pytest.mark.parametrize("rule", ["adagrad", "rowwise_adagrad", "adam", "ftrl"])
def test_a_fetch_brings_the_mean_squares_of_the_rows(apart, rule, exchange):
    """The next gradient moves a line as the owner moves the row, which divides by their root."""
    table = EmbeddingTable(
        apart, 40, 3, RowOptimizer(rule, 0.1, beta1=0.0), staleness=Staleness(100, anticipate=1.0, drift=0.0),
        cache=CacheSettings(64, admit="all"), exchange=exchange, init_std=0.5,
    )  # fmt: skip
    keys = torch.arange(40)
    for step in range(6):
        table.write(keys, torch.full((40, 3), 1.0 + apart.rank + step))
    table.flush()
    before = table.read(keys).clone()
    own = keys if apart.rank == 0 else keys[:0]
    table.write(own, torch.full((len(own), 3), 0.5))
    lines = table.read(keys).clone()
    table.flush()
    rows = table.peek(keys)
    table.close()
    if apart.rank == 0:
        moved = (rows - before).abs().min()
        assert moved > 1e-4 and (lines - rows).abs().max() < 0.05 * moved


def test_ranks_may_look_at_different_numbers_of_rows(apart):
    table = make_table(apart, exchange="messages")
    expected = torch.from_numpy(all_rows(table, apart))
    for num in (0, 1, 50, 200):
        keys = torch.randperm(len(expected))[: num if apart.rank == 0 else 7 * apart.rank]
        assert torch.equal(table.peek(keys), expected[keys])
    table.close()


def test_the_trial_leaves_the_rows_and_all_ranks_choose_alike(apart):
    chosen, untried = (make_table(apart, exchange=exchange) for exchange in ("auto", "windows"))
    assert len(set(apart.comm.allgather(chosen.client.channel.name))) == 1
    if not apart.is_one_node:
        assert re.fullmatch(r"fetching 2,048 random rows took \S+ ms by windows, \S+ ms by messages", chosen.client.why)
    assert np.array_equal(all_rows(chosen, apart), all_rows(untried, apart))
    assert train(chosen, apart, steps=10) == train(untried, apart, steps=10)
    for table in (chosen, untried):
        table.close()


@pytest.mark.parametrize("staleness", [0, 10])
def test_messages_is_taken_where_mpi_makes_no_window_over_nodes(apart, staleness, monkeypatch):
    """As Open MPI 4.1 over TCP."""
    if apart.is_one_node:
        pytest.skip("takes two nodes")
    monkeypatch.setattr("hetmpi.wire.windows.MPI", SimpleNamespace(Exception=MPI.Exception, Win=NoWindow))
    table = make_table(apart, exchange="auto", staleness=Staleness(staleness))
    assert table.client.channel.name == "messages"
    assert table.client.why == "this MPI supports no one-sided window over several nodes"
    train(table, apart, steps=3)
    table.close()
    with pytest.raises(UserError, match="set table.exchange=messages"):
        make_table(apart, exchange="windows", staleness=Staleness(staleness))


class NoWindow:
    @staticmethod
    def Allocate(*_, **__):
        raise MPI.Exception(MPI.ERR_WIN)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_table_may_be_closed_while_gradients_are_on_their_way(apart, staleness):
    for _ in range(20):
        table = make_table(apart, staleness=Staleness(staleness), exchange="messages")
        table.write(torch.arange(100), torch.ones(100, 5))
        table.close()


def test_tables_of_both_exchanges_train_side_by_side(apart):
    ways = ["messages", "windows", "messages"]
    tables = [make_table(apart, "adagrad", name=str(i), exchange=way) for i, way in enumerate(ways)]
    keys = torch.arange(apart.rank, 200, 2)
    for _ in range(5):
        for table in tables:
            table.read(keys)
        for table in reversed(tables):
            table.write(keys, torch.ones(len(keys), 5))
    for table in tables:
        table.flush()
        used = [sum(key >= rank and (key - rank) % 2 == 0 for rank in range(apart.size)) for key in range(200)]
        assert np.array_equal(table.shard.clock, [5 * (key < 200 and used[key] > 0) for key in table.keys()])  # noqa: SIM118
        table.close()


def test_an_unknown_exchange_is_refused(world):
    with pytest.raises(ValueError, match="table.exchange must be one of messages, windows, auto, got mail"):
        make_table(world, exchange="mail")
