"""Runs the contenders of `bench step` and `bench cluster` in turns on one problem and compares them.

`launcher` is a command line that starts a contender's command on every rank when that is appended. Rank 0 prints its
figures by problem.report().
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from race import problem
from race.sampled import write_links

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parent
MARK = "CONTENDER "
PEERS = {"local": None, "torchrec": "requirements-torchrec.txt", "allgather": None, "horovod": None}  # -> packages
LOSSES_AGREE = 2e-3  # the order of additions differs, and SGD propagates the difference


class Failed(Exception):
    """A contender ended without figures."""


def on_hosts(hosts: int, rate: str, ranks: int = 1) -> list[str]:
    """The start of a command that runs `ranks` ranks on each of `hosts` hosts of this machine. rate: in the syntax of
    tc, or none."""
    shaped = [] if rate == "none" else ["-r", rate]
    return [str(ROOT / "tools/hosts.sh"), "-n", str(ranks), "-H", str(hosts), *shaped]


def chosen(peers: list[str]) -> list[str]:
    """The names in `peers=`. Exits for unknown names."""
    names = {"all": list(PEERS), "none": []}.get(peers[0], peers)
    if set(names) - set(PEERS):
        sys.exit(f"peers must be all, none or some of {', '.join(PEERS)}, got {','.join(peers)}")
    return names


def command_of(name: str, folder: str, overrides: list[str]) -> list[str]:
    """The command of each rank of a contender."""
    if name.replace("=", " ").split(" ")[0] in ("hetmpi", "floor", "local", "tables"):
        return [sys.executable, str(BENCH / "race/rank.py"), name.split(" ")[0], folder, *overrides]
    if name == "horovod":
        return [sys.executable, "-m", "peers.horovod", folder]
    # torch.distributed reads these variables
    ranks = (
        "RANK=${PMI_RANK:-$OMPI_COMM_WORLD_RANK} WORLD_SIZE=${PMI_SIZE:-$OMPI_COMM_WORLD_SIZE} "
        'LOCAL_RANK=${MPI_LOCALRANKID:-${OMPI_COMM_WORLD_LOCAL_RANK:-0}} exec "$0" "$@"'
    )
    python = sys.executable if "device=cuda" in overrides else python_of(name)
    return ["sh", "-c", ranks, str(python), "-m", f"peers.{name}", folder, *overrides]


def python_of(peer: str) -> Path:
    """The Python of a peer's environment, which is created if it is missing."""
    requirements = PEERS[peer]
    if requirements is None:
        return Path(sys.executable)
    python = ROOT / f".venv-{peer}/bin/python"
    if not python.exists():
        print(f"making {python.parent.parent} for {peer}, some minutes", flush=True)
        made = python.parent.parent.with_suffix(".part")
        shutil.rmtree(made, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", made], check=True)
        pip = [made / "bin/python", "-m", "pip", "install", "-q", "--no-deps", "-r", BENCH / "peers" / requirements]
        subprocess.run(pip, check=True)
        made.rename(python.parent.parent)
    return python


def race(launcher: list[str], folder: str, contenders: dict[str, list[str]], settings: dict) -> dict[str, list[dict]]:
    """Runs all contenders with their overrides, `repeats` times in turns: name -> reports of its runs. A peer that
    fails, of memory for example, is skipped with its reason; exits if hetmpi or the floor fails."""
    runs = {name: [] for name in contenders}
    for turn in range(settings["repeats"]):
        for name, overrides in contenders.items():
            if name not in runs:
                continue
            try:
                runs[name].append(run(launcher, name, folder, overrides))
            except Failed as failure:
                if name.partition("=")[0] not in PEERS:
                    sys.exit(str(failure))
                del runs[name]
                print(f"{failure}\n{name} is left out", flush=True)
                continue
            print(
                f"{turn + 1}/{settings['repeats']} {name:<16} {step_ms(runs[name][-1], settings):8.2f} ms", flush=True
            )
    return runs


def run(launcher: list[str], name: str, folder: str, overrides: list[str]) -> dict:
    """The report of one run of a contender. Raises Failed with its output."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{BENCH}", "OMP_NUM_THREADS": "1", "MASTER_PORT": "29511"}
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    done = subprocess.run([*launcher, *command_of(name, folder, overrides)], env=env, text=True, capture_output=True)
    lines = [line for line in done.stdout.splitlines() if MARK in line]
    if done.returncode != 0 or not lines:
        raise Failed(f"{name} failed with exit code {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].split(MARK, 1)[1])


def after_warmup(values: list, settings: dict) -> list:
    """The figures of the chunks of steps after the warm-up."""
    return values[settings["warmup"] // problem.chunk_steps() :]


def step_ms(result: dict, settings: dict) -> float:
    """ms per step of one run: the median over chunks."""
    return statistics.median(after_warmup(result["step_ms"], settings))


def median_ms(runs: list[dict], settings: dict) -> float:
    return statistics.median(step_ms(result, settings) for result in runs)


def median_of(runs: list[dict], figure: str, settings: dict) -> float:
    """Median over runs of the mean over the chunks after the warm-up."""
    return statistics.median(statistics.fmean(after_warmup(result[figure], settings)) for result in runs)


def check_losses(runs: dict[str, list[dict]], settings: dict):
    """Exits unless all runs of all contenders that report losses, except at s >= 1, had the same losses on the same
    samples."""
    exact = {
        name: [result["loss"] for result in results] for name, results in runs.items()
        if "loss" in results[0] and results[0].get("is_exact", True)
    }  # fmt: skip
    if not exact:
        return
    reference = next(iter(exact.values()))[0]
    for name, losses in exact.items():
        worst = float(np.abs(np.array(losses) - reference).max())
        if not worst <= LOSSES_AGREE:  # also if one is NaN
            sys.exit(
                f"losses of {name} are up to {worst:.2g} away from those of {next(iter(exact))}: no times are compared"
            )
        print(f"losses of {name}: within {worst:.1e} of {next(iter(exact))}'s, the last {losses[0][-1]:.5f}")


def made_problem(settings: dict, ranks: int) -> tempfile.TemporaryDirectory:
    """A folder with the problem that the settings describe."""
    from hetmpi.data.synthetic import Synthetic

    folder = tempfile.TemporaryDirectory(prefix="hetmpi-bench-")
    if settings["net"] in problem.SAMPLED:
        kept = {name: settings[name] for name in ("batch", "dim", "net", "steps", "scale", "fanout")}
        problem.describe(folder.name, ranks=ranks, **kept)
        if settings["net"] == "complex":
            write_links(folder.name, settings["scale"])
        return folder
    data = Synthetic(0, scale=settings["scale"], zipf=settings["zipf"], num_valid=1)
    shape = {name: settings[name] for name in ("batch", "dim", "net", "steps")}
    problem.make(folder.name, data, ranks, **shape, distinct=settings.get("distinct") or settings["steps"])
    return folder
