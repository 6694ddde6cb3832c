"""Kills a random rank of a training again and again, now and then while a checkpoint is written, and resumes; the rows at its end must be those of
a training that nobody killed. For s >= 1 rows count how often their keys were in a sample (counting_model.py), and at the end it is every sample of
the stream once. Prints how it went; exit code 1 if it went wrong.

    python tests/kill_check.py [KILLS] [STALENESS] [RANKS]      default 50 0 2; some 7 minutes
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import counting_model
import numpy as np
from launch import ROOT, environment, mpiexec, run
from test_checkpoint import assert_same_bits, by_key, ranks_of

STEPS, EVERY, BATCH, SCALE = 30_000, 100, 64, 0.002


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
    text = finish(folder / "killed", staleness, ranks)
    resumed = re.search(r"resumed from \S+/(step-\d+)", text)
    print(f"killed {counts}, resumed last at {resumed and resumed[1]} of {STEPS}")
    end = Path("checkpoints", f"step-{STEPS:08d}")
    if staleness == 0:
        finish(folder / "whole", staleness, ranks)
        assert_same_bits(folder / "killed" / end, folder / "whole" / end)
        print("the same bits as of a training that nobody killed")
    else:
        samples = STEPS * BATCH * ranks
        counting_model.assert_counted(by_key(folder / "killed" / end)["weight"], samples, SCALE)
        print(f"each of {samples:,} samples counted once")
    shutil.rmtree(folder)


def finish(folder: Path, staleness: int, ranks: int) -> str:
    """Trains to the end; what was printed."""
    outcome = run(command_of(folder, staleness, ranks), timeout_s=600)
    if outcome.code != 0:
        sys.exit(f"kill_check: {outcome.text}")
    return outcome.text


def command_of(folder: Path, staleness: int, ranks: int) -> list[str]:
    settings = [
        "device=cpu", f"data.scale={SCALE}", "table.dim=16", f"batch_size={BATCH}", f"steps={STEPS}", f"table.staleness={staleness}", "table.cache.admit=all",
        "log.every_steps=10000", "eval.max_samples=500", f"checkpoint.every_steps={EVERY}", f"run.dir={folder}", "resume=auto",
    ]  # fmt: skip
    settings += counting_model.settings(ranks) if staleness > 0 else []
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
