"""The processors that a process may use: those of its affinity (taskset, Slurm's cpuset, the launcher's binding), at
most the quota of its control groups (cpu.max). A host may have many more. Imports nothing heavy; as a program it prints
their number, for run.sh."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NO_QUOTA = float("inf")
GROUPS, OWN_GROUPS = "/sys/fs/cgroup", "/proc/self/cgroup"


def usable_cores(affinity: set[int] | None = None, groups: str = GROUPS, own_groups: str = OWN_GROUPS) -> int:
    """Number of processors that this process may use. affinity: in place of its own, that of several processes of its
    control group. groups, own_groups: where the kernel shows control groups, and those of this process."""
    allowed = os.sched_getaffinity(0) if affinity is None else affinity
    return max(1, int(min(len(allowed), quota(groups, own_groups))))


def cores_of_ranks(num_ranks: int) -> int:
    """Number of processors that the `num_ranks` ranks of this node may use together, as far as one of them knows before
    MPI starts: the launcher, which may bind each rank to some of them, is not bound itself."""
    cores = os.sched_getaffinity(0)
    if num_ranks > 1:
        with contextlib.suppress(OSError):  # the launcher has ended, or is hidden
            cores |= os.sched_getaffinity(os.getppid())
    step = os.environ.get("SLURM_CPUS_ON_NODE", "")  # Slurm's launcher may use all processors, its step these
    return min(usable_cores(cores), int(step) if step.isdigit() and int(step) > 0 else len(cores))


def quota(groups: str, own_groups: str) -> float:
    """Processors' worth of time that the control groups of this process and their ancestors allow; NO_QUOTA without a
    limit."""
    most = NO_QUOTA
    with contextlib.suppress(OSError), open(own_groups) as lines:
        for line in lines:
            _, controllers, group = line.strip().split(":", 2)
            if controllers == "":
                most = min(most, least_of(groups, group, of_version_2))
            elif "cpu" in controllers.split(","):
                most = min(most, least_of(f"{groups}/cpu", group, of_version_1))
    return most


def least_of(root: str, group: str, read) -> float:
    """The least quota of a group and its ancestors. A group may be invisible in a container."""
    most, folder = NO_QUOTA, os.path.join(root, group.lstrip("/"))
    while folder.startswith(root):
        with contextlib.suppress(OSError, ValueError):  # ValueError: of an emulation with another form
            most = min(most, read(Path(folder)))
        folder = os.path.dirname(folder)
    return most


def of_version_2(folder: Path) -> float:
    limit, period = (folder / "cpu.max").read_text().split()
    return NO_QUOTA if limit == "max" else int(limit) / int(period)


def of_version_1(folder: Path) -> float:
    limit, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return NO_QUOTA if limit <= 0 else limit / period


if __name__ == "__main__":
    print(usable_cores())
