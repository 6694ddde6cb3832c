"""The state of a run, in status.json of its folder.

state   running | finished | stopped (it saved and left on a signal) | failed
time    since when, seconds since 1970
host, pid, process_start   rank 0's process, while it is running; process_start in ticks since the host's boot
step, resume   of one that is stopped: the last step, and the checkpoint to go on from
message   of one that failed

A process that is killed writes nothing: its state stays `running`, and whoever reads it looks for the process.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from hetmpi.log.files import replace

STATUS = "status.json"
RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"


def write_status(folder: Path, state: str, **more) -> None:
    """Raises OSError."""
    replace(folder / STATUS, json.dumps({"state": state, "time": time.time(), **more}) + "\n")


def write_running(folder: Path) -> None:
    """Raises OSError."""
    pid = os.getpid()
    write_status(folder, RUNNING, host=socket.gethostname(), pid=pid, process_start=process_start(pid))


def write_failed(folder: Path, message: str) -> None:
    """Called on the rank that fails, whichever it is; never raises. The first message stays, and a run that has ended
    has not failed."""
    with suppress(OSError, ValueError):
        if read_status(folder).get("state") == RUNNING:
            write_status(folder, FAILED, message=message)


def read_status(folder: Path) -> dict:
    """{} if there is none. Raises OSError and ValueError."""
    path = folder / STATUS
    status = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(status, dict) or not isinstance(status.get("state", ""), str):
        raise ValueError("it holds no state")
    return status


def process_start(pid: int) -> int | None:
    """When a process of this host began, which tells it from a later one of its number; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[18])


def is_alive(status: dict) -> bool | None:
    """Whether rank 0's process is there; None if that cannot be seen from this host."""
    if status.get("host") != socket.gethostname() or not isinstance(status.get("pid"), int):
        return None
    started = process_start(status["pid"])
    return started is not None and started == status.get("process_start")
