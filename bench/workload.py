"""The workloads of `bench traffic` and `bench staleness`: HET's shapes, smaller; and the start of a benchmark's
ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from hetmpi.world.cores import usable_cores

QUIET_S = 9
GRAPHS = ("reddit", "amazon", "mag")  # as conf/experiment/het_NAME.yaml


def parse(name: str, settings: dict, arguments: list[str], least: dict[str, tuple[int, str]] | None = None) -> dict:
    """`settings` with KEY=VALUE of the command line, each of its default's type; lists are comma-separated. least:
    minimum of some settings, and the reason."""
    settings = dict(settings)
    for argument in arguments:
        key, _, text = argument.partition("=")
        try:
            settings[key] = value_like(settings[key], text)
        except (KeyError, ValueError):
            known = ", ".join(f"{key}={value_text(value)}" for key, value in settings.items())
            sys.exit(f"bench {name}: cannot take {argument}; the settings are {known}")
    for key, (bound, why) in (least or {}).items():
        if settings[key] < bound:
            sys.exit(f"bench {name}: {key} must be at least {bound:,}, {why}, got {settings[key]:,}")
    if not {"PMI_RANK", "OMPI_COMM_WORLD_RANK"} & set(os.environ):  # in a rank, the program that started it shows
        threading.Thread(target=show_elapsed, args=(name,), daemon=True).start()
    return settings


def show_elapsed(name: str):
    """Shows that a benchmark runs, between its rows."""
    began = time.monotonic()
    while True:
        time.sleep(QUIET_S)
        print(f"bench {name}: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)


def value_like(default, text: str):
    """The value in `text`, of the type of `default`. Raises ValueError."""
    if isinstance(default, list):
        return [value_like(default[0], part) for part in text.split(",")]
    if default is None or (isinstance(default, int) and text == "null"):
        return None if text == "null" else int(text)
    return type(default)(text)


def value_text(value) -> str:
    """`value` in the syntax of the command line."""
    if isinstance(value, list):
        return ",".join(value_text(item) for item in value)
    return "null" if value is None else str(value)


def start_ranks(file: str, ranks: int, arguments: list[str]) -> int:
    """Runs `file` with `--rank` on `ranks` ranks; returns the exit code."""
    command = [*mpiexec(ranks), sys.executable, file, *arguments, "--rank"]
    return subprocess.call(command, env={**os.environ, **naps(ranks)})


def mpiexec(ranks: int) -> list[str]:
    """The start of a command that runs `ranks` ranks with this environment's MPI."""
    own = Path(sys.executable).parent / "mpiexec"
    return [str(own) if own.exists() else shutil.which("mpiexec"), "-n", str(ranks)]


def naps(ranks: int) -> dict[str, str]:
    """Additional environment variables if ranks outnumber cores (cpp/naps.c), as in run.sh."""
    found = sorted(Path(__file__).parent.parent.glob("hetmpi/_naps.*.so"))
    return {"LD_PRELOAD": str(found[0])} if found and ranks > usable_cores() and "LD_PRELOAD" not in os.environ else {}


def key_of(staleness: int | None) -> str:
    """The bound as a JSON key and in settings."""
    return "null" if staleness is None else str(staleness)


def graph_of(world, settings: dict, seed: int):
    """The settings of a run on one of GRAPHS, as a benchmark's `settings` say, and its source. Collective."""
    from hetmpi.run.build import make
    from hetmpi.run.config import compose

    chosen = {"experiment": f"het_{settings['workload']}", "seed": seed, "data.scale": settings["scale"]}
    chosen |= {"batch_size": settings["batch"], "table.dim": settings["dim"]}
    if settings["metis"]:
        chosen |= {"data.partition": "metis", "table.partition": "range"}
    config = compose(world, [f"{key}={value}" for key, value in chosen.items()])
    source = make(config.data)
    source.prepare(world.rank, world.size, world.comm.Barrier)
    return config, source


class Keys:
    """The unique keys of each step and rank of a data set, computed once per step, the same for every run."""

    def __init__(self, data, rank: int, size: int, batch_size: int):
        self.data, self.rank, self.size, self.batch_size = data, rank, size, batch_size
        self.made: dict[int, np.ndarray] = {}

    def at(self, step: int) -> np.ndarray:
        """(U,) int64."""
        from hetmpi import _C
        from hetmpi.data.batch import Bag

        if step not in self.made:
            begin = (step * self.size + self.rank) * self.batch_size
            ids = self.data.train(begin, begin + self.batch_size).ids
            self.made[step] = _C.unique(ids.values if isinstance(ids, Bag) else ids.reshape(-1))[0]
        return self.made[step]
