"""Plotly figures that compare runs. A run has the same colour in all of them.

A picture draws record.Run objects: `number` (index of the run), `name`, `table(keys, of)` (values of its log lines) and
`by_rank` (from its summary). It has a title, a caption, `shown(runs)`: the runs with data to draw, `why`: the reason
given for the other runs, and `figure(runs)`: {"data": traces, "layout": axes} for Plotly.newPlot. The `meta` of a trace
is the number of its run. The page sets the colours of text and grid. A figure over samples has a third entry, "time":
{"x": the traces' x values over time, "title": of that axis}.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from hetmpi.log.figures import bytes_text, figure_of, is_of_task
from hetmpi.spans import OWN, PARTS, WAITS

# The palette of Okabe and Ito, chosen for colour-blind readers.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("solid", "dash", "dot")  # the next one after each use of all colours
PART_COLOURS = {  # own work in blue, the table in orange
    **dict(zip(OWN, ("#b3d4ec", "#6baed6", "#2f7fbc", "#0b4a8a"))),
    **dict(zip(WAITS, ("#fdd49e", "#fdae6b", "#f08030", "#c85010", "#843000"))),
    "allreduce": "#8c8c8c",
}
MOST_POINTS = 400  # per line; neighbours are averaged to get there
MOST_COLUMNS = 30  # whose unseen values are drawn
MOST_MARKS = 25  # lines with more points are drawn without markers
DIGITS = 6  # significant digits of numbers in the page
X_AXES = {  # key -> possible units of the axis: (size, label)
    "samples": [(1, "samples"), (1e3, "thousand samples"), (1e6, "million samples"), (1e9, "billion samples")],
    "elapsed_s": [(1, "seconds of training"), (60, "minutes of training"), (3600, "hours of training")],
    "moved_so_far": [
        (1, "bytes between ranks"), (1e3, "kB between ranks"), (1e6, "MB between ranks"), (1e9, "GB between ranks"),
    ],
}  # fmt: skip
PROGRESS = ("samples", "elapsed_s")  # the x axes between which the page's switch chooses
NO_LINES, NO_EVALUATION = "no step is logged yet", "no evaluation has measured it"
ONE_POINT = {
    "lines": "one step is logged (log.every_steps)",
    "evaluations": "it was evaluated once (eval.every_steps)",
}
NO_CACHE = "no rows were read from a cache: table.staleness=0, or table.cache has no capacity"
FLUSHES = "With a staleness bound, an evaluation or a checkpoint first pushes all pending gradients."
NO_BYTES = "no bytes cross between ranks"


def style_of(run) -> dict:
    """Colour and dash of a run's lines."""
    number = run.number
    return {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number // len(COLOURS) % len(DASHES)]}


def thinned(table: np.ndarray) -> np.ndarray:
    """Averages neighbouring rows: (n, k) -> (at most MOST_POINTS, k)."""
    if len(table) <= MOST_POINTS:
        return table
    begins = np.arange(MOST_POINTS) * len(table) // MOST_POINTS
    return np.add.reduceat(table, begins) / np.diff(begins, append=len(table))[:, None]


def running_mean(table: np.ndarray, width: int) -> np.ndarray:
    """The mean of each `width` neighbouring rows: (n, k) -> (n - width + 1, k)."""
    return np.stack([np.convolve(column, np.full(width, 1 / width), "valid") for column in table.T], 1)


def unit_of(x: str, most: float) -> tuple[float, str]:
    """Size of the unit and label for an axis that ends at `most`."""
    return [unit for unit in X_AXES[x] if unit == X_AXES[x][0] or most >= 2 * unit[0]][-1]


def short(values) -> list[float]:
    """Rounds numbers to DIGITS significant digits."""
    return [float(f"{value:.{DIGITS}g}") for value in values]


class Axes:
    """The x axes of a figure, one at a time, and its traces. The page's switch changes from the first axis to the
    second, if there is one.

    keys: of the x values in a log line. tables: the points of each run, (n, number of keys or more), x values first."""

    def __init__(self, keys: tuple[str, ...], tables):
        ends = np.max([table[-1, : len(keys)] for table in tables], 0)
        units = [unit_of(key, most) for key, most in zip(keys, ends)]
        self.sizes, self.labels = np.array([size for size, _ in units]), [label for _, label in units]
        self.traces, self.times = [], []

    def add(self, run, x, y, **more):
        """Adds a trace, as trace(). x: (n, number of keys or more)"""
        x = x[:, : len(self.sizes)] / self.sizes
        self.traces.append(trace(run, x[:, 0], y, **more))
        self.times.append(short(x[:, -1]))

    def figure(self, label: str, **of_y) -> dict:
        """The figure. label, of_y: of the y axis."""
        found = {"data": self.traces, "layout": axes(self.labels[0], label, **of_y)}
        return found if len(self.labels) == 1 else {**found, "time": {"x": self.times, "title": self.labels[1]}}


def trace(run, x, y, **more) -> dict:
    """A trace of a run: a line, unless `more` overrides its keys."""
    values = {"type": "scatter", "mode": "lines", "name": escape(run.name), "meta": run.number, "x": short(x)}
    return {**values, "y": short(y), "line": {"width": 2, **style_of(run)}, **more}


def marked(x) -> str:
    """The plotly mode of a line with these points."""
    return "lines+markers" if len(x) <= MOST_MARKS else "lines"


def hidden(**line) -> dict:
    """Keys of a trace without hover text."""
    return {"hoverinfo": "skip", "line": line}


def axes(x: str, y: str, **of_y) -> dict:
    """A layout with the labels of its axes."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, **of_y}}


class Picture:
    """Base class of pictures. run: the only run that it shows, None for a picture of all runs."""

    caption, why, run = "", NO_LINES, None

    def shown(self, runs: list) -> list:
        """The runs that have data to draw."""
        return [run for run in runs if len(self.points(run))]

    def reason(self, run) -> str:
        """Why a run is not shown."""
        return self.why


@dataclass(frozen=True)
class Curve(Picture):
    """A line per run.

    key, x: keys of the y values and of the x axes in a log line. label: of the y axis. text: plotly's format of a y
    value. times: factor applied to y values. of: "lines" or "evaluations". is_noisy: draw a running mean over the faint
    original line. is_from_zero: begin the y axis at 0."""

    title: str
    key: str
    label: str
    text: str = ".4f"
    x: tuple[str, ...] = PROGRESS
    times: float = 1
    of: str = "lines"
    is_noisy: bool = False
    is_from_zero: bool = False
    caption: str = ""
    why: str = NO_LINES

    def points(self, run) -> np.ndarray:
        """(n, number of x axes + 1)"""
        return run.table((*self.x, self.key), self.of) * (*(1 for _ in self.x), self.times)

    def shown(self, runs: list) -> list:
        """The runs with a line to draw; a single value stands in the table of figures."""
        return [run for run in runs if len(self.points(run)) > 1]

    def reason(self, run) -> str:
        return ONE_POINT[self.of] if len(self.points(run)) else self.why

    def figure(self, runs: list) -> dict:
        drawn = Axes(self.x, map(self.points, runs))
        for run in runs:
            points = thinned(self.points(run))
            if self.is_noisy and len(points) >= 20:
                drawn.add(run, points, points[:, -1], opacity=0.3, **hidden(width=1, **style_of(run)))
                points = running_mean(points, max(5, len(points) // 20))
            drawn.add(run, points, points[:, -1], mode=marked(points))
        return drawn.figure(self.label, hoverformat=self.text, rangemode="tozero" if self.is_from_zero else "normal")


@dataclass(frozen=True)
class CurveOfStep(Picture):
    """A curve of the best evaluation. key: in the run's curves. ends: of the dashed line, None for none."""

    title: str
    key: str
    x: str
    y: str
    ends: tuple[tuple[float, float], tuple[float, float]] | None = None
    caption: str = ""
    why: str = "it has no predictions of two labels"

    def points(self, run) -> list:
        """x, y and further numbers of each point."""
        return run.curves.get(self.key, [])

    def figure(self, runs: list) -> dict:
        traces = []
        for run in runs:
            x, y, *more = zip(*self.points(run))
            said = f"step {run.curves['step']:,}: %{{x:.3g}}, %{{y:.3g}}"
            about = {"customdata": more[0], "hovertemplate": f"{said}, %{{customdata:,}} samples"} if more else {}
            traces.append(trace(run, x, y, mode=marked(x), **(about or {"hovertemplate": said})))
        if self.ends is not None:
            (x, y), line = zip(*self.ends), {"width": 1, "dash": "dot", "color": "#8c8c8c"}
            traces.append({"type": "scatter", "mode": "lines", "x": x, "y": y, "hoverinfo": "skip", "line": line})
        return {"data": traces, "layout": {**axes(self.x, self.y), "hovermode": "closest"}}


def unseen_shares(run) -> dict[str, float]:
    """Column -> percentage of its held-out values that training had not seen, the largest first."""
    shares = {name: 100 * unseen / max(1, num) for name, (unseen, num) in run.curves.get("unseen", {}).items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1])[:MOST_COLUMNS])


