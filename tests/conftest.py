"""Fixtures for tests at any rank count. Tests marked `mpi` run at 1, 2 and 3 ranks (./run.sh test), the others at
one."""

from pathlib import Path

import pytest

from hetmpi.comm.world import World


@pytest.fixture(scope="session")
def world():
    """All ranks of this run."""
    return World()


@pytest.fixture(scope="session", params=["near", "far"])
def placed(world, request):
    """All ranks as one node, then each as a node of its own, so that rows travel by MPI_Get and MPI_Put."""
    return world if request.param == "near" else World(world.comm, ranks_per_node=1)


def pytest_collection_modifyitems(items):
    """Whole programs and compilers take seconds."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in ("system", "cpp") or starts_programs(item):
            item.add_marker("slow")


def starts_programs(item) -> bool:
    """Whether a test, or a fixture it takes, calls what starts a process."""
    fixtures = item._fixtureinfo.name2fixturedefs
    functions = [item.function, *(made.func for name in item.fixturenames for made in fixtures.get(name, ()))]
    return any({"train", "run", "Popen", "saved"} & set(function.__code__.co_names) for function in functions)
