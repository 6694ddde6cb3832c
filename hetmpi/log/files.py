"""Files of a run folder: each entry is written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def append(path: Path, data: bytes) -> None:
    """Appends data to a file, whole or not at all. Raises OSError."""
    begin = None
    try:
        with open(path, "ab") as file:
            begin = file.tell()
            file.write(data)
    except OSError as error:
        error.filename = error.filename or str(path)
        if begin is not None:
            with suppress(OSError):
                os.truncate(path, begin)
        raise


def replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all, in place of a file or a link of that name: no link is followed. Raises
    OSError."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # of a process that was killed, or a link to elsewhere
        with open(part, "x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def flat(settings: dict, above: str = "") -> dict:
    """Flattens groups of settings into one dict, with keys joined by dots as on the command line."""
    found = {}
    for key, value in settings.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found
