"""Memory that this process can still allocate."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from hetmpi.errors import UserError

UNLIMITED = 1 << 60  # control groups version 1 express "no limit" as a number near 2^63


def check_fits(nbytes: int, what: str, cure: str):
    """Raises UserError if this process cannot allocate so many bytes. what, cure: for the message."""
    free = min(limits().values())
    if nbytes > free:
        raise UserError(f"{what} needs {nbytes / 1e9:,.1f} GB of memory, {max(0, free) / 1e9:,.1f} GB are free: {cure}")


def limits() -> dict[str, float]:
    """Free bytes by what limits this process."""
    return {
        "memory": available_memory(),
        "the job's memory limit": cgroup_memory(),
        "this process's address space (ulimit -v)": address_space(),
    }


def address_space() -> float:
    """Bytes that this process may still map; infinity without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    with open("/proc/self/statm") as text:
        used = int(text.read().split()[0]) * resource.getpagesize()
    return float("inf") if limit == resource.RLIM_INFINITY else limit - used


def available_memory() -> int:
    """The kernel's estimate of the bytes that can be allocated without swapping."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def cgroup_memory() -> float:
    """Bytes left under the memory limits of this process's control groups; infinity without a limit."""
    left = float("inf")
    with open("/proc/self/cgroup") as lines:
        for line in lines:
            _, controllers, group = line.strip().split(":", 2)
            if controllers == "":
                left = min(left, groups_left("/sys/fs/cgroup", group, "memory.max", "memory.current"))
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes"
                left = min(left, groups_left("/sys/fs/cgroup/memory", group, *names))
    return left


def groups_left(root: str, group: str, limit_name: str, used_name: str) -> float:
    """Bytes left in a control group and its ancestors. Page cache that can be dropped counts as free."""
    left, folder = float("inf"), os.path.join(root, group.lstrip("/"))
    while folder.startswith(root):
        try:
            limit, used = (Path(folder, name).read_text().strip() for name in (limit_name, used_name))
            stat = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
        except OSError:  # the root group has no limit; a group may be invisible in a container
            limit = "max"
        if limit != "max" and int(limit) < UNLIMITED:
            cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            left = min(left, int(limit) - int(used) + int(cache))
        folder = os.path.dirname(folder)
    return left
