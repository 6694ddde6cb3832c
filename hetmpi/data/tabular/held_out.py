"""Refuses held-out rows that cannot tell how good a model is."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable

from hetmpi.data.checked import CheckedParquet
from hetmpi.data.files import DataError
from hetmpi.data.tabular.reading import CLICK, Reading
from hetmpi.errors import one_line

LEAST_ROWS = 100
MANY_ROWS = 10_000  # fewer are a trial, whose held-out rows may be few


def check_held_out(folder: str, manifest: dict, reading: Reading, cure: str | None = None) -> None:
    """Raises DataError for held-out rows of prepared data that are few of many, or of which a label is the same in all.
    cure: advice of the rule that holds them out. Opens all held-out files: for one rank."""
    cure = cure or default_cure(reading)
    train, valid = (sum(manifest[split].values()) for split in ("train", "valid"))
    if train + valid < MANY_ROWS:
        return
    if valid < LEAST_ROWS:
        raise DataError(
            f"data.valid holds out {valid:,} of {train + valid:,} rows, at least {LEAST_ROWS} are needed to tell "
            f"how good a model is: {cure}"
        )
    if reading.label_kind != CLICK:
        return
    for name, found in zip(reading.labels, label_ranges(folder, list(manifest["valid"]), len(reading.labels))):
        if found is not None and found[0] < found[1]:
            continue
        of_all = "all without the label" if found is None else f"all with the label {found[0] + 0.0:g}"
        which = f" of {one_line(name)}" if len(reading.labels) > 1 else ""
        raise DataError(
            f"data.valid holds out {valid:,} of {train + valid:,} rows, {of_all}{which}, of which there is no AUC: "
            f"{cure}"
        )


def default_cure(reading: Reading) -> str:
    """Advice where only prepared data are known."""
    if reading.split is None:
        return "give another share or other files, as data.valid=0.1 or data.valid=PATH"
    return "give the raw files with a share as data.valid=0.1"


def label_ranges(folder: str, files: Iterable[str], num: int) -> list[tuple[float, float] | None]:
    """The least and the greatest value of each of `num` labels, by the statistics of prepared files; None for one that
    no row has. Raises Damaged, and OSError."""
    ranges: list[tuple[float, float] | None] = [None] * num
    for metadata in (CheckedParquet(os.path.join(folder, name)).metadata for name in files):
        for group, label in itertools.product(range(metadata.num_row_groups), range(num)):
            found = metadata.row_group(group).column(label).statistics
            if found is not None and found.has_min_max:  # else all are NaN
                least, most = ranges[label] or (found.min, found.max)
                ranges[label] = min(least, found.min), max(most, found.max)
    return ranges
