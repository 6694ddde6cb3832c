"""Kills a random rank of a run repeatedly, sometimes while a checkpoint is written, and resumes; the final rows must
equal those of an uninterrupted run. For s >= 1 rows count the samples with their keys (counting_model.py), and at the
end every sample of the stream must be counted once. Prints its progress; exit code 1 on failure.

    python tests/support/kill_check.py [KILLS] [STALENESS] [RANKS] [EVERY] [SETTING=VALUE ...]

default 50 0 2 100; 7 minutes. EVERY: steps between checkpoints.
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
from launch import ROOT, environment, mpiexec, ranks_of, run
from saved_files import assert_same_bits, by_key

ENDLESS, BATCH, SCALE = 10**9, 64, 0.002


def main():
    numbers, settings = (
        [text for text in sys.argv[1:] if "=" not in text],
        [text for text in sys.argv[1:] if "=" in text],
    )
    kills, staleness, ranks, every = (int(text) for text in numbers + ["50", "0", "2", "100"][len(numbers) :])
    settings.append(f"checkpoint.every_steps={every}")
    folder = Path(tempfile.mkdtemp(prefix="hetmpi-kill-"))
    random, counts = np.random.default_rng(0), {"in a checkpoint": 0, "between": 0}
    while sum(counts.values()) < kills:
        process = subprocess.Popen(
            command_of(folder / "killed", staleness, ranks, ENDLESS, settings),
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        in_checkpoint = sum(counts.values()) % 5 == 0
        moment = await_moment(folder / "killed", process, in_checkpoint, 1.5 * random.random())
        if process.poll() is not None:
            sys.exit(
                f"kill_check: the training ended by itself, exit code {process.returncode}, after "
                f"{sum(counts.values())} kills"
            )
        os.kill(int(random.choice(ranks_of(folder / "killed"))), signal.SIGKILL)
        counts[moment] += 1
        process.wait(60)
        while ranks_of(folder / "killed"):
            time.sleep(0.05)
    steps = newest(folder / "killed") + 5 * every
    resumed = re.search(r"resumed from \S+/(step-\d+)", finish(folder / "killed", staleness, ranks, steps, settings))
    print(f"killed {counts}, resumed last at {resumed and resumed[1]} of {steps}")
    end = Path("checkpoints", f"step-{steps:08d}")
    if staleness == 0:
        finish(folder / "whole", staleness, ranks, steps, settings)
        assert_same_bits(folder / "killed" / end, folder / "whole" / end)
        print("the same bits as of a training that nobody killed")
    else:
        samples = steps * BATCH * ranks
        counting_model.assert_counted(by_key(folder / "killed" / end)["weight"], samples, SCALE)
        print(f"each of {samples:,} samples counted once")
    shutil.rmtree(folder)


def finish(folder: Path, staleness: int, ranks: int, steps: int, settings: list[str]) -> str:
    """Trains to the end; returns the output."""
    outcome = run(command_of(folder, staleness, ranks, steps, settings), timeout_s=1800)
    if outcome.code != 0:
        sys.exit(f"kill_check: {outcome.text}")
    return outcome.text


def command_of(folder: Path, staleness: int, ranks: int, steps: int, further: list[str]) -> list[str]:
    settings = [
        "device=cpu",
        *([] if any(text.startswith("data=") for text in further) else [f"data.scale={SCALE}"]),
        "table.dim=16",
        f"batch_size={BATCH}",
        f"steps={steps}",
        f"table.staleness={staleness}",
        "table.cache.admit=all",
        "log.every_steps=10000",
        "eval.max_samples=500",
        "checkpoint.full_every=3",
        f"run.dir={folder}",
        "resume=auto",
    ]
    settings += counting_model.settings(ranks) if staleness > 0 else []
    return [mpiexec(), "-n", str(ranks), sys.executable, "-m", "hetmpi.train", *settings, *further]


def await_moment(folder: Path, process, in_checkpoint: bool, seconds: float) -> str:
    """Waits until the run has written a checkpoint and `seconds` have passed, or until it writes the next one. Returns
    which of the two happened."""
    before = newest(folder)
    while newest(folder) == before and process.poll() is None:
        time.sleep(0.02)
    time.sleep(seconds)
    until = time.monotonic() + 10
    while in_checkpoint and process.poll() is None and time.monotonic() < until:
        if any((folder / "checkpoints").glob("*.part")):
            return "in a checkpoint"
        time.sleep(0.001)
    return "between"


def newest(folder: Path) -> int:
    """Step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-????????")), default=0)


if __name__ == "__main__":
    main()
