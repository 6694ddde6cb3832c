"""The protocol on ranks of one process, in an order of events that a seed chooses (tests/support/sim.py)."""

import gc
import time
import weakref

import pytest
import torch
from faults import FAULTS
from sim import Deadlock, Simulation, draw_sim_case, drive, install, runs_of, simulate

from hetmpi import EmbeddingTable, RowOptimizer, Staleness
from hetmpi.table.group import TableGroup
from hetmpi.world import at_exit

SECONDS, FAULT_S = 20, 60


@pytest.fixture(autouse=True)
def simulation(monkeypatch):
    install(monkeypatch.setattr)
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


def cases(sizes):
    """(case, seed) of each number."""
    for number in range(1_000_000):
        yield draw_sim_case(1, number, sizes[number % len(sizes)]), f"1 {number}"


def test_random_cases():
    until, num = time.monotonic() + SECONDS, 0
    for case, seed in cases([1, 2, 3, 4, 5, 7]):
        told = simulate(case, seed)
        assert not told, f"simulate seed=1 only={case['number']} ranks={case['ranks']}: {told[:4]}"
        num += 1
        if time.monotonic() > until:
            break
    assert num > 10


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, monkeypatch):
    FAULTS[name](monkeypatch.setattr)
    until = time.monotonic() + FAULT_S
    told = (simulate(case, seed) or time.monotonic() > until for case, seed in cases([2, 3, 4]))
    found = next(filter(None, told))
    assert time.monotonic() < until
    assert not found[0].startswith(("AttributeError", "NameError", "TypeError")), found  # of the planted code itself


def test_a_case_replays_exactly():
    case = next(case for case, _ in cases([4]) if len(case["tables"]) > 1 and case["num_steps"] > 4)
    counts = []
    for seed in ("a", "a", "b"):
        sim = Simulation(seed, runs_of(case)[-1][0])
        sim.run(lambda world: drive(world, case))
        counts.append(dict(sim.counts))
    assert counts[0] == counts[1] != counts[2]


@pytest.mark.parametrize("exchange", ["messages", "windows"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_tables_that_are_dropped_without_close_are_freed(exchange, staleness):
    """Python's collector sees what the core refers to."""
    worlds = []

    def main(world):
        worlds.append(weakref.ref(world))
        how = {"exchange": exchange, "staleness": Staleness(staleness)}
        group = TableGroup({name: EmbeddingTable(world, 20, 2, RowOptimizer("sgd"), name=name, **how) for name in "ab"})
        group.read(dict.fromkeys(group, torch.arange(20)))

    Simulation(0, [0, 1]).run(main)
    at_exit._open.clear()
    gc.collect()
    assert len(worlds) == 2 and not any(world() for world in worlds)


def test_an_error_of_one_rank_ends_all():
    def main(world):
        if world.rank == 2:
            raise ValueError("of rank 2")
        world.meet("for rank 2")

    with pytest.raises(ValueError, match="of rank 2"):
        Simulation(0, [0, 0, 1, 1]).run(main)


def test_ranks_that_wait_for_what_is_not_under_way_are_named():
    def main(world):
        world.wait(lambda: world.rank == 1, f"for thing {world.rank}")

    with pytest.raises(Deadlock, match="^rank 0 waits for thing 0; rank 2 waits for thing 2$"):
        Simulation(0, [0, 1, 1]).run(main)
