"""Identifies the sources of the core: ranks whose cores differ must not exchange messages, and a core in a wheel takes
the place of one that would be compiled only if it is of the same sources. Imports nothing but the standard library."""

from __future__ import annotations

import glob
import hashlib
import zipfile
from pathlib import Path

CORE = Path(__file__).parent
KINDS = {".c", ".cpp", ".cu", ".cuh", ".h"}


def digest() -> str:
    """Of all files of this folder that are compiled."""
    files = sorted(file for file in CORE.rglob("*") if file.suffix in KINDS)
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:12]


def libraries_of(wheel: str) -> dict[str, bytes]:
    """The compiled files of a wheel of hetmpi, by path."""
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if name.endswith(".so")}


def prebuilt(folder: str, tag: str, on_gpu: bool) -> str | None:
    """Path of a wheel in `folder` that holds a core of these sources. tag: of the Python, as cp311. on_gpu: with the
    GPU's half, whose wheels have a local version that begins with cuda."""
    ours = digest().encode()
    for wheel in sorted(glob.glob(f"{glob.escape(folder)}/hetmpi-*-{tag}-{tag}-*.whl")):
        version = Path(wheel).name.split("-")[1]
        if ("+cuda" in version) == on_gpu and any(ours in data for data in libraries_of(wheel).values()):
            return wheel
    return None
