"""Draws the README's pictures from tables of docs/results.md: python docs/figures.py

gains.svg   bytes and AUC by staleness, from "Traffic" and "What staleness costs"
trade.svg   AUC against bytes, from "Bytes against AUC"; docs/results.md and docs/concepts.md show it"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).parent
BOUNDS = "s = 0", "s = 10", "s = 100"
COLORS = "#5b6b7d", "#2a78b8", "#0b8a6a"
INK = "#1f2933"
LIMITS = {"count": "s", "drift": "drift", "HET's rule": "s"}  # and the meaning of a setting
SHOWN_FROM = -0.0035  # of AUC; no bound is far below


def table(title: str) -> list[list[str]]:
    """The cells of each row of the first table under the heading `title`."""
    section = (HERE / "results.md").read_text().split(f"\n## {title}\n")[1]
    (first, *_) = (block for block in section.split("\n\n") if block.lstrip().startswith("|"))
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in first.strip().splitlines()]


def number(cell: str) -> float:
    return float(re.match(r"\d*\.\d+", cell)[0])


def draw(axes, title: str, values: list[float], labels: list[str], least: float, most: float):
    """Bars from `least`, one for each of BOUNDS, with a label at each end."""
    axes.barh(BOUNDS, [value - least for value in values], left=least, color=COLORS, height=0.62)
    for at, (value, label) in enumerate(zip(values, labels)):
        axes.text(value + 0.02 * (most - least), at, label, va="center", color=INK, fontsize=11)
    axes.set_title(title, loc="left", fontsize=12, color=INK, fontweight="bold")
    axes.set_xlim(least, most)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=12, labelcolor=INK)
    axes.spines[:].set_visible(False)


def trade():
    """Draws the loss of AUC against the bytes of each limit of staleness."""
    rows = table("Bytes against AUC")
    figure, axes = plt.subplots(figsize=(7.0, 3.4), layout="constrained", facecolor="white")
    for (limit, meaning), color, marker in zip(LIMITS.items(), (COLORS[0], COLORS[2], "#b8562a"), "oD^"):
        found = [row[1:] for row in rows if row[0] == limit]
        points = sorted((float(share), float(auc), float(error), name) for name, auc, error, share in found)
        points = [point for point in points if point[1] > SHOWN_FROM]
        share, auc, error, names = zip(*points)
        axes.errorbar(share, auc, error, color=color, marker=marker, capsize=2, label=f"{limit} ({meaning})")
        for x, y, name in zip(share, auc, names):
            axes.annotate(name, (x, y), xytext=(4, 5), textcoords="offset points", fontsize=9, color=color)
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.set(xlim=(30, 50), xlabel="bytes between ranks, % of s = 0", ylabel="AUC less that of s = 0")
    axes.legend(loc="lower right", frameon=False, title="a copy's age is limited by")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "trade.svg", metadata={"Date": None})


def main():
    (bytes_row,) = (row for row in table("Traffic") if row[0] == "SGD")
    megabytes = [number(cell) for cell in bytes_row[1 : 1 + len(BOUNDS)]]
    auc = [number(row[1]) for row in table("What staleness costs") if f"s = {row[0]}" in BOUNDS]
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.0, 1.9), layout="constrained", facecolor="white")
    saved = ["", *(f"   {100 * (1 - value / megabytes[0]):.0f} % fewer" for value in megabytes[1:])]
    labels = [f"{value:.1f} MB{text}" for value, text in zip(megabytes, saved)]
    draw(left, "Bytes between ranks per step", megabytes, labels, 0.0, 1.3 * max(megabytes))
    draw(right, "Held-out AUC (from 0.5)", auc, [f"{value:.4f}" for value in auc], 0.5, 0.84)
    right.set_yticklabels([])
    figure.savefig(HERE / "gains.svg", metadata={"Date": None})
    trade()


if __name__ == "__main__":
    plt.rcParams |= {"svg.hashsalt": "hetmpi", "font.family": "DejaVu Sans"}
    main()
