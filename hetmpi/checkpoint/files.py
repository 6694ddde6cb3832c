"""Files of a checkpoint: written to disk with a hash, verified, and opened. Arrays are mapped only after their header
and size have been compared with the expected ones; nothing is unpickled.
"""

from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path

import numpy as np
import xxhash

from hetmpi import _C
from hetmpi.bounded_file import open_file
from hetmpi.errors import UserError

CHUNK_BYTES = 16 << 20
DTYPES = {"weight": np.float32, "state": np.float32, "clock": np.int32}
NPY_PREFIX = 10  # bytes of a .npy file before its header: magic, version, length of the header


# Writing.


def write_array(path: Path, array: np.ndarray, look=None) -> dict:
    """Writes an array, or one that is read in parts, in the format of numpy.save. look(first, part): called with
    each part (m, ...) before it is written; first is the number of rows before it. Returns the manifest's entry of the
    file."""
    num, row_bytes = len(array), max(1, array.nbytes // max(1, len(array)))
    header, step = io.BytesIO(), max(1, CHUNK_BYTES // row_bytes)
    about = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(header, about)

    def part_from(first: int) -> np.ndarray:
        part = array[first : first + step]
        if look is not None:
            look(first, part)
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8)

    return write_bytes(path, itertools.chain([header.getbuffer()], map(part_from, range(0, num, step))))


def write_bytes(path: Path, chunks) -> dict:
    """Writes a file and syncs it to disk. Returns its entry in the manifest: {"bytes": int, "xxh3_128": str}."""
    total, hasher = 0, xxhash.xxh3_128()
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
            hasher.update(chunk)
            total += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": total, "xxh3_128": hasher.hexdigest()}


def write_json(path: Path, value):
    """Writes a file atomically."""
    part = path.with_suffix(".tmp")
    write_bytes(part, [json.dumps(value, indent=1).encode()])
    os.rename(part, path)


def write_link(path: Path, name: str):
    """Makes `path` a link to the file or folder `name` beside it, in place of an earlier link, atomically."""
    part = path.with_suffix(".tmp")
    part.unlink(missing_ok=True)  # of a run that was killed
    os.symlink(name, part)
    os.rename(part, path)
    sync_folder(path.parent)


def sync_folder(path: Path):
    """Syncs the entries of a folder to disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# Values.


def rows_not_finite(rows: np.ndarray) -> np.ndarray:
    """Indices of the rows (n, width) float32 that are not finite: (m,) int64."""
    if _C.all_finite(rows):
        return np.empty(0, np.int64)
    return np.flatnonzero(~np.isfinite(rows).all(axis=1))


def wrong_values(array: str, values: np.ndarray) -> str | None:
    """Values of weight or state (n, width) or clock (n, ...) that are invalid for training, None if there are none."""
    if DTYPES[array] == np.float32:
        return "rows that are not finite" if len(rows_not_finite(values)) else None
    return "clocks below 0" if len(values) and values.min() < 0 else None


# Reading.


def damage_of(path: Path, known: dict, checkpoint: Path) -> str | None:
    """Defect in the bytes or values of a file of a checkpoint or of its base, None if there is none. known: its entry
    in the manifest."""
    name = path.name if path.parent == checkpoint else f"{path.parent.name}/{path.name}, which it builds on,"
    array = path.name.split(".")[-2]  # "dense" for dense.pt, which has no array
    hasher, wrong = xxhash.xxh3_128(), None
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != known["bytes"]:
                return f"{name} has {size:,} bytes, expected {known['bytes']:,}"
            while chunk := file.read(CHUNK_BYTES):
                is_first = file.tell() == len(chunk)
                hasher.update(chunk)
                if array in DTYPES and wrong is None:
                    wrong = wrong_values(array, numbers_in(chunk, is_first, DTYPES[array]))
    except OSError as problem:
        return f"{name}: {problem.strerror}"
    if hasher.hexdigest() != known["xxh3_128"]:
        return f"{name} does not match its hash"
    return None if wrong is None else f"{name} has {wrong}"


def numbers_in(chunk: bytes, is_first: bool, dtype) -> np.ndarray:
    """The 4-byte numbers in a chunk of a .npy file, (n, 1); the first chunk starts with the header."""
    offset = min(len(chunk), NPY_PREFIX + int.from_bytes(chunk[8:NPY_PREFIX], "little")) if is_first else 0
    return np.frombuffer(chunk, dtype, (len(chunk) - offset) // 4, offset).reshape(-1, 1)


def open_array(path: Path, dtype, shape: tuple[int | None, ...]) -> np.ndarray:
    """Maps the array of a .npy file. shape: None for a dimension of any size. Raises UserError for another dtype or
    shape, or if the file size does not match."""
    try:
        with open_file(path) as file:
            found_shape, found_dtype, is_in_order = header_of(file)
            begin, size = file.tell(), os.fstat(file.fileno()).st_size
            is_expected = found_dtype == np.dtype(dtype) and is_in_order and len(found_shape) == len(shape)
            if not is_expected or any(n not in (None, m) for n, m in zip(shape, found_shape)):
                raise UserError(
                    f"{path} must hold {np.dtype(dtype)} of shape {shape_text(shape)}, it holds "
                    f"{str(found_dtype)[:80]} of shape {shape_text(found_shape)[:80]}"
                    f"{'' if is_in_order else ' in columns'}"
                )
            nbytes = int(np.prod(found_shape, dtype=object)) * np.dtype(dtype).itemsize
            if min(found_shape) < 0 or size != begin + nbytes:
                raise UserError(f"{path} must have {begin + nbytes:,} bytes for shape {found_shape}, it has {size:,}")
            return np.memmap(file, dtype, "r", begin, found_shape) if nbytes else np.empty(found_shape, dtype)
    except OSError as problem:
        raise UserError(f"{path}: {problem.strerror}") from problem


def header_of(file) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape and dtype in the header of a .npy file, and whether rows are contiguous."""
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not of version 1.0")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except OSError:
        raise
    except Exception as problem:  # numpy evaluates a literal: a crafted one may raise any exception
        raise UserError(f"{file.name} is not an array in numpy.save's format: {str(problem)[:100]!r}") from problem
    return shape, dtype, not is_fortran


def shape_text(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if n is None else str(n) for n in shape) + ")"
