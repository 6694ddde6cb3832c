"""Compares runs by their main figures: quality, speed, traffic, cache and settings; first in one sentence."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetmpi.log.figures import bytes_text, figure_of, megabytes_text, value_text
from hetmpi.log.record import Run, differing_settings, runs_of
from hetmpi.log.run_files import is_number

Row = tuple[str, list["Cell"]]


@dataclass(frozen=True)
class Cell:
    """A cell of the comparison. note: distance from the best value."""

    text: str
    note: str = ""
    is_best: bool = False


def difference(value: float, best: float) -> str:
    return f"{value - best:+.4f}".replace("-", "\N{MINUS SIGN}")


def points(value: float, best: float) -> str:
    return f"{100 * (value - best):+.1f} points".replace("-", "\N{MINUS SIGN}")


def ratio(value: float, best: float) -> str:
    if not best:
        return ""
    times = value / best
    return f"{times:.1f} times" if times >= 2 else f"{times - 1:+.0%}".replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True)
class Compared:
    """A row of the comparison. text: formats a value. best: max or min, whichever returns the better of two values;
    None: neither. distance: formats the distance between a value and the best."""

    name: str
    text: Callable[[float], str]
    best: Callable | None = None
    distance: Callable[[float, float], str] = ratio


COMPARED = {  # key of Run.figures() -> its row; these follow the rows of the task's metrics
    "samples_per_s": Compared("samples per second, all ranks", "{:,.0f}".format, max),
    "elapsed_s": Compared("seconds of training", "{:,.1f}".format, min),
    "step_bytes": Compared("bytes between ranks per step, all ranks", bytes_text, min),
    "sample_bytes": Compared("bytes between ranks per sample", bytes_text, min),
    "hit_rate": Compared("cacheable reads served from the cache", "{:.1%}".format, max, points),
    "lag_p99": Compared("staleness of a read, 99th percentile", "{:.0f} iterations".format),
    "samples": Compared("samples trained on", "{:,.0f}".format),
}
MOST = {"samples_per_s": "most", "sample_bytes": "fewest"}  # key of a row -> word for its best value in a sentence


def compared_rows(runs: list[Run], now: float) -> list[Row]:
    """The rows of the comparison: state at `now` (seconds since 1970), settings, figures. The best value of a row is
    marked."""
    figures = [run.figures() for run in runs]
    task = dict.fromkeys(key for found in figures for key in found if key not in COMPARED)
    of_task = {key: Compared(figure_of(key).name, figure_of(key).text, figure_of(key).best, difference) for key in task}
    rows = [
        *described(runs, {"state": lambda run: run.state(now), **WHAT_RAN}),
        *(values(compared, key, runs, figures) for key, compared in {**of_task, **COMPARED}.items()),
        *described(runs, WHERE_FROM),
    ]
    return [(name, cells) for name, cells in rows if {cell.text for cell in cells} != {"-"}]


def described(runs: list[Run], rows: dict[str, Callable[[Run], str]]) -> list[Row]:
    return [(name, [Cell(text(run)) for run in runs]) for name, text in rows.items()]


def values(compared: Compared, key: str, runs: list[Run], figures: list[dict]) -> Row:
    """The row of a figure. Runs that have not ended are not compared. Training times are compared only if all runs used
    the same number of samples."""
    found = [of_run.get(key) for of_run in figures]
    best = None if key == "elapsed_s" and len({of_run["samples"] for of_run in figures}) > 1 else compared.best
    known = [value for run, value in zip(runs, found) if run.has_ended and value is not None]
    first = best(known) if best and len(set(known)) > 1 else None
    return compared.name, [value_cell(compared, value, run.has_ended, first) for run, value in zip(runs, found)]


def value_cell(compared: Compared, value: float | None, has_ended: bool, first: float | None) -> Cell:
    """first: the best value, None if there is none."""
    if value is None:
        return Cell("-")
    text = compared.text(value)
    if not has_ended:
        return Cell(text, "so far")
    if first is None:
        return Cell(text)
    return Cell(text, "best", True) if value == first else Cell(text, compared.distance(value, first))


# In one sentence.


def conclusion(runs: list[Run]) -> str:
    """One sentence: the main figures of a run alone; of several, the finished runs with the best value of each."""
    ended = [run for run in runs if run.has_ended]
    if len(runs) == 1:
        return alone(runs[0])
    if not ended:
        return f"None of the {len(runs)} runs has finished: the table shows their states and their figures so far."
    if len(ended) == 1:
        return f"Of {len(runs)} runs one has finished: {alone(ended[0])}"
    return best_of(ended, len(runs))


def alone(run: Run) -> str:
    """The sentence on one run."""
    figures = run.figures()
    found = {
        key: (compared.text(figures[key]), plain_name(compared)) for key, compared in main_figures([figures]).items()
    }
    rates = [f"{text} {name.removeprefix('bytes ')}" for key, (text, name) in found.items() if key in MOST]
    reached = [f"reached {text} in {name}" for key, (text, name) in found.items() if key not in MOST]
    at = f", at {listed(rates)}" if rates else ""
    if run.has_ended:
        return f"{run.name} {''.join(reached) or 'finished'} after {counted(run.summary['steps'], 'step')}{at}."
    so_far = f"; so far it {''.join(reached) or 'trained'}{at}" if found else " and has no figures yet"
    return f"{run.name} has not finished{so_far}."


def best_of(runs: list[Run], num_runs: int) -> str:
    """The sentence on several finished runs, of `num_runs` in all."""
    figures = [run.figures() for run in runs]
    found: dict[str, list[str]] = {}  # subject and verb -> objects
    for key, compared in main_figures(figures).items():
        subject, said = winner(compared, MOST.get(key, "best"), runs, [of_run[key] for of_run in figures])
        found.setdefault(subject, []).append(said)
    of_runs = f"{len(runs)} runs" if len(runs) == num_runs else f"the {len(runs)} finished of {num_runs} runs"
    if len({of_run["samples"] for of_run in figures}) > 1:
        of_runs += ", which trained on different numbers of samples"
    clauses = [f"{subject} {listed(said)}" for subject, said in found.items()]
    return f"Of {of_runs}, {'; '.join(clauses) or 'no figure is known of all'}."


def main_figures(figures: list[dict]) -> dict[str, Compared]:
    """The rows of which the sentence tells, by key: the task's first metric with a better and a worse, the speed, the
    traffic. Those that a run lacks are left out."""
    common = [key for key in figures[0] if all(is_number(of_run.get(key)) for of_run in figures)]
    quality = [key for key in common if key not in COMPARED and figure_of(key).best][:1]
    of_task = {key: Compared(figure_of(key).name, figure_of(key).text, figure_of(key).best) for key in quality}
    return {**of_task, **{key: COMPARED[key] for key in MOST if key in common}}


def winner(compared: Compared, most: str, runs: list[Run], values: list[float]) -> tuple[str, str]:
    """The runs with the best value, with their verb, and what they have. Values that read the same are the same."""
    texts, best = [compared.text(value) for value in values], compared.text(compared.best(values))
    names = [run.name for run, text in zip(runs, texts) if text == best]
    if len(names) == len(runs):
        return "both have" if len(runs) == 2 else "all have", f"the same {plain_name(compared)} ({best})"
    second = compared.text(compared.best(value for value, text in zip(values, texts) if text != best))
    second = f"the {'other' if len(runs) == 2 else 'next'} {second}"
    verb = "has" if len(names) == 1 else "have"
    return f"{listed(names)} {verb}", f"the {most} {plain_name(compared)} ({best}, {second})"


def plain_name(compared: Compared) -> str:
    return compared.name.removesuffix(", all ranks")


def listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


# Descriptions of a run.


def model_text(run: Run) -> str:
    return f"{part_text(run, 'model', 'hetmpi.models.')} on {part_text(run, 'data', 'hetmpi.')}"


def part_text(run: Run, group: str, ours: str) -> str:
    """The name of a part of the run, or its class if that is not from this package."""
    target = str(run.settings.get(f"{group}._target_", ours))
    return run.settings.get(f"{group}_name", "?") if target.startswith(ours) else target


def ranks_text(run: Run) -> str:
    hosts = run.environment.get("ranks_by_host") or {}
    size = sum(hosts.values()) or run.summary.get("world_size")
    if not size:
        return "-"
    where = f" on {counted(len(hosts), 'host')} ({', '.join(list(hosts)[:3])})" if hosts else ""
    split = run.settings.get("table.ranks_per_node")
    nodes = f"split into nodes of {counted(split, 'rank')}" if split else ""
    device = run.environment.get("device") or run.summary.get("device")
    return ", ".join(filter(None, [counted(size, "rank") + where, device and str(device), nodes]))


def counted(count, noun: str) -> str:
    """count: as in a file: a number if the trainer wrote it."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}" if is_number(count) else f"{count} {noun}s"


