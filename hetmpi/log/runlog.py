"""RunLog: writes the run folder and displays progress, on rank 0.

The run folder holds
  config.yaml       the resolved configuration
  environment.json  commit, versions, hosts and command (environment.py)
  status.json       whether the run is running, finished, stopped or failed (status.py)
  metrics.jsonl     one line per logged step, each with at least `step` and `loss`; the trainer also writes
                      samples    samples of the stream so far
                      elapsed_s  seconds of training so far, without evaluations; a resumed run continues from the last
                                 value
                      own_ms_min, own_ms, own_ms_max  own work (spans.OWN) per step: minimum, mean, maximum over ranks
                      slowest_rank                    the rank with the most own work
  evaluation.jsonl  one line per evaluation, each with at least `step`; samples and elapsed_s as above
  events.out.tfevents.*  the values of both files for TensorBoard (events.py)
  curves.json       curves of the best evaluation of all held-out samples, by the task's first metric (tasks/curves.py),
                    its step, and `unseen`: of each column how many held-out values training had not seen, and how many
                    there are
  trace.json        with train.profile=true: every rank's last steps, for chrome://tracing or Perfetto
  summary.json      written when the run finishes; complete if it exists. by_rank: host, and ms per step of each part,
                    for every rank. With eval.patience or checkpoint.best, or if the best evaluation was not the last:
                    best_metric, best_METRIC, best_step, and best_checkpoint of checkpoint.best; ended_early, the reason
                    if training ended early
  report.html       if `hetmpi report` was run

JSON has neither NaN nor infinity: such values are written as null.

If the folder cannot be written at the start, RunLog raises an error. A write that fails later, for example on a full
disk, does not end the run: the first failure prints a warning, later writes are still attempted, and the end of the run
reports the missing entries and files.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from hetmpi.bounded_file import open_regular, read_text
from hetmpi.errors import UserError, cure_of
from hetmpi.log import status
from hetmpi.log.display import display, tell_ending
from hetmpi.log.events import FINAL, EventFile
from hetmpi.log.figures import is_of_task, moved_per_step
from hetmpi.log.files import append, flat, replace
from hetmpi.log.run_files import LARGEST_LINE, LARGEST_LINES, is_number
from hetmpi.spans import Spans

SHOWN_NAME = "standard output"
TICK_S = 0.3  # time between two updates of the progress display
CURVES = "curves.json"
OF_SAMPLES = "of_samples"  # key of the number of samples of an evaluation of some
OF_AN_EARLIER_RUN = ("summary.json", CURVES, "trace.json", "report.html")


class RunLog:
    """Rank 0's log of one run. Call `close` in a `finally` block, as it restores the terminal's cursor.

    A new run replaces the files of an earlier run in its folder. A resumed run keeps the lines up to the step that it
    resumes from, of a stream without those of files that were opened later. earlier_s: the last `elapsed_s` of these
    lines, 0.0 if there are none."""

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
        files: Collection[str] | None = None,
    ):
        """run_dir: created if missing. config_yaml: text of config.yaml. total_steps: end of the progress bar, None if
        unknown. resumed_at: steps made before, 0 for a new run. spans: of this rank, for the progress between logged
        steps. step_samples: samples per step over all ranks. environment: contents of environment.json. files: of a
        stream, those that were opened before; none for a new run.

        Raises UserError if the folder cannot be written. The methods do not (see above)."""
        self._dir = Path(run_dir)
        with self._writing():
            self._dir.mkdir(parents=True, exist_ok=True)
            for name in (*OF_AN_EARLIER_RUN, *(() if resumed_at else ("events.out.tfevents.*",))):
                for old in self._dir.glob(name):
                    old.unlink()
            self.earlier_s = max(
                self._keep_until(self._dir / name, resumed_at, files) for name in ("metrics.jsonl", "evaluation.jsonl")
            )
            replace(self._dir / "config.yaml", config_yaml)
            replace(self._dir / "environment.json", json.dumps(environment or {}, indent=2) + "\n")
            status.write_running(self._dir)
            self._events = EventFile(self._dir, flat(yaml.safe_load(config_yaml) or {}))
        self._missing = Counter()  # file -> number of failed writes
        self._shown = display(spans or Spans(), resumed_at, total_steps, step_samples)
        self._ended = threading.Event()
        self._ticking = threading.Thread(target=self._tick, name="hetmpi-progress", daemon=True)
        self._ticking.start()

    def step(self, values: dict) -> None:
        """Writes and displays the values of a step: `step` (int), `loss`, and any other numbers by name."""
        self._record("metrics.jsonl", values, self._events.step, self._shown.step)

    def evaluation(self, values: dict) -> None:
        """Writes and displays an evaluation: `step` (int), `auc`, `log_loss`, and any other numbers by name."""
        self._record("evaluation.jsonl", values, self._events.evaluation, self._shown.evaluation)

    def evaluations(self, metric: str) -> list[tuple[int, float]]:
        """Step and value of a metric in the evaluations of all held-out samples so far, as far as they could be
        written."""
        with suppress(OSError, ValueError):
            lines = map(json.loads, read_text(self._dir / "evaluation.jsonl", LARGEST_LINES).splitlines())
            return [
                (line["step"], line[metric])
                for line in lines
                if line.get(metric) is not None and OF_SAMPLES not in line
            ]
        return []

    def note(self, text: str) -> None:
        """Prints a message."""
        with self._surviving(SHOWN_NAME):
            print(f"hetmpi: {text}", flush=True)

    def finish(self, summary: dict, predicts: str | None = None) -> None:
        """Writes summary.json, whole or not at all, and prints the closing lines. summary: `steps`, `run_dir` and
        any other figures; `checkpoint`: path of the last one, None if none was saved. predicts: as display.ending."""
        self.write("summary.json", json.dumps(_jsonable(summary), indent=2, allow_nan=False) + "\n")
        with self._surviving(self._events.path.name):
            self._events.finish(summary["steps"], _final(summary))
        with self._surviving(status.STATUS):
            status.write_status(self._dir, status.FINISHED)
        with self._surviving(SHOWN_NAME):
            self._stop_display()
            tell_ending(summary, predicts)

    def stop(self, step: int, checkpoint: str | os.PathLike) -> None:
        """Records in status.json that the run stopped after `step` steps and can resume from `checkpoint`."""
        with self._surviving(status.STATUS):
            status.write_status(self._dir, status.STOPPED, step=step, resume=str(checkpoint))

    def write(self, name: str, text: str) -> None:
        """Writes another file of the run folder, whole or not at all."""
        with self._surviving(name):
            replace(self._dir / name, text)

    def close(self) -> None:
        """Ends the progress display and reports missing entries and files; may be called twice."""
        with self._surviving(SHOWN_NAME):
            self._stop_display()
            sys.stdout.flush()
        if SHOWN_NAME in self._missing:  # otherwise Python's flush at exit fails, with exit code 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if self._missing:
            _tell(f"run folder {self._dir} lacks {', '.join(_missing_text(*item) for item in self._missing.items())}")
            self._missing.clear()

    def _tick(self):
        """Updates the display every TICK_S until the run ends or standard output fails."""
        while not self._ended.wait(TICK_S):
            try:
                self._shown.tick()
            except OSError:  # the next logged step fails too and reports it
                return

    def _stop_display(self):
        self._ended.set()
        self._ticking.join()
        self._shown.close()

    def _keep_until(self, path: Path, step: int, files: Collection[str] | None) -> float:
        """Removes the lines of later steps and files and a truncated last line. Returns the last elapsed_s kept, 0.0 if
        there is none."""
        if not os.path.lexists(path):
            return 0.0
        with open_regular(path) as file:
            lines = iter(lambda: file.readline(LARGEST_LINE), b"")
            kept = [line for line in lines if line.endswith(b"\n") and is_until(line, step, files)]
        replace(path, b"".join(kept).decode(errors="replace")) if kept else path.unlink()
        elapsed_s = json.loads(kept[-1]).get("elapsed_s") if kept else None
        return float(elapsed_s) if is_number(elapsed_s) else 0.0

    def _record(self, name: str, values: dict, *calls: Callable[[dict], None]) -> None:
        """Appends values to a .jsonl file, then passes them to `calls`, for TensorBoard and standard output."""
        line = json.dumps(_jsonable(values), allow_nan=False) + "\n"
        with self._surviving(name):
            append(self._dir / name, line.encode())
        for place, call in zip((self._events.path.name, SHOWN_NAME), calls):
            with self._surviving(place):
                call(values)

    @contextmanager
    def _surviving(self, name: str):
        """A context that catches and counts failed writes to a file, and prints a warning for the first one."""
        try:
            yield
        except BrokenPipeError:  # the reader of standard output has exited
            raise
        except OSError as error:
            if not self._missing:
                what = error.filename or (name if name == SHOWN_NAME else self._dir / name)
                cure = cure_of(error, "run.dir")
                _tell(f"run folder: cannot write {what}: {error.strerror}: training continues; {cure}")
            self._missing[name] += 1

    @contextmanager
    def _writing(self):
        try:
            yield
        except OSError as error:
            path = error.filename or self._dir
            raise UserError(
                f"run folder: cannot write {path}: {error.strerror}: {cure_of(error, 'run.dir')}"
            ) from error


def _final(summary: dict) -> dict:
    """The figures of a summary by which runs are compared."""
    moved = moved_per_step(summary)
    task = {key: value for key, value in summary.items() if is_of_task(key, value)}
    return {**task, **{key: summary.get(key) for key in FINAL}, "mb_per_step": None if moved is None else moved / 1e6}


def _tell(text: str) -> None:
    with suppress(OSError):
        print(f"hetmpi: {text}", file=sys.stderr, flush=True)


def _missing_text(name: str, count: int) -> str:
    """A missing file, or the number of entries missing in it."""
    return f"{count} entries of {name}" if name.endswith(".jsonl") or "tfevents" in name else name


def _jsonable(value):
    """Converts value for JSON: NumPy numbers to Python's, numbers that are not finite to None."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    return value


def is_until(line: bytes, step: int, files: Collection[str] | None) -> bool:
    """Whether a logged line is of a step up to `step`, at this step of no other file than `files`; a damaged one is
    not."""
    try:
        values = json.loads(line)
        is_other = files is not None and "file" in values and values["file"] not in files
        return float(values["step"]) < step or (float(values["step"]) == step and not is_other)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return False
