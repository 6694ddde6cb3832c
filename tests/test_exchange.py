"""Rows and gradients that travel by MPI_Alltoallv instead of one-sided: the same numbers. Run at 1, 2 and 3 ranks."""

import numpy as np
import pytest
from test_staleness import trained
from test_table import RULES, all_rows, make_table, train

from hetmpi.cache import CacheSettings
from hetmpi.partition import PARTITIONS
from hetmpi.world import World

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["far", "mixed"])
def apart(world, request):
    """Every rank on a node of its own; ranks 0 and 1 on one and rank 2 on another."""
    if request.param == "mixed" and world.size < 3:
        pytest.skip("takes 3 ranks")
    return World(world.comm, ranks_per_node=1 if request.param == "far" else 2)


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_rows_are_those_of_rma_bit_for_bit(apart, rule, partition):
    results = []
    for exchange, prefetch in [("rma", False), ("alltoall", False), ("alltoall", True)]:
        table = make_table(apart, rule, 0.02, partition=partition, exchange=exchange)
        assert table.exchange.name == (None if apart.is_one_node else exchange)
        results.append((train(table, apart, steps=10, prefetch=prefetch), all_rows(table, apart)))
        table.close()
    for losses, rows in results[1:]:
        assert losses == results[0][0]
        assert np.array_equal(rows, results[0][1])


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_cache_changes_no_bit_at_staleness_0(apart, rule):
    expected, _ = trained(apart, rule, weight_decay=0.01)
    for capacity_rows, prefetch in [(0, True), (1, False), (64, True), (64, False)]:
        cache = CacheSettings(capacity_rows, admit="all")
        found, _ = trained(apart, rule, prefetch, weight_decay=0.01, cache=cache, exchange="alltoall")
        assert all(np.array_equal(a, b) for a, b in zip(found, expected)), (capacity_rows, prefetch)
