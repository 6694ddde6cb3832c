"""Rows and clocks over nodes of unequal size, 3 + 1 ranks and 2 + 2 + 1, and runs there whose ranks are killed."""

import sys

import pytest
from launch import ROOT, mpiexec, run

CASES = "mixed and (bit or lost or reference or 2s or own_updates or larger)"


@pytest.mark.rare
@pytest.mark.parametrize("ranks", [4, 5])
def test_nodes_of_unequal_size_lose_nothing_and_keep_the_bound(ranks):
    of_windows = ("test_windows.py", "mixed and (lost or place or operations)", 8)
    for file, cases, num in (("test_exchange.py", CASES, 32), ("test_joint_pulls.py", "mixed", 9), of_windows):
        outcome = run_tests(ranks, file, cases)
        assert outcome.code == 0 and f"{num} passed" in outcome.text, outcome.text


@pytest.mark.rare
@pytest.mark.parametrize(
    "staleness, ranks, on_node, exchange",
    [(0, 4, 3, "messages"), (10, 5, 2, "messages"), (0, 4, 3, "windows"), (10, 5, 2, "windows")],
)
def test_a_run_killed_on_nodes_of_unequal_size_resumes(staleness, ranks, on_node, exchange):
    """At s = 0 with the bits of a run that was not killed, at s >= 1 with each sample counted once."""
    script = str(ROOT / "tests/support/kill_check.py")
    settings = [f"table.exchange={exchange}", f"table.ranks_per_node={on_node}"]
    outcome = run([sys.executable, script, "2", str(staleness), str(ranks), *settings], timeout_s=400)
    assert outcome.code == 0, outcome.text


@pytest.mark.long
def test_full_rings_of_four_ranks_empty_whose_nodes_interleave():
    outcome = run_tests(4, "test_group.py", "not_consecutive")
    assert outcome.code == 0 and "1 passed" in outcome.text, outcome.text


def run_tests(ranks: int, file: str, cases: str):
    """Runs the cases of a file of tests/mpi on so many ranks."""
    program = [sys.executable, "-m", "mpi4py", "-m", "pytest", "-x", "-q", "-m", "mpi", "-p", "no:cacheprovider"]
    path = str(ROOT / "tests/mpi" / file)
    return run([mpiexec(), "-n", str(ranks), *program, path, "-k", cases], timeout_s=300)
