"""Calls of CUDA and time by kernel of a training step on one rank, by torch's profiler.

    ./run.sh bench kernels [net=het] [dim=128] [batch=8192] [scale=0.1] [zipf=1.05] [steps=60] [distinct=10]
                           [device=cuda] [settings=table.staleness=null]

The settings are those of `bench step`, whose trainer runs here; device=cpu shows the operations of the CPU. Prints the
time of a step, slowed by the profiler, the number of calls of each function of CUDA, and the operations that take most.
"""

import os
import subprocess
import sys

from race.turns import BENCH, ROOT, made_problem
from workload import mpiexec, parse

SETTINGS = {
    "net": "het", "dim": 128, "batch": 8192, "scale": 0.1, "zipf": 1.05, "steps": 60, "distinct": 10, "device": "cuda",
    "settings": ["table.staleness=null", "table.cache.admit=all", "table.cache.capacity_fraction=1"],
}  # fmt: skip


def main():
    """Makes the problem and profiles its trainer."""
    settings = parse("kernels", SETTINGS, sys.argv[1:], {"steps": (20, "half of which are profiled")})
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{BENCH}", "OMP_NUM_THREADS": "1"}
    with made_problem(settings, 1) as folder:
        rank = [sys.executable, str(BENCH / "race/rank.py"), "profile", folder]
        overrides = [f"device={settings['device']}", *settings["settings"]]
        sys.exit(subprocess.call([*mpiexec(1), *rank, *overrides], env=env))


if __name__ == "__main__":
    main()
