"""What a person sees of a run, and what stays of it: rank 0's run folder, the progress shown, the summary.

The run folder holds
  config.yaml       the resolved configuration
  metrics.jsonl     one line per logged step, each with at least `step` and `loss`; of the trainer's also
                    samples    of the stream, so far
                    elapsed_s  seconds of training so far, evaluation not counted; a resumed run goes on from its last
                               line
                    own_ms_min, own_ms, own_ms_max, slowest_rank  a rank's own work (spans.OWN) per step: the least,
                                                                  mean and
                               most over ranks, and whose is most
  evaluation.jsonl  one line per evaluation, each with at least `step`; samples and elapsed_s as above
  events.out.tfevents.*  both again, for TensorBoard
  trace.json        with train.profile=true: every rank's last steps, for chrome://tracing or Perfetto
  summary.json      written when the run has ended, and only then; complete whenever it is there. by_rank: host and ms
                    per step, part by part, of every rank
  report.html       if ./run.sh report was asked for it

JSON has no NaN and no infinity: such values are written as null.

A folder that cannot be written when the run begins is refused. One that cannot be written later, on a full disk say,
does not end the run: it is said once, each line or file is tried anew, and the end of the run names what is missing.
"""

import io
import json
import math
import numbers
import os
import socket
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

from hetmpi.errors import UserError


