"""Reads run folders, without MPI or torch."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np

from hetmpi.bounded_file import shown
from hetmpi.errors import UserError
from hetmpi.log import status
from hetmpi.log.figures import MOVED, is_of_task, moved_per_step
from hetmpi.log.lines import Lines
from hetmpi.log.run_files import (
    is_rank,
    read_curves,
    read_environment,
    read_lines,
    read_metrics,
    read_settings,
    read_status,
    read_summary,
)

CURE = "; continue with resume=auto"
SILENT_S, SILENT_TIMES = 60.0, 10  # a run without a log line for this time and this many usual intervals is late


class Run:
    """The contents of a run folder.

    name, number      its name, and its index among the compared runs
    settings          key -> value, keys as on the command line
    environment       contents of environment.json, {} if there is none
    lines, evaluations  contents of metrics.jsonl, as columns, and of evaluation.jsonl, without a truncated last line
    curves            contents of curves.json, {} if there is none
    summary           contents of summary.json, {} until the run has ended"""

    def __init__(self, folder: Path, name: str, number: int):
        """Raises UserError if `folder` is not a run folder or one of its files cannot be read."""
        if not os.path.isfile(folder / "config.yaml"):
            raise UserError(
                f"{shown(folder)} is not a run folder, as it has no config.yaml: name one that hetmpi.train wrote "
                "(run.dir), or a folder of such folders"
            )
        self.folder, self.name, self.number = folder, name, number
        self.settings = read_settings(folder / "config.yaml")
        self.environment, self.status = (
            read_environment(folder / "environment.json"),
            read_status(folder / status.STATUS),
        )
        self.lines, self.evaluations = read_metrics(folder / "metrics.jsonl"), read_lines(folder / "evaluation.jsonl")
        self.curves = read_curves(folder / "curves.json")
        self._add_moved_bytes()
        self.summary = read_summary(folder / "summary.json")
        by_rank = self.summary.get("by_rank")
        self.by_rank = by_rank if isinstance(by_rank, list) and all(map(is_rank, by_rank)) else []

    @cache
    def table(self, keys: tuple[str, ...], of: str = "lines") -> np.ndarray:
        """Values of keys in the log lines, or in the evaluations with of="evaluations": (n, number of keys) float64.
        Lines that lack a number for one of the keys are left out."""
        return (self.lines if of == "lines" else Lines.of(self.evaluations)).table(keys)

    def _add_moved_bytes(self):
        """Adds `moved_bytes`, bytes between ranks per step, to each line, and `moved_so_far`, bytes since the run
        began, to each evaluation; nothing instead of 0."""
        columns, steps = self.lines.columns, self.lines.columns.get("step", np.empty(0))
        counted = [np.nan_to_num(columns[key]) for key in MOVED if key in columns]
        moved = np.sum(counted, 0) if counted else np.zeros(len(steps))
        so_far = np.cumsum(moved * np.diff(steps, prepend=0))
        columns["moved_bytes"] = np.where(moved == 0, np.nan, moved)
        for line in self.evaluations:
            line["moved_so_far"] = float(np.interp(line["step"], [0, *steps], [0, *so_far])) or None

    @property
    def lags(self) -> list[float]:
        """Histogram of the lags of all reads, in the bins of TableGroup.lags; [] without a cache."""
        return self.lines.lags.tolist()

    @property
    def has_ended(self) -> bool:
        """Whether the run has finished and written its summary."""
        return bool(self.summary)

    def mean(self, key: str) -> float | None:
        """Mean over the log lines; None if they have no values."""
        found = self.table((key,))
        return float(found.mean()) if len(found) else None

    def figures(self) -> dict[str, float | None]:
        """The figures by which runs are compared: the task's metrics, and step_bytes, sample_bytes, samples_per_s,
        elapsed_s, hit_rate, lag_p99, samples. For a run that has not ended they are the values so far."""
        last = self.lines.last
        samples, seconds = last.get("samples"), last.get("elapsed_s", self.summary.get("seconds"))
        task = self.summary or (self.evaluations[-1] if self.evaluations else {})
        step_bytes = moved_per_step(self.summary) if self.summary else self.mean("moved_bytes")
        step_samples = samples / last["step"] if samples and last["step"] else None
        so_far = samples / seconds if samples and seconds else None
        return {
            **{key: task[key] for key in task if is_of_task(key, task[key])},
            "step_bytes": step_bytes,
            "sample_bytes": step_bytes / step_samples if step_samples and step_bytes is not None else None,
            "samples_per_s": (self.summary.get("samples_per_s") or None) if self.summary else so_far,
            "elapsed_s": seconds,
            "hit_rate": self.summary.get("hit_rate", self.mean("hit_rate")),
            "lag_p99": self.summary.get("lag_p99", self.mean("lag_p99")),
            "samples": samples,
        }

    def slowest_rank(self) -> str:
        """The rank that was most often the slowest, its host, and the share of log lines in which it was; '-' without
        lines."""
        counts = self.lines.slowest_ranks()
        if not counts:
            return "-"
        [(rank, times)] = counts.most_common(1)
        host = f" on {self.by_rank[rank]['host']}" if rank < len(self.by_rank) else ""
        return f"rank {rank}{host}, in {times / counts.total():.0%} of the lines"

    # State.

    def state(self, now: float) -> str:
        """The state of the run at `now` (seconds since 1970), derived from its files and the processes of this host."""
        resumed = self.settings.get("resume")
        return self._state(now) + (f"; resumed from {resumed}" if resumed else "")

    def _state(self, now: float) -> str:
        state = self.status.get("state")
        if self.summary:
            early = self.summary.get("ended_early")
            return f"finished after {self.summary['steps']:,} steps{f', early: {early}' if early else ''}"
        if state == status.FINISHED:
            return f"finished, but summary.json is missing; {self._last(now)}"
        if state == status.STOPPED:
            return f"stopped by a signal at step {self.status.get('step')}, saved{CURE}"
        if state == status.FAILED:
            return f"failed: {last_words(str(self.status.get('message')))}; {self._last(now)}"
        if state == status.RUNNING:
            return self._state_unless_killed(now)
        return f"not finished; state unknown; {self._last(now)}"

    def _state_unless_killed(self, now: float) -> str:
        """The state of a run with status `running`, which a killed process leaves unchanged."""
        host, is_alive, silent_s = self.status.get("host"), status.is_alive(self.status), self._silent_s(now)
        usual_s = self._usual_interval_s()
        is_late = silent_s > max(SILENT_S, SILENT_TIMES * usual_s)
        wait = f"no line for {span(silent_s)}" + (f", usually every {span(usual_s)}" if usual_s else "")
        if is_alive is False:
            return f"probably killed: its process on {host} ended without a message; {self._last(now)}{self._cure()}"
        if is_alive:
            return f"running{f', but {wait}' if is_late else ''}; {self._last(now)}"
        if is_late:
            return f"killed or hanging, on {host}: {wait}; {self._last(now)}{self._cure()}"
        return f"probably running, on {host} (processes there are not visible from here); {self._last(now)}"

    def _cure(self) -> str:
        return CURE if any(self.folder.glob("checkpoints/step-*/manifest.json")) else ""

    def _silent_s(self, now: float) -> float:
        return now - max(self._written(), self.status.get("time", 0.0))

    def _written(self) -> float:
        return os.path.getmtime(self.folder / "metrics.jsonl") if self.lines else 0.0

    def _usual_interval_s(self) -> float:
        """Median time between two log lines; 0 if there are fewer than two."""
        times = self.table(("elapsed_s",))[:, 0]
        return float(statistics.median(np.diff(times))) if len(times) > 1 else 0.0

    def _last(self, now: float) -> str:
        if not self.lines:
            return "no step logged"
        of_all = f" of {self.settings['steps']:,}" if isinstance(self.settings.get("steps"), int) else ""
        return f"last logged step {self.lines.last['step']:,}{of_all}, {span(round(now - self._written()))} ago"


def last_words(message: str) -> str:
    """The part of a failing rank's message after its traceback."""
    return " ".join(message.rpartition("hetmpi: ")[2].split())


