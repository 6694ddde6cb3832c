"""FolderLock: one job at a time writes to a folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from launch import environment
from omegaconf import OmegaConf

from hetmpi.checkpoint.lock import FolderLock, Holder
from hetmpi.errors import UserError
from hetmpi.run.saving import locked, take_all
from hetmpi.world import process as processes

HOLDS = """
import sys, time
from pathlib import Path
from hetmpi.checkpoint.lock import FolderLock
FolderLock("run.dir", Path(sys.argv[1])).take()
print("held", flush=True)
time.sleep(60)
"""
SILENT_S = 0.6


@pytest.fixture
def lock(tmp_path):
    lock = FolderLock("run.dir", tmp_path / "run", beat_s=0.05, silent_s=SILENT_S)
    yield lock
    lock.release()


@pytest.fixture
def other(tmp_path):
    """A process that holds the lock."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "run")]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def write(lock, **changes):
    """Writes the lock of a process like this one on another machine, with `changes`."""
    values = json.loads(Holder.here().text) | {"machine": "another", "host": "node7"} | changes
    lock.folder.mkdir(exist_ok=True)
    lock.path.write_text(json.dumps(values))


def test_a_second_process_is_refused_until_the_first_is_killed(lock, other):
    with pytest.raises(UserError, match=rf"run.dir=\S+run is in use by process {other.pid} on \S+, since 20\S+ \S+: "):
        lock.take()
    os.kill(other.pid, signal.SIGSTOP)  # it is stopped, and still there
    with pytest.raises(UserError, match="is in use by process"):
        lock.take()
    other.kill()
    other.wait()
    lock.take()
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    assert [path.name for path in lock.folder.iterdir()] == [".lock"]


def test_a_process_on_another_machine_is_known_to_run_by_its_beats(lock, capsys):
    write(lock, pid=12)
    ended = threading.Event()
    beats = threading.Thread(target=lambda: [os.utime(lock.path) for _ in iter(lambda: ended.wait(SILENT_S / 4), True)])
    beats.start()
    with pytest.raises(UserError, match="is in use by process 12 on node7, since "):
        lock.take()
    ended.set()
    beats.join()
    before = time.monotonic()
    lock.take()
    assert time.monotonic() - before > SILENT_S
    assert capsys.readouterr().out.count("is of process 12 on node7") == 2


def test_a_slurm_job_that_was_requeued_takes_the_lock_of_its_earlier_start_on_another_node(lock, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "44")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    write(lock, job="44", restarts=1)
    lock.take()
    assert capsys.readouterr().out == ""
    write(lock, job="44", restarts=2)  # another step of this start
    threading.Timer(SILENT_S / 2, write, [lock], {"job": "44", "restarts": 2, "pid": 77}).start()
    with pytest.raises(UserError, match="is in use by process"):
        lock.take()


@pytest.mark.parametrize("text", ["", "[" * 4000, "{}", '{"pid": 1}', "[1]", "null", "\udcff" * 3])
def test_a_file_that_names_no_process_is_replaced_after_a_while(lock, text):
    lock.folder.mkdir()
    lock.path.write_bytes(text.encode(errors="surrogateescape"))
    lock.take()
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()


def test_a_process_that_lost_its_lock_is_refused_and_does_not_remove_that_of_the_other(lock):
    lock.take()
    write(lock, pid=12)
    before = lock.path.stat().st_mtime_ns
    with pytest.raises(UserError, match="is in use by process 12 on node7"):
        lock.take()
    lock.release()
    assert lock.path.stat().st_mtime_ns == before
    lock.path.unlink()
    lock.take()  # somebody removed it


def test_locks_of_one_process_are_one_and_leave_nothing_behind(lock):
    second = FolderLock("checkpoint.dir", lock.folder)
    lock.take()
    second.take()
    lock.take()
    lock.release()
    assert not lock.folder.exists()
    second.release()
    lock.folder.mkdir()
    (lock.folder / "kept").touch()
    lock.take()
    lock.release()
    assert [path.name for path in lock.folder.iterdir()] == ["kept"]


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path):
    write(FolderLock("run.dir", tmp_path / "run"), machine=Holder.here().machine, pid=1 << 22)
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "run")]
    tried = [
        subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.stdout.readline() for process in tried]
    for process in tried:
        process.kill()
        process.communicate()
    assert sorted(said) == ["", "", "held\n"]


def test_a_process_that_proc_hides_is_watched_and_an_ended_or_dead_one_is_not(lock, other, monkeypatch, capsys):
    pid, start = other.pid, processes.process_start(other.pid)
    assert processes.is_running(pid, start) is True and processes.is_running(pid, start + 1) is False
    with monkeypatch.context() as hidden:
        hidden.setattr(processes, "_stat", lambda pid: None)
        assert processes.is_running(pid, start) is None
        hidden.setattr(os, "kill", lambda pid, signal: raise_(PermissionError))
        assert processes.is_running(pid, start) is None
    other.kill()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert processes.is_running(pid, start) is False  # a zombie
    other.wait()
    assert processes.is_running(pid, start) is False
    lock.take()
    assert capsys.readouterr().out == ""


def raise_(kind):
    raise kind


@pytest.fixture
def two(tmp_path):
    """The locks of run.dir and checkpoint.dir, of a job on another machine."""
    locks = [FolderLock(name, tmp_path / name, silent_s=SILENT_S) for name in ("run.dir", "checkpoint.dir")]
    for lock in locks:
        write(lock)
    yield locks
    for lock in locks:
        lock.release()


def test_both_locks_of_a_killed_job_are_watched_at_once(two, capsys):
    take_all(two)
    assert capsys.readouterr().out.count("whether it still runs") == 1
    take_all(two)


def test_a_second_lock_that_is_touched_while_the_first_is_watched_is_in_use(two):
    beat = threading.Timer(SILENT_S / 2, os.utime, [two[1].path])
    beat.start()
    with pytest.raises(UserError, match="checkpoint.dir is in use by process"):
        take_all(two)
    beat.join()


@pytest.mark.parametrize("kind", ["link", "link to a lock", "folder", "pipe"])
def test_a_lock_that_is_no_regular_file_is_refused(lock, kind):
    lock.folder.mkdir()
    if kind == "folder":
        lock.path.mkdir()
    elif kind == "pipe":
        os.mkfifo(lock.path)
    else:
        write(FolderLock("run.dir", lock.folder.with_name("other")))
        lock.path.symlink_to("nowhere" if kind == "link" else "../other/.lock")
    for call in (lock.take, lock.watch):
        with pytest.raises(UserError, match=rf"{lock.path} must be a regular file, .*: remove it"):
            call()
    lock.release()


@pytest.mark.parametrize("saved", ["run", "other/../run", "saved"])
def test_a_run_that_ends_at_once_leaves_no_new_folder(tmp_path, saved):
    checkpoint = {"dir": str(tmp_path / saved), "every_steps": 1, "best": None, "at_end": True}
    config = OmegaConf.create({"run": {"dir": str(tmp_path / "run")}, "checkpoint": checkpoint})
    with locked(SimpleNamespace(rank=0, from_first=lambda call: call()), config):
        assert (tmp_path / "run/.lock").is_file()
    assert not [*tmp_path.iterdir()]
