"""RunLog: what a person sees of a run, and what stays of it: rank 0's run folder, the progress shown, the last lines.

The run folder holds
  config.yaml       the resolved configuration
  environment.json  commit, versions, hosts and command (environment.py)
  status.json       whether it is running, finished, stopped or failed (status.py)
  metrics.jsonl     one line per logged step, each with at least `step` and `loss`; of the trainer's also
                      samples    of the stream, so far
                      elapsed_s  seconds of training so far, evaluation not counted; a resumed run goes on from its last
                                 line
                      own_ms_min, own_ms, own_ms_max  a rank's own work (spans.OWN) per step: least, mean and most
                      slowest_rank                    the rank that had the most
  evaluation.jsonl  one line per evaluation, each with at least `step`; samples and elapsed_s as above
  events.out.tfevents.*  both again, for TensorBoard (events.py)
  trace.json        with train.profile=true: every rank's last steps, for chrome://tracing or Perfetto
  summary.json      written when the run has ended, and only then; complete whenever it is there. by_rank: host and ms
                    per step, part by part, of every rank
  report.html       if ./run.sh report was asked for it

JSON has no NaN and no infinity: such values are written as null.

A folder that cannot be written when the run begins is refused. One that cannot be written later, on a full disk say,
does not end the run: it is said once, each line or file is tried anew, and the end of the run names what is missing.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from hetmpi.errors import UserError
from hetmpi.log import status
from hetmpi.log.display import display, tell_ending
from hetmpi.log.events import FINAL, EventFile
from hetmpi.log.figures import is_of_task, moved_per_step
from hetmpi.log.files import append, flat, replace
from hetmpi.spans import Spans

SHOWN_NAME = "standard output"
TICK_S = 0.3  # between two looks at how far the run is
OF_AN_EARLIER_RUN = ("summary.json", "trace.json", "report.html")


class RunLog:
    """Rank 0's record of one run. `close` it in a `finally`: a terminal gets its cursor back.

    A run into a folder that holds an earlier one replaces that one's files, but one that is resumed keeps what was
    written up to there. earlier_s: the `elapsed_s` of what was kept, 0.0 if nothing was."""

    def __init__(
        self,
        run_dir: str | os.PathLike,
        config_yaml: str,
        total_steps: int | None,
        resumed_at: int = 0,
        *,
        spans: Spans | None = None,
        step_samples: int = 0,
        environment: dict | None = None,
    ):
        """run_dir: made if missing. config_yaml: text of config.yaml. total_steps: where the progress bar ends, None if
        unknown. resumed_at: steps made before, 0 for a new run. spans: of this rank, for the progress between logged
        steps. step_samples: samples of a step, over all ranks. environment: for environment.json.

        Raises UserError with one sentence (what, why, cure) when the folder cannot be written; the methods do not, see
        above."""
        self._dir = Path(run_dir)
        with self._writing():
            self._dir.mkdir(parents=True, exist_ok=True)
            for name in (*OF_AN_EARLIER_RUN, *(() if resumed_at else ("events.out.tfevents.*",))):
                for old in self._dir.glob(name):
                    old.unlink()
            self.earlier_s = max(
                self._keep_until(self._dir / name, resumed_at) for name in ("metrics.jsonl", "evaluation.jsonl")
            )
            replace(self._dir / "config.yaml", config_yaml)
            replace(self._dir / "environment.json", json.dumps(environment or {}, indent=2) + "\n")
            status.write_running(self._dir)
            self._events = EventFile(self._dir, flat(yaml.safe_load(config_yaml) or {}))
        self._missing = Counter()  # file -> lines or files that could not be written
        self._shown = display(spans or Spans(), resumed_at, total_steps, step_samples)
        self._ended = threading.Event()
        self._ticking = threading.Thread(target=self._tick, name="hetmpi-progress", daemon=True)
        self._ticking.start()

    def step(self, values: dict) -> None:
        """Writes and shows one step's values: `step` (int), `loss`, and any other numbers by their name."""
        self._record("metrics.jsonl", values, self._events.step, self._shown.step)

    def evaluation(self, values: dict) -> None:
        """Writes and shows an evaluation: `step` (int), `auc`, `log_loss`, and any other numbers by their name."""
        self._record("evaluation.jsonl", values, self._events.evaluation, self._shown.evaluation)

    def note(self, text: str) -> None:
        """Shows a sentence."""
        with self._surviving(SHOWN_NAME):
            print(f"hetmpi: {text}", flush=True)

    def finish(self, summary: dict) -> None:
        """Shows the five lines of the end and writes summary.json, whole or not at all. summary: `steps`, `run_dir`,
        and what else there is; `checkpoint`: path of the last one, None if none was kept."""
        self.write("summary.json", json.dumps(_jsonable(summary), indent=2, allow_nan=False) + "\n")
        with self._surviving(self._events.path.name):
            self._events.finish(summary["steps"], _final(summary))
        with self._surviving(status.STATUS):
            status.write_status(self._dir, status.FINISHED)
        with self._surviving(SHOWN_NAME):
            self._stop_display()
            tell_ending(summary)

    def stop(self, step: int, checkpoint: str | os.PathLike) -> None:
        """Notes that the run leaves after `step` steps, to go on from a checkpoint."""
        with self._surviving(status.STATUS):
            status.write_status(self._dir, status.STOPPED, step=step, resume=str(checkpoint))

    def write(self, name: str, text: str) -> None:
        """Writes another file of the run folder, whole or not at all."""
        with self._surviving(name):
            replace(self._dir / name, text)

    def close(self) -> None:
        """Ends the progress display and says what is missing in the folder; may be called twice."""
        with self._surviving(SHOWN_NAME):
            self._stop_display()
            sys.stdout.flush()
        if SHOWN_NAME in self._missing:  # Python flushes it again and would exit with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if self._missing:
            _tell(f"run folder {self._dir} lacks {', '.join(_missing_text(*item) for item in self._missing.items())}")
            self._missing.clear()

    def _tick(self):
        """Lets the display move by time, until the run has ended or nobody reads."""
        while not self._ended.wait(TICK_S):
            try:
                self._shown.tick()
            except OSError:  # the next logged step meets it too, and says so
                return

    def _stop_display(self):
        self._ended.set()
        self._ticking.join()
        self._shown.close()

    def _keep_until(self, path: Path, step: int) -> float:
        """Drops the lines of later steps, and one that was cut short. Returns the last elapsed_s kept, 0.0 if there is
        none."""
        if not path.exists():
            return 0.0
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and step_of(line) <= step]
        path.write_text("".join(kept)) if kept else path.unlink()
        return json.loads(kept[-1]).get("elapsed_s", 0.0) if kept else 0.0

    def _record(self, name: str, values: dict, *calls: Callable[[dict], None]) -> None:
        """Appends values to a .jsonl file, then gives them to the calls for TensorBoard and standard output."""
        line = json.dumps(_jsonable(values), allow_nan=False) + "\n"
        with self._surviving(name):
            append(self._dir / name, line.encode())
        for place, call in zip((self._events.path.name, SHOWN_NAME), calls):
            with self._surviving(place):
                call(values)

    @contextmanager
    def _surviving(self, name: str):
        """Says so if something of the folder cannot be written, the first time, and goes on."""
        try:
            yield
        except BrokenPipeError:  # nobody reads what is shown
            raise
        except OSError as error:
            if not self._missing:
                what = error.filename or (name if name == SHOWN_NAME else self._dir / name)
                _tell(f"run folder: cannot write {what}: {error.strerror}: training goes on without; make room there")
            self._missing[name] += 1

    @contextmanager
    def _writing(self):
        try:
            yield
        except OSError as error:
            path = error.filename or self._dir
            raise UserError(
                f"run folder: cannot write {path}: {error.strerror}: make room there or choose another run.dir"
            ) from error


def _final(summary: dict) -> dict:
    """Of a summary, the figures by which runs are compared."""
    moved = moved_per_step(summary)
    task = {key: value for key, value in summary.items() if is_of_task(key, value)}
    return {**task, **{key: summary.get(key) for key in FINAL}, "mb_per_step": None if moved is None else moved / 1e6}


def _tell(text: str) -> None:
    with suppress(OSError):
        print(f"hetmpi: {text}", file=sys.stderr, flush=True)


def _missing_text(name: str, count: int) -> str:
    """What is missing: a file, or how many entries of it."""
    return f"{count} entries of {name}" if name.endswith(".jsonl") or "tfevents" in name else name


def _jsonable(value):
    """value as JSON can hold it: numpy's numbers as Python's, what is not finite as None."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    return value


def step_of(line: str) -> float:
    """The step of a logged line, infinity for a damaged one."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf
