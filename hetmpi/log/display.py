"""Displays a run on standard output: log lines in a pipe or a file, a progress bar in a terminal, and closing lines."""

from __future__ import annotations

import os
import shlex
import textwrap
import time

from hetmpi.log.figures import MOVED, is_of_task, megabytes_text, moved_per_step, shown, value_text
from hetmpi.spans import IDLE, PARTS, Spans
from hetmpi.world.commands import command

SILENT_S = 10.0  # maximum time between two plain lines
WORD_WIDTH = 8  # of the label of a closing line


def display(spans: Spans, first_step: int, total_steps: int | None, step_samples: int):
    """Returns a display that suits standard output. It has step(values), evaluation(values), close(), and tick(), which
    the caller calls a few times per second.

    spans: of rank 0; `step` and `doing` are its current progress. step_samples: samples per step over all ranks."""
    from rich.console import Console  # a slow import, needed only on rank 0

    console = Console()
    if is_screen(console):
        return Screen(console, spans, first_step, total_steps)
    return Lines(spans, first_step, step_samples)


class Lines:
    """Prints a line per logged step, and a progress line after SILENT_S without one."""

    def __init__(self, spans: Spans, first_step: int, step_samples: int):
        self._spans, self._step_samples = spans, step_samples
        self._steps, self._said_at, self._moved_at = first_step, time.monotonic(), time.monotonic()

    def step(self, values: dict) -> None:
        self._say(values["step"], shown(values))

    evaluation = step

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._said_at < SILENT_S or self._spans.doing == IDLE:
            return
        steps = max(self._spans.step, self._steps)
        if steps > self._steps:
            speed = (steps - self._steps) * self._step_samples / (now - self._moved_at)
            self._say(steps, [f"{value_text('samples_per_s', speed)} since step {self._steps}"])
        else:
            self._say(steps, [f"no step ended for {now - self._moved_at:.0f} s, in {self._spans.doing}"])

    def close(self) -> None:
        pass

    def _say(self, steps: int, parts: list[str]):
        now = time.monotonic()
        self._said_at = now
        if steps > self._steps:
            self._steps, self._moved_at = steps, now
        print(" | ".join(["r0", f"step {steps}", *parts]) + "\n", end="", flush=True)


class Screen:
    """A progress bar across the terminal, updated at each tick, with the last logged metrics below it and evaluations
    above it."""

    def __init__(self, console, spans: Spans, first_step: int, total_steps: int | None):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text

        class Bar(Progress):
            figures: list[str] = []

            def get_renderables(self):
                yield self.make_tasks_table(self.tasks)
                yield Text("\n".join(folded(self.figures, console.width - 1)), "dim", no_wrap=True)

        self._spans, self._first_step = spans, first_step
        self._bar = Bar(
            SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=None),
            TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True),
            console=console, auto_refresh=False, expand=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total_steps, completed=first_step)
        self._bar.start()

    def step(self, values: dict) -> None:
        self._bar.figures = shown(values)
        self._draw(values["step"])

    def evaluation(self, values: dict) -> None:
        self._bar.console.print(" | ".join([f"step {values['step']}", *shown(values)]), highlight=False)

    def tick(self) -> None:
        self._draw(max(self._spans.step, self._first_step))

    def close(self) -> None:
        self._bar.stop()

    def _draw(self, steps: int):
        doing = "training" if self._spans.doing in PARTS else self._spans.doing
        steps = max(steps, int(self._bar.tasks[0].completed))
        self._bar.update(self._task, completed=steps, description=f"{doing:<10}", refresh=True)


def folded(parts: list[str], width: int) -> list[str]:
    """Joins parts with " | " into lines of at most `width` characters. Parts are not split, so a long part can make a
    longer line."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" | {part}"
        else:
            lines.append(part)
    return lines


def tell(lines: list[str], indent: str = "") -> None:
    """Prints lines. On a terminal they wrap between words, and continuation lines begin with `indent`."""
    from rich.console import Console

    console = Console()
    if is_screen(console):
        style = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
        lines = [textwrap.fill(line, console.width, **style) for line in lines]
    print("\n".join(lines), flush=True)


def is_screen(console) -> bool:
    """Whether standard output is a terminal that can display a progress bar. TTY_COMPATIBLE=1 asserts this for a
    launcher's pipe."""
    if console.is_dumb_terminal:
        return False
    if not console.is_terminal or os.environ.get("TTY_COMPATIBLE") == "1":
        return console.is_terminal
    try:
        # Open MPI gives its ranks a pseudo-terminal even when its own output goes to a file; the width is then 0.
        return os.get_terminal_size(console.file.fileno()).columns > 0
    except OSError:
        return False