def of_best_step(runs: list) -> list:
    """Pictures of the best evaluation, if a run has its curves."""
    caption = "Of the best evaluation of all held-out samples."
    most = max((max(point[:2]) for run in runs for point in run.curves.get("calibration", [])), default=1)
    found = [
        CurveOfStep(
            "Calibration by tenths", "calibration", "mean prediction", "share of label 1", ((0, 0), (most, most)),
            "A point per tenth of the predictions; on the dotted line the predictions are right on average.",
        ),
        CurveOfStep("ROC curve", "roc", "false positive rate", "true positive rate", ((0, 0), (1, 1)), caption),
        CurveOfStep("Precision over recall", "precision", "recall", "precision", None, caption),
        Bars(
            "Unseen held-out values", unseen_shares, "% of a column's values", "{:.3g} %".format,
            "Held-out values that training had not seen, by a sample.", "all were seen, or no column has a vocabulary",
        ),
    ]  # fmt: skip
    return found if any(run.curves for run in runs) else []


class Band(Picture):
    """The spread of own work over ranks."""

    title = "Own work of the ranks"
    caption = "Load, find, forward and backward: minimum, mean and maximum over ranks."
    why = "it needs at least two ranks, and two logged steps"

    def shown(self, runs: list) -> list:
        return [run for run in runs if len(self.points(run)) > 1]

    def points(self, run) -> np.ndarray:
        """(n, 5); empty for a single rank."""
        table = run.table((*PROGRESS, "own_ms_min", "own_ms", "own_ms_max"))
        return table if (table[:, 2] < table[:, 4]).any() else table[:0]

    def figure(self, runs: list) -> dict:
        drawn = Axes(PROGRESS, map(self.points, runs))
        for run in runs:
            points = thinned(self.points(run))
            least, mean, most = points[:, 2:].T
            around = [short(pair) for pair in zip(least, most)]
            fill = {"fill": "tonexty", "fillcolor": f"{style_of(run)['color']}38"}
            said = "%{y:.2f} ms, %{customdata[0]:.2f} to %{customdata[1]:.2f} ms"
            drawn.add(run, points, least, **hidden(width=0))
            drawn.add(run, points, most, **fill, **hidden(width=0))
            drawn.add(run, points, mean, mode=marked(points), customdata=around, hovertemplate=said)
        return drawn.figure("own work, ms per step", rangemode="tozero")


