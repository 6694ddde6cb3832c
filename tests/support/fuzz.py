"""Runs random cases of a reader, each in a forked process of its own, until a time is over.

A file of tests/fuzz/ has a function case(rng, folder). It writes an input into an empty folder, gives it to a reader
and asserts what the reader makes of it. A case fails if it raises anything but a UserError of one line, if its process
dies, or if it takes longer than CASE_S seconds. Case n has the seed n: the first failing one is printed, and
`python tests/support/fuzz.py FILE FOLDER SECONDS n` repeats it.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

CASE_S = 15
LONGEST_LINE = 1000
OUTCOMES = {0: "right", 3: "refused"}  # exit codes of a case's process


def fuzz(file: str, folder: Path):
    """Runs the cases of a file for HETMPI_FUZZ_S seconds (60) in a process of their own."""
    seconds = os.environ.get("HETMPI_FUZZ_S", "60")
    done = subprocess.run([sys.executable, __file__, file, folder, seconds], text=True, capture_output=True)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def run_cases(file: Path, folder: Path, seconds: float, first: int | None = None) -> bool:
    """Whether all cases passed; from case `first` on, and only this one if it is given."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gc.freeze()
    outcomes, until = Counter(), time.monotonic() + seconds
    for seed in itertools.count() if first is None else [first]:
        if time.monotonic() > until and first is None:
            break
        outcome, report = run_case(module.case, seed, folder / "case")
        if outcome not in OUTCOMES.values():
            print(f"case {seed} of {file}: {outcome}\n{report}")
            return False
        if first is not None:
            print(report)
        outcomes[outcome] += 1
    print(f"{file.name}: {dict(outcomes)}")
    return True


def run_case(case, seed: int, folder: Path) -> tuple[str, str]:
    """(outcome, what the case's process printed)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    output = folder.with_name("output")
    child = os.fork()
    if child == 0:
        run_child(case, seed, folder, output)
    until = time.monotonic() + CASE_S
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return OUTCOMES.get(code, f"exit code {code}"), output.read_text(errors="replace")[-6000:]
        time.sleep(0.002)
    os.kill(child, signal.SIGUSR1)  # faulthandler prints where it is
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"not done after {CASE_S} s", output.read_text(errors="replace")[-6000:]


def run_child(case, seed: int, folder: Path, output: Path):
    """The life of a case's process."""
    import faulthandler

    from hetmpi.errors import UserError

    code = 1
    try:
        file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        np.random.seed(seed)
        case(random.Random(seed), folder)
        code = 0
    except UserError as error:
        text = str(error)
        print("refused:", text)
        is_one_line = text.strip() and len(text.splitlines()) == 1 and len(text) <= LONGEST_LINE
        code = 3 if is_one_line and text.isprintable() else 4
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    ok = run_cases(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
    sys.exit(0 if ok else 1)
