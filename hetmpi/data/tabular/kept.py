"""Columns of text that are passed on: numbers where each of their texts is as a number is written, other bytes than
UTF-8 as they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

WHOLE_TEXT = r"^(0|-?[1-9][0-9]{0,17})$"
FLOAT_TEXT = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-][0-9]+)?$"


class TextKind(NamedTuple):
    """What all texts of a part of a column are; has_values: whether one is not empty."""

    has_values: bool = False
    is_whole: bool = True
    is_float: bool = True
    is_utf8: bool = True

    def __add__(self, other: TextKind) -> TextKind:
        return TextKind(self[0] or other[0], *(a and b for a, b in zip(self[1:], other[1:])))

    @property
    def type(self) -> pa.DataType:
        if not self.is_utf8:
            return pa.binary()
        if self.has_values and self.is_whole:
            return pa.int64()
        return pa.float64() if self.has_values and self.is_float else pa.string()


def kind_of(texts: pa.Array | pa.ChunkedArray) -> TextKind:
    """texts: binary; other columns hold no text."""
    if not pa.types.is_binary(texts.type):
        return TextKind()
    values = pc.unique(texts).drop_null()
    values = values.filter(pc.not_equal(values, b""))
    try:
        values = values.cast(pa.string())
    except pa.ArrowInvalid:
        return TextKind(True, False, False, False)
    is_whole = bool(np.asarray(pc.match_substring_regex(values, WHOLE_TEXT)).all())
    return TextKind(len(values) > 0, is_whole, is_whole or are_floats(values))


def are_floats(values: pa.Array) -> bool:
    """Whether each text is one that a float is written as, with or without .0."""
    if not np.asarray(pc.match_substring_regex(values, FLOAT_TEXT)).all():
        return False
    written = values.cast(pa.float64()).cast(pa.string())
    is_same = pc.or_(pc.equal(values, written), pc.equal(values, pc.binary_join_element_wise(written, ".0", "")))
    others = values.filter(pc.invert(is_same)).to_pylist()
    return all(text == repr(float(text)) for text in others)


def typed_as(texts: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Binary texts as values of a type of TextKind; of numbers null for the empty text."""
    if pa.types.is_int64(kind) or pa.types.is_float64(kind):
        texts = pc.if_else(pc.equal(texts, b""), pa.scalar(None, pa.binary()), texts)
        return texts.cast(pa.string()).cast(kind)
    return texts.cast(kind)