class Ranks(Picture):
    """Each rank's own work over the run."""

    title, caption = "Own work, rank by rank", "Mean over the run."
    why = "it needs at least two ranks and a finished run"

    def points(self, run) -> np.ndarray:
        """(ranks,); empty for a single rank."""
        own = np.array([rank["own_ms"] for rank in run.by_rank])
        return own if len(own) > 1 else own[:0]

    def figure(self, runs: list) -> dict:
        traces = []
        for place, run in enumerate(runs):
            own = self.points(run)
            aside = 0.3 * (place / len(runs) - 0.5 + 0.5 / len(runs)) if len(own) <= 32 else 0.0  # no overlap
            places = [f"rank {number} on {escape(str(rank['host']))}" for number, rank in enumerate(run.by_rank)]
            said = "%{customdata}: %{y:.2f} ms<extra>%{fullData.name}</extra>"
            marker = {"color": style_of(run)["color"], "size": 9 if len(own) <= 32 else 5}
            x = np.arange(len(own)) + aside
            traces.append(trace(run, x, own, mode="markers", marker=marker, customdata=places, hovertemplate=said))
        layout = axes("rank", "own work, ms per step", rangemode="tozero")
        most = max(len(run.by_rank) for run in runs)
        layout["xaxis"] |= {"range": [-0.5, most - 0.5], **({"dtick": 1} if most <= 16 else {})}
        return {"data": traces, "layout": {**layout, "hovermode": "closest"}}


