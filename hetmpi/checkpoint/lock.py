"""FolderLock: one job at a time writes to a folder.

The file .lock in the folder names the process that holds it, rank 0 of a job, which touches the file every BEAT_S
seconds and removes it at its end. A killed job leaves it behind. Another job takes such a lock if
    its process ran on this machine and has ended, or
    it is that of an earlier start of the same Slurm job, which was requeued since, or
    nobody touches it for SILENT_S seconds. The other job watches the file for as long, as clocks of two hosts differ.

It is created by O_EXCL, which is atomic on NFS too, and read by open(), which asks an NFS server for the newest state.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import socket
import stat
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hetmpi.errors import UserError
from hetmpi.world.process import is_running, machine, process_start

LOCK = ".lock"
BEAT_S, SILENT_S = 5.0, 45.0
POLL_S = 0.2
CONFIRM_S = 0.5  # after a stale lock is replaced: another job may replace it at the same time
LARGEST_BYTES = 1 << 12


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock. began: seconds since 1970. job, restarts: of Slurm, "" and 0 without it."""

    host: str
    machine: str
    pid: int
    process_start: int
    began: float
    job: str
    restarts: int

    @staticmethod
    def here() -> Holder:
        """This process."""
        pid, restarts = os.getpid(), os.environ.get("SLURM_RESTART_COUNT", "")
        return Holder(
            socket.gethostname(), machine(), pid, process_start(pid) or 0, time.time(),
            os.environ.get("SLURM_JOB_ID", ""), int(restarts) if restarts.isdecimal() else 0,
        )  # fmt: skip

    @staticmethod
    def of_text(text: str) -> Holder | None:
        """The holder that a lock names, None for any other content."""
        try:
            found = Holder(**json.loads(text))
            kinds = (str, str, int, int, float, str, int)
            if any(type(value) is not kind for value, kind in zip(asdict(found).values(), kinds)):
                return None
            time.localtime(found.began)
            return found if found.host.isprintable() and 0 < found.pid < 1 << 31 else None
        except (ValueError, TypeError, OverflowError, OSError, RecursionError):
            return None

    @property
    def identity(self) -> tuple:
        return self.machine, self.pid, self.process_start

    @property
    def text(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def is_running(self, here: Holder) -> bool | None:
        """Whether the process exists; None if that cannot be known from `here`."""
        if self.machine == here.machine:
            return is_running(self.pid, self.process_start)
        return False if self.job and self.job == here.job and self.restarts < here.restarts else None

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began))
        return f"process {self.pid} on {self.host}, since {began}"


