"""What all sources share that read files: the error for data that cannot be read, and absolute paths."""

from __future__ import annotations

import os

from hetmpi.errors import UserError, check_path, one_line


class DataError(UserError):
    """Data that cannot be read or prepared; the message is complete without a traceback."""


def absolute(path: str, key: str = "data.path") -> str:
    """The absolute path, with ~ expanded. key: its setting. Raises DataError for a URL."""
    check_path(key, path, DataError)
    return os.path.abspath(os.path.expanduser(path))


def all_files(folder: str) -> list[str]:
    """Paths of the files in a folder and those below it, in order; a file's own."""
    if not os.path.isdir(folder):
        return [folder]
    found = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if ".part-" not in path)


def first_line(error: Exception) -> str:
    """The first line of an error's text, without its last point, in characters that can be printed."""
    lines = str(error).splitlines() or [type(error).__name__]
    return one_line(lines[0].rstrip("."), 300)
