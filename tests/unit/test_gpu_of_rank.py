"""Which GPU a rank of a node gets, without one: by the launcher's variables and the files of the devices."""

import os

import pytest

from hetmpi.world.launch import share_gpus
from hetmpi.world.mpi import LOCAL_RANKS, local_rank


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*LOCAL_RANKS, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def shared(monkeypatch, folder, rank: int) -> str | None:
    monkeypatch.setenv("MPI_LOCALRANKID", str(rank))
    share_gpus(str(folder))
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("name", LOCAL_RANKS)
def test_each_launcher_tells_the_rank_on_its_node(monkeypatch, name):
    assert local_rank() is None
    monkeypatch.setenv(name, "3")
    assert local_rank() == 3


@pytest.mark.parametrize("name", LOCAL_RANKS[:-1])
def test_a_launcher_in_a_shell_of_slurm_is_believed_before_the_shell(monkeypatch, name):
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv(name, "2")
    assert local_rank() == 2


def test_ranks_take_the_gpus_that_they_may_open_in_turn(monkeypatch, tmp_path):
    for number in (0, 1):
        (tmp_path / f"nvidia{number}").touch()
    for number in (2, 3):  # of other jobs: there, and cannot be opened
        (tmp_path / f"nvidia{number}").symlink_to(tmp_path / "none")
    (tmp_path / "nvidiactl").touch()
    assert shared(monkeypatch, tmp_path, 3) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert shared(monkeypatch, tmp_path, 4) == "6"


def test_without_gpus_nothing_is_set(monkeypatch, tmp_path):
    assert shared(monkeypatch, tmp_path, 0) is None
