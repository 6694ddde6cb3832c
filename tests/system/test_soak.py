"""A long run at s = 100 with a small cache: memory does not grow, and no update is lost."""

import re
import sys

import pytest
from launch import ROOT, mpiexec, run

SLACK_KB = 1500  # growth of allocators and MPI after the warm-up; a leak of 1 byte per key would be 1,300
POOLS_KB = 8000  # MPI's pools of buffers, which grow by megabytes once when ranks drift apart


@pytest.mark.long
@pytest.mark.parametrize("ranks_per_node, steps", [pytest.param(4, 5000, marks=pytest.mark.rare), (2, 2000)])
def test_memory_does_not_grow_and_no_update_is_lost(ranks_per_node, steps):
    program = [sys.executable, str(ROOT / "tests/support/cache_soak.py"), str(ranks_per_node), str(steps)]
    outcome = run([mpiexec(), "-n", "4", *program], timeout_s=300)
    assert outcome.code == 0, outcome.text
    told = re.search(
        r"grown (-?\d+) kB, in each third (-?\d+) kB, written (\d+) held (\d+) evicted (\d+)", outcome.text
    )
    grown, steadily, written, held, evicted = map(int, told.groups())
    assert written == held
    assert evicted > written / 10
    assert steadily < SLACK_KB / 3 and grown < POOLS_KB, outcome.text
