"""Ids that travel between ranks: to their directories and back, and to all ranks (vocabularies.py)."""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.open_rows import ID
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World


def finish(world: World, request):
    world.wait(request.Test, "for all ranks to look up ids")


def of_all(world: World, parts: dict[str, np.ndarray], most: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    """table -> the parts (n,) int64 of all ranks, one after the other; None for a table with more than `most` in all.
    Collective."""
    most = most or {}
    if world.size == 1:
        return {name: None if len(part) > most.get(name, len(part)) else part for name, part in parts.items()}
    sizes = np.array([len(part) for part in parts.values()], np.int64)
    all_sizes = np.empty((world.size, len(sizes)), np.int64)
    finish(world, world.comm.Iallgather(sizes, all_sizes))
    whole = all_sizes.sum(0).tolist()
    left_out = {name for name, num in zip(parts, whole) if num > most.get(name, num)}
    if left_out:
        all_sizes[:, [name in left_out for name in parts]] = 0
        parts = {name: part[:0] if name in left_out else part for name, part in parts.items()}
    found = gathered(world, parts, all_sizes)
    return {name: None if name in left_out else part for name, part in found.items()}


def gathered(world: World, parts: dict[str, np.ndarray], all_sizes: np.ndarray) -> dict[str, np.ndarray]:
    """As of_all. all_sizes (ranks, tables): of the parts of all ranks."""
    of_ranks = all_sizes.sum(1)
    if not of_ranks.any():
        return parts
    mine, whole = np.concatenate(list(parts.values())), np.empty(of_ranks.sum(), np.int64)
    finish(world, world.comm.Iallgatherv(mine, [whole, of_ranks, np.cumsum(of_ranks) - of_ranks, MPI.INT64_T]))
    labels = np.repeat(np.tile(np.arange(len(parts)), world.size), all_sizes.reshape(-1))
    return {name: whole[labels == number] for number, name in enumerate(parts)}


class Exchange:
    """Records of ids that travel to their directories, and numbers that travel back."""

    def __init__(self, world: World, records: dict[str, np.ndarray]):
        """records: table -> (n, width) int64, whose first column is the id; of equal width."""
        self._world, self._names, size = world, list(records), world.size
        self._lengths = [len(one) for one in records.values()]
        whole, num = np.concatenate(list(records.values())), len(records)
        self._width = whole.shape[1]
        codes = _C.directories(np.ascontiguousarray(whole[:, ID]), size) * num
        codes += np.repeat(np.arange(num), self._lengths)
        self._order = np.argsort(codes, kind="stable")
        self._sizes = np.bincount(codes, minlength=size * num).reshape(size, num)
        self._sent = np.ascontiguousarray(whole[self._order])

    def received(self) -> dict[str, np.ndarray]:
        """The records that other ranks have sent to this directory: table -> (m, width) int64."""
        num = len(self._names)
        self._got_sizes = np.zeros_like(self._sizes)
        if self._world.size > 1:
            finish(self._world, self._world.comm.Ialltoall(self._sizes, self._got_sizes))
        got = self._exchanged(self._sent, self._sizes, self._got_sizes, self._width)
        labels = np.repeat(np.tile(np.arange(num), self._world.size), self._got_sizes.reshape(-1))
        self._got_order = np.argsort(labels, kind="stable")
        ends = np.cumsum(self._got_sizes.sum(0))
        return dict(zip(self._names, np.split(got[self._got_order], ends[:-1])))

    def answered(self, answers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The answers to this rank's records: table -> (n,) int64. answers: to those received, in their order."""
        back = np.empty(len(self._got_order), np.int64)
        back[self._got_order] = np.concatenate([answers[name] for name in self._names])
        got = self._exchanged(back, self._got_sizes, self._sizes, 1)
        whole = np.empty(len(got), np.int64)
        whole[self._order] = got.reshape(-1)
        return dict(zip(self._names, np.split(whole, np.cumsum(self._lengths)[:-1])))

    def _exchanged(self, values: np.ndarray, sizes: np.ndarray, got_sizes: np.ndarray, width: int) -> np.ndarray:
        """values (n, width) for ranks in turn -> those of all ranks (m, width). sizes: of the parts, by rank and
        table."""
        if self._world.size == 1:
            return values
        of_ranks, from_ranks = sizes.sum(1) * width, got_sizes.sum(1) * width
        got = np.empty((got_sizes.sum(), width), np.int64)
        request = self._world.comm.Ialltoallv(
            [values, of_ranks, np.cumsum(of_ranks) - of_ranks, MPI.INT64_T],
            [got, from_ranks, np.cumsum(from_ranks) - from_ranks, MPI.INT64_T],
        )
        finish(self._world, request)
        return got
