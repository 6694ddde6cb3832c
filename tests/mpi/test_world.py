"""World: checks before ranks train together."""

import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launch import mpiexec, run

from hetmpi.checkpoint.checkpoints import Checkpoints
from hetmpi.dense import DenseOptimizer
from hetmpi.errors import UserError
from hetmpi.schedule import Schedule
from hetmpi.world import mpi as module
from hetmpi.world.launch import check_same_command, describe, first_difference
from hetmpi.world.launcher import JOB_SIZES, SIZES
from hetmpi.world.mpi import MPI, check_launcher, check_library, check_one_mpi, check_torchrun, libraries_in, start_mpi
from hetmpi.world.same_build import check_same_build, own_build
from hetmpi.world.world import World

MPICH = "7f00 r-xp 00000000 08:01 1 /opt/mpich/lib/libmpi.so.12\n"
OPENMPI = (
    "7f01 r-xp 00000000 08:01 2 /opt/openmpi/lib/libmpi.so.40\n7f02 r--p 0 08:01 2 /opt/openmpi/lib/libmpi.so.40\n"
)
OTHER = "7f03 r-xp 00000000 08:01 3 /usr/lib/libmpi_cxx.so.40\n7f04 rw-p 0 00:00 0 [heap]\n"


def test_one_mpi_library_is_fine():
    check_one_mpi(libraries_in(OPENMPI + OTHER))


def test_two_mpi_libraries_are_refused_by_path():
    with pytest.raises(UserError, match="/opt/mpich/lib/libmpi.so.12, /opt/openmpi/lib/libmpi.so.40.*HETMPI_MPI"):
        check_one_mpi(libraries_in(MPICH + OPENMPI))


def test_another_mpi_of_a_horovod_that_is_there_is_refused_before_mpi_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    monkeypatch.setattr(module, "mpi_libraries", lambda: libraries_in(MPICH + OPENMPI))
    with pytest.raises(UserError, match="different MPI libraries"):
        start_mpi()


@pytest.mark.mpi
def test_a_horovod_of_other_ranks_is_refused(world):
    world.check_horovod(SimpleNamespace(rank=lambda: world.rank, size=lambda: world.size))
    with pytest.raises(UserError, match=f"Horovod says rank 0 of 9, MPI says {world.rank} of {world.size}"):
        world.check_horovod(SimpleNamespace(rank=lambda: 0, size=lambda: 9))


