"""Labels and parts of nodes in tables: a class or several labels of each node, and whether it is trained on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.data.files import DataError
from hetmpi.data.graph.columns import (
    BOOLEAN_TEXT,
    Remark,
    all_match,
    as_texts,
    ids_in,
    is_list,
    is_text,
    type_text,
    whole,
)
from hetmpi.data.graph.graph import NO_PART, TEST, TRAIN, VALID, check_labels_fit, classes_below, classes_of
from hetmpi.errors import one_line

SPLITS = {"train": TRAIN, "valid": VALID, "val": VALID, "validation": VALID, "test": TEST}
SPLITS |= {"0": TRAIN, "1": VALID, "2": TEST, "-1": NO_PART}
MASKS = {"train_mask": TRAIN, "val_mask": VALID, "valid_mask": VALID, "test_mask": TEST}
MASK_VALUES = {"true": True, "false": False, "1": True, "0": False}
SEPARATORS = (" ", ",", ";", "|")
SUSPECTS = {"-", "--", "?", ".", "_", "n/a", "N/A", "#N/A", "none", "unknown", "Unknown", "missing", "undefined"}
OFTEN = 0.75  # share of the values between separators that occur in several texts, if these are lists of labels


def labels_of(found: pa.Array, what: str, separator: str | None, remark: Remark) -> tuple[np.ndarray, list[str]]:
    """Labels as in Graph, and the names of classes. separator: between several labels of a text; "": texts are one
    class; None: texts that seem to be several are refused. Raises DataError."""
    if is_text(found.type) and separator:
        found = pc.split_pattern_regex(found, rf"\s*{re.escape(separator.strip())}\s*" if separator.strip() else r"\s+")
    if is_list(found.type):
        return several_labels(found, what)
    values = integers_or_texts(found, what)
    if is_text(values.type) and separator is None:
        refuse_several(pc.unique(values.drop_null()).to_pylist(), what)
    texts = [None if type(value) is int and value < 0 or value == "-1" else value for value in values.to_pylist()]
    labels, names = classes_of(texts)
    classes_below(len(names), what)
    for name in sorted(SUSPECTS.intersection(names)):
        remark(f"{what}: {name} is a class: if it stands for no label, add it to data.missing")
    return labels, names


def integers_or_texts(found: pa.Array, what: str) -> pa.Array:
    """Integers of integers, of whole doubles and of texts that are all integers; else texts; booleans as true and
    false. Raises DataError for other values."""
    if pa.types.is_null(found.type):
        return found.cast(pa.int64())
    if pa.types.is_boolean(found.type) or (is_text(found.type) and all_match(found, BOOLEAN_TEXT)):
        return pc.utf8_lower(found.cast(pa.string()))
    integers = whole(found)
    if integers is None and not is_text(found.type):
        raise DataError(f"{what} must hold integers, texts or lists, it holds {type_text(found)}")
    return found if integers is None else integers


def refuse_several(texts: Sequence[str], what: str):
    """Raises DataError for distinct texts that seem to be lists of labels: most of the values between their separators
    occur in several of them."""
    for separator in SEPARATORS:
        joined = [text for text in texts if separator in text]
        values = {value.strip() for text in joined for value in text.split(separator)} - {""}
        counts = Counter(value.strip() for text in texts for value in set(text.split(separator)))
        if len(values) > 1 and sum(counts[value] > 1 for value in values) >= OFTEN * len(values):
            shown = one_line(repr(min(joined)), 100)
            raise DataError(
                f"{what}: {shown} may be several labels: set data.label_separator={separator!r}, or "
                "data.label_separator='' if such a text is one class"
            )


def several_labels(found: pa.Array, what: str) -> tuple[np.ndarray, list[str]]:
    if pa.types.is_floating(found.type.value_type) or pa.types.is_boolean(found.type.value_type):
        raise DataError(f"{what} must hold lists of integers or of texts, it holds {type_text(found)}")
    bag, distinct = ids_in(found, what)
    num = len(distinct)
    check_labels_fit(len(found), num, what)
    labels = np.zeros((len(found), num), np.float32)
    labels[np.repeat(np.arange(len(found)), np.diff(bag.offsets)), bag.values] = 1
    labels[np.asarray(found.is_null())] = np.nan
    return labels, [str(value) for value in distinct.to_pylist()]


def part_texts(found: pa.Array) -> list[str | None]:
    """Values of a column of parts or of a mask, as lower-case texts; of lists and structs their type alone."""
    if pa.types.is_nested(found.type):
        return [type_text(found)] * len(found)
    integers = whole(found)
    texts = as_texts(found if integers is None else integers)
    return pc.utf8_lower(texts).to_pylist()


def split_of(found: pa.Array, what: str) -> np.ndarray:
    """(N,) int8. Raises DataError for values that name no part."""
    is_boolean = pa.types.is_boolean(found.type)
    texts = ["-1" if text is None else text for text in part_texts(found)]
    wrong = sorted(set(texts) - set(SPLITS))
    if wrong or is_boolean:
        raise DataError(
            f"{what} must be train, valid or test, or 0, 1 or 2, or missing, got {one_line((wrong or texts)[0])}"
        )
    return np.array([SPLITS[text] for text in texts], np.int8)


def split_of_masks(masks: Mapping[str, pa.Array], what: str) -> np.ndarray:
    """(N,) int8 of columns train_mask, val_mask and test_mask of true and false. Raises DataError for other values,
    without train_mask, and for a node in two parts."""
    if "train_mask" not in masks:
        raise DataError(f"{what} has {', '.join(masks)}, but no train_mask")
    split = None
    for name, found in masks.items():
        texts = part_texts(found)
        wrong = sorted({text for text in texts if text is not None and text not in MASK_VALUES})
        if wrong:
            cure = ": choose one split" if is_list(found.type) else ""
            raise DataError(f"{what}: {name} must be true or false for each node, got {one_line(wrong[0])}{cure}")
        is_part = np.array([MASK_VALUES.get(text, False) for text in texts], bool)
        split = np.full(len(is_part), NO_PART, np.int8) if split is None else split
        both = is_part & (split != NO_PART)
        if both.any():
            row = both.argmax() + 1
            raise DataError(f"{what}: {name} is true for {both.sum():,} nodes of another mask, first row {row:,}")
        split[is_part] = MASKS[name]
    return split
