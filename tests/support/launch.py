"""Runs programs as a user does, in separate processes."""

import atexit
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAY_FORK = os.environ.get("HETMPI_TEST_FORKS") != "0"
FORKED = str(ROOT / "tests/support/forked.py")
STARTS = ("CUDA", "HETMPI_TEST_STORE", "HOME", "LD_", "MPI4PY", "PATH", "PYTHON")
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "HYDRA_", "MPI_LOCAL", "PRTE_")
_FORKS, _FORKS_LOCK = [], threading.Lock()
NODE_MODELS = ("gat", "gcn", "graphsage")  # of task=node
LINK_MODELS = ("complex", "distmult", "rescal", "rotate", "simple", "transe")  # of task=link
SEQUENCE_MODELS = ("din",)  # which need features with pool: none
LABEL_MODELS = ("mmoe", "ple", "sharedbottom")  # of several labels
PAIR_MODELS = ("sasrec", "two_tower")  # of task=retrieval
OTHERS = {*NODE_MODELS, *LINK_MODELS, *SEQUENCE_MODELS, *LABEL_MODELS, *PAIR_MODELS}
CLICK_MODELS = tuple(sorted({path.stem for path in (ROOT / "conf/model").glob("*.yaml")} - OTHERS))
SMALL = ["data.scale=0.0005", "table.dim=4", "batch_size=32", "steps=6", "log.every_steps=2", "eval.max_samples=500"]


@dataclass
class Outcome:
    """How a run ended: exit code, output, seconds from hetmpi's first message to its end (0 without a message), and its
    processes still alive 10 s later."""

    code: int
    text: str
    seconds_left: float
    survivors: list


def environment(**extra):
    """This process's environment without the variables of its own launcher, and with room for more ranks than cores."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"):
        env[name] = "1"
    env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    ours = Path(find_spec("hetmpi").origin).parents[1]  # of this process's package, which may not be ROOT's
    path = os.pathsep.join([str(ours), str(ROOT), str(ROOT / "tests/support")])
    return {**env, "PYTHONPATH": path, "HETMPI_TEST_RUN": uuid.uuid4().hex, **extra}


def run(command, timeout_s=120, cwd=ROOT, may_fork=True, **extra):
    """Runs a command to its end. may_fork: modules of hetmpi and scripts may start by forked.py, unless `extra` has
    variables that a start depends on."""
    env, text, told_at = environment(**extra), "", None
    if may_fork and MAY_FORK and not any(name.startswith(STARTS) for name in extra):
        command = forking(command)
    process = subprocess.Popen(
        command, cwd=cwd, env=env, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    stop = threading.Timer(timeout_s, process.kill)
    stop.start()
    for line in process.stdout:
        text += line
        told_at = told_at or ("hetmpi:" in line and time.monotonic())
    code = process.wait()
    assert stop.is_alive(), f"not done after {timeout_s} s:\n{text}"
    stop.cancel()
    assert not _FORKS or fork_server()
    return Outcome(code, text, time.monotonic() - told_at if told_at else 0.0, survivors(env["HETMPI_TEST_RUN"]))


def forking(command):
    """The command, with its module of hetmpi or its script started by forked.py if it is one that a fork can start."""
    words = [str(word) for word in command]
    at = 3 if words[0] == mpiexec() else 0
    if words[at] != sys.executable:
        return command
    is_module = words[at + 1] == "-m" and words[at + 2].split(".")[0] == "hetmpi"
    if not is_module and not words[at + 1].endswith(".py"):
        return command
    return [*words[:at], sys.executable, "-IS", FORKED, fork_server(), *words[at + 1 :]]


def fork_server():
    """The path of the socket of the process that forks for this one."""
    with _FORKS_LOCK:
        if not _FORKS:
            path = Path(tempfile.mkdtemp()) / "forks"
            command = [sys.executable, FORKED, "serve", path]
            server = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, start_new_session=True
            )
            atexit.register(end_forks, server, path)
            while not path.exists() and server.poll() is None:
                time.sleep(0.02)
            _FORKS[:] = server, str(path)
    server, path = _FORKS
    assert server.poll() is None, "tests/support/forked.py has ended"
    return path


def end_forks(server, path):
    server.stdin.close()
    server.wait()
    shutil.rmtree(path.parent)


def train(ranks, *overrides, launcher=None, **extra):
    """Trains on `ranks` ranks; 0 means without a launcher."""
    return run([*launcher_of(ranks, launcher), sys.executable, "-m", "hetmpi.train", "device=cpu", *overrides], **extra)


def launcher_of(ranks, launcher=None):
    """The command that starts `ranks` ranks; 0 means without a launcher."""
    return [] if ranks == 0 else [launcher or mpiexec(), "-np" if launcher else "-n", str(ranks)]


def mpiexec():
    """The launcher of this environment's MPI: its own, otherwise the one on PATH."""
    own = Path(sys.executable).parent / "mpiexec"
    return str(own) if own.exists() else shutil.which("mpiexec")


def survivors(run_id, within_s=10):
    """Processes of a run that are still alive `within_s` seconds after its end."""
    deadline = time.monotonic() + within_s
    while alive(run_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive(run_id)


def alive(run_id):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_fork = (folder / "comm").read_text().strip() == run_id[:15]
            if is_fork or run_id.encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:  # the process has ended, or belongs to another user
            pass
    return found


def summary(folder):
    """summary.json of a run."""
    return json.loads((Path(folder) / "summary.json").read_text())


def losses(folder):
    """Loss by step of a run, from metrics.jsonl."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def ranks_of(folder):
    """Process ids of the ranks that train into a folder, but for forks."""
    pattern = rf"^[^ ]*python[^ ]* -m hetmpi\.train .*run\.dir={re.escape(str(folder))}"
    return [
        int(number)
        for number in subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout.split()
    ]