def staleness_text(run: Run) -> str:
    bound = run.settings.get("table.staleness", 0)
    return "no bound" if bound is None else counted(bound, "iteration") if bound else "0: every read is exact"


def cache_text(run: Run) -> str:
    cache = {key.removeprefix("table.cache."): value for key, value in run.settings.items()}
    rows, fraction = cache.get("capacity_rows"), cache.get("capacity_fraction")
    is_default = rows is None and fraction is None
    if run.settings.get("table.staleness", 0) == 0 if is_default else not (rows or fraction):
        return "none"
    share = f"{fraction:.3g}" if is_number(fraction) else fraction
    size = "default size" if is_default else counted(rows, "row") if rows is not None else f"{share} of all rows"
    unused = "not used: " if run.has_ended and run.summary.get("hit_rate") is None else ""
    return f"{unused}{size} on each rank, {cache.get('policy')}, admits {cache.get('admit')}"


def commit_text(run: Run) -> str:
    commit = str(run.environment.get("commit") or "-")
    return commit[:10] + (", with uncommitted changes" if run.environment.get("is_modified") else "")


WHAT_RAN = {
    "model and data": model_text,
    "ranks": ranks_text,
    "staleness bound": staleness_text,
    "cache": cache_text,
}
WHERE_FROM = {
    "started": lambda run: str(run.environment.get("started", "-")),
    "commit": commit_text,
    "last checkpoint": lambda run: str(run.summary.get("checkpoint") or "-"),
    "best checkpoint": lambda run: str(run.summary.get("best_checkpoint") or "-"),
}


