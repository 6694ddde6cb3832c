"""The wire by one-sided calls, where a rank reaches all owners of another node through one of them: nodes of several
ranks, of unequal size, and of ranks that are not consecutive. Run at 1, 2 and 3 ranks, and by hand at 4 and 5."""

import time

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from row_rules import RULES
from test_staleness import (
    PLAIN,
    cases,
    changes,
    check_that_nothing_is_lost_while_an_owner_stands_still,
    first_row,
    open_table,
    run_freely,
    total_change,
)
from test_table import all_rows, check_same_bits, make_table, train

from hetmpi.table.cache import CacheSettings
from hetmpi.table.staleness import Staleness
from hetmpi.wire.rails import Rails

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("inbox_bytes", [1, 1 << 20])
@pytest.mark.parametrize("partition", ["round_robin", "hash"])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_rows_are_those_of_one_node_bit_for_bit(world, shared, rule, partition, inbox_bytes):
    results = []
    for placed in (world, shared):
        table = make_table(placed, rule, 0.02, partition=partition, inbox_bytes=inbox_bytes)
        results.append((train(table, placed, steps=6), all_rows(table, placed)))
        table.close()
    check_same_bits(results)


@cases(
    8, staleness=st.sampled_from([0, 1, 3, 10, None]), num_steps=st.integers(5, 25), ring=st.sampled_from([1, 2048]),
)  # fmt: skip
def test_no_update_is_lost_or_applied_twice(shared, case):
    table = open_table(shared, case, case["staleness"], inbox_bytes=case["ring"] * shared.size)
    run_freely(shared, table, case, lambda step: table.flush() if step == 3 else None)
    assert np.array_equal(changes(table, case), total_change(shared, case)[table.keys()])
    table.close()


@pytest.mark.parametrize("staleness", [0, 1, 10])
def test_no_update_is_lost_while_a_server_stands_still(shared, staleness):
    check_that_nothing_is_lost_while_an_owner_stands_still(shared, {**PLAIN, "staleness": staleness})


@pytest.mark.parametrize("partition", ["round_robin", "range"])
def test_every_row_is_read_from_its_place(apart, partition):
    table = open_table(apart, {**PLAIN, "num_rows": 1001, "dim": 3, "partition": partition}, staleness=0)
    keys = torch.randperm(1001, generator=torch.Generator().manual_seed(apart.rank))
    assert np.array_equal(table.read(keys), [first_row(key, 3) for key in keys.tolist()])
    table.close()


@pytest.mark.parametrize("staleness", [0, 10])
def test_operations_are_as_many_as_other_nodes(apart, staleness):
    """Requests of rows, and at s = 0 gradients; at s >= 1 these leave with requests."""
    others = len(Rails(apart).servers)
    cache = CacheSettings(64, admit="all") if staleness else CacheSettings(capacity_rows=0)
    table = make_table(apart, "adagrad", staleness=Staleness(staleness), cache=cache, inbox_bytes=1 << 20)
    rounds, keys = table.client.channel.exchange, torch.arange(60)
    for _ in range(3):
        assert posted(rounds, lambda: table.read(keys)) == others
        assert posted(rounds, lambda: table.write(keys, torch.ones(60, 5))) == (0 if staleness else others)
    assert posted(rounds, table.flush) == (others if staleness else 0)
    assert posted(rounds, lambda: table.peek(keys)) == others
    table.close()


@pytest.mark.parametrize("staleness", [0, 10])
def test_a_read_needs_no_call_of_the_owner(apart, staleness):
    """Rank 0 reads and peeks while the others wait for a message of its own, and call nothing."""
    table = make_table(apart, staleness=Staleness(staleness))
    expected = all_rows(table, apart)
    apart.comm.Barrier()
    if apart.rank == 0:
        keys = torch.arange(len(expected))
        for found in (table.read(keys), table.peek(keys), table.peek(keys.flip(0)).flip(0)):
            assert np.array_equal(found, expected)
        for rank in range(1, apart.size):
            apart.comm.send(None, rank)
    else:
        while not apart.comm.iprobe(0):
            time.sleep(1e-4)
        apart.comm.recv(source=0)
    table.close()


def test_a_message_that_is_not_one_ends_its_receiver(apart):
    """In place of a wait without end."""
    if apart.is_one_node:
        pytest.skip("takes two nodes")
    table = make_table(apart, staleness=Staleness(10))
    wire, rails = table.client.channel.exchange.wire, Rails(apart)
    pipes = [wire._servers[server] for server in rails.servers]
    for pipe in pipes:
        pipe.unsent.append([np.array([1000, 5], np.int64), 0])  # a section of 1,000 words that is not there
    wire._put(pipes)
    wire._window.Flush_all()
    apart.comm.Barrier()
    if rails.clients:
        deadline = time.monotonic() + 10
        with pytest.raises(IndexError, match="a section exceeds its message"):
            while time.monotonic() < deadline:
                wire.receive_pending()
    apart.comm.Barrier()
    table.close()


def posted(way, call):
    """Operations or messages that a call posts."""
    before = way.num_messages
    call()
    return way.num_messages - before
