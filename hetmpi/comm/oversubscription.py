"""More ranks than cores: threads that wait for others must sleep, or they take the cores of those that work.

MPI libraries and Horovod wait by calling sched_yield() in a loop. cpp/naps.c is a sched_yield() that sleeps; it counts
only if it is loaded before the C library is bound, that is when the program starts. Measured in docs/results.md, "More
ranks than cores". Imports nothing heavy, as a program may have to be started anew.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from hetmpi.comm.mpi import local_size


def restart_with_naps():
    """Starts this program anew, with cpp/naps.c preloaded, if the ranks of this node outnumber its cores. Must run
    before MPI starts."""
    library = missing_naps(local_size())
    if library is not None:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [library, os.environ.get("LD_PRELOAD")]))
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def missing_naps(num_ranks: int) -> str | None:
    """The library to preload for `num_ranks` ranks on this node; None if there are as many cores, or if it is
    loaded."""
    if num_ranks <= os.cpu_count():
        return None
    spec = find_spec("hetmpi._naps")
    return None if spec is None or spec.origin in os.environ.get("LD_PRELOAD", "") else spec.origin
