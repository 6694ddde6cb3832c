"""Processes of this machine, told apart for good: a pid alone is used again."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def process_start(pid: int) -> int | None:
    """Start time of a process on this host, in clock ticks since boot, which distinguishes it from a later process with
    the same pid; None if it has ended, or if /proc hides it."""
    stat = _stat(pid)
    return None if stat is None or stat[0] == "Z" else int(stat[19])


def is_running(pid: int, start: int) -> bool | None:
    """Whether the process of this host with that process_start() exists. None if this cannot be known: /proc may hide
    the processes of other users (hidepid)."""
    if _stat(pid) is not None:
        return process_start(pid) == start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on, None if there is no such file or it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def machine() -> str:
    """Identifies the machine since its last boot, and the container on it: within them a pid and its start time name
    one process."""
    found = [socket.gethostname()]
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)
