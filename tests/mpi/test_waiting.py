"""Warnings about long waits name the reason and the ranks that are not waiting; one rank prints. Run at 1, 2 and 3
ranks."""

import re
import time

import pytest
import torch
from test_table import make_table

from hetmpi.reductions import MpiReductions
from hetmpi.table.staleness import Staleness
from hetmpi.world.waiting import StallNotices, listeners, ranks_text
from hetmpi.world.world import World

LATE_S = 1.5


@pytest.fixture
def impatient(world):
    """A world of several ranks that warns of waits of 0.2 s."""
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    impatient = World(world.comm)
    impatient.notices.warn_after_s = 0.2
    return impatient


@pytest.fixture
def impatient_apart(world):
    """The same, with each rank on a node of its own. Horovod's thread serves one-sided calls to a sleeping rank."""
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    world.start_horovod()
    impatient = World(world.comm, ranks_per_node=1)
    impatient.notices.warn_after_s = 0.2
    return impatient


def check_warning(world, told, *words):
    """Rank 1 printed once and named rank 0 as not waiting; the others printed nothing. Open MPI 5
    itself prints a line and an empty one for each window where it cannot use UCX."""
    told = re.sub(r"\[.*osc_ucx_component\.c.*\n *\n", "", told)
    if world.rank != 1:
        assert told == ""
        return
    assert told.count("hetmpi: rank 1 on ") == 1 and "not waiting: rank 0 on " in told, told
    assert all(word in told for word in words), told
    assert "rank 2 on" not in told, told


@pytest.mark.mpi
def test_a_wait_for_all_ranks(impatient, capfd):
    if impatient.rank == 0:
        time.sleep(LATE_S)
    impatient.meet("in step 3 for all ranks to come")
    check_warning(impatient, capfd.readouterr().err, "has waited", "in step 3 for all ranks to come")


@pytest.mark.mpi
def test_a_sum_of_dense_gradients_by_mpi(impatient, capfd):
    sums = MpiReductions(impatient)
    if impatient.rank == 0:
        time.sleep(LATE_S)
    assert sums.allreduce(torch.ones(2), sums.Sum, "ones").tolist() == [impatient.size] * 2
    told = capfd.readouterr().err
    sums.close()
    check_warning(impatient, told, "has waited", "to sum the gradients of the dense layers")


@pytest.mark.mpi
def test_a_fence(impatient_apart, capfd):
    table = make_table(impatient_apart, staleness=Staleness(1))
    if impatient_apart.rank == 0:
        time.sleep(LATE_S)
    table.flush()
    check_warning(impatient_apart, capfd.readouterr().err, "in step 1 for all ranks to flush")
    table.close()


@pytest.mark.mpi
@pytest.mark.parametrize("exchange", ["windows", "messages"])
def test_a_ring_that_stays_full(impatient, impatient_apart, capfd, exchange):
    """Rank 0 makes no write for a while, so the others' rings fill up."""
    world = impatient if exchange == "windows" else impatient_apart
    table = make_table(world, inbox_bytes=1, exchange=exchange)
    keys = torch.arange(200)
    table.read(keys)
    if world.rank == 0:
        time.sleep(LATE_S)
    table.write(keys, torch.ones(200, 5))
    table.read(keys)
    told = capfd.readouterr().err
    check_warning(
        world, told, "to make room for its gradients" if exchange == "windows" else "for the gradients of rank"
    )
    table.close()


@pytest.mark.mpi
def test_gradients_that_do_not_come(impatient_apart, capfd):
    table = make_table(impatient_apart)
    keys = torch.arange(20)
    table.read(keys)
    table.write(keys, torch.ones(20, 5)) if impatient_apart.rank else time.sleep(LATE_S)
    if impatient_apart.rank == 0:
        table.write(keys, torch.ones(20, 5))
    table.read(keys)
    check_warning(impatient_apart, capfd.readouterr().err, "in step 1 for the gradients of rank 0")
    table.close()


