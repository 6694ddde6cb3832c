"""Classes of a label (data.label_kind=classes): the distinct labels of the training rows, from prepared files."""

from __future__ import annotations

import os
import re

import pyarrow.compute as pc
import xxhash

from hetmpi.data.checked import CheckedParquet, read_json, write_json
from hetmpi.data.files import DataError
from hetmpi.data.tabular.reading import CLASSES, LABEL
from hetmpi.errors import one_line

MOST_CLASSES = 10_000
MOST_SHOWN = 10


def path_of(folder: str, manifest: dict) -> str:
    identity = xxhash.xxh3_64_hexdigest(repr(manifest["units"]).encode())
    return os.path.join(folder, f"counts-classes-{identity}.json")


def count(folder: str, manifest: dict) -> None:
    """Counts the rows of each class in the training and in the held-out rows, unless they are counted. For one rank.
    Raises DataError for more than MOST_CLASSES, and for a single one."""
    path = path_of(folder, manifest)
    if os.path.exists(path):
        return
    counts = {split: counted(folder, list(manifest[split])) for split in ("train", "valid")}
    if len(counts["train"]) < 2:
        raise DataError(
            f"data.label_kind={CLASSES}: all training rows have the label {one_line(', '.join(counts['train']))}, at "
            "least two classes are needed"
        )
    write_json(counts, path)


def counted(folder: str, files: list[str]) -> dict[str, int]:
    """Class -> its rows in prepared files."""
    found: dict[str, int] = {}
    for file in (CheckedParquet(os.path.join(folder, name)) for name in files):
        for group in range(file.metadata.num_row_groups):
            for one in pc.value_counts(file.read(group, [LABEL])[LABEL]).to_pylist():
                found[one["values"]] = found.get(one["values"], 0) + one["counts"]
            if len(found) > MOST_CLASSES:
                raise DataError(
                    f"data.label_kind={CLASSES}: the label has more than {MOST_CLASSES:,} distinct values: is it a "
                    "number (data.label_kind=number), or an item to find (task=retrieval)?"
                )
    return found


def load(folder: str, manifest: dict) -> tuple[tuple[str, ...], dict]:
    """The classes in their order, integers by their values and others by their texts, and what count() has counted."""
    counts = read_json(path_of(folder, manifest))
    are_integers = all(re.fullmatch(r"-?[0-9]{1,18}", text) for text in counts["train"])
    return tuple(sorted(counts["train"], key=int if are_integers else str)), counts


def lines(label: str, classes: tuple[str, ...], counts: dict) -> list[str]:
    """What to say of them at the start of a run."""
    shown = [f"{one_line(name, 40)} ({counts['train'][name]:,} rows)" for name in classes[:MOST_SHOWN]]
    rest = ["..."] if len(classes) > MOST_SHOWN else []
    found = [f"{len(classes):,} classes of {one_line(label)}: {', '.join(shown + rest)}"]
    unseen = {name: num for name, num in counts["valid"].items() if name not in counts["train"]}
    if unseen:
        found.append(
            f"{sum(unseen.values()):,} held-out rows have classes that no training row has, such as "
            f"{one_line(next(iter(unseen)), 40)}: metrics leave them out"
        )
    return found
