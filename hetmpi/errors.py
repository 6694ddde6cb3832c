"""Errors that are printed in one line: expected and actual value, and advice. All other errors keep their traceback."""

from __future__ import annotations

import contextlib
import errno
import numbers
import re
import sys
from collections.abc import Mapping, Sequence


class UserError(ValueError):
    """Invalid input, or a machine that lacks something: the message says what was expected, what came, what to do. Its
    control characters are escaped, as it may hold foreign text."""

    def __str__(self) -> str:
        return "\n".join(map(printable, super().__str__().split("\n")))


class NotFinite(UserError):
    """Gradients that are NaN or infinite, before they reach their owners."""


class ReportedElsewhere(UserError):
    """An error whose message another rank prints."""


class MissingLibrary(UserError, ImportError):
    """A library that this machine or this Python lacks."""


def show_in_one_line(kind: type, error: BaseException, trace):
    """As sys.excepthook: prints a UserError in one line. For errors at imports, before launch() can print them."""
    if not isinstance(error, UserError):
        sys.__excepthook__(kind, error, trace)
    elif not isinstance(error, ReportedElsewhere):
        print(f"hetmpi: {error}", file=sys.stderr)


def printable(text: str) -> str:
    """A foreign text for a line: line ends and control characters as escapes."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class doing:
    """A context for user-defined code. An error in it keeps its traceback, and its last line names `what`."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception) and not isinstance(error, UserError):
            with contextlib.suppress(AttributeError):  # a class without a __dict__
                error.doing = getattr(error, "doing", self._what)  # keeps that of an inner context


URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def check_path(name: str, value: str, kind: type[UserError] = UserError):
    """Raises UserError, or its subclass `kind`, for a URL in the place of a path. name: of the setting."""
    scheme = URL.match(value)
    if scheme is not None:
        path = value[scheme.end() :]
        cure = (
            f"write {name}={one_line(path, 300)}"
            if scheme[1].lower() == "file" and path.startswith("/")
            else "copy its files to a folder of this machine, or mount the storage, and give the path of that"
        )
        raise kind(f"{name}={one_line(value, 300)} is a URL, hetmpi reads and writes files: {cure}")


def check_paths(name: str, paths: Sequence[str], settings: Mapping[str, str]):
    """As check_path, of the arguments of a command: paths without a key, called `name`, and settings but those of
    sources, which a source of one's own may read otherwise."""
    for path in paths:
        check_path(name, path)
    for key, value in settings.items():
        if not key.startswith("data"):
            check_path(key, value.strip("'\""))


def cure_of(problem: OSError, setting: str) -> str:
    """What to do about a file that cannot be written. setting: of its folder."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free space there or choose another {setting}"
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"make it writable or choose another {setting}"
    return f"choose another {setting}"


LARGEST = (1 << 63) - 1


def check_integer(name: str, value, least: int, most: int = LARGEST):
    """Raises UserError unless `value` is an integer in [least, most]."""
    check_number(name, value, least, most, numbers.Integral)


def check_number(name: str, value, least: float, most: float = LARGEST, kinds=numbers.Real):
    """Raises UserError unless `value` is a finite number of `kinds` in [least, most]. The default of `most` does not
    limit floats."""
    kind = "an integer" if kinds is numbers.Integral else "a number"
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < float("inf"):
        is_whole = isinstance(value, float) and value.is_integer() and least <= value <= most
        cure = f": write {value:.0f}, without point or exponent" if is_whole else ""
        raise UserError(f"{name} must be {kind} of at least {least}, got {one_line(value, 100)}{cure}")
    if value > most and (most < LARGEST or isinstance(value, numbers.Integral)):  # LARGEST limits integers only
        raise UserError(f"{name} must be at most {most:,}, got {one_line(f'{value:,}', 100)}")


def check_choice(name: str, value: str, choices):
    """Raises ValueError if `value` is none of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {one_line(value, 100)}")


def one_line(value: object, most: int = 200) -> str:
    """A value from a file or the command line as part of one line: characters that cannot be printed are escaped, and
    what is longer than `most` is cut."""
    text = printable(str(value)[: most + 1])
    return text if len(text) <= most else f"{text[: most - 3]}..."