# Closing lines.


def tell_ending(summary: dict, predicts: str | None = None) -> None:
    """Prints the closing lines of a run."""
    tell(ending(summary, predicts), " " * WORD_WIDTH)


def ending(summary: dict, predicts: str | None = None) -> list[str]:
    """The closing lines: quality, speed, bytes, path of the model, next commands; also the reason if training ended
    early, and the best evaluation if a metric was followed or the last one was worse. predicts: what `hetmpi predict`
    takes besides the checkpoint, None if the model has no predictions."""
    followed = f"best_{summary.get('best_metric')}"
    metrics = [key for key in summary if is_of_task(key, summary[key]) and key != followed]
    quality = [f"{label(key)} {value_text(key, summary[key])}" for key in metrics]
    rows = {
        **({"end": f"after step {summary['steps']:,}: {summary['ended_early']}"} if "ended_early" in summary else {}),
        "quality": ", ".join(quality) or "not measured",
        **({"best": best(summary)} if "best_metric" in summary else {}),
        "speed": speed(summary),
        "bytes": traffic(summary),
        "model": summary.get("checkpoint") or not_kept(summary),
        "next": f"{report_command()} {shlex.quote(str(summary['run_dir']))}",
    }
    checkpoint = summary.get("best_checkpoint") or summary.get("checkpoint")
    if predicts is not None and checkpoint is not None:
        rows["predict"] = f"{command('predict')} {shlex.quote(str(checkpoint))} {predicts}"
    return [f"{name:<{WORD_WIDTH}}{text}" for name, text in rows.items()]


def best(summary: dict) -> str:
    """The best evaluation, and its checkpoint if that is kept."""
    metric, step, path = (summary.get(f"best_{name}") for name in ("metric", "step", "checkpoint"))
    if step is None:
        return f"{label(metric)} was undefined in every evaluation"
    text = f"{label(metric)} {value_text(metric, summary[f'best_{metric}'])} at step {step:,}"
    if "best_checkpoint" not in summary and step < summary["steps"]:
        return f"{text}; checkpoint.best={metric} keeps such a checkpoint"
    return f"{text}, in {path}" if path else text


def steps_made(summary: dict) -> int:
    """Number of steps that this run made, without those before it was resumed."""
    return summary["steps"] - summary.get("first_step", 0)


def speed(summary: dict) -> str:
    if not steps_made(summary):
        return "no step was made"
    per_second = value_text("samples_per_s", summary["samples_per_s"])
    return f"{per_second}, {steps_made(summary):,} steps in {value_text('seconds', summary['seconds'])}"


def label(key: str) -> str:
    known = {"auc": "AUC", "teacher_auc": "AUC of the true probabilities", "progressive_auc": "progressive AUC"}
    return known.get(key, key.replace("_", " "))


def traffic(summary: dict) -> str:
    """Bytes between ranks per step, by kind, and the cache's hit rate."""
    rate = summary.get("hit_rate")
    cache = "no cache in use" if rate is None else f"cache hits {value_text('hit_rate', rate)}"
    moved = moved_per_step(summary)
    if moved is None:
        return f"no step was made; {cache}"
    if summary["world_size"] == 1:
        return f"0 MB between ranks: only one rank; {cache}"
    kinds = [
        f"{key.removesuffix('_bytes')} {megabytes_text(summary[key] / steps_made(summary)).removesuffix(' MB')}"
        for key in MOVED
        if summary.get(key) is not None
    ]
    ranks = "ranks of one node" if summary["is_one_node"] else "ranks"
    return f"{megabytes_text(moved)} per step between {ranks} ({', '.join(kinds)}); {cache}"


def not_kept(summary: dict) -> str:
    made_none = summary.get("steps") == summary.get("first_step")
    return "not saved: no step was made" if made_none else "not saved: checkpoint.at_end=false"


def report_command() -> str:
    """The command that writes a report, to be entered in the folder where this run was started."""
    return command("report")
