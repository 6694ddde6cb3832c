"""The processors that count are those that this process may use."""

import os
import subprocess
import sys

import pytest

from hetmpi.world import cores
from hetmpi.world.cores import cores_of_ranks, usable_cores

HOST_HAS = set(range(64))


@pytest.fixture
def one_core():
    """This process may use one processor, as under taskset."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


def test_processors_outside_the_affinity_do_not_count(one_core):
    assert usable_cores() == cores_of_ranks(1) == 1
    printed = subprocess.run([sys.executable, cores.__file__], capture_output=True, text=True, check=True).stdout
    assert printed == "1\n"


def test_ranks_that_the_launcher_binds_to_one_processor_each_have_those_of_the_launcher(one_core):
    launcher = os.sched_getaffinity(os.getppid())
    assert cores_of_ranks(2) == usable_cores(launcher | os.sched_getaffinity(0))


def test_of_a_host_only_the_processors_of_the_slurm_step_count(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    assert cores_of_ranks(2) == 1


@pytest.mark.parametrize(
    "own, files, num",
    [
        ("0::/job/step\n", {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "350000 100000\n"}, 3),
        ("0::/job/step\n", {"job/step/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {}, 64),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "400000", "cpu/job/cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 64),
    ],
)
def test_time_beyond_the_quota_of_the_control_groups_does_not_count(own, files, num, tmp_path):
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    assert usable_cores(HOST_HAS, str(tmp_path / "groups"), str(tmp_path / "own")) == num


def test_without_control_groups_the_affinity_counts(tmp_path):
    assert usable_cores(HOST_HAS, str(tmp_path), str(tmp_path / "none")) == 64
