"""Rows and clocks over nodes of unequal size: 3 + 1 ranks, then 2 + 2 + 1."""

import sys

import pytest
from launch import ROOT, mpiexec, run

CASES = "mixed and (lost or reference or 2s or own_updates or larger)"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [4, 5])
def test_nodes_of_unequal_size_lose_nothing_and_keep_the_bound(ranks):
    program = [sys.executable, "-m", "mpi4py", "-m", "pytest", "-x", "-q", "-m", "mpi", "-p", "no:cacheprovider"]
    file = str(ROOT / "tests/mpi/test_exchange.py")
    outcome = run([mpiexec(), "-n", str(ranks), *program, file, "-k", CASES], timeout_s=300)
    assert outcome.code == 0 and "15 passed" in outcome.text, outcome.text