# As plain text.


def comparison(folders: list[Path]) -> str:
    """A plain-text table of the runs in these folders, at most 100 columns wide: AUC (or the task's first metric), its
    best value where runs followed it, MB between ranks per step, samples/s, and the settings that differ, shortest
    names first, on as many lines as they need. '-' is a missing value. Raises UserError as runs_of."""
    from rich.console import Console
    from rich.table import Table

    runs = runs_of(folders)
    figures, differing = [run.figures() for run in runs], differing_settings(runs)
    brief = sorted((key for key in differing if not key.endswith("._target_")), key=len)
    quality = next((key for found in figures for key in found if key not in COMPARED), "auc")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column("run", overflow="fold", max_width=36)
    heading = "AUC" if quality == "auc" else quality.replace("_", " ")
    shown = {quality: heading}
    if any(run.summary.get(f"best_{quality}") is not None for run in runs):
        shown[f"best_{quality}"] = f"best {heading}"
    for heading in (*shown.values(), "MB per step", "samples/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("settings that differ", overflow="fold", ratio=1)
    for place, (run, found) in enumerate(zip(runs, figures)):
        moved, speed = found["step_bytes"], found["samples_per_s"]
        table.add_row(
            run.name if run.has_ended else f"{run.name} (not ended)",
            *(value_text(quality, {**run.summary, **found}.get(key)) for key in shown),
            "-" if moved is None else megabytes_text(moved).removesuffix(" MB"),
            "-" if speed is None else f"{speed:,.0f}",
            " ".join(f"{key}={differing[key][place]}" for key in brief),
        )
    text = io.StringIO()
    Console(file=text, width=100, markup=False, highlight=False, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
