"""Arrow's values -> the values of prepared files. Text is parsed here only in blocks with a fault; of other blocks
Arrow has parsed the numbers."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hetmpi import _C
from hetmpi.data.files import DataError
from hetmpi.data.tabular.dialect import POINT, with_points
from hetmpi.data.tabular.reading import (
    BAD_LABEL,
    BAD_NUMBER,
    CLASSES,
    HASH,
    MAX_EXAMPLES,
    OTHER_PLACES,
    OTHER_SPELLING,
    POSITIVE,
    PROBABILITY,
    UNEQUAL_VECTOR,
    BadRows,
    Reading,
    StoredColumn,
    all_missing,
    shown,
)
from hetmpi.data.tabular.rules import LAST, NUMBER
from hetmpi.data.tabular.times import NAMES, moments

NUMBER_TEXT = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
# [1, 2], ["a", "b"] and ['a' 'b'], as JSON, Python and numpy write lists; (), (1,) and (1, 2), as Python does tuples
LIST_TEXT = r"^\s*(?:\[([^\[\]]*)\]|\(\s*\)|\(([^(),]*),\s*\)|\(([^()]*,[^()]*[^(),\s])\s*\))\s*$"
QUOTED_TEXT = r"""(^|[, ]) *(?:'([^']*)'|"([^"]*)")"""  # one of their texts
TRUE_TEXT, FALSE_TEXT = "^(?i:true)$", "^(?i:false)$"
NAN_TEXT = r"^[+-]?(?i:nan)$"
INTEGER_TEXT = r"^-?[0-9]{1,18}$"
TIME_TEXT = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?$"
ZONE_TEXT = r":.*(Z|[+-][0-9:]+)$"
MICROSECONDS = pa.timestamp("us")
NO_INTEGER = -1  # a missing value among integers
SPACES = " \t"
REWRITTEN = (*"-0123456789tTfF",)  # what texts begin with that may stand for a value written in another way
KEPT = "kept "  # before the names of columns that are passed on


class Fault(NamedTuple):
    """Rows with a bad value in one column. labels: texts of bad labels."""

    column: str
    kind: str  # for counts
    what: str  # as in: 'x' is not a number
    rows: np.ndarray  # (n,) bool
    labels: tuple[str, ...] = ()


def is_text(array: pa.Array) -> bool:
    return pa.types.is_binary(array.type)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def as_text(array: pa.Array) -> pa.Array:
    """Values as binary texts; other types as Arrow writes them, dates and times in ISO form, those with a zone in
    UTC."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return as_text(array.cast(kind.value_type))
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        array = array.cast(pa.timestamp(kind.unit))
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return (
        array.cast(pa.binary()) if is_bytes or pa.types.is_string(kind) else array.cast(pa.string()).cast(pa.binary())
    )


def typed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column without any value, to which Parquet gives no type, as `kind`; others as they are."""
    return array.cast(kind) if pa.types.is_null(array.type) else array


def buffers_of(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """offsets (n + 1,) int32 and data (m,) uint8 of binary texts."""
    if len(texts) == 0:
        return np.zeros(1, np.int32), np.zeros(0, np.uint8)
    _, offsets, data = texts.buffers()
    offsets = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return offsets, np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)


def hashes(array: pa.Array, seed: int, missing: tuple[str, ...]) -> np.ndarray:
    """(n,) int64, 63 bits of xxh3_64 of the values' canonical texts (cpp/data/canonical_text.h), the same for a value
    in any type and file; missing ones and nulls as the empty text."""
    if pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)  # a missing number
        found = _C.hash_floats(np.ascontiguousarray(array.fill_null(0).to_numpy()), seed)
    elif pa.types.is_signed_integer(array.type):
        found = _C.hash_integers(np.ascontiguousarray(array.fill_null(0).cast(pa.int64()).to_numpy()), seed)
    else:
        array = as_text(array)
        found = _C.hash_texts(*buffers_of(array), seed, [text.encode() for text in missing])
    none = np.asarray(array.is_null()) if array.null_count else None
    others = tuple(text for text in missing if text[:1] in REWRITTEN)
    if others:
        none = (
            np.isin(found, hashes_of(others, seed)) if none is None else none | np.isin(found, hashes_of(others, seed))
        )
    if none is not None:
        found[none] = no_value(seed)
    return found


