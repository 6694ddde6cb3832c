"""The state of a run, in status.json of its folder.

state   running | finished | stopped (by a signal, after saving) | failed
time    time of the last change of state, in seconds since 1970
host, pid, process_start   rank 0's process, if running; process_start in clock ticks since the host's boot
step, resume   if stopped: the last step, and the checkpoint to resume from
message   if failed: the error message

A killed process does not update its state, which remains `running`; is_alive checks whether the process exists.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from hetmpi.bounded_file import parsed_json, read_bytes
from hetmpi.log.files import replace
from hetmpi.world.process import process_start

STATUS = "status.json"
LARGEST_BYTES = 16 << 20
RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"


def write_status(folder: Path, state: str, **more) -> None:
    """Raises OSError."""
    replace(folder / STATUS, json.dumps({"state": state, "time": time.time(), **more}) + "\n")


def write_running(folder: Path) -> None:
    """Raises OSError."""
    pid = os.getpid()
    write_status(folder, RUNNING, host=socket.gethostname(), pid=pid, process_start=process_start(pid))


def write_failed(folder: Path, message: str) -> None:
    """Records a failure if the state is `running`: later failures do not replace the first message, nor the state of a
    run that has ended. Can be called on any rank; never raises."""
    with suppress(OSError, ValueError):
        if read_status(folder).get("state") == RUNNING:
            write_status(folder, FAILED, message=message)


def read_status(folder: Path) -> dict:
    """The contents of status.json, {} if there is none. Raises OSError and ValueError."""
    path = folder / STATUS
    status = parsed_json(read_bytes(path, LARGEST_BYTES), STATUS) if path.exists() else {}
    if not isinstance(status, dict) or not isinstance(status.get("state", ""), str):
        raise ValueError("status.json has no state")
    return status


def is_alive(status: dict) -> bool | None:
    """Whether rank 0's process exists; None if it ran on another host or is not recorded."""
    if status.get("host") != socket.gethostname() or not isinstance(status.get("pid"), int):
        return None
    started = process_start(status["pid"])
    return started is not None and started == status.get("process_start")
