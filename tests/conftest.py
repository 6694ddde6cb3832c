"""Fixtures for tests at any rank count. Tests marked `mpi` run at 1, 2 and 3 ranks (./run.sh test), the others at
one."""

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