@dataclass(frozen=True)
class Bars(Picture):
    """Groups of bars, a bar per run. values(run): group -> number, {} without data. text: formats a number."""

    title: str
    values: Callable
    label: str
    text: Callable[[float], str] = "{:.3g}".format
    caption: str = ""
    why: str = NO_LINES

    def points(self, run) -> dict:
        values = self.values(run)
        return values if any(values.values()) else {}

    def figure(self, runs: list) -> dict:
        bars = [self.points(run) for run in runs]
        groups = max(bars, key=len)
        is_roomy = len(runs) * len(groups) <= 12
        traces = []
        for run, values in zip(runs, bars):
            heights = [values.get(group, 0) for group in groups]
            texts = [self.text(height) for height in heights]
            drawn = {"text": texts, "textposition": "outside" if is_roomy else "none", "cliponaxis": False}
            said = {"customdata": texts, "hovertemplate": "%{customdata}"}
            bar = {"type": "bar", "name": escape(run.name), "meta": run.number, "x": list(groups), "y": short(heights)}
            pattern = ("", "/", "x")[run.number // len(COLOURS) % len(DASHES)]
            marker = {"color": style_of(run)["color"], "pattern": {"shape": pattern}}
            traces.append({**bar, **drawn, **said, "marker": marker})
        layout = axes("", self.label)
        layout["xaxis"] |= {"showgrid": False, "type": "category"}
        if self.text is bytes_text:
            layout["yaxis"] |= {"ticksuffix": "B", "exponentformat": "SI"}
        return {"data": traces, "layout": layout}


class Stack(Picture):
    """The parts of a step of one run, stacked. most_ms: upper end of the y axis."""

    why = "it needs two logged steps"

    def __init__(self, run, most_ms: float):
        self.title, self.run, self.most_ms = f"A step of {run.name}", run, most_ms

    def shown(self, runs: list) -> list:
        return [self.run] if len(self.points(self.run)) > 1 else []

    def points(self, run) -> np.ndarray:
        """As stacked()."""
        return stacked(run)

    def figure(self, runs: list) -> dict:
        points = thinned(self.points(self.run))
        drawn = Axes(PROGRESS, [points])
        for (part, colour), ms in zip(PART_COLOURS.items(), points[:, 2:].T):
            said = {"name": part, "hovertemplate": "%{y:.2f} ms"}
            drawn.add(
                self.run, points, ms, stackgroup="parts", fillcolor=colour, line={"width": 0, "color": colour}, **said
            )
        return drawn.figure("ms per step", range=[0, round(self.most_ms, 3)])


def stacked(run) -> np.ndarray:
    """(n, 2 + number of parts): samples, seconds, ms of each part in the order of PART_COLOURS."""
    return run.table((*PROGRESS, *(f"{part}_ms" for part in PART_COLOURS)))


def means(run, keys: dict[str, str]) -> dict[str, float]:
    """Name of a group -> mean of its key over the log lines, without groups that have no values."""
    return {name: float(table.mean()) for name, key in keys.items() if len(table := run.table((key,)))}


def bytes_by_kind(run) -> dict[str, float]:
    """Bytes per step by kind: of the whole run including its last flush if it has ended, otherwise of the logged
    steps."""
    keys = {
        "rows pulled": "row_bytes",
        "clocks pulled": "clock_bytes",
        "gradients pushed": "pushed_bytes",
    }
    num_steps = run.summary.get("steps", 0) - (run.summary.get("first_step") or 0)
    if num_steps <= 0:
        return means(run, keys)
    return {name: run.summary[key] / num_steps for name, key in keys.items() if run.summary.get(key) is not None}


def ms_by_part(run) -> dict[str, float]:
    return means(run, {part: f"{part}_ms" for part in PARTS})


def lag_shares(run) -> dict[str, float]:
    """Range of lags -> percentage of the reads. The ranges are those of TableGroup.lags: 0, 1, 2 to 3, 4 to 7, ..."""
    counts = run.lags
    names = ["0", "1", *(f"{1 << i - 1}\N{EN DASH}{(1 << i) - 1}" for i in range(2, len(counts)))]
    total = sum(counts) or 1
    return {name: 100 * count / total for name, count in zip(names, counts)}


def evaluated(runs: list) -> list[str]:
    """Keys of the task's metrics in the evaluations, by default those of ctr.py. teacher_auc, the same at all steps, is
    left out."""
    keys = dict.fromkeys(key for run in runs for line in run.evaluations for key in line if is_of_task(key, line[key]))
    return [key for key in keys if key != "teacher_auc"] or ["auc", "log_loss"]


def title_of(key: str) -> str:
    return {"auc": "AUC", "progressive_auc": "Progressive AUC"}.get(key, key.replace("_", " ").capitalize())


def sections(runs: list) -> dict[str, list]:
    """Heading -> pictures of that section of the page."""
    of_task = [
        Curve(title_of(key), key, figure_of(key).name, of="evaluations", why=NO_EVALUATION) for key in evaluated(runs)
    ]
    loss = Curve("Loss", "loss", "training loss", is_noisy=True, caption="From 20 points on, bold is a running mean.")
    most_ms = max((thinned(table)[:, 2:].sum(1).max() for run in runs if len(table := stacked(run))), default=0)
    per_cent = {"text": ".2f", "times": 100, "why": NO_CACHE}
    behind = {"text": ".0f", "is_from_zero": True, "why": NO_CACHE}
    return {
        "Quality": [*of_task, loss, *of_best_step(runs)],
        "Bytes between ranks": [
            Bars("Bytes by kind", bytes_by_kind, "bytes per step, all ranks", bytes_text, "Mean over steps.", NO_BYTES),
            Curve(
                "Bytes of a step", "moved_bytes", "bytes per step, all ranks", ".3~s", is_noisy=True,
                is_from_zero=True, caption=FLUSHES, why=NO_BYTES,
            ),
            replace(
                of_task[0], title=f"{of_task[0].title} over bytes", x=("moved_so_far",),
                caption="Bytes since the run began.", why=NO_BYTES,
            ),
        ],
        "Cache": [
            Curve("Hit rate", "hit_rate", "% of cacheable reads served", **per_cent),
            Curve("Stale rate", "stale_rate", "% of cacheable reads found too old", is_from_zero=True, **per_cent),
            Curve("Staleness (median)", "lag_p50", "iterations behind, median", **behind),
            Curve("Staleness (p99)", "lag_p99", "iterations behind, 99th percentile", **behind),
            Bars(
                "Staleness of all reads", lag_shares, "% of the reads",
                caption="Iterations by which a row lagged when it was read.", why=NO_CACHE,
            ),
        ],
        "Speed": [
            Curve("Samples per second", "samples_per_s", "samples/s, all ranks", ",.0f", is_from_zero=True),
            Bars("Parts of a step", ms_by_part, "ms per step", caption="Mean over ranks and logged steps."),
            *(Stack(run, 1.05 * most_ms) for run in runs),
        ],
        "Ranks": [Band(), Ranks()],
    }  # fmt: skip
