"""Kills a random rank of a training again and again, now and then while a checkpoint is written, and resumes; the rows at its end must be those of
a training that nobody killed. Prints how it went; exit code 1 if rows differ. For s >= 1 it compares steps and samples alone.

    python tests/kill_check.py [KILLS] [STALENESS] [RANKS]      default 50 0 2; some 7 minutes
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from launch import ROOT, environment, mpiexec, run
from test_checkpoint import assert_same_bits, ranks_of

STEPS, EVERY = 30_000, 100


def main():
    kills, staleness, ranks = (int(text) for text in (sys.argv[1:] + ["50", "0", "2"][len(sys.argv) - 1 :]))
    folder = Path(tempfile.mkdtemp(prefix="hetmpi-kill-"))
    random, counts = np.random.default_rng(0), {"in a checkpoint": 0, "between": 0}
    while sum(counts.values()) < kills:
        process = subprocess.Popen(
            command_of(folder / "killed", staleness, ranks), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        in_checkpoint = sum(counts.values()) % 5 == 0
        moment = await_moment(folder / "killed", process, in_checkpoint, 0.3 + 1.5 * random.random())
        if process.poll() is not None:
            sys.exit(f"kill_check: the training ended by itself, exit code {process.returncode}, after {sum(counts.values())} kills")
        os.kill(int(random.choice(ranks_of(folder / "killed"))), signal.SIGKILL)
        counts[moment] += 1
        process.wait(60)
        while ranks_of(folder / "killed"):
            time.sleep(0.05)
    outcomes = [run(command_of(folder / name, staleness, ranks), timeout_s=600) for name in ("killed", "whole")]
    for outcome in outcomes:
        if outcome.code != 0:
            sys.exit(f"kill_check: {outcome.text}")
    ends = [folder / name / f"checkpoints/step-{STEPS:08d}" for name in ("killed", "whole")]
    resumed = re.search(r"resumed from \S+/(step-\d+)", outcomes[0].text)
    print(f"killed {counts}, resumed last at {resumed and resumed[1]} of {STEPS}")
    told = [{name: json.loads((end / "manifest.json").read_text())[name] for name in ("step", "samples")} for end in ends]
    if told[0] != told[1]:
        sys.exit(f"kill_check: {told}")
    if staleness == 0:
        assert_same_bits(*ends)
    print("the same " + ("bits" if staleness == 0 else f"{told[0]}"))
    shutil.rmtree(folder)


def command_of(folder: Path, staleness: int, ranks: int) -> list[str]:
    settings = [
        "device=cpu", "data.scale=0.002", "table.dim=16", "batch_size=64", f"steps={STEPS}", f"table.staleness={staleness}", "table.cache.admit=all",
        "log.every_steps=10000", "eval.max_samples=500", f"checkpoint.every_steps={EVERY}", f"run.dir={folder}", "resume=auto",
    ]  # fmt: skip
    return [mpiexec(), "-n", str(ranks), sys.executable, "-m", "hetmpi.train", *settings]


def await_moment(folder: Path, process, in_checkpoint: bool, seconds: float) -> str:
    """Waits until a rank runs and so many seconds have passed, or a checkpoint is being written; which of both it came to."""
    while not ranks_of(folder) and process.poll() is None:
        time.sleep(0.02)
    time.sleep(seconds)
    until = time.monotonic() + 10
    while in_checkpoint and process.poll() is None and time.monotonic() < until:
        if any((folder / "checkpoints").glob("*.part")):
            return "in a checkpoint"
        time.sleep(0.001)
    return "between"


if __name__ == "__main__":
    main()
