"""Processes of this machine, told apart for good: a pid alone is used again."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def process_start(pid: int) -> int | None:
    """Start time of a process on this host, in clock ticks since boot, which distinguishes it from a later process with
    the same pid; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[18])


def machine() -> str:
    """Identifies the machine since its last boot, and the container on it: within them a pid and its start time name
    one process."""
    found = [socket.gethostname()]
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)
