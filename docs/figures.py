"""Draws docs/gains.svg, the README's picture, from the first table of docs/results.md: python docs/figures.py"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).parent
BOUNDS = "s = 0", "s = 10", "s = 100"
COLORS = "#5b6b7d", "#2a78b8", "#0b8a6a"
INK = "#1f2933"


def figures_of(row: str) -> list[float]:
    """The first numbers in the second column of the row that begins so, one for each of BOUNDS."""
    table = (HERE / "results.md").read_text()
    cells = next(line for line in table.splitlines() if line.startswith(f"| {row}")).split("|")
    return [float(text) for text in re.findall(r"\d*\.\d+", cells[2])[: len(BOUNDS)]]


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


def main():
    megabytes, auc = figures_of("bytes between all ranks"), figures_of("held-out AUC")
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.0, 1.9), layout="constrained", facecolor="white")
    saved = ["", *(f"   {100 * (1 - value / megabytes[0]):.0f} % fewer" for value in megabytes[1:])]
    labels = [f"{value:.1f} MB{text}" for value, text in zip(megabytes, saved)]
    draw(left, "Bytes between ranks per step", megabytes, labels, 0.0, 1.3 * max(megabytes))
    draw(right, "Held-out AUC (from 0.5)", auc, [f"{value:.4f}" for value in auc], 0.5, 0.84)
    right.set_yticklabels([])
    figure.savefig(HERE / "gains.svg", metadata={"Date": None})


if __name__ == "__main__":
    plt.rcParams |= {"svg.hashsalt": "hetmpi", "font.family": "DejaVu Sans"}
    main()
