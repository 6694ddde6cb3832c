"""One-sided calls, where a rank reaches all owners of another node through one of them: nodes of several ranks, of
unequal size, and of ranks that are not consecutive. Run at 1, 2 and 3 ranks, and by hand at 4 and 5."""

from mmap import PAGESIZE

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
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
from test_table import RULES, all_rows, check_same_bits, make_table, train

from hetmpi.comm.rails import Rails
from hetmpi.table.cache import CacheSettings, Staleness

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
    15, staleness=st.sampled_from([0, 1, 3, 10, None]), num_steps=st.integers(5, 25), ring=st.sampled_from([1, 2048]),
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


def test_operations_are_as_many_as_other_nodes(apart):
    """Of each kind: rows, gradients, their heads, and tails; with a cache, requests."""
    others = len(Rails(apart).servers)
    table = make_table(apart, inbox_bytes=1 << 20)
    keys, window, ones = torch.arange(60), table.window, torch.ones(60, 5)
    for _ in range(3):
        assert posted(window, lambda: table.read(keys)) == others  # one get of rows
        assert posted(window, lambda: table.write(keys, ones)) == others  # one put
        assert posted(window, table.flush) == others  # the heads
    table.close()
    cache = CacheSettings(64, admit="all")
    table = make_table(apart, "adagrad", staleness=Staleness(10), cache=cache, inbox_bytes=1 << 20)
    rounds = table.client.transport.rounds
    for _ in range(3):
        assert posted(rounds, lambda: table.read(keys)) == others
        assert posted(rounds, lambda: table.write(keys, ones)) == 0
    assert posted(rounds, table.flush) == others
    table.close()


def posted(way, call):
    """Operations or messages that a call posts."""
    before = way.num_messages
    call()
    return way.num_messages - before


def test_the_parts_of_a_node_are_whole_pages_one_after_the_other(shared):
    table = make_table(shared)
    begins = [table.window.begin_of(rank, "weight") for rank in shared.node_ranks]
    sizes = [table.window.layouts[rank].nbytes for rank in shared.node_ranks]
    assert all(nbytes % PAGESIZE == 0 for nbytes in sizes)
    assert begins == np.cumsum([0, *sizes[:-1]]).tolist()
    addresses = [table.window.on_node[rank].weight.ctypes.data for rank in shared.node_ranks]
    assert [address - addresses[0] for address in addresses] == begins
    table.close()
