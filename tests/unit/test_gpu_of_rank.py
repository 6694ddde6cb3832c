"""Which GPU a rank of a node gets, without one: by the launcher's variables and the files of the devices."""

import os

import pytest

from hetmpi.world.launch import share_gpus
from hetmpi.world.launcher import LOCAL_RANKS


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*LOCAL_RANKS, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def shared(monkeypatch, folder, rank: int) -> str | None:
    monkeypatch.setenv("MPI_LOCALRANKID", str(rank))
    share_gpus(str(folder))
    return os.environ.get("CUDA_VISIBLE_DEVICES")


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