def bytes_text(count: float) -> str:
    """A number of bytes in decimal units: 1,234,567 is '1.2 MB'."""
    if count < 1000:
        return f"{count:.0f} B"
    power = min(int(math.log10(count)) // 3, 4)
    return f"{count / 1000**power:.1f} {' kMGT'[power]}B"


SHOWN_NAME = "standard output"

# What a line shows, in this order: key -> (word before the value, how the value is written). Others are only stored,
# and those without a word only shown in the summary.
SHOWN = {
    "loss": ("loss", "{:.4f}".format),
    "step_ms": ("", "{:.1f} ms".format),
    "samples_per_s": ("", "{:,.0f} samples/s".format),
    "hit_rate": ("hit", "{:.1%}".format),
    "stale_rate": ("stale", "{:.1%}".format),
    "lag_p99": ("lag p99", "{:.0f}".format),
    "pulled_bytes": ("pulled", bytes_text),
    "pushed_bytes": ("pushed", bytes_text),
    "reduced_bytes": ("reduced", bytes_text),
    "clock_bytes": (None, bytes_text),
    "row_bytes": (None, bytes_text),
    "auc": ("auc", "{:.4f}".format),
    "log_loss": ("log loss", "{:.4f}".format),
    "teacher_auc": ("teacher auc", "{:.4f}".format),
    "seconds": ("", "{:.1f} s".format),
}


class RunLog:
    """Rank 0's record of one run. `close` it in a `finally`: a terminal gets its cursor back.

    A run into a folder that holds an earlier one replaces that one's files, but one that is resumed keeps what was
    written up to there. earlier_s: the `elapsed_s` of what was kept, 0.0 if nothing was.

    Args: run_dir: the folder, made if missing; config_yaml: text of config.yaml; total_steps: where the progress bar
    ends, None if unknown; resumed_at: steps made before, 0 for a new run.
    Raises UserError with one sentence (what, why, cure) when the folder cannot be written. Its methods do not: see
    above.
    """

    def __init__(self, run_dir: str | os.PathLike, config_yaml: str, total_steps: int | None, resumed_at: int = 0):
        # rich and tensorboard are imported here, not above: 0.15 s that only rank 0 has to spend.
        from rich.console import Console

        self._dir = Path(run_dir)
        with self._writing():
            self._dir.mkdir(parents=True, exist_ok=True)
            for name in (
                "summary.json",
                "trace.json",
                "report.html",
                *(() if resumed_at else ("events.out.tfevents.*",)),
            ):
                for old in self._dir.glob(name):
                    old.unlink()
            self.earlier_s = max(
                self._keep_until(self._dir / name, resumed_at) for name in ("metrics.jsonl", "evaluation.jsonl")
            )
            (self._dir / "config.yaml").write_text(config_yaml)
            self._events = _EventFile(self._dir)
        console = Console()
        self._shown = _Screen(console, total_steps) if _is_screen(console) else _Lines()
        self._missing = Counter()  # file -> lines or files that could not be written

    def step(self, values: dict) -> None:
        """Writes and shows one step's values: `step` (int), `loss`, and any other numbers by their name."""
        self._append("metrics.jsonl", values)
        with self._surviving(SHOWN_NAME):
            self._shown.step(values)

    def evaluation(self, values: dict) -> None:
        """Writes and shows an evaluation: `step` (int), `auc`, `log_loss`, and any other numbers by their name."""
        self._append("evaluation.jsonl", values)
        with self._surviving(SHOWN_NAME):
            self._shown.evaluation(values)

    def note(self, text: str) -> None:
        """Shows a sentence."""
        with self._surviving(SHOWN_NAME):
            print(f"hetmpi: {text}", flush=True)

    def finish(self, summary: dict) -> None:
        """Shows the summary as a table and writes summary.json, whole or not at all."""
        with self._surviving(SHOWN_NAME):
            self._shown.close()
            self._shown.table([(key, value_text(key, value)) for key, value in summary.items() if key != "by_rank"])
        self.write("summary.json", json.dumps(_jsonable(summary), indent=2, allow_nan=False) + "\n")

    def write(self, name: str, text: str) -> None:
        """Writes another file of the run folder, whole or not at all."""
        part = self._dir / f"{name}.part"
        with self._surviving(name):
            try:
                part.write_text(text)
                part.replace(self._dir / name)
            except OSError:
                with suppress(OSError):
                    part.unlink()
                raise

    def close(self) -> None:
        """Ends the progress display and says what is missing in the folder; may be called twice."""
        with self._surviving(SHOWN_NAME):
            self._shown.close()
            sys.stdout.flush()
        if SHOWN_NAME in self._missing:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # Python flushes it again and would exit with 120
        if self._missing:
            _tell(f"run folder {self._dir} lacks {', '.join(_missing_text(*item) for item in self._missing.items())}")
            self._missing.clear()

    def _keep_until(self, path: Path, step: int) -> float:
        """Drops the lines of later steps, and one that was cut short. Returns the last elapsed_s kept, 0.0 if there is
        none."""
        if not path.exists():
            return 0.0
        kept = [
            line
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n") and json.loads(line)["step"] <= step
        ]
        path.write_text("".join(kept)) if kept else path.unlink()
        return json.loads(kept[-1]).get("elapsed_s", 0.0) if kept else 0.0

    def _append(self, name: str, values: dict) -> None:
        line = json.dumps(_jsonable(values), allow_nan=False) + "\n"
        with self._surviving(name):
            _append(self._dir / name, line.encode())
        with self._surviving(self._events.path.name):
            self._events.append(values)

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


class _EventFile:
    """TensorBoard's event file, written record by record.

    By tensorboard's own record writer and no SummaryWriter: no thread beside the training, a tenth of the time per step
    (40 us for 8 values), and a full disk is an exception here, not a traceback of another thread.
    """

    def __init__(self, folder: Path):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._histogram_proto = HistogramProto
        self._event, self._summary, self._record_writer = Event, Summary, RecordWriter
        self.path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def append(self, values: dict) -> None:
        """Every number of values under its key, at values["step"]."""
        shown = [
            self._summary.Value(tag=key, simple_value=value)
            for key, value in values.items()
            if key != "step" and isinstance(value, numbers.Real)
        ]
        if values.get("lags"):
            shown.append(self._summary.Value(tag="lags", histo=self._histogram(values["lags"])))
        self._write(self._event(wall_time=time.time(), step=values["step"], summary=self._summary(value=shown)))

    def _histogram(self, lags: list[int]):
        """lags as EmbeddingTable counts them: bin 0 no lag, bin i lags below 2^i."""
        limits = [2**i - 0.5 for i in range(len(lags))]
        middles = [0.0] + [1.5 * 2 ** (i - 1) - 0.5 for i in range(1, len(lags))]
        return self._histogram_proto(
            min=0, max=max(limit for limit, count in zip(limits, lags) if count), num=sum(lags),
            sum=sum(m * n for m, n in zip(middles, lags)), sum_squares=sum(m * m * n for m, n in zip(middles, lags)),
            bucket_limit=limits, bucket=lags,
        )  # fmt: skip

    def _write(self, event) -> None:
        record = io.BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        _append(self.path, record.getvalue())


def _append(path: Path, data: bytes) -> None:
    """Adds data to a file's end, whole or not at all, and leaves nothing to fail later. Raises OSError."""
    begin = None
    try:
        with open(path, "ab") as file:
            begin = file.tell()
            file.write(data)
    except OSError as error:
        error.filename = error.filename or str(path)
        if begin is not None:
            with suppress(OSError):
                os.truncate(path, begin)
        raise


def _tell(text: str) -> None:
    with suppress(OSError):
        print(f"hetmpi: {text}", file=sys.stderr, flush=True)


def _missing_text(name: str, count: int) -> str:
    """What is missing: a file, or how many entries of it."""
    return f"{count} entries of {name}" if name.endswith(".jsonl") or "tfevents" in name else name


class _Lines:
    """Progress as plain lines, for a pipe or a file."""

    def step(self, values: dict) -> None:
        print(f"r0 | step {values['step']} | {_line(values)}", flush=True)

    evaluation = step

    def table(self, rows: list[tuple[str, str]]) -> None:
        width = max((len(name) for name, _ in rows), default=0)
        for name, text in rows:
            print(f"{name:<{width}}  {text}", flush=True)

    def close(self) -> None:
        pass


class _Screen:
    """Progress as a bar that stays in its place, with evaluations above it, for a terminal."""

    def __init__(self, console, total_steps: int | None):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        # Drawn by `step` alone: a thread of rich would take time from the training ten times a second.
        self._progress = Progress(
            MofNCompleteColumn(), BarColumn(bar_width=10), TimeRemainingColumn(),
            TextColumn("{task.fields[line]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console, auto_refresh=False, expand=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total_steps, line="")
        self._progress.start()

    def step(self, values: dict) -> None:
        self._progress.update(self._task, completed=values["step"], line=_line(values), refresh=True)

    def evaluation(self, values: dict) -> None:
        self._progress.console.print(f"step {values['step']} | {_line(values)}", highlight=False)

    def table(self, rows: list[tuple[str, str]]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table("summary", "")
        for name, text in rows:
            table.add_row(name, Text(text))
        self._progress.console.print(table)

    def close(self) -> None:
        self._progress.stop()


def _is_screen(console) -> bool:
    """Whether a person's terminal is at the other end. TTY_COMPATIBLE=1 says so through a launcher's pipe."""
    if not console.is_terminal or os.environ.get("TTY_COMPATIBLE") == "1":
        return console.is_terminal
    try:
        # Open MPI gives its ranks a pseudo-terminal even when its own output goes to a file: one of no width.
        return os.get_terminal_size(console.file.fileno()).columns > 0
    except OSError:
        return False


def _line(values: dict) -> str:
    shown = [
        (word, text(values[key]))
        for key, (word, text) in SHOWN.items()
        if word is not None and values.get(key) is not None
    ]
    return " | ".join(f"{word} {text}".strip() for word, text in shown)


def value_text(key: str, value) -> str:
    """A value of the summary as a person reads it; '-' for None."""
    if value is None:
        return "-"
    if key in SHOWN:
        return SHOWN[key][1](value)
    if isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer() and abs(value) >= 1000):
        return f"{value:,.0f}"
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return f"{value:.4g}" if isinstance(value, numbers.Real) else str(value)


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
