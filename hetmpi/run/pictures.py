"""Pictures of runs side by side, as SVG to stand in a page: a run has one colour in all of them, ink is the page's own.

What is drawn is a report.Run: `number` (its place), `table(keys, of)` (its lines), `by_rank` (of its summary). A
picture has a title, a caption, a size in inches, `shown(runs)`: those it has something to draw of, and `why`: what to
say if there are none.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hetmpi.run.runlog import bytes_text
from hetmpi.spans import OWN, PARTS, WAITS

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)  # Okabe's and Ito's: the colour-blind tell them apart
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))  # of the runs after the sixth, and the twelfth
PART_COLOURS = {  # own work in blue, the table in orange
    **dict(zip(OWN, ("#b3d4ec", "#6baed6", "#2f7fbc", "#0b4a8a"))),
    **dict(zip(WAITS, ("#fdd49e", "#fdae6b", "#f08030", "#c85010", "#843000"))),
    "allreduce": "#8c8c8c",
}
INK, FAINT = "#010203", "#040506"  # stand for the page's, which change with light and dark
MOST_POINTS = 400  # of a line; more are averaged
MOST_MARKS = 25  # points that are marked on a line
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hetmpi",
    "text.parse_math": False,
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
}
X_AXES = {  # key -> unit of the axis: (from which value on, what it is called)
    "samples": [(1, "samples"), (1e3, "thousand samples"), (1e6, "million samples"), (1e9, "billion samples")],
    "elapsed_s": [(1, "seconds of training"), (60, "minutes of training"), (3600, "hours of training")],
}
NO_LINES, NO_EVALUATION = "no step is logged yet", "there is no evaluation yet"
NO_CACHE = "no rows were read from a cache: table.staleness=0, or table.cache keeps none"
FLUSHES = "Under a bound an evaluation or a checkpoint has everything pushed that was held back."
NO_BYTES = "no bytes cross between ranks"


def svg(picture, runs: list, name: str) -> str:
    """The picture of those `runs` that it shows. name: what no other picture of the page is called."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure, text = Figure(picture.size, layout="constrained"), io.StringIO()
        picture.draw(figure, picture.shown(runs))
        figure.savefig(
            text, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    whole = re.sub(
        r"<style.*?</style>", "", text.getvalue()[text.getvalue().index("<svg") :]
    )  # it would hold for the page
    whole = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", whole)
    whole = re.sub(
        r' (d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), whole
    )  # 1/100 point will do
    return whole.replace(INK, "currentColor").replace(FAINT, "var(--faint)")


def style_of(run) -> dict:
    """How a run's lines are drawn."""
    number = run.number
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def thinned(table: np.ndarray) -> np.ndarray:
    """(n, k) -> (at most MOST_POINTS, k): each row the mean of neighbours."""
    if len(table) <= MOST_POINTS:
        return table
    begins = np.arange(MOST_POINTS) * len(table) // MOST_POINTS
    return np.add.reduceat(table, begins) / np.diff(begins, append=len(table))[:, None]


def unit_of(x: str, most: float) -> tuple[float, str]:
    """How to show an axis that ends at `most`: what to divide by, its name."""
    return [unit for unit in X_AXES[x] if unit == X_AXES[x][0] or most >= 2 * unit[0]][-1]


def counted(number: float, _=None, digits: int = 4) -> str:
    """A number on an axis: 37000 is '37k'."""
    power = 0 if abs(number) < 1000 else min(int(np.log10(abs(number))) // 3, 3)
    return f"{number / 1000**power:.{digits}g}{' kMG'[power].strip()}"


class Picture:
    """What all pictures share."""

    size, caption, why = (4.7, 2.8), "", NO_LINES

    def shown(self, runs: list) -> list:
        """The runs of which there is something to draw."""
        return [run for run in runs if len(self.points(run))]


@dataclass(frozen=True)
class Curve(Picture):
    """A line per run.

    key, x: of a logged line. label: of the axis. times: what is drawn per unit of key. of: "lines" or "evaluations".
    is_noisy: draw a running mean, and faintly what it is of. is_from_zero: where the axis begins."""

    title: str
    key: str
    label: str
    x: str = "samples"
    times: float = 1
    of: str = "lines"
    is_noisy: bool = False
    is_from_zero: bool = False
    caption: str = ""
    why: str = NO_LINES

    def points(self, run) -> np.ndarray:
        """(n, 2)"""
        return run.table((self.x, self.key), self.of) * (1, self.times)

    def draw(self, figure, runs: list):
        axes, points = figure.subplots(), {run.number: self.points(run) for run in runs}
        per_unit, name = unit_of(self.x, max(table[-1, 0] for table in points.values()))
        for run in runs:
            x, y = thinned(points[run.number]).T
            if self.is_noisy and len(x) >= 20:
                axes.plot(x / per_unit, y, linewidth=0.6, alpha=0.35, **style_of(run))
                width = max(5, len(x) // 20)
                x, y = (np.convolve(values, np.full(width, 1 / width), "valid") for values in (x, y))
            marker = "o" if len(x) <= MOST_MARKS else ""
            axes.plot(
                x / per_unit, y, linewidth=1.5, marker=marker, markersize=3, zorder=3, clip_on=False, **style_of(run)
            )
        axes.set(xlabel=name, ylabel=self.label)
        if self.is_from_zero:
            axes.set_ylim(0, 1.05 * max(thinned(table)[:, 1].max() for table in points.values()) or 1)
        axes.yaxis.set_major_formatter(counted)


class Band(Picture):
    """How uneven the ranks' own work is."""

    title = "Own work of the ranks"
    caption = (
        "load, find, forward and backward: the rank with the least, the mean, the one with the most, for which "
        "all wait."
    )
    why = "one rank alone waits for none"

    def points(self, run) -> np.ndarray:
        """(n, 4); none of a rank alone."""
        table = run.table(("samples", "own_ms_min", "own_ms", "own_ms_max"))
        return table if (table[:, 1] < table[:, 3]).any() else table[:0]

    def draw(self, figure, runs: list):
        axes, points = figure.subplots(), {run.number: thinned(self.points(run)) for run in runs}
        per_unit, name = unit_of("samples", max(table[-1, 0] for table in points.values()))
        for run in runs:
            x, least, mean, most = points[run.number].T
            axes.fill_between(x / per_unit, least, most, color=style_of(run)["color"], alpha=0.22, linewidth=0)
            axes.plot(
                x / per_unit,
                mean,
                linewidth=1.5,
                marker="o" if len(x) <= MOST_MARKS else "",
                markersize=3,
                **style_of(run),
            )
        axes.set(xlabel=name, ylabel="own ms per step", ylim=(0, None))


class Ranks(Picture):
    """Each rank's own work over the run."""

    title, caption = "Own work, rank by rank", "Mean over the run."
    why = "one rank alone, or no run has ended yet"

    def points(self, run) -> np.ndarray:
        """(ranks,); none of a rank alone."""
        own = np.array([rank["own_ms"] for rank in run.by_rank])
        return own if len(own) > 1 else own[:0]

    def draw(self, figure, runs: list):
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        for place, run in enumerate(runs):
            own = self.points(run)
            aside = (
                0.3 * (place / len(runs) - 0.5 + 0.5 / len(runs)) if len(own) <= 32 else 0.0
            )  # so that none covers another
            axes.plot(
                np.arange(len(own)) + aside,
                own,
                "o",
                color=style_of(run)["color"],
                markersize=6 if len(own) <= 32 else 3,
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        own = [self.points(run) for run in runs]
        axes.set(xlabel="rank", ylabel="own ms per step")
        axes.set(xlim=(-0.5, max(map(len, own)) - 0.5), ylim=(0, 1.1 * max(map(np.max, own))))


@dataclass(frozen=True)
class Bars(Picture):
    """Groups of bars, a bar per run. values(run): name of the group -> number, {} for none; text: of a number."""

    title: str
    values: Callable
    label: str
    text: Callable = partial(counted, digits=3)
    caption: str = ""
    why: str = NO_LINES

    def points(self, run) -> dict:
        values = self.values(run)
        return values if any(values.values()) else {}

    def draw(self, figure, runs: list):
        axes, bars = figure.subplots(), [self.points(run) for run in runs]
        groups, width = max(bars, key=len), 0.8 / len(runs)
        for place, (run, values) in enumerate(zip(runs, bars)):
            heights = [values.get(group, 0) for group in groups]
            drawn = axes.bar(
                np.arange(len(groups)) + (place - (len(runs) - 1) / 2) * width,
                heights,
                width,
                color=style_of(run)["color"],
            )
            if len(runs) * len(groups) <= (12 if len(runs) == 1 else 6):
                axes.bar_label(drawn, [self.text(height) for height in heights], fontsize=7.5, padding=1)
        slant = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(groups) > 6 else {}
        axes.set_xticks(range(len(groups)), groups, **slant)
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel(self.label)
        axes.yaxis.set_major_formatter(lambda number, _: self.text(number))
        axes.grid(axis="x", visible=False)


class Stack(Picture):
    """The parts of a step of one run, one on the other. most_ms: where the axis ends."""

    why = "it takes two logged steps"

    def __init__(self, run, most_ms: float):
        self.title, self.run, self.most_ms = f"A step of {run.name}", run, most_ms

    def shown(self, runs: list) -> list:
        return [self.run] if len(self.points(self.run)) > 1 else []

    def points(self, run) -> np.ndarray:
        """As stacked."""
        return stacked(run)

    def draw(self, figure, runs: list):
        axes, table = figure.subplots(), thinned(self.points(self.run))
        per_unit, name = unit_of("samples", table[-1, 0])
        axes.stackplot(table[:, 0] / per_unit, table[:, 1:].T, colors=list(PART_COLOURS.values()), linewidth=0)
        axes.set(
            xlabel=name,
            ylabel="ms per step",
            ylim=(0, self.most_ms),
            xlim=(table[0, 0] / per_unit, table[-1, 0] / per_unit),
        )


def stacked(run) -> np.ndarray:
    """(n, 1 + number of parts): samples, ms of each part in the order of PART_COLOURS."""
    return run.table(("samples", *(f"{part}_ms" for part in PART_COLOURS)))


def means(run, keys: dict[str, str]) -> dict[str, float]:
    """Name of a group -> mean over the logged lines of the key under it; {} where there are no lines."""
    return {name: float(table.mean()) for name, key in keys.items() if len(table := run.table((key,)))}


def bytes_by_kind(run) -> dict[str, float]:
    """Bytes per step: of the whole run once it has ended, with its last flush; until then of the logged steps."""
    keys = {"rows": "row_bytes", "clocks": "clock_bytes", "pushed": "pushed_bytes", "reduced": "reduced_bytes"}
    num_steps = run.summary.get("steps", 0) - run.summary.get("first_step", 0)
    if num_steps <= 0:
        return means(run, keys)
    return {name: run.summary[key] / num_steps for name, key in keys.items() if run.summary.get(key) is not None}


def ms_by_part(run) -> dict[str, float]:
    return means(run, {part: f"{part}_ms" for part in PARTS})


def lag_shares(run) -> dict[str, float]:
    """Lags as EmbeddingTable counts them, bin 0 no lag, bin i lags below 2^i -> percent of the reads."""
    counts = run.lags
    names = ["0", "1", *(f"{1 << i - 1}\N{EN DASH}{(1 << i) - 1}" for i in range(2, len(counts)))]
    return {name: 100 * count / sum(counts) for name, count in zip(names, counts)}


def sections(runs: list) -> dict[str, list]:
    """The page's pictures under their headings."""
    learnt = [
        Curve("Loss", "loss", "training loss", is_noisy=True, caption="Of 20 lines and more in bold a running mean.")
    ]
    for title, key, label in (("AUC", "auc", "held-out AUC"), ("Log loss", "log_loss", "held-out log loss (nats)")):
        learnt.append(Curve(title, key, label, of="evaluations", why=NO_EVALUATION))
    over_time = [replace(curve, title=f"{curve.title} over time", x="elapsed_s") for curve in learnt]
    most_ms = max((thinned(table)[:, 1:].sum(1).max() for run in runs if len(table := stacked(run))), default=0)
    return {
        "What was learnt": [picture for pair in zip(learnt, over_time) for picture in pair],
        "Speed": [
            Curve("Samples per second", "samples_per_s", "samples/s, all ranks", is_from_zero=True),
            Bars("Parts of a step", ms_by_part, "ms per step", caption="Mean over ranks and logged steps."),
            *(Stack(run, 1.05 * most_ms) for run in runs),
        ],
        "Ranks": [Band(), Ranks()],
        "Cache": [
            Curve("Hit rate", "hit_rate", "% of the reads the cache may serve", times=100, why=NO_CACHE),
            Curve("Stale rate", "stale_rate", "% found, but too old", times=100, is_from_zero=True, why=NO_CACHE),
            Curve("Staleness, median", "lag_p50", "iterations behind, p50", is_from_zero=True, why=NO_CACHE),
            Curve("Staleness, p99", "lag_p99", "iterations behind, p99", is_from_zero=True, why=NO_CACHE),
            Bars(
                "Staleness of all reads",
                lag_shares,
                "% of the reads",
                caption="Iterations that a row was behind when it was read.",
                why=NO_CACHE,
            ),
        ],
        "Bytes between ranks": [
            Bars(
                "Bytes by kind", bytes_by_kind, "bytes per step, all ranks", bytes_text, "Mean over the run.", NO_BYTES
            ),
            Curve(
                "Bytes over samples",
                "moved_bytes",
                "bytes per step, all kinds",
                is_noisy=True,
                is_from_zero=True,
                caption=FLUSHES,
                why=NO_BYTES,
            ),
        ],
    }
