"""Whether all ranks read the same files: a stale copy on the disk of a node would train another model there.

Names, sizes and contents are compared, of many bytes by a sample. Only ranks that may see other files than the first
rank of their node read them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from hetmpi.errors import UserError, one_line
from hetmpi.world.world import World

WHOLE_BYTES = 64 << 20  # up to which all files are compared byte by byte
PLACE_BYTES = 4096
NUM_PLACES = 14  # of a larger source, in each file, beside its first and last bytes
MOST_FILES = 1000  # of which contents are compared
SEED = 2022


class File(NamedTuple):
    """What is compared of a file. name: in the folder of the source. digest: of its content, or a sample."""

    name: str
    size: int
    digest: str = ""


def check_same_files(world: World, files: Callable[[], Sequence[str]]):
    """Raises UserError on every rank, which names the first file that differs and its host, unless all ranks see the
    same files. files(): their paths; ranks on which it raises have none. Collective."""
    paths = seen(files)
    check_same_entries(world, described(paths) if must_read(world, paths) else None)


def check_same_entries(world: World, entries: Sequence[File] | None):
    """As check_same_files, of entries that each rank has; None on ranks that need not be compared. Collective."""
    digest = None if entries is None else xxhash.xxh3_128_hexdigest(repr(list(entries)).encode())
    found = world.comm.allgather((world.host, digest))
    differing = [rank for rank, (_, other) in enumerate(found) if other is not None and other != found[0][1]]
    if not differing:
        return
    rank = differing[0]
    first, other = (world.comm.bcast(entries, root) for root in (0, rank))
    raise UserError(
        f"all ranks must read the same data: {difference(first, other, found[0][0], rank, found[rank][0])}: "
        "copy the data anew to the disks of the nodes, or give a folder that all nodes share"
    )


def difference(first: Sequence[File], other: Sequence[File], first_host: str, rank: int, host: str) -> str:
    """The first difference, as text."""
    of_first, of_other = ({file.name: file for file in files} for files in (first, other))
    name = min(name for name in {*of_first, *of_other} if of_first.get(name) != of_other.get(name))
    here, there = of_first.get(name), of_other.get(name)
    if here is None or there is None:
        lacks = f"rank 0 on {first_host}" if here is None else f"rank {rank} on {host}"
        return f"{one_line(name, 300)} is missing on {lacks}"
    if here.size != there.size:
        sizes = f"{here.size:,} bytes on rank 0 on {first_host}, {there.size:,} on rank {rank} on {host}"
        return f"{one_line(name, 300)} has {sizes}"
    return f"{one_line(name, 300)} has another content on rank {rank} on {host} than on rank 0 on {first_host}"


def times_of(files: Callable[[], Sequence[str]]) -> dict[str, int]:
    """Path -> time of change in nanoseconds."""
    return {path: os.stat(path).st_mtime_ns for path in seen(files) if os.path.exists(path)}


def seen(files: Callable[[], Sequence[str]]) -> list[str]:
    try:
        return list(files())
    except (UserError, OSError):  # the source says it when it reads them
        return []


def must_read(world: World, paths: Sequence[str]) -> bool:
    """Whether this rank is the first one of its node that sees these files, and others may see other ones.
    Collective."""
    identity = xxhash.xxh3_128_hexdigest(repr([identity_of(path) for path in paths]).encode())
    identities = world.node.allgather(identity)
    is_first = world.node.rank == identities.index(identity)
    others = world.comm.allgather(is_first)
    return is_first and sum(others) > 1


def identity_of(path: str) -> tuple | None:
    """Equal on one node only for the same file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def described(paths: Sequence[str]) -> list[File]:
    """What is compared of the files."""
    sizes = {path: os.path.getsize(path) if os.path.isfile(path) else -1 for path in paths}
    top = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    is_whole = sum(sizes.values()) <= WHOLE_BYTES
    chosen = set(paths)
    if len(paths) > MOST_FILES:
        chosen = set(np.random.default_rng(SEED).choice(sorted(paths), MOST_FILES, replace=False).tolist())
    return [
        File(os.path.relpath(path, top), size, digest_of(path, size, is_whole) if path in chosen else "")
        for path, size in sizes.items()
    ]


def digest_of(path: str, size: int, is_whole: bool) -> str:
    """Of a file's content: the whole, or its first and last bytes and NUM_PLACES between, drawn by its size."""
    if size < 0:
        return ""
    places = [(0, size)]
    if not is_whole and size > (NUM_PLACES + 2) * PLACE_BYTES:
        drawn = np.random.default_rng((SEED, size)).integers(size - PLACE_BYTES, size=NUM_PLACES).tolist()
        places = [(begin, PLACE_BYTES) for begin in (0, *sorted(drawn), size - PLACE_BYTES)]
    digest = xxhash.xxh3_128()
    try:
        with open(path, "rb") as file:
            for begin, length in places:
                file.seek(begin)
                digest.update(file.read(length))
    except OSError as error:
        return f"{error.strerror}"
    return digest.hexdigest()
