"""Finished runs side by side, as a table of text."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

COLUMNS = {  # heading -> what a summary says under it
    "AUC": lambda summary: figure(summary.get("auc"), "{:.4f}"),
    "MB per step": lambda summary: figure(moved_mb(summary), "{:.3f}"),
    "from the cache": lambda summary: figure(summary.get("hit_rate"), "{:.0%}"),
    "samples/s": lambda summary: figure(summary.get("samples_per_s"), "{:,.0f}"),
}


def comparison(folders: list[str | Path]) -> str:
    """A line per run folder: held-out AUC, bytes between ranks, share of the reads that the cache served, speed. A run
    that has no summary.json is said not to have ended."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("run", box=SIMPLE_HEAD)
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for folder in map(Path, folders):
        path = folder / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else None
        figures = ["not ended"] if summary is None else [text(summary) for text in COLUMNS.values()]
        table.add_row(folder.name, *figures)
    Console(file=(written := StringIO()), width=100).print(table)
    return written.getvalue()


def moved_mb(summary: dict) -> float | None:
    """Million bytes between ranks per step: rows, clocks, gradients, and rows summed by allreduce."""
    num_steps = summary["steps"] - summary.get("first_step", 0)
    moved = [summary.get(f"{kind}_bytes") or 0 for kind in ("pulled", "pushed", "reduced")]
    return sum(moved) / num_steps / 1e6 if num_steps > 0 else None


def figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
