"""Files that a command writes: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from hetmpi.errors import UserError


@contextlib.contextmanager
def part_of(out: Path) -> Iterator[Path]:
    """A context with the path of a part file beside `out`, whose folder is created. Without an error the part file
    becomes `out`, otherwise it is removed. Raises UserError if the folder or `out` cannot be written."""
    part = out.with_name(f".{out.name}.{socket.gethostname()}.{os.getpid()}.part")
    with cannot_write(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # a link, or the file of a killed process
        part.touch(exist_ok=False)  # by O_EXCL, which follows no link
    try:
        yield part
        with cannot_write(out):
            part.replace(out)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


@contextlib.contextmanager
def cannot_write(out: Path):
    """A context that turns an error of the disk into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