@pytest.mark.mpi
def test_reads_of_an_exchange_in_which_all_ranks_take_part(impatient_apart, capfd):
    table = make_table(impatient_apart, exchange="messages")
    if impatient_apart.rank == 0:
        time.sleep(LATE_S)
    table.read(torch.arange(3))
    check_warning(impatient_apart, capfd.readouterr().err, "for rank 0 to read or write")
    table.close()


@pytest.mark.mpi
def test_ranks_that_wait_for_different_things_are_all_named(impatient, capfd):
    """Rank r waits for a fixed time. The ranks do not wait for each other, but the lowest one prints for all."""
    until = time.monotonic() + LATE_S
    impatient.comm.Barrier()
    impatient.wait(lambda: time.monotonic() > until, f"for thing {impatient.rank}")
    told = capfd.readouterr().err
    assert told.count("hetmpi:") == (impatient.rank == 0)
    for rank in range(impatient.size):
        assert (f"for thing {rank}" in told) == (impatient.rank == 0)
    assert "not waiting" not in told
    impatient.comm.Barrier()


@pytest.mark.mpi
def test_a_rank_that_goes_on_is_no_longer_said_to_wait(impatient, capfd):
    """All ranks wait long; later only rank 0 is late, and is named although it had waited before."""
    for late in (1, 0):
        if impatient.rank == late:
            time.sleep(LATE_S)
        impatient.meet(f"for rank {late}")
    told = capfd.readouterr().err
    if impatient.rank == 1:
        assert "has waited" in told and told.count("not waiting: rank 0") == 1, told
    impatient.comm.Barrier()


def test_ranks_are_listed_up_to_a_few():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 2]) == "ranks 1 and 2"
    assert ranks_text(list(range(9))) == "ranks 0, 1, 2, 3 and 5 more"


@pytest.mark.mpi
def test_a_rank_without_a_core_of_its_own_looks_less_often_the_longer_it_waits(world, monkeypatch):
    monkeypatch.setattr(world.notices, "is_crowded", True)
    looks, until = [], time.monotonic() + 0.3
    assert world.wait(lambda: looks.append(time.monotonic()) or time.monotonic() > until, "for the test")
    assert 10 < len(looks) < 200  # every 5 ms in the end


@pytest.mark.mpi
def test_a_notice_that_nobody_has_read_is_received_before_its_communicator_is_freed(world):
    """Else Open MPI delivers it to the next communicator."""
    notices = StallNotices(world.comm.Dup(), ["a"] * world.size)
    notices.send("for the test")
    notices.free()
    if world.rank in listeners(world.size):
        assert notices.waiting == {rank: "for the test" for rank in range(world.size) if rank != world.rank}


class CountingComm:
    """A communicator that delivers to nobody and counts."""

    def __init__(self, rank, size):
        self.rank, self.size, self.num_sent = rank, size, 0

    def isend(self, message, rank):
        assert rank != self.rank
        self.num_sent += 1
        return self

    def Test(self):
        return True


@pytest.mark.parametrize("size, most", [(1, 0), (3, 6), (64, 1_000), (1024, 25_000)])
def test_a_stall_of_all_ranks_sends_few_notices_per_rank(size, most):
    comms = [CountingComm(rank, size) for rank in range(size)]
    for comm in comms:
        StallNotices(comm, ["a"] * size).send("for a test")
    assert sum(comm.num_sent for comm in comms) <= most


def test_when_the_first_ranks_are_stopped_one_other_rank_warns():
    stopped, size, warned = range(5), 16, []
    for rank in range(len(stopped), size):
        notices = StallNotices(CountingComm(rank, size), ["a"] * size)
        notices.waiting = {other: "for a test" for other in range(len(stopped), size) if other != rank}
        warned.append(notices.warning("for a test", 60))
    (text,) = filter(None, warned)
    assert "not waiting: rank 0 on a, rank 1 on a" in text


def test_a_rank_that_waits_alone_warns_itself_whoever_else_would():
    for rank in range(8):
        said = StallNotices(CountingComm(rank, 8), ["a"] * 8).warning("for room", 60)
        assert f"rank {rank} on a has waited 60 s for room; not waiting:" in said