class FolderLock:
    """The lock of one folder, which all objects of a process hold together."""

    def __init__(self, setting: str, folder: Path, beat_s: float = BEAT_S, silent_s: float = SILENT_S):
        """setting: the one that names the folder, for messages. beat_s, silent_s: as above."""
        self.setting, self.folder, self.path = setting, folder, folder / LOCK
        self.beat_s, self.silent_s = beat_s, silent_s
        self._watched: tuple[tuple[int, str], float] | None = None  # a beat, and the time when it was seen
        self._was_taken = False
        self._made_folder = False

    def watch(self):
        """Begins to watch a lock that is there: the next take() counts its silence from here. Raises UserError if .lock
        is no regular file."""
        with contextlib.suppress(OSError):  # take() reports it
            beat, _ = self._read()
            self._watched = None if beat is None else (beat, time.monotonic())

    def take(self):
        """Takes the lock, or makes sure that this process still holds it. Creates the folder. Raises UserError if
        another process holds it or .lock is no regular file, OSError if the folder cannot be written."""
        here = Holder.here()
        is_new = self._create(here)
        while not is_new and not self._is_of(here):
            is_new = self._replace(here, self._await_silence(here))
            if not is_new:  # another job was faster
                time.sleep(POLL_S)
        self._was_taken, self._watched = True, None
        if is_new:
            atexit.register(self.release)
            threading.Thread(target=self._beat, args=[here], name="hetmpi-lock", daemon=True).start()

    def release(self):
        """Removes the lock if this process holds it, and the folder if take() made it and it is empty."""
        atexit.unregister(self.release)
        with contextlib.suppress(OSError, UserError):
            if self._was_taken and self._is_of(Holder.here()):
                self.path.unlink()
                if self._made_folder:
                    self.folder.rmdir()

    def _create(self, here: Holder) -> bool:
        """Creates the file, unless there is one. Raises OSError."""
        self._made_folder |= not self.folder.is_dir()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            write_new(self.path, here.text)
        except FileExistsError:
            return False
        return True

    def _read(self) -> tuple[tuple[int, str] | None, Holder | None]:
        """The time of the last beat with the content, None if there is no file; and the holder, None if the content
        names none. Raises UserError if it is no regular file."""
        try:
            beat = read_beat(self.path)
        except OSError as problem:
            if problem.errno not in (errno.ENOENT, errno.ESTALE):  # ESTALE: of NFS, for a file that was removed
                raise
            return None, None
        return beat, Holder.of_text(beat[1])

    def _is_of(self, here: Holder) -> bool:
        _, holder = self._read()
        return holder is not None and holder.identity == here.identity

    def _await_silence(self, here: Holder) -> tuple[int, str] | None:
        """Waits until the lock is stale. Returns its last beat, None if it is gone. Raises UserError if its process
        runs, or if this process held it before."""
        first, since = self._watched or (self._read()[0], time.monotonic())
        self._watched, is_told = None, False
        while True:
            beat, holder = self._read()
            running = None if holder is None else holder.is_running(here)
            if holder is not None and (running or self._was_taken or beat != first):
                raise self._in_use(holder)
            if beat is None or running is False or time.monotonic() > since + self.silent_s:
                return beat
            if not is_told:
                is_told = True
                print(
                    f"hetmpi: {self.path} is of {holder or 'an unknown process'}: watching for {self.silent_s:.0f} s "
                    "whether it still runs",
                    flush=True,
                )
            time.sleep(POLL_S)

    def _replace(self, here: Holder, beat: tuple[int, str] | None) -> bool:
        """Takes over a stale lock with this last beat. Returns whether it is now that of `here`."""
        if beat is None:
            return self._create(here)
        part = self.path.with_name(f"{LOCK}.{here.host}.{here.pid}")
        part.unlink(missing_ok=True)
        write_new(part, here.text)
        if self._read()[0] != beat:
            part.unlink()
            return False
        os.replace(part, self.path)
        time.sleep(CONFIRM_S)
        return self._is_of(here)

    def _beat(self, here: Holder):
        """Touches the file until it is removed or that of another process."""
        while True:
            with contextlib.suppress(OSError, UserError):  # the next beat tries again
                if not self._is_of(here):
                    return
                os.utime(self.path)
            time.sleep(self.beat_s)

    def _in_use(self, holder: Holder) -> UserError:
        return UserError(
            f"{self.setting}={self.folder} is in use by {holder}: wait for its end, or choose another {self.setting}; "
            f"if that process does not write there, remove {self.path}"
        )


def write_new(path: Path, content: bytes):
    """Writes a file that is not there yet. Raises FileExistsError, and OSError without leaving a file."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        os.write(file, content)
    except OSError:  # the disk is full
        path.unlink()
        raise
    finally:
        os.close(file)


def read_beat(path: Path) -> tuple[int, str]:
    """The time of the last change of a lock, and its content. Follows no link, waits for no pipe. Raises UserError if
    it is no regular file, OSError if it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise not_regular(path) from problem
        raise
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise not_regular(path)
        return about.st_mtime_ns, os.read(file, LARGEST_BYTES).decode(errors="replace")
    finally:
        os.close(file)


def not_regular(path: Path) -> UserError:
    return UserError(f"{path} must be a regular file, it is a link, a folder or a device: remove it")