@functools.lru_cache(4096)
def hashes_of(texts: tuple[str, ...], seed: int) -> np.ndarray:
    """(n,) int64"""
    return hashes(pa.array([text.encode() for text in texts], pa.binary()), seed, ())


@functools.lru_cache(4096)
def numbers_among(texts: tuple[str, ...]) -> np.ndarray:
    """The texts that are numbers, (n,) float64."""
    return np.array([float(text) for text in texts if re.match(NUMBER_TEXT, text)])


def no_value(seed: int) -> int:
    """The hash of a missing value."""
    return int(_C.hash_texts(np.zeros(2, np.int32), np.zeros(0, np.uint8), seed, [])[0])


def trimmed(texts: pa.Array, missing: tuple[str, ...]) -> tuple[pa.Array, np.ndarray]:
    """texts without spaces around them, as binary, and which are missing (n,) bool."""
    texts = pc.ascii_trim(texts.view(pa.string()), characters=SPACES).view(pa.binary())  # bytes may be no UTF-8
    none = pc.is_in(texts, value_set=pa.array([text.encode() for text in missing], pa.binary()))
    return texts, np.asarray(pc.or_(none, texts.is_null()).fill_null(True))


def numbers(array: pa.Array, missing: tuple[str, ...], decimal: str = POINT) -> tuple[np.ndarray, np.ndarray | None]:
    """(n,) float32 with NaN for missing values, and where the value is no finite number (n,) bool, None if nowhere.
    decimal: the sign in texts."""
    bad = None
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type) or pa.types.is_dictionary(array.type):
        array = as_text(array)
    if is_text(array):
        texts, none = trimmed(array, missing)
        none |= np.asarray(pc.match_substring_regex(texts, NAN_TEXT).fill_null(False))
        pattern = NUMBER_TEXT.replace(r"\.", re.escape(decimal))
        good = np.asarray(pc.match_substring_regex(texts, pattern).fill_null(False)) & ~none
        bad = ~good & ~none
        if decimal != POINT:
            texts = pc.replace_substring(texts, decimal.encode(), POINT.encode())
        texts = pc.replace_substring_regex(texts, pattern=r"^\+", replacement="")
        array = pc.if_else(pa.array(good), texts, pa.scalar(None, pa.binary())).cast(pa.string())
    try:
        array = array.cast(pa.float64(), safe=not pa.types.is_integer(array.type))  # integers beyond 2^53 are rounded
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"it holds {array.type}, numbers were expected") from error
    values = array.to_numpy(zero_copy_only=False)
    if len(numbers_among(missing)):
        values = np.where(np.isin(values, numbers_among(missing)), np.nan, values)
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    infinite = np.isinf(values)
    if infinite.any():
        bad = infinite if bad is None else bad | infinite
    return values, bad if bad is not None and bad.any() else None


