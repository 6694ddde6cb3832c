"""Partitions map a key to its owner (cpp/owner/partition.h), whose directory has its row (cpp/owner/directory.h). A
_C.Route maps the keys of a batch to their owners (cpp/owner/route.h)."""

from __future__ import annotations

from hetmpi import _C

PARTITIONS = ("round_robin", "range", "hash")


def make_partition(name: str, num_rows: int, size: int) -> _C.Partition:
    """The partition called `name`. Raises ValueError for an unknown name or an empty table."""
    return _C.Partition(name, num_rows, size)
