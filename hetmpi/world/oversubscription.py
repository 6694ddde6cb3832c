"""Support for more ranks than cores: threads that wait must sleep, or they take processor time from working threads.

MPI libraries and Horovod wait by calling sched_yield() or polling UCX in a loop. cpp/naps.c lets both sleep, if it is
preloaded when the program starts. Measurements: docs/results.md, "Scale". Imports nothing heavy, as the program may
have to be restarted.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from hetmpi.world.cores import cores_of_ranks
from hetmpi.world.launcher import local_size
from hetmpi.world.mpi import MPI


def restart_with_naps():
    """Restarts this program with cpp/naps.c preloaded if the ranks of this node outnumber its cores. Must run before
    MPI starts."""
    library = missing_naps(local_size(), cores_of_ranks(local_size()))
    if library is not None and not MPI.Is_initialized():
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [library, os.environ.get("LD_PRELOAD")]))
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def missing_naps(num_ranks: int, num_cores: int) -> str | None:
    """Path of the library to preload for `num_ranks` ranks on `num_cores` of this node; None if these are enough, or if
    it is loaded."""
    if num_ranks <= num_cores:
        return None
    spec = find_spec("hetmpi._naps")
    return None if spec is None or spec.origin in os.environ.get("LD_PRELOAD", "") else spec.origin
