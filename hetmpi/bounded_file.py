"""Files that anybody may have written, read without trust: only regular files, up to a limit of bytes, and JSON up to a
limit of nesting. A pipe or a device is refused before it is read, and a file that grows is not followed.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import BinaryIO

from hetmpi.errors import UserError, one_line

MOST_DEPTH = 32  # of nested lists and objects
LARGEST_NUMBER = 1e100  # sums and products of such numbers stay finite


class NotRegular(OSError):
    """A folder, a pipe or a device in the place of a file."""

    def __init__(self):
        super().__init__(errno.EINVAL, "is not a regular file")


def open_file(path: str | Path) -> BinaryIO:
    """Opens a regular file for reading. Raises NotRegular for any other kind, OSError if it cannot be opened."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for its writer
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotRegular
    return open(path, "rb", opener=lambda path, flags: file)  # so that its name is the path


def open_regular(path: str | Path) -> BinaryIO:
    """As open_file, but raises UserError."""
    try:
        return open_file(path)
    except NotRegular as error:
        raise UserError(f"{shown(path)} cannot be read: it is not a regular file") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UserError(f"{shown(path)} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def read_bytes(path: str | Path, most_bytes: int) -> bytes:
    """The contents of a regular file of at most `most_bytes`. Raises UserError for any other."""
    with open_regular(path) as file:
        try:
            data = file.read(most_bytes + 1) or b""
        except OSError as error:
            raise UserError(f"{shown(path)} cannot be read: {error.strerror}") from error
    if len(data) > most_bytes:
        raise UserError(f"{shown(path)} cannot be read: it is larger than {most_bytes:,} bytes")
    return data


def read_text(path: str | Path, most_bytes: int) -> str:
    """As read_bytes, decoded; bytes that are not UTF-8 become U+FFFD."""
    return read_bytes(path, most_bytes).decode(errors="replace")


def parsed_json(text: str | bytes, place: str, most_depth: int = MOST_DEPTH):
    """The value of a JSON text. Raises UserError, which names `place`, for a text that is not JSON, is nested more
    deeply than `most_depth`, or holds a number that is NaN, infinite or beyond LARGEST_NUMBER."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    try:
        value = json.loads(text, parse_constant=refuse_constant)
        check_values(value, most_depth)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply to be parsed
        why = "nested too deeply" if isinstance(error, RecursionError) else one_line(error, 200)
        raise UserError(f"{place} is not JSON ({why})") from error
    return value


def check_values(value, most_depth: int):
    """Raises ValueError if a value of JSON is nested too deeply or holds a number that is too large."""
    nested = isinstance(value, (dict, list))
    if nested and most_depth == 0:
        raise ValueError("nested too deeply")
    for item in (value.values() if isinstance(value, dict) else value) if nested else [value]:
        if isinstance(item, (dict, list)):
            check_values(item, most_depth - 1)
        elif isinstance(item, (int, float)) and not -LARGEST_NUMBER <= item <= LARGEST_NUMBER:
            raise ValueError("a number is too large")


def refuse_constant(name: str):
    raise ValueError(f"{name} is not a number")


def shown(path: str | Path) -> str:
    """A path in one line of a message."""
    return one_line(path, 400)
