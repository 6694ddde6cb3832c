"""Ranks on two hosts, each a network namespace of this machine (hosts.sh); skipped if these cannot be created."""

import json
import os
import sys
from pathlib import Path

import pytest
from launch import ROOT, SMALL, environment, losses, run, summary, train

from hetmpi.world.mpi import MPI

SCRIPT = str(ROOT / "tools/hosts.sh")
PATH = os.pathsep.join([str(Path(sys.executable).parent), environment()["PATH"]])


def two_hosts(ranks_per_host, *command, cores=()):
    """Runs a command on two hosts to its end; skips the test, with the script's reason, if that is impossible. cores:
    those of which each host gets a share, default all."""
    bound = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    outcome = run([*bound, SCRIPT, "-n", str(ranks_per_host), *command], PATH=PATH)
    if outcome.code == 77:
        pytest.skip(outcome.text.strip())
    return outcome


def namespaces():
    """Names of existing network namespaces of hosts.sh."""
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.glob("hetmpi-*")) if folder.exists() else []


@pytest.fixture(scope="module")
def told():
    """Output of hosts_check.py from each rank, on two hosts with two ranks each."""
    outcome = two_hosts(2, sys.executable, str(ROOT / "tests/support/hosts_check.py"))
    assert outcome.code == 0, outcome.text
    return json.loads(outcome.text.splitlines()[-1])


def test_each_host_is_a_node_of_its_own(told):
    assert [(rank["host"], rank["node"]) for rank in told] == [("h1", [0, 1])] * 2 + [("h2", [2, 3])] * 2


def test_one_sided_puts_and_gets_of_a_megabyte_reach_the_other_host(told):
    assert all(rank["put_arrived"] and rank["get_arrived"] for rank in told)


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory):
    """Losses of two ranks that share memory."""
    folder = tmp_path_factory.mktemp("one")
    assert train(2, *SMALL, f"run.dir={folder}").code == 0
    return losses(folder)


@pytest.mark.long
@pytest.mark.parametrize("exchange", ["messages", "windows"])
def test_two_hosts_learn_what_one_host_learns(on_one_host, tmp_path, exchange):
    command = [sys.executable, "-m", "hetmpi.train", *SMALL, f"table.exchange={exchange}", f"run.dir={tmp_path}"]
    outcome = two_hosts(1, *command)
    assert outcome.code == 0, outcome.text
    assert losses(tmp_path) == on_one_host
    if "ch4:ucx,ofi" in MPI.Get_library_version():
        assert json.loads((tmp_path / "environment.json").read_text())["network"] == "libfabric, tcp"


def test_the_exit_code_is_that_of_the_command():
    assert two_hosts(1, "sh", "-c", "exit 3").code == 3


def test_nothing_is_left_behind():
    before = namespaces()
    outcome = two_hosts(1, "true")
    assert outcome.survivors == []
    assert set(namespaces()) <= set(before)


def test_across_hosts_ranks_without_a_processor_for_horovod_sum_by_mpi_to_the_same_bits(tmp_path):
    two = sorted(os.sched_getaffinity(0))[:2]
    for kind, taken, num_told in (("auto", "mpi", 1), ("horovod", "horovod", 0)):
        folder = tmp_path / kind
        settings = ["device=cpu", *SMALL, f"optim.dense_exchange={kind}", f"run.dir={folder}"]
        outcome = two_hosts(1, sys.executable, "-m", "hetmpi.train", *settings, cores=two)
        assert outcome.code == 0, outcome.text
        assert outcome.text.count("MPI sums the dense gradients") == num_told, outcome.text
        assert summary(folder)["dense_exchange"] == taken
    assert losses(tmp_path / "auto") == losses(tmp_path / "horovod")