def test_a_launcher_that_agrees_with_mpi_is_believed_over_slurm(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.setenv("PMI_SIZE", "2")
    check_launcher(2)


@pytest.mark.parametrize("name", [*SIZES, *JOB_SIZES])
def test_a_launcher_that_started_ranks_whom_mpi_does_not_see_is_refused(monkeypatch, name):
    for other in (*SIZES, *JOB_SIZES, "WORLD_SIZE"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "8")
    check_launcher(8)
    with pytest.raises(UserError, match=f"the launcher says {name}=8, but MPI sees 1 rank"):
        check_launcher(1)


@pytest.mark.parametrize("of_rank", [{"RANK": "0", "LOCAL_RANK": "0"}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_torchrun_is_refused_with_the_line_that_starts_ranks(monkeypatch, of_rank):
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "HETMPI_RUN_SH", "SLURM_JOB_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_torchrun(1)  # a script of one's own may set it
    for name, value in of_rank.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"WORLD_SIZE=2.*would train alone: .* mpirun -np 2 hetmpi train"):
        check_torchrun(1)
    check_torchrun(2)  # MPI has joined them
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_torchrun(1)


def test_the_first_difference_of_two_commands_is_named():
    assert first_difference(["train", "a=1", "b=2"], ["train", "a=1", "b=3"]) == ("b=2", "b=3")
    assert first_difference(["train", "b=2"], ["train", "modle=dcn", "b=2"]) == ("nothing of the kind", "modle=dcn")
    assert first_difference(["train", "a=1"], ["predict", "a=1"]) == ("train", "predict")
    assert first_difference(["train", "a=1", "a=2"], ["train", "a=2", "a=1"]) == ("a=1", "a=2")
    assert first_difference(["train", "a=1", "a=1"], ["train", "a=1"]) == ("a=1", "nothing of the kind")


def test_mpich_under_the_launcher_of_open_mpi_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(UserError, match="a launcher for Open MPI .* started this, but mpi4py loads MPICH"):
        check_library("MPICH Version: 5.0.1")
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    monkeypatch.setenv("PMIX_RANK", "0")
    with pytest.raises(UserError, match="--mpi=pmi2 for MPICH"):
        check_library("MPICH Version: 5.0.1")
    check_library("MPICH Version: 5.0.1 Configure options: --with-pmix=/opt/pmix")
    check_library("Open MPI v4.1.4")


def test_a_refusal_is_told_without_a_traceback():
    assert describe(UserError("no such thing"), 0, 1) == "hetmpi: no such thing"


def test_another_error_is_told_with_its_traceback():
    try:
        raise KeyError("x")
    except KeyError as error:
        text = describe(error, 1, 2)
    assert text.startswith("Traceback") and "hetmpi: KeyError: 'x' (rank 1 of 2 on " in text
    assert "hetmpi.errors.UserError: no such thing" in describe(UserError("no such thing"), 0, 1, is_traced=True)


def test_a_program_without_a_name_is_started(world, monkeypatch):
    monkeypatch.setattr(sys, "argv", [""])
    check_same_command(world)


def test_ranks_of_different_builds_are_refused_in_one_line_with_their_hosts():
    check_same_build(["a", "b"], [own_build()] * 2)
    with pytest.raises(UserError, match=r"rank 0 on a has 1\.0, core x.*, rank 2 on b has 1\.0, core y") as refused:
        check_same_build(["a", "a", "b"], ["1.0, core x", "1.0, core x", "1.0, core y"])
    assert "\n" not in str(refused.value)
    assert re.fullmatch(r"[\d.]+, core [0-9a-f]{12}, modules [0-9a-f]{12}", own_build())


@pytest.mark.mpi
def test_an_error_of_one_rank_is_raised_on_all(world):
    last = world.size - 1
    error = UserError("mine") if world.rank == last else None
    with pytest.raises(UserError, match="mine" if world.rank == last else f"rank {last}: UserError: mine"):
        world.agree(error)
    world.agree(None)


@pytest.mark.mpi
def test_nodes_can_be_split_into_smaller_ones(world):
    alone = World(world.comm, ranks_per_node=1)
    assert alone.node_ranks == [world.rank] and alone.is_one_node == (world.size == 1)
    assert World(world.comm, ranks_per_node=2).node_ranks == [
        rank for rank in range(world.size) if rank // 2 == world.rank // 2
    ]


@pytest.mark.mpi
def test_waits_of_a_world_receive_for_the_tables_of_its_smaller_nodes(world):
    class Table:
        num_drained = 0

        def receive_pending(self):
            self.num_drained += 1

    whole, table = World(world.comm), Table()
    parts = whole.split(1)
    parts.receivers[table] = None
    whole.receive_pending()
    assert parts.node_ranks == [world.rank] and whole.node.size == world.node.size
    assert (parts.comm, parts.notices, table.num_drained) == (whole.comm, whole.notices, 1)
    parts.node.Free()


@pytest.mark.mpi
def test_a_run_on_smaller_nodes_waits_in_one_world_and_leaves_no_communicator(world, tmp_path):
    from hetmpi.run.config import compose
    from hetmpi.table.bsp import BspClient
    from hetmpi.train import train

    class Preempting:
        """Waits in the whole world after each step."""

        def __init__(self):
            self.worlds = set()

        def is_agreed(self):
            self.worlds |= {one.context.world for one in world.receivers if isinstance(one, BspClient)}
            return False

    world.receivers.clear()
    small = ["data.scale=0.001", "table.dim=4", "batch_size=16", "steps=2", "device=cpu", "eval.max_samples=16"]
    kept = ["checkpoint.at_end=false", "watchdog.seconds=0", f"run.dir={tmp_path}", "table.ranks_per_node=1"]
    preempting = Preempting()
    assert train(world, compose(world, [*small, *kept]), preempting)
    (parts,) = preempting.worlds
    assert parts is not world and parts.node == MPI.COMM_NULL and world.node != MPI.COMM_NULL


@pytest.mark.mpi
def test_horovod_runs_over_the_same_ranks(world):
    import torch

    hvd = world.start_horovod()
    total = hvd.allreduce(torch.tensor([float(world.rank)]), op=hvd.Sum)
    assert total.item() == np.arange(world.size).sum()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_share_the_cores_of_a_node():
    shares = [set(map(int, cores.split(","))) for cores in re.findall(r"cores ([\d,]+)", shown_cores(2))]
    assert len(shares) == 2 and not shares[0] & shares[1] and shares[0] | shares[1] == os.sched_getaffinity(0)


def test_more_ranks_than_cores_are_not_bound():
    every = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    ranks = len(os.sched_getaffinity(0)) + 1
    if ranks > 9:
        pytest.skip("many cores")
    assert shown_cores(ranks).count(f"cores {every};") == ranks


def shown_cores(ranks):
    """The cores that each of `ranks` ranks prints."""
    show = "import os; print(f\"cores {','.join(map(str, sorted(os.sched_getaffinity(0))))};\", flush=True)"
    program = f"from hetmpi.world.launch import launch; launch(lambda world: exec({show!r}))"
    outcome = run([mpiexec(), "-n", str(ranks), sys.executable, "-c", program])
    assert outcome.code == 0, outcome.text
    return outcome.text


@pytest.mark.mpi
def test_the_objects_of_a_loop_of_ones_own_show_their_arguments(world):
    assert repr(world).startswith(f"World(rank {world.rank} of {world.size} on {world.host}, ")
    dense = DenseOptimizer(world.start_horovod(), torch.nn.Linear(3, 2), "adam", 0.01, 0.0, Schedule("cosine"))
    shown = "DenseOptimizer(8 parameters, Adam, lr=0.01, weight_decay=0.0, Schedule(kind='cosine', "
    assert repr(dense).startswith(shown) and repr(dense).endswith("), clip_norm=None)")
    assert repr(Checkpoints(world, "saved")) == "Checkpoints('saved', keep=2, full_every=1)"
