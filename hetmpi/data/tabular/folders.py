"""Folders named KEY=VALUE, as Hive and Spark write them: each file in one has the column KEY with this value."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from hetmpi.data.files import DataError
from hetmpi.data.tabular.convert import column_of, hashes, is_list, value_text
from hetmpi.data.tabular.files import is_key
from hetmpi.data.tabular.reading import Reading
from hetmpi.errors import printable

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


def keys_of(path: str) -> dict[str, str | None]:
    """The keys of the folders in which a file lies, and their values, None for a missing one."""
    pairs = (part.partition("=") for part in os.path.dirname(path).split(os.sep) if is_key(part))
    return {unquote(key): None if value == NO_VALUE else unquote(value) for key, _, value in pairs}


def keys_below(top: str, path: str, others: Iterable[str] = ()) -> dict[str, str | None]:
    """Those of keys_of() that are below the folder `top`, which lies above all files of a source. others: keys of other
    files, the only ones of a file that does not lie below."""
    below = os.path.relpath(path, top)
    return {key: value for key, value in keys_of(below).items() if not below.startswith("..") or key in others}


def top_of(source: str) -> str:
    """The folder above all files of a source."""
    if os.path.isdir(source):
        return source
    while glob.has_magic(source):
        source = os.path.dirname(source)
        if not glob.has_magic(source):
            return source
    return os.path.dirname(source)


def keys_read(path: str, reading: Reading) -> dict[str, str | None]:
    """Those of keys_of that are read as columns."""
    return {key: value for key, value in keys_of(path).items() if key in reading.keys and key in reading.wanted}


def in_file(wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns that are read in a file with the columns `names`: those that are wanted, at least one."""
    known = set(names)
    return [name for name in wanted if name in known] or list(names[:1])


def with_keys(table: pa.Table, keys: Mapping[str, str | None], missing: tuple[str, ...], path: str) -> pa.Table:
    """A file's columns and those of its folders, as texts. Raises DataError for a column of the file with another
    value."""
    for key, value in keys.items():
        if key in table.column_names:
            check_same(column_of(table, key), key, value, missing, path)
        else:
            table = table.append_column(key, repeated(value, len(table)))
    return table


def repeated(value: str | None, num: int) -> pa.Array:
    """A folder's value as binary texts (num,)."""
    scalar = pa.scalar(value and value.encode(errors="surrogateescape"), pa.binary())
    return pa.repeat(scalar, num)


def check_same(values: pa.Array, key: str, value: str | None, missing: tuple[str, ...], path: str):
    """Raises DataError unless the values are that of the folder."""
    [wanted] = hashes(repeated(value, 1), 0, missing)
    differ = np.zeros(len(values), bool) if is_list(values.type) else hashes(values, 0, missing) != wanted
    if is_list(values.type) or differ.any():
        other = value_text(pa.table({key: values}), key, int(np.argmax(differ))) if len(values) else "lists"
        raise DataError(
            f"data.path: {path}: column {printable(key)[:100]} holds {other}, another value than its folder's name: "
            "rename the column, or the folder"
        )
