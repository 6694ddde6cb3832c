"""Rows whose due sums have not left yet, with lines on the emulated GPU: tests/cpp/test_emulated_gpu.py runs it."""

import pytest
import torch
from gpu_on_cpu import OnGpu

from hetmpi import CacheSettings, EmbeddingTable, RowOptimizer, Staleness, World

WAYS = 32  # of a set, the only one of this cache


@pytest.mark.parametrize("num_writes", [1, 2, 3])
def test_a_row_has_its_due_sum_although_its_line_was_evicted_by_a_read_that_no_write_followed(num_writes):
    def rows(cache: type[CacheSettings], device: str) -> torch.Tensor:
        table = EmbeddingTable(
            World(), 4 * WAYS, 4, RowOptimizer("sgd", 1.0), staleness=Staleness(1, None, 0.0),
            cache=cache(WAYS, policy="lru", admit="all"), device=device,
        )  # fmt: skip
        keys, others = torch.arange(8), torch.arange(WAYS, 2 * WAYS)
        for _ in range(num_writes):
            table.read(keys)
            table.write(keys, torch.ones(8, 4))
        table.read(others)
        found = table.read(keys).clone()
        table.close()
        return found

    torch.testing.assert_close(rows(OnGpu, "cpu:0"), rows(CacheSettings, "cpu"), rtol=0, atol=0)
