"""The watchdog names ranks that all others wait for, and ends the job when a rank becomes unresponsive."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from launch import ROOT, SMALL, environment, mpiexec, ranks_of, run, survivors, train

from hetmpi.run.watchdog import Watchdog
from hetmpi.spans import Spans
from hetmpi.world.world import World

THREE_AND_ONE = ["table.ranks_per_node=3", "table.exchange=messages"]  # ranks of nodes of unequal size
LATE = ["table.staleness=10", "table.cache.capacity_fraction=0.1"]
ONE_SIDED = ["table.ranks_per_node=3", "table.exchange=windows"]  # rank 0 serves rank 3, which serves all others
UNEVEN = (
    (0, 4, THREE_AND_ONE), (3, 4, [*THREE_AND_ONE, *LATE]), (0, 4, ONE_SIDED), (3, 4, ONE_SIDED),
    (3, 4, [*ONE_SIDED, *LATE]),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "rank, ranks, nodes",
    [(0, 3, []), (1, 3, []), *(pytest.param(*case, marks=pytest.mark.rare) for case in UNEVEN)],
)
def test_a_rank_that_answers_no_more_ends_the_job(tmp_path, rank, ranks, nodes):
    env = environment()
    settings = [*SMALL, "device=cpu", f"run.dir={tmp_path}", "steps=1000000", "watchdog.seconds=3", *nodes]
    process = subprocess.Popen(
        [mpiexec(), "-n", str(ranks), sys.executable, "-m", "hetmpi.train", *settings], cwd=ROOT, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.5)  # until all know that its set-up is finished
    os.kill(ranks_of(tmp_path)[rank], signal.SIGSTOP)
    text, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    told = re.findall(r"hetmpi: rank (\d) on \S+ \(in \w+ of step \d+ for \d+ s\) has not responded for [3-6] s", text)
    assert set(told) == {str(rank)}, text
    assert not survivors(env["HETMPI_TEST_RUN"])


@pytest.fixture(scope="module")
def stopped():
    """The outcomes of jobs in which a rank stops early, run concurrently."""
    defaults = [f"~data.{name}" for name in ("scale", "zipf", "num_train", "num_valid")]
    stops = [*SMALL[1:], *defaults, "data._target_=broken_data.Stops", "watchdog.seconds=3"]
    early = [sys.executable, str(ROOT / "tests/support/stops_early.py"), *SMALL, "device=cpu", "watchdog.seconds=3"]
    with ThreadPoolExecutor() as pool:
        jobs = {rank: pool.submit(train, 3, *stops, f"+data.stops={rank}") for rank in (0, 1)}
        jobs["unwatched"] = pool.submit(run, [mpiexec(), "-n", "2", *early])
        return {name: job.result() for name, job in jobs.items()}


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stops_before_its_first_step_ends_the_job(stopped, rank):
    """The limit is 20 s longer than after the first step."""
    outcome = stopped[rank]
    assert outcome.code != 0, outcome.text
    told = re.findall(r"hetmpi: rank (\d) on \S+ \(in set-up for \d+ s\) has not responded for (\d+) s", outcome.text)
    assert [who for who, _ in told] == [str(rank)] and 23 <= int(told[0][1]) <= 28, outcome.text
    assert outcome.survivors == []


@pytest.mark.mpi
def test_the_first_allreduce_of_objects_lets_other_threads_run(world):
    """As in the watchdog while a rank is stopped; mpi4py's own first call would not return."""
    fresh, ticks = World(world.comm), []
    fresh.comm.Barrier()
    stop = threading.Event()
    thread = threading.Thread(
        target=lambda: [ticks.append(time.monotonic()) for _ in iter(lambda: stop.wait(0.02), True)]
    )
    thread.start()
    for comm in (fresh.comm, fresh.node):
        time.sleep(0.0 if world.rank else 1.0)
        before = len(ticks)
        comm.allreduce(1)
        assert world.rank == 0 or len(ticks) - before > 10
    stop.set()
    thread.join()


@pytest.mark.long
def test_a_rank_that_stops_before_it_is_watched_ends_the_job(stopped):
    outcome = stopped["unwatched"]
    assert outcome.code != 0 and outcome.text.count("hetmpi: not all ranks have begun after 23 s") == 1, outcome.text
    assert outcome.survivors == []


@pytest.mark.long
def test_a_rank_that_lags_is_named_and_the_run_goes_on():
    stalls = ["data._target_=broken_data.StallsOnRankOne", "~data.scale"]
    outcome = train(3, *SMALL, *stalls, "steps=400", "log.every_steps=50", "watchdog.seconds=2")
    assert outcome.code == 0, outcome.text
    assert re.search(r"hetmpi: all wait for rank 1 on \S+ \(in load of step \d+ for \d s\)\n", outcome.text), (
        outcome.text
    )
    assert re.search(r"hetmpi: rank 1 continues after \d s", outcome.text), outcome.text
    assert set(re.findall(r"all wait for rank (\d)", outcome.text)) == {"1"}, outcome.text


@pytest.mark.mpi
@pytest.mark.parametrize("seconds", [0, 60])
def test_ranks_may_close_at_different_times(world, seconds):
    watchdog = Watchdog(world, Spans(), seconds)
    watches = any(thread.name == "hetmpi-watchdog" for thread in threading.enumerate())
    assert watches == (seconds > 0 and world.size > 1)
    time.sleep(0.2 * world.rank)
    watchdog.close()