def span(seconds: float) -> str:
    """A duration in a suitable unit: '12 s', '5 min'. A float below ten seconds gets one decimal: '0.1 s'."""
    unit, size = next((u for u in (("days", 86400), ("h", 3600), ("min", 60)) if seconds >= 2 * u[1]), ("s", 1))
    is_exact = isinstance(seconds, float) and seconds < 10
    return f"{max(0, seconds) / size:.{1 if is_exact else 0}f} {unit}"


# Folders.


def runs_of(folders: list[Path]) -> list[Run]:
    """The runs in these folders, each a run folder or a folder of run folders. Raises UserError as Run."""
    found = [run for folder in folders for run in run_folders(folder)]
    last_names = [os.path.basename(os.path.realpath(folder)) for folder in found]
    repeated = Counter(last_names)
    names = [str(folder) if repeated[name] > 1 else name for folder, name in zip(found, last_names)]
    return [Run(folder, name, number) for number, (folder, name) in enumerate(zip(found, names))]


def run_folders(folder: Path) -> list[Path]:
    """The run folders in `folder`, sorted with 2 before 10; [folder] if it is a run folder or contains none."""
    if os.path.isfile(folder / "config.yaml"):
        return [folder]
    return sorted((path.parent for path in folder.glob("*/config.yaml")), key=natural) or [folder]


def natural(path: Path) -> list:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", path.name) if part]


def differing_settings(runs: list[Run]) -> dict[str, list[str]]:
    """Key -> its value in each run, for the settings that differ."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = {key: [setting_text(run.settings.get(key, "-")) for run in runs] for key in keys}
    for key, name in (("run.dir", ""), ("checkpoint.dir", "/checkpoints")):  # these always differ by default
        if all(run.settings.get(key) == f"{run.settings.get('run.dir')}{name}" for run in runs):
            rows.pop(key, None)
    return {key: texts for key, texts in rows.items() if len(set(texts)) > 1}


def setting_text(value) -> str:
    """A value as written in config.yaml."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