def integers(array: pa.Array, missing: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    """(n,) int64 with NO_INTEGER for missing values, and where the value is no integer of at least 0 (n,) bool."""
    if pa.types.is_integer(array.type) and array.type != pa.uint64():
        values = array.cast(pa.int64()).fill_null(NO_INTEGER).to_numpy(zero_copy_only=False)
        none = np.asarray(array.is_null()) | np.isin(values, numbers_among(missing))
        values = np.where(none, NO_INTEGER, values)
        bad = (values < 0) & ~none
    else:
        texts, none = trimmed(as_text(array), missing)
        texts = pc.replace_substring_regex(texts, pattern=r"\.0+$", replacement="")
        good = np.asarray(pc.match_substring_regex(texts, INTEGER_TEXT).fill_null(False)) & ~none
        cast = pc.if_else(pa.array(good), texts, pa.scalar(b"-1", pa.binary())).cast(pa.string()).cast(pa.int64())
        values = cast.to_numpy(zero_copy_only=False)
        none |= good & np.isin(values, numbers_among(missing))
        values = np.where(none, NO_INTEGER, values)
        bad = ~none & (values < 0)
    return values, bad if bad.any() else None


def times(
    array: pa.Array, missing: tuple[str, ...], unit: str | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Microseconds since 1970 (n,) int64 of dates and timestamps, in UTC unless they have a zone, or of numbers in
    `unit` (times.py); which are missing, and which are texts of another form or beyond the range of microseconds, (n,)
    bool."""
    array = typed(array, MICROSECONDS if unit is None else pa.int64())
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if unit is not None:
        return numbered_times(array, missing, unit)
    if pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("ms"))
    none, good = ~np.asarray(array.is_valid()), np.asarray(array.is_valid())
    if not pa.types.is_timestamp(array.type):
        if not (is_text(array) or pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
            raise DataError(f"it holds {array.type}, dates or timestamps were expected for a span of time")
        texts, none = trimmed(as_text(array), missing)
        array = moments_of(texts)
        good = np.asarray(array.is_valid())
    found = array.cast(pa.timestamp("us", array.type.tz), safe=False)
    if array.type.unit in ("s", "ms"):
        good &= np.asarray(pc.equal(found.cast(array.type, safe=False), array).fill_null(True))
    return found.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False), none, ~good & ~none


def numbered_times(array: pa.Array, missing: tuple[str, ...], unit: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As times(), of numbers and their texts."""
    parts, none = quantities(array, missing)
    found, bad = np.zeros(len(array), np.int64), ~none
    for values, rows in parts:
        found[rows], bad[rows] = moments(values, unit)
    return found, none, bad


def quantities(array: pa.Array, missing: tuple[str, ...]) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Numbers and their texts, integers exactly: values int64 or float64 and their rows, for each of these types; and
    which are missing (n,) bool. Raises DataError for another type."""
    if is_number_type(array.type):
        known = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        none = np.asarray(array.is_null(nan_is_null=True)) | np.isin(known, numbers_among(missing))
        is_exact = pa.types.is_integer(array.type) and array.type != pa.uint64()
        values = array.cast(pa.int64() if is_exact else pa.float64(), safe=is_exact)
        return [(values.filter(pa.array(~none)).to_numpy(zero_copy_only=False), np.flatnonzero(~none))], none
    if not (is_text(array) or pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        raise DataError(f"it holds {array.type}, numbers were expected")
    texts, none = trimmed(as_text(array), missing)
    is_integer = np.asarray(pc.match_substring_regex(texts, INTEGER_TEXT).fill_null(False)) & ~none
    is_float = np.asarray(pc.match_substring_regex(texts, NUMBER_TEXT).fill_null(False)) & ~none & ~is_integer
    return [
        (texts.filter(pa.array(rows)).cast(pa.string()).cast(kind).to_numpy(zero_copy_only=False), np.flatnonzero(rows))
        for rows, kind in ((is_integer, pa.int64()), (is_float, pa.float64()))
    ], none


def is_time_type(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def is_number_type(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def moments_of(texts: pa.Array) -> pa.Array:
    """Timestamps in UTC, null for texts of another form. texts: binary."""
    is_time = pc.match_substring_regex(texts, TIME_TEXT).fill_null(False)
    texts = pc.if_else(is_time, texts, pa.scalar(None, pa.binary())).cast(pa.string())
    texts = pc.replace_substring_regex(texts, pattern=r"(\.[0-9]{6})[0-9]+", replacement=r"\1")
    has_zone = pc.match_substring_regex(texts, ZONE_TEXT).fill_null(False)
    zoned, others = (
        cast_some(pc.if_else(which, texts, pa.scalar(None, pa.string())), kind)
        for which, kind in ((has_zone, pa.timestamp("us", "UTC")), (pc.invert(has_zone), MICROSECONDS))
    )
    return pc.coalesce(zoned.cast(MICROSECONDS), others)


def cast_some(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """texts as timestamps, null where that cannot be, as of a 30th of February."""
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        if len(texts) == 1:
            return pa.nulls(1, kind)
        half = len(texts) // 2
        return pa.concat_arrays([cast_some(texts[:half], kind), cast_some(texts[half:], kind)])


def divided(array: pa.Array, column: StoredColumn) -> pa.Array:
    """A column of several values as lists of any Arrow type, texts divided into binary ones. Raises DataError."""
    array = typed(array, pa.list_(pa.string()))
    if column.separator is not None and not is_list(array.type):  # else they are divided already
        array = parts_of(as_text(array).fill_null(b""), column.separator)
    if not is_list(array.type):
        raise DataError(f"it holds {array.type}, lists were expected")
    return array if pa.types.is_list(array.type) else array.cast(pa.list_(array.type.value_type))


def parts_of(texts: pa.Array, separator: str) -> pa.Array:
    """Binary texts divided into lists; of [1, 2] and ('a', 'b'), as programs write lists, without brackets and
    quotes."""
    has_brackets = pc.match_substring_regex(texts, LIST_TEXT)
    if separator in (",", " ") and pc.any(has_brackets).as_py():
        bare = pc.replace_substring_regex(texts, pattern=LIST_TEXT, replacement=r"\1\2\3")
        bare = pc.replace_substring_regex(bare, pattern=QUOTED_TEXT, replacement=r"\1\2\3")
        texts = pc.if_else(has_brackets, bare, texts)
    return pc.split_pattern(texts, separator.encode())


class Places(NamedTuple):
    """Which values of the lists of a column are used. sizes: values of each list (n,), missing ones too. offsets: of
    the lists of used ones (n + 1,). of_list: the place of each in its list (m,)."""

    column: str
    sizes: np.ndarray
    offsets: np.ndarray
    of_list: np.ndarray


def lists(
    array: pa.Array, column: StoredColumn, missing: tuple[str, ...]
) -> tuple[pa.Array, np.ndarray | None, Places | None]:
    """list<int64> of the values' hashes or integers, without missing ones, rows with a bad value, and, if its order
    matters, the places of the values."""
    array = divided(array, column)
    sizes = sizes_of(array)
    values, is_value, bad = list_values(array.flatten(), column, missing)
    used, offsets = remaining(is_value, sizes, column)
    places = None
    if column.in_order:
        begins = np.cumsum(sizes) - sizes
        places = Places(column.name, sizes, offsets, used - np.repeat(begins, np.diff(offsets)))
    return listed(offsets, values[used]), None if bad is None else in_rows(bad, sizes), places


def misaligned(all_places: list[Places]) -> Iterator[Fault]:
    """Rows in which two lists whose order matters are equally long and lack equally many values, but at different
    places: once these are skipped, values at one position do not belong together. Lists of other lengths are left to
    the model."""
    for first, second in itertools.combinations(all_places, 2):
        used = np.diff(first.offsets)
        alike = (first.sizes == second.sizes) & (used == np.diff(second.offsets))
        ours, theirs = (one.of_list[np.repeat(alike, np.diff(one.offsets))] for one in (first, second))
        wrong = np.zeros(len(alike), bool)
        wrong[alike] = in_rows(ours != theirs, used[alike])
        if wrong.any():
            what = f"has missing values, which are skipped, at other places than {second.column}"
            yield Fault(first.column, OTHER_PLACES, what, wrong)


def list_values(flat: pa.Array, column: StoredColumn, missing: tuple[str, ...]):
    """Hashes or integers (n,) int64 of values, which are not missing (n,) bool, and which are bad, None for none."""
    if column.as_ == HASH:
        values = hashes(flat, column.seed, missing)
        return values, values != no_value(column.seed), None
    values, bad = integers(flat, missing)
    return values, values != NO_INTEGER, bad


def remaining(is_value: np.ndarray, sizes: np.ndarray, column: StoredColumn) -> tuple[np.ndarray, np.ndarray]:
    """Places among the values of lists of so many of those that are used, and the offsets (n + 1,) of the lists that
    they make."""
    offsets = np.concatenate([[0], np.cumsum(is_value)])[np.concatenate([[0], np.cumsum(sizes)])]
    used = np.flatnonzero(is_value)
    if column.max_len is None:
        return used, offsets
    places, sizes = np.arange(len(used)), np.diff(offsets)
    from_end = np.repeat(offsets[1:], sizes) - 1 - places
    from_begin = places - np.repeat(offsets[:-1], sizes)
    used = used[(from_end if column.keep == LAST else from_begin) < column.max_len]
    return used, np.concatenate([[0], np.cumsum(np.minimum(sizes, column.max_len))])


def sizes_of(array: pa.Array) -> np.ndarray:
    """Values of each list, (n,) int64."""
    return pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def in_rows(is_so: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Which lists of so many values have one that is so, (n,) bool."""
    return np.bincount(np.repeat(np.arange(len(sizes)), sizes), is_so, len(sizes)) > 0


def listed(offsets: np.ndarray, values: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def weighted_lists(
    raw: pa.Table, column: StoredColumn, reading: Reading
) -> tuple[pa.Array, pa.Array, np.ndarray | None, list[Fault]]:
    """As lists(), and list<float> of the weights of the values, and rows whose values lack a weight."""
    missing = reading.missing_of(column)
    flat, weights, sizes, faults = values_and_weights(raw, column, reading)
    values, is_value, bad = list_values(flat, column, missing)
    numbers_of, no_number = numbers(weights, ("",), reading.decimal)
    lacks = np.isnan(numbers_of) if no_number is None else np.isnan(numbers_of) | no_number
    wrong = in_rows(lacks & is_value, sizes)
    if wrong.any():
        what = "has a value whose weight is no finite number"
        faults.append(Fault(column.name, "bad weight of a value", what, wrong))
    places, offsets = remaining(is_value, sizes, column)
    bad = None if bad is None else in_rows(bad, sizes)
    return listed(offsets, values[places]), listed(offsets, numbers_of[places]), bad, faults


def values_and_weights(raw: pa.Table, column: StoredColumn, reading: Reading):
    """The values of all lists and their weights, (m,) of any Arrow type; how many each list has (n,); faults."""
    array = column_of(raw, column.name)
    if column.is_map:
        array = pairs_of(array)
        return *array.flatten().flatten(), sizes_of(array), []
    array = divided(array, column)
    sizes = sizes_of(array)
    if column.weights is not None:
        return *split_weights(array.flatten(), column.weights), sizes, []
    others = divided(column_of(raw, column.weight_column), column)
    wrong = sizes_of(others) != sizes
    if not wrong.any():
        return array.flatten(), others.flatten(), sizes, []
    what = f"has another number of values than {column.weight_column} has weights"
    good = pa.array(~wrong)
    array, others = (pc.if_else(good, one, pa.scalar(None, one.type)) for one in (array, others))
    return array.flatten(), others.flatten(), sizes_of(array), [Fault(column.name, "unequal lists", what, wrong)]


def pairs_of(maps: pa.Array) -> pa.Array:
    """Maps as lists of key and value. Raises DataError for other types."""
    if not pa.types.is_map(maps.type):
        raise DataError(f"it holds {maps.type}, maps were expected")
    return maps.cast(pa.list_(pa.struct([("key", maps.type.key_type), ("value", maps.type.item_type)])))


def flat_values(array: pa.Array, column: StoredColumn) -> pa.Array:
    """The values of a column of several values, one after the other, without their weights."""
    if column.is_map:
        return pairs_of(array).flatten().field(0)
    flat = divided(array, column).flatten()
    return flat if column.weights is None else split_weights(flat, column.weights)[0]


def split_weights(texts: pa.Array, separator: str) -> tuple[pa.Array, pa.Array]:
    """Values and weights of texts as t6:2.5, binary; of texts without a weight the empty one."""
    parts = pc.split_pattern(as_text(texts), separator.encode(), max_splits=1, reverse=True)
    has = pa.array(sizes_of(parts) == 2)
    both = pc.if_else(has, parts, pa.scalar([b"", b""], parts.type))
    values = pc.if_else(has, pc.list_element(both, 0), as_text(texts))
    return trimmed(values, ())[0], pc.list_element(both, 1)


def labels(raw: pa.Table, reading: Reading, path: str) -> tuple[list[np.ndarray], list[Fault]]:
    """(n,) float32 for each label, NaN where one of several is missing, or texts of classes, and the faults. Raises
    DataError."""
    found, faults = [], []
    for name, missing in zip(reading.labels, reading.label_missing):
        try:
            values, fault = one_label(column_of(raw, name), name, reading, missing)
        except (DataError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"data.path: {path}, column {name}, the label: {error}") from error
        found.append(values)
        faults += [fault] if fault else []
    if len(found) > 1:
        without = np.logical_and.reduce([np.isnan(values) for values in found])
        for fault in faults:
            without &= ~fault.rows
        if without.any():
            faults.append(Fault(reading.labels[0], "no label", f"and none in {', '.join(reading.labels[1:])}", without))
    return found, faults


def one_label(
    array: pa.Array, name: str, reading: Reading, missing: tuple[str, ...]
) -> tuple[np.ndarray, Fault | None]:
    """(n,) float32, or texts of classes, and rows with a bad label; of several labels NaN where this one is missing."""
    is_one = len(reading.labels) == 1
    if reading.label_kind == CLASSES:
        return class_label(array, name, missing)
    if reading.positive is not None:
        found = hashes(array, 0, missing)
        none = found == no_value(0)
        values = np.isin(found, hashes(pa.array([text.encode() for text in reading.positive]), 0, ()))
        values, bad = np.where(none, np.nan, values), none if is_one else np.zeros(len(none), bool)
        kind, what = "missing label", "is no label"
        is_other = np.isin(found, hashes_of(other_spellings(reading.positive), 0))
        if is_other.any():
            bad, kind, what = bad | is_other, OTHER_SPELLING, "seems to be another spelling of one of data.positive"
    else:
        values, bad = numbers(array, missing, reading.decimal)
        none = np.isnan(values) if bad is None else np.isnan(values) & ~bad
        wrong = (values != 0) & (values != 1)
        if reading.label_kind == NUMBER:
            wrong = np.isnan(values)
        elif reading.label_kind == PROBABILITY:
            wrong = ~((values >= 0) & (values <= 1))
        bad = wrong if bad is None else bad | wrong
        bad = bad if is_one else bad & ~none
        kind, what = BAD_LABEL, "is neither 0 nor 1"
        if reading.label_kind == NUMBER:
            kind, what = "label that is no number", "is no finite number"
        elif reading.label_kind == PROBABILITY:
            kind, what = "label that is no probability", "is no number from 0 to 1"
        if none[bad].all():
            kind, what = "missing label", "is no label, as it is missing"
    if not bad.any():
        return values.astype(np.float32), None
    texts, none = trimmed(pc.unique(as_text(array.filter(pa.array(bad)))), missing)
    texts = texts.filter(pa.array(~none)).slice(0, MAX_EXAMPLES).to_pylist()
    labels = tuple(text.decode(errors="replace") for text in texts)
    return values.astype(np.float32), Fault(name, kind, what, bad, labels)


def class_label(array: pa.Array, name: str, missing: tuple[str, ...]) -> tuple[pa.Array, Fault | None]:
    """Texts (n,) of classes, alike for integers and booleans in any type, and rows without one."""
    texts, none = trimmed(as_text(array), missing)
    for pattern, replacement in ((r"^(-?[0-9]+)\.0*$", r"\1"), (TRUE_TEXT, "true"), (FALSE_TEXT, "false")):
        texts = pc.replace_substring_regex(texts, pattern=pattern, replacement=replacement)
    texts = decoded(texts)
    if pa.types.is_floating(array.type):
        none |= np.asarray(pc.is_nan(array).fill_null(True))
    fault = Fault(name, "missing label", "is no label, as it is missing", none) if none.any() else None
    return texts, fault


def decoded(texts: pa.Array) -> pa.Array:
    """Binary texts as strings, of which bytes that are not UTF-8 are replaced."""
    try:
        return texts.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([text and text.decode(errors="replace") for text in texts.to_pylist()], pa.string())


@functools.lru_cache(64)
def other_spellings(positive: tuple[str, ...]) -> tuple[str, ...]:
    """Texts of labels that differ from those of data.positive by case, or as 1 differs from yes, and are none of
    them."""
    found = {spelled for text in positive for spelled in (text.lower(), text.upper(), text.capitalize())}
    if any(text.lower() in POSITIVE for text in positive):
        found.add("1")
    if "1" in positive:
        found |= {"true", "yes", "Yes", "YES"}
    known = set(hashes_of(positive, 0).tolist())
    return tuple(sorted(text for text in found if int(hashes_of((text,), 0)[0]) not in known))


def weights(array: pa.Array, reading: Reading, path: str) -> tuple[np.ndarray, Fault | None]:
    """(n,) float32, and rows with a bad weight. Raises DataError."""
    name = reading.sample_weight
    try:
        values, bad = numbers(array, all_missing(), reading.decimal)  # as of labels, data.missing=[0] is for features
    except (DataError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"data.sample_weight: {path}, column {name}: {error}") from error
    wrong = ~(values >= 0) if bad is None else ~(values >= 0) | bad
    fault = Fault(name, "bad weight", "is no weight: a finite number of at least 0 was expected", wrong)
    return values, fault if wrong.any() else None


def convert(raw: pa.Table, reading: Reading, path: str) -> tuple[pa.Table, list[Fault]]:
    """The prepared form of raw columns, with bad rows, and the faults. Raises DataError, with file and column, for a
    type that cannot be read as its rule asks."""
    of_labels, faults = labels(raw, reading, path)
    arrays = [pa.array(values) for values in of_labels]
    if reading.sample_weight is not None:
        values, fault = weights(column_of(raw, reading.sample_weight), reading, path)
        arrays.append(pa.array(values))
        faults += [fault] if fault else []
    of_values, vectors, places = [], {}, []
    for column in reading.columns:
        try:
            if column.is_weighted:
                values, found, bad, wrong = weighted_lists(raw, column, reading)
                of_values.append(found)
                faults += wrong
            elif column.vector is not None:
                if column.vector not in vectors:
                    vectors[column.vector], wrong = vectors_of(column_of(raw, column.vector), column, reading)
                    faults += wrong
                values, bad = pa.array(np.ascontiguousarray(vectors[column.vector][:, column.place])), None
            elif column.is_list:
                values, bad, in_order = lists(column_of(raw, column.name), column, reading.missing_of(column))
                places += [in_order] if in_order else []
            else:
                values, bad = one_column(column_of(raw, column.name), column, reading)
        except (DataError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"data.path: {path}, column {column.name}: {error}") from error
        arrays.append(values)
        if bad is not None:
            what = "is no finite number" if column.as_ == NUMBER else "is no integer of at least 0"
            faults.append(Fault(column.name, BAD_NUMBER if column.as_ == NUMBER else "bad integer", what, bad))
    faults += misaligned(places)
    table = pa.table([*arrays, *of_values], schema=reading.schema())
    if reading.split:
        try:
            is_valid, fault = held_out(column_of(raw, reading.split[0]), reading)
        except DataError as error:
            raise DataError(f"data.valid: {path}, column {reading.split[0]}: {error}") from error
        table = table.append_column("is_valid", pa.array(is_valid))
        faults += [fault] if fault else []
    for name in reading.kept:
        table = table.append_column(KEPT + name, column_of(raw, name))
    return table, faults


def held_out(array: pa.Array, reading: Reading) -> tuple[np.ndarray, Fault | None]:
    """Which rows are held out by the values of the column of data.valid, (n,) bool; rows with a bad value."""
    name, texts = reading.split
    array = pointed(array, reading)
    if reading.after is None:
        wanted = pa.array([text.encode(errors="surrogateescape") for text in texts], pa.binary())
        return np.isin(hashes(array, 0, reading.missing), hashes(wanted, 0, ())), None
    values, none, bad = times(array, reading.missing, reading.unit)
    what = "is no date or timestamp as 2024-05-01 or 2024-05-01T12:30:00Z"
    if reading.unit is not None:
        what = f"is no time in {NAMES[reading.unit]}"
    fault = Fault(name, "bad time", what, bad)
    return (values > reading.after) & ~none & ~bad, fault if bad.any() else None


def column_of(raw: pa.Table, name: str) -> pa.Array:
    column = raw.column(name)
    array = (
        column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])
    )
    if pa.types.is_string_view(array.type):
        return array.cast(pa.string())
    return array.cast(pa.binary()) if pa.types.is_binary_view(array.type) else array


def pointed(array: pa.Array, reading: Reading) -> pa.Array:
    """Values, with points in texts that are numbers with a decimal comma."""
    return with_points(array) if reading.decimal != POINT and is_text(array) else array


def one_column(array: pa.Array, column: StoredColumn, reading: Reading) -> tuple[pa.Array, np.ndarray | None]:
    bad, missing = None, reading.missing_of(column)
    if pa.types.is_nested(array.type):
        raise DataError(f"it holds {array.type}, single values were expected")
    if column.as_ == NUMBER:
        values, bad = numbers(array, missing, reading.decimal)
    elif column.as_ == HASH:
        values = hashes(pointed(array, reading), column.seed, missing)
    else:
        values, bad = integers(array, missing)
    return pa.array(values), bad


def vectors_of(array: pa.Array, column: StoredColumn, reading: Reading) -> tuple[np.ndarray, list[Fault]]:
    """Vectors (n, size) float32, NaN for missing numbers and vectors, and rows with others."""
    if not is_list(array.type) or not is_number_type(array.type.value_type):
        raise DataError(f"it holds {array.type}, vectors of {column.size} numbers were expected")
    array = array if pa.types.is_list(array.type) else array.cast(pa.list_(array.type.value_type))
    sizes, is_null = sizes_of(array), ~np.asarray(array.is_valid())
    is_whole = sizes == column.size
    flat, bad = numbers(array.flatten(), reading.missing_of(column), reading.decimal)
    found = np.full((len(sizes), column.size), np.nan, np.float32)
    found[is_whole] = flat[np.repeat(is_whole, sizes)].reshape(-1, column.size)
    what, faults = f"has another length than {column.size}, that of the first", []
    if not (is_whole | is_null).all():
        faults.append(Fault(column.vector, UNEQUAL_VECTOR, what, ~is_whole & ~is_null))
    if bad is not None:
        faults.append(Fault(column.vector, "bad number", "has a number that is not finite", in_rows(bad, sizes)))
    return found, faults


def without(table: pa.Table, raw: pa.Table, faults: list[Fault], place, bad: BadRows) -> tuple[pa.Table, np.ndarray]:
    """The rows without faults, and their numbers (n,) among all. Counts and shows the others in `bad`."""
    is_bad = np.zeros(len(table), bool)
    for fault in faults:
        bad.add(fault.kind, int(fault.rows.sum()))
        for row in np.flatnonzero(fault.rows)[:5].tolist():
            bad.show(place(row), f"column {fault.column}: {value_text(raw, fault.column, row)} {fault.what}")
        bad.show_labels(fault.labels)
        is_bad |= fault.rows
    bad.rows += int(is_bad.sum())
    return table.filter(pa.array(~is_bad)), np.flatnonzero(~is_bad)


def value_text(raw: pa.Table, column: str, row: int) -> str:
    value = raw.column(column)[row]
    try:
        value = value.as_py()
    except (OverflowError, ValueError):  # a time that Python cannot hold
        value = f"{value.cast(pa.int64()).as_py()} ({value.type})"
    return (
        "a missing value"
        if value in (None, b"", "")
        else shown(value if isinstance(value, (bytes, str)) else str(value))
    )
