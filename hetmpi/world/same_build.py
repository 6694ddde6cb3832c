"""Ranks exchange messages without a version in each: so all must run the same sources, or they would misread them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import hetmpi
from hetmpi import _C
from hetmpi.errors import UserError


@functools.cache
def own_build() -> str:
    """Identifies version, core and the modules that exchange messages."""
    top = Path(__file__).parents[1]
    rooms = [sorted((top / name).glob("*.py")) for name in ("world", "owner", "wire", "table")]
    texts = [file.read_bytes() for file in (*sum(rooms, []), top / "open_rows.py")]
    modules = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()[:12]
    return f"{hetmpi.__version__}, core {_C.SOURCES or 'unknown'}, modules {modules}"


def check_same_build(hosts: Sequence[str], builds: Sequence[str]):
    """Raises UserError, on every rank that calls it with the hosts and builds of all ranks, unless these are the
    same."""
    for rank, build in enumerate(builds):
        if build != builds[0]:
            raise UserError(
                f"all ranks must run the same hetmpi: rank 0 on {hosts[0]} has {builds[0]}, rank {rank} on "
                f"{hosts[rank]} has {build}: install the same sources there and set them up again (./run.sh setup)"
            )
