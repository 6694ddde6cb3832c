"""Fixtures for tests at any rank count. Tests marked `mpi` run at 1, 2 and 3 ranks (./run.sh test), all others at
one."""

import os
import threading
import time
from pathlib import Path

import pytest

from hetmpi.world.world import World

QUIET_S = 8  # tests that take longer are named
HAS_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def world():
    """All ranks of this run."""
    return World()


@pytest.fixture(scope="module")
def by_mpi(world):
    """MpiReductions of all ranks."""
    from hetmpi.reductions import MpiReductions  # imports torch, which few tests need

    made = MpiReductions(world)
    yield made
    made.close()


@pytest.fixture(scope="session", params=["near", "far"])
def placed(world, request):
    """All ranks on one node, then each rank as a node of its own, so that rows are sent by MPI_Get and MPI_Put."""
    return world if request.param == "near" else ranks_apart(world)


@pytest.fixture(autouse=True)
def worlds_are_freed(monkeypatch, request):
    """Frees the communicators of the worlds that a test makes for itself: MPICH has 2,048 of them. Not after a failure,
    which the other ranks may not share."""
    made, make = [], World.__init__

    def make_and_note(self, *args, **kwargs):
        make(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(World, "__init__", make_and_note)
    yield
    for one in () if request.node.stash.get(HAS_FAILED, False) else made:
        one.free()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        item.stash[HAS_FAILED] = True
    return report


@pytest.fixture(autouse=True)
def rows_elsewhere(monkeypatch):
    """With HETMPI_TEST_STORE=FOLDER the rows of all tables are in files there, a hundredth of them in memory; with
    HETMPI_TEST_STORE=gpu those of exact tables are on the emulated GPU (support/emulated.py)."""
    folder = os.environ.get("HETMPI_TEST_STORE")
    if folder is None:
        return
    from support.stores import HundredthStore

    from hetmpi.owner.gpu_rows import GpuStore
    from hetmpi.table.staleness import Staleness
    from hetmpi.table.table import EmbeddingTable

    make = EmbeddingTable.__init__

    def make_elsewhere(self, *args, **kwargs):
        if folder != "gpu":
            kwargs = {"store": HundredthStore(folder, 0), **kwargs}
        elif kwargs.get("staleness", Staleness(0)).is_exact:
            kwargs |= {"store": GpuStore(), "device": "cpu:0"}
        make(self, *args, **kwargs)

    monkeypatch.setattr(EmbeddingTable, "__init__", make_elsewhere)


@pytest.fixture
def interleaved(world, monkeypatch):
    """Two nodes, of the even and of the odd ranks."""
    return interleaved_nodes(world, monkeypatch)


@pytest.fixture(scope="session", params=["mixed", "interleaved"])
def shared(world, request):
    """Nodes of several ranks: of unequal size, then one of the even and one of the odd ranks."""
    if world.size < 3:
        pytest.skip("takes 3 ranks")
    if request.param == "mixed":
        return mixed_nodes(world)
    with pytest.MonkeyPatch.context() as patch:
        return interleaved_nodes(world, patch)


def ranks_apart(world):
    """Every rank on a node of its own."""
    if world.size == 1:
        pytest.skip("one rank is one node")
    return World(world.comm, ranks_per_node=1)


def interleaved_nodes(world, patch):
    patch.setattr("hetmpi.world.world.split_nodes", lambda comm, _: comm.Split(comm.rank % 2, comm.rank))
    return World(world.comm)


def mixed_nodes(world):
    """Nodes of unequal size: of 3 ranks 2 + 1, of 4 ranks 3 + 1, of 5 ranks 2 + 2 + 1."""
    return World(world.comm, ranks_per_node=3 if world.size == 4 else 2)


def pytest_configure(config):
    config.pluginmanager.register(LongTests())


def pytest_report_collectionfinish(items):
    ranks = os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1  # MPI has not started
    return f"{len(items)} tests at {ranks} rank(s)"


class LongTests:
    """Prints the name of a test that runs longer than QUIET_S seconds, repeatedly: pytest prints nothing meanwhile."""

    def __init__(self):
        self.output = os.dup(2)  # pytest captures it later; processes of xdist have no standard output

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        done, began = threading.Event(), time.monotonic()

        def name_it():
            while not done.wait(QUIET_S):
                os.write(self.output, f"\n{item.nodeid}: {time.monotonic() - began:.0f} s so far\n".encode())

        waiting = threading.Thread(target=name_it, daemon=True)
        waiting.start()
        result = yield
        done.set()
        waiting.join()
        return result


def pytest_collection_modifyitems(items):
    """Whole programs and compilers take seconds, fuzzers a minute. What is rare is long."""
    here = Path(__file__).parent
    for item in items:
        room = item.path.relative_to(here).parts[0]
        if room in ("system", "cpp", "fuzz") or starts_programs(item):
            item.add_marker("slow")
        if room == "fuzz" or item.get_closest_marker("rare"):
            item.add_marker("long")


def starts_programs(item) -> bool:
    """Whether a test or one of its fixtures calls a function that starts a process."""
    fixtures = item._fixtureinfo.name2fixturedefs
    functions = [item.function, *(made.func for name in item.fixturenames for made in fixtures.get(name, ()))]
    return any({"train", "run", "Popen", "saved"} & set(function.__code__.co_names) for function in functions)


@pytest.fixture(params=["far", "mixed"])
def apart(world, request):
    """Every rank on a node of its own; then nodes of unequal size."""
    if request.param == "mixed" and world.size < 3:
        pytest.skip("takes 3 ranks")
    return ranks_apart(world) if request.param == "far" else mixed_nodes(world)
