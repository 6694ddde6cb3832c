"""Columns of tables of nodes and edges: values as arrays of Arrow, whatever type and format they came in.

N nodes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.data.batch import Bag
from hetmpi.data.files import DataError
from hetmpi.data.graph.graph import offsets_of
from hetmpi.errors import one_line
from hetmpi.memory import check_fits

INTEGER_TEXT = r"^(0|-?[1-9][0-9]{0,17})$"  # 00030, +3 and -0 are texts
WHOLE_TEXT = r"^(0|-?[1-9][0-9]{0,14})(\.0*)?$"  # as pandas writes integers beside missing ones
NUMBER_TEXT = r"^[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?(?i:inf|infinity|nan)$"
BOOLEAN_TEXT = r"^(?i:true|false)$"
LIST_TEXT = r"^[\[(].*[\])]$"
FRACTION_TEXT = r"^[+-]?[0-9]*(\.[0-9]*([eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+)$"
QUANTITY_TEXT = r"^[+-]?([0-9]+([.,][0-9]+)?%|[0-9]+,[0-9]+|[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?)$"  # 5%, 0,5, 1,200
SPACES = " \t"  # around values, as in tabular data
HEAD = 64  # values that are tried before all
LARGEST_WHOLE = 1 << 53  # of doubles that hold every integer


def plain(found: pa.ChunkedArray, missing: Sequence[str], is_typed: bool) -> pa.Array:
    """The values of a column: texts without the blanks around them, and null for those in `missing`; texts of a file
    without types that all are lists, as lists."""
    kind = found.type
    if pa.types.is_dictionary(kind):
        found = found.cast(kind.value_type)
    integers = integers_in(found, missing) if is_text(found.type) and not is_typed else None
    if integers is not None:
        return integers
    if is_text(found.type):
        found = pc.ascii_trim(found.cast(pa.large_string()), SPACES)
        none = pc.is_in(found, value_set=pa.array([*missing, ""], pa.large_string()))
        found = pc.if_else(none, pa.scalar(None, pa.large_string()), found)
    found = in_one(found)
    if not is_typed and is_text(found.type) and all_match(found, LIST_TEXT):
        return lists_in(found)
    return found


def integers_in(texts: pa.ChunkedArray, missing: Sequence[str]) -> pa.Array | None:
    """Texts that all are integers, as INTEGER_TEXT, as int64; None for others. Faster than that expression."""
    if not len(texts) or any(re.fullmatch(INTEGER_TEXT, text) for text in missing):
        return None
    try:
        texts.slice(0, HEAD).cast(pa.int64())  # first, as a cast of many texts takes long to fail
        found = texts.cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    return in_one(found) if pc.all(pc.equal(found.cast(texts.type), texts)).as_py() else None


def in_one(found: pa.ChunkedArray) -> pa.Array:
    found = found.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)


def all_match(texts: pa.Array, pattern: str) -> bool:
    """Whether there is a text, and all match."""
    parts = texts.slice(0, HEAD), texts
    matches = (pc.all(pc.match_substring_regex(part, pattern)).as_py() for part in parts)  # None of nulls alone
    return texts.null_count < len(texts) and all(is_match is not False for is_match in matches)


def lists_in(texts: pa.Array) -> pa.Array:
    """Texts such as ['a', 'b'], [a,b], [0.5 1.5] or (1, 2) as lists of texts."""
    return pa.array([None if text is None else list_in(text) for text in texts.to_pylist()], pa.list_(pa.string()))


def list_in(text: str) -> list[str]:
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, (list, tuple)) or any(isinstance(value, (list, tuple, dict)) for value in found):
        found = re.split(r"[\s,]+", text[1:-1].strip())
    return [str(value) for value in found if value is not None and str(value)]


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_number(kind: pa.DataType) -> bool:
    is_decimal = pa.types.is_decimal(kind)
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or is_decimal


def whole(values: pa.Array) -> pa.Array | None:
    """Integers as they are; doubles and decimals that are whole, and texts that all are integers, as int64 with null
    for NaN; None for any other values."""
    kind = values.type
    if pa.types.is_integer(kind):
        return values
    if pa.types.is_floating(kind):
        values = values.cast(pa.float64())
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, pa.float64()), values)
        is_whole = pc.and_(pc.equal(pc.floor(values), values), pc.less_equal(pc.abs(values), float(LARGEST_WHOLE)))
        return values.cast(pa.int64()) if pc.all(is_whole).as_py() is not False else None
    if pa.types.is_decimal(kind):
        try:
            return values.cast(pa.int64())
        except pa.ArrowInvalid:  # a fraction, or beyond int64
            return None
    if is_text(kind) and all_match(values, INTEGER_TEXT):
        return values.cast(pa.int64())
    if is_text(kind) and all_match(values, WHOLE_TEXT):
        return pc.replace_substring_regex(values, r"\..*$", "").cast(pa.int64())
    return None


def as_texts(values: pa.Array) -> pa.Array:
    """Texts as they are; integers, whole doubles and booleans as the texts that a CSV file has of them."""
    if is_text(values.type):
        return values.cast(pa.large_string())
    found = whole(values)
    return (values if found is None else found).cast(pa.large_string())


def same_ids(columns: Sequence[pa.Array], names: Sequence[str]) -> list[pa.Array]:
    """Ids of several columns in one type: integers if all values are integers, as 30 but not 00030, else texts. Raises
    DataError for missing ids, and for values that are neither. names: of the columns, for messages."""
    for name, values in zip(names, columns):
        kind = values.type
        if not (is_text(kind) or pa.types.is_null(kind) or (is_number(kind) and not pa.types.is_boolean(kind))):
            raise DataError(f"{name} must hold integers or texts, it holds {type_text(values)}")
        if pa.types.is_floating(kind) and whole(values) is None:
            raise DataError(f"{name} must hold integers or texts, it holds {type_text(values)} with fractions")
        num = values.null_count + (pc.sum(pc.is_nan(values)).as_py() or 0 if pa.types.is_floating(kind) else 0)
        if num:
            raise DataError(f"{name} is missing in {num:,} rows: fill it in, or set data.missing if its texts are ids")
    integers = [values if not len(values) else whole(values) for values in columns]
    if all(values is not None for values in integers):
        for name, values in zip(names, integers):
            if pa.types.is_uint64(values.type) and len(values) and pc.max(values).as_py() > np.iinfo(np.int64).max:
                raise DataError(f"{name} must be below 2^63, the highest is {pc.max(values)}")
        return [values.cast(pa.int64()) for values in integers]
    return [as_texts(values) for values in columns]


def numbers_in(values: pa.Array, is_typed: bool) -> np.ndarray | None:
    """The numbers (N, width) float32 of a column, NaN for missing ones; several of each node where all are lists of so
    many fractions. None for a column of ids. is_typed: whether texts are texts even if they are numbers."""
    if is_text(values.type) and not is_typed:
        if all_match(values, NUMBER_TEXT):
            return floats_of(pc.replace_substring(values, "+", ""))[:, None]
        if all_match(values, BOOLEAN_TEXT):
            return floats_of(pc.equal(pc.utf8_lower(values), "true"))[:, None]
    if is_number(values.type):
        return floats_of(values)[:, None]
    return vectors_in(split_texts(values)) if is_list(values.type) or not is_typed else None


def floats_of(values: pa.Array) -> np.ndarray:
    """(n,) float32, NaN for null; numbers beyond its range are infinite."""
    return values.cast(pa.float64(), safe=False).cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)


def vectors_in(lists: pa.Array) -> np.ndarray | None:
    """(N, width) float32 of lists of at least two numbers, all of one length, of which one is a fraction; None for
    others."""
    if not is_list(lists.type) or not len(lists) or lists.null_count:
        return None
    flat, sizes = values_in(lists), pc.list_value_length(lists)
    width = sizes[0].as_py()
    if width < 2 or flat.null_count or not pc.all(pc.equal(sizes, width)).as_py():
        return None
    if is_text(flat.type) and all_match(flat, NUMBER_TEXT):
        has_fraction = pc.any(pc.match_substring_regex(flat, FRACTION_TEXT)).as_py()
        flat = pc.replace_substring(flat, "+", "").cast(pa.float64()) if has_fraction else flat
    if not pa.types.is_floating(flat.type):
        return None
    return floats_of(flat).reshape(-1, width)


def split_texts(values: pa.Array) -> pa.Array:
    """Texts as lists of what stands between their blanks; other values as they are."""
    return pc.utf8_split_whitespace(values) if is_text(values.type) else values


def ids_in(values: pa.Array, what: str) -> tuple[Bag, pa.Array]:
    """The ids of a column of lists, or of texts with blanks between: places among its distinct values, and these.
    Raises DataError."""
    lists = split_texts(values)
    if not is_list(lists.type):
        raise DataError(f"{what} must hold lists, texts or numbers, it holds {type_text(values)}")
    flat = values_in(lists)
    if pa.types.is_floating(flat.type):
        raise DataError(
            f"{what} holds {type_text(values)}: fractions must be as many in every row, at least 2 and none missing; "
            "ids are integers or texts"
        )
    if not (pa.types.is_integer(flat.type) or is_text(flat.type) or pa.types.is_null(flat.type)):
        raise DataError(f"{what} must hold lists of integers or of texts, which are ids, it holds {type_text(values)}")
    refuse_indicators(lists, flat, what)
    sizes = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    is_there = is_given(flat)
    owners = np.repeat(np.arange(len(lists)), sizes)[np.asarray(is_there)]
    coded = flat.filter(is_there).dictionary_encode()
    codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return Bag(codes, offsets_of(np.bincount(owners, minlength=len(lists)))), coded.dictionary


def remark_numbers(values: pa.Array, distinct: pa.Array, what: str, remark: Remark):
    """Says that numbers become ids, where most of the distinct ids of a column of texts seem to be numbers: fractions,
    or texts of one number each."""
    texts = distinct.cast(pa.string())
    is_fraction = pc.match_substring_regex(texts, FRACTION_TEXT)
    is_number = pc.or_(pc.or_(is_fraction, pc.match_substring_regex(texts, NUMBER_TEXT)),
                       pc.match_substring_regex(texts, QUANTITY_TEXT))  # fmt: skip
    is_single = is_text(values.type) and (pc.max(pc.list_value_length(split_texts(values))).as_py() or 0) < 2
    num = pc.sum(is_number).as_py() or 0
    if 2 * num < max(1, len(texts)) or not (is_single or pc.any(is_fraction).as_py()):
        return
    others = texts.filter(pc.invert(pc.match_substring_regex(texts, NUMBER_TEXT)))
    why = f"as {value_text(others[0])!r} is none" if len(others) else "as these are not as many in every row"
    remark(
        f"{what}: {num:,} of {len(texts):,} distinct values seem to be numbers, but all are ids, with a row each, "
        f"{why}: correct the file if they are numbers"
    )


def refuse_indicators(lists: pa.Array, flat: pa.Array, what: str):
    """Raises DataError for vectors of 0 and 1, of one length, which would be ids 0 and 1."""
    sizes = pc.list_value_length(lists)
    if len(lists) < 2 or lists.null_count or len(pc.unique(sizes)) > 1 or sizes[0].as_py() < 3:
        return
    if set(map(str, pc.unique(flat).to_pylist())) == {"0", "1"}:
        raise DataError(
            f"{what} holds {sizes[0]} values 0 or 1 in every row, which would be two ids: give the places of the ones "
            "as ids, or numbers, as 0.0 and 1.0"
        )


def values_in(lists: pa.Array) -> pa.Array:
    """The values of all lists."""
    flat = lists.flatten()
    return flat.dictionary_decode() if pa.types.is_dictionary(flat.type) else flat


def is_given(values: pa.Array) -> pa.Array:
    """Which values are neither missing nor an empty text."""
    return pc.not_equal(values, "").fill_null(False) if is_text(values.type) else values.is_valid()


def check_distinct(ids: pa.Array, what: str):
    counts = pc.value_counts(ids)
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        first = value_text(twice[0]["values"])
        raise DataError(f"{what} must be unique, {len(twice):,} occur several times, first {first}")


def names_of(ids: pa.Array, what: str) -> np.ndarray:
    """Ids (N,) as int64 or texts."""
    if not is_text(ids.type):
        return ids.to_numpy().astype(np.int64)
    longest = pc.max(pc.utf8_length(ids)).as_py()
    check_fits(4 * longest * len(ids), f"{what} with up to {longest:,} characters", "use shorter texts, or integers")
    return np.array(ids.to_pylist(), np.str_)


def type_text(values: pa.Array) -> str:
    return one_line(" ".join(str(values.type).split()).replace("large_string", "string"), 100)


def value_text(value: pa.Scalar) -> str:
    return one_line(value, 100)


Remark = Callable[[str], None]  # takes a line for the user
