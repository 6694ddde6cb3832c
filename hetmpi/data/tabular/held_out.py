"""Refuses held-out rows that cannot tell how good a model is."""

from __future__ import annotations

import os

from hetmpi.data.checked import CheckedParquet
from hetmpi.data.files import DataError
from hetmpi.data.tabular.reading import CLICK, Reading

LEAST_ROWS = 100
MANY_ROWS = 10_000  # fewer are a trial, whose held-out rows may be few


def check_held_out(folder: str, manifest: dict, reading: Reading) -> None:
    """Raises DataError for held-out rows of prepared data that are few of many, or all have one label. Opens all
    held-out files: for one rank."""
    train, valid = (sum(manifest[split].values()) for split in ("train", "valid"))
    if train + valid < MANY_ROWS:
        return
    if valid < LEAST_ROWS:
        raise DataError(
            f"data.valid holds out {valid:,} of {train + valid:,} rows, at least {LEAST_ROWS} are needed to tell "
            f"how good a model is: {cure(reading)}"
        )
    if reading.label_kind != CLICK:
        return
    least, most = label_range(folder, list(manifest["valid"]))
    if least == most:
        raise DataError(
            f"data.valid holds out {valid:,} of {train + valid:,} rows, all with the label {most:g}, of which there is "
            f"no AUC: {cure(reading)}"
        )


def cure(reading: Reading) -> str:
    if reading.after is not None:
        return "give a longer span of time, or a share as data.valid=0.1"
    if reading.split is None:
        return "give another share or other files, as data.valid=0.1 or data.valid=PATH"
    column = reading.split[0]
    return (
        f"last: N counts distinct values of {column}: give more, or, of timestamps, a span as "
        f"data.valid='{{column: {column}, last: 7d}}', or a share as data.valid=0.1"
    )


def label_range(folder: str, files: list[str]) -> tuple[float, float]:
    """The least and the greatest label, by the statistics of prepared files. Raises Damaged, and OSError."""
    metadata = [CheckedParquet(os.path.join(folder, name)).metadata for name in files]
    found = [one.row_group(group).column(0).statistics for one in metadata for group in range(one.num_row_groups)]
    return min(one.min for one in found), max(one.max for one in found)
