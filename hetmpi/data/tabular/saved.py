"""An encoder from arrays that anybody may have written, such as those of a checkpoint: checked before it is used."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from hetmpi.data.tabular.classes import MOST_CLASSES
from hetmpi.data.tabular.encoder import FIRST_KEY, HASHED, IDS, INTEGERS, VOCABULARY, Encoder
from hetmpi.data.tabular.files import PARQUET, TEXT
from hetmpi.data.tabular.reading import CLASSES, LABEL_KINDS, stored_columns
from hetmpi.data.tabular.rules import ID, NUMBER, TRANSFORMS
from hetmpi.data.tabular.scaling import Scaling
from hetmpi.data.tabular.times import UNITS
from hetmpi.errors import UserError

LARGEST_BYTES = 1 << 26  # of an encoder's description
MOST_COLUMNS, MOST_TABLES = 1 << 17, 1 << 10
MOST_ROWS = 1 << 53


def encoder_from(arrays: Mapping[str, np.ndarray]) -> Encoder:
    """The encoder that Encoder.to_arrays gave as `arrays`. Raises UserError for values that no encoder has; for other
    structures also KeyError, TypeError, ValueError and RecursionError."""
    described = arrays["encoder"]
    if described.dtype != np.uint8 or described.ndim != 1 or len(described) > LARGEST_BYTES:
        raise UserError(f"encoder must be at most {LARGEST_BYTES:,} bytes, got {described.dtype} {described.shape}")
    columns = json.loads(described.tobytes())["columns"]
    if not isinstance(columns, list) or not 0 < len(columns) <= MOST_COLUMNS:
        raise UserError(f"there must be 1 to {MOST_COLUMNS:,} columns")
    tables = {json.dumps([column.get(key) for key in ("dim", "optim", "cache")]) for column in columns}
    if len(tables) > MOST_TABLES:
        raise UserError(f"there must be at most {MOST_TABLES:,} tables, got {len(tables):,}")
    encoder = Encoder.from_arrays(arrays)
    check_reading(encoder)
    check_columns(encoder)
    check_scalings(encoder)
    check_coders(encoder)
    return encoder


def check_reading(encoder: Encoder):
    """Raises UserError unless the rules of reading have the declared types, and those of the columns."""
    reading = encoder.reading
    check_fields("reading", reading)
    reading.dialect.check()
    if (
        reading.form not in (TEXT, PARQUET)
        or reading.label_kind not in LABEL_KINDS
        or reading.unit not in (None, *UNITS)
    ):
        raise UserError("form, label_kind or unit is unknown")
    for column in encoder.columns:
        check_fields("column", column)
    classes = encoder.classes
    if (
        not all(isinstance(name, str) for name in classes)
        or len(set(classes)) < len(classes)
        or (len(classes) not in ((range(2, MOST_CLASSES + 1)) if reading.label_kind == CLASSES else (0,)))
    ):
        raise UserError(f"there must be 2 to {MOST_CLASSES:,} different classes, or none for other labels")
    if tuple(reading.columns) != stored_columns(encoder.columns):
        raise UserError("the columns are not those that are read")


def check_columns(encoder: Encoder):
    """Raises UserError unless each column has a kind, a name of its own, and what its transform needs."""
    names = [column.name for column in encoder.columns]
    if len(set(names)) < len(names) or not all(names):
        raise UserError("columns must have names, each once")
    if len(encoder.moments) != len(names):
        raise UserError(f"there must be moments of {len(names):,} columns, got {len(encoder.moments):,}")
    for column, moments in zip(encoder.columns, encoder.moments):
        if column.kind not in (ID, NUMBER) or (
            isinstance(column.transform, str) and column.transform not in TRANSFORMS
        ):
            raise UserError("a column's kind or transform is unknown")
        if not all(type(value) in (int, float) and math.isfinite(value) for value in [*column_edges(column), *moments]):
            raise UserError("moments and edges must be finite numbers")
        if list(column_edges(column)) != sorted(column_edges(column)):
            raise UserError("edges must be ascending")


def check_scalings(encoder: Encoder):
    """Raises UserError unless the scalings of numbers have the declared types, and no negative deviation."""
    hints = get_type_hints(Scaling)
    for name, scaling in encoder.scalings.items():
        if not all(map(fits, scaling, hints.values())) or scaling.deviation < 0:
            raise UserError(f"scaling of column {name[:100]!r} must be is_log, mean and deviation")


def column_edges(column) -> tuple[float, ...]:
    """Of the buckets of a number."""
    return column.transform if column.is_buckets else ()


def check_coders(encoder: Encoder):
    """Raises UserError unless each coder gives keys in [0, rows)."""
    columns = {column.name: column for column in encoder.columns}
    for name, coder in encoder.coders.items():
        place, values = f"coder of column {name[:100]!r}", coder.values
        if type(coder.rows) is not int or not 0 < coder.rows <= MOST_ROWS or type(coder.seed) is not int:
            raise UserError(f"{place}: rows and seed must be integers, at least 1 row")
        if not 0 <= coder.seed < 1 << 63:
            raise UserError(f"{place}: seed must be at least 0 and below 2^63")
        if values.dtype != np.int64 or values.ndim != 1 or (values[1:] <= values[:-1]).any():
            raise UserError(f"{place}: values must be ascending int64")
        if coder.mode not in (HASHED, INTEGERS, VOCABULARY, IDS):
            raise UserError(f"{place}: mode must be {HASHED}, {INTEGERS}, {VOCABULARY} or {IDS}")
        wanted = columns[name].open if name in columns else None
        if (coder.mode == IDS) != (wanted is not None) or (wanted is not None and coder.rows != wanted.num_rows):
            raise UserError(f"{place}: its rows are not those of its column")
        if coder.mode == VOCABULARY and coder.rows != len(values) + FIRST_KEY:
            raise UserError(f"{place}: {len(values):,} values must have {len(values) + FIRST_KEY:,} rows")
        grown = coder.of_values
        if grown is not None and (
            coder.mode != VOCABULARY
            or grown.dtype != np.int64
            or not np.array_equal(np.sort(grown, axis=None), np.arange(FIRST_KEY, coder.rows))
        ):
            raise UserError(f"{place}: the keys of values must be int64, each from {FIRST_KEY} to {coder.rows - 1:,}")


def check_fields(place: str, one):
    """Raises UserError unless the fields of a dataclass have the declared types."""
    hints = get_type_hints(type(one))
    for field in fields(one):
        value = getattr(one, field.name)
        if not fits(value, hints[field.name]):
            raise UserError(f"{place}: {field.name} must be {hints[field.name]}, got {type(value).__name__}")


def fits(value, hint) -> bool:
    """Whether a value is of a declared type. Integers are floats, booleans are neither; floats are finite."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return True
    if kind in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        if parts[1:] == (...,):
            return all(fits(part, parts[0]) for part in value)
        return len(value) == len(parts) and all(map(fits, value, parts))
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind is int:
        return type(value) is int and abs(value) < 1 << 63
    return isinstance(value, kind)
