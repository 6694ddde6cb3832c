"""A rank's place by the variables of each launcher, which are set here as it sets them: rank 5, the second of 4."""

import pytest

from hetmpi.world.launcher import LOCAL_RANKS, LOCAL_SIZES, RANKS, is_first_rank, local_rank, local_size

LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK=5", "OMPI_COMM_WORLD_LOCAL_RANK=1", "OMPI_COMM_WORLD_LOCAL_SIZE=4"),
    "Hydra": ("PMI_RANK=5", "MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=4"),
    "PALS": ("PALS_RANKID=5", "PALS_LOCAL_RANKID=1", "PALS_LOCAL_SIZE=4"),
    "Slurm's PMI of Cray": ("PMI_RANK=5", "PALS_LOCAL_RANKID=1", "PMI_LOCAL_SIZE=4"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK=5", "MV2_COMM_WORLD_LOCAL_RANK=1", "MV2_COMM_WORLD_LOCAL_SIZE=4"),
    "jsrun": ("JSM_NAMESPACE_RANK=5", "JSM_NAMESPACE_LOCAL_RANK=1", "JSM_NAMESPACE_LOCAL_SIZE=4"),
    "Flux": ("FLUX_TASK_RANK=5", "FLUX_TASK_LOCAL_ID=1", "FLUX_JOB_SIZE=7", "FLUX_JOB_NNODES=2"),
    "Slurm": ("SLURM_PROCID=5", "SLURM_LOCALID=1", "SLURM_TASKS_PER_NODE=4(x2)"),
}
SHELL = ("SLURM_PROCID=0", "SLURM_LOCALID=0", "SLURM_TASKS_PER_NODE=1")  # of salloc


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*RANKS, *LOCAL_RANKS, *LOCAL_SIZES, "FLUX_JOB_SIZE", "FLUX_JOB_NNODES", "SLURM_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)


def started(monkeypatch, variables):
    for variable in variables:
        monkeypatch.setenv(*variable.split("="))


def test_without_a_launcher_a_process_is_the_only_rank():
    assert (is_first_rank(), local_rank(), local_size()) == (True, None, 1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launcher_tells_a_rank_its_place(monkeypatch, launcher):
    started(monkeypatch, LAUNCHERS[launcher])
    assert (is_first_rank(), local_rank(), local_size()) == (False, 1, 4)


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "Slurm"])
def test_a_launcher_in_a_shell_of_slurm_is_believed_before_the_shell(monkeypatch, launcher):
    started(monkeypatch, (*SHELL, *LAUNCHERS[launcher]))
    assert (is_first_rank(), local_rank(), local_size()) == (False, 1, 4)
