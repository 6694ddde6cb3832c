"""PullRequest: one batch of keys on its way through announce, read and write, and what is known of it so far."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from hetmpi import _C
from hetmpi.comm.mailbox import NO_KEYS
from hetmpi.comm.route import Route
from hetmpi.comm.transport import Ticket

MOST_AHEAD = 4  # batches announced and not read yet


@dataclass
class Keys:
    """Keys as a caller gives them, checked.

    tensor  (U,) int64 on the CPU, by which a caller names a batch again; it may be filled anew later
    array   its numbers (U,) int64"""

    tensor: torch.Tensor
    array: np.ndarray


class Phase(Enum):
    """How far a request is; the value says what happens in it."""

    NEW = "not asked for"
    ASKED = "clocks are asked for"
    ORDERED = "rows are on their way"
    READ = "read"
    WRITTEN = "written"


class PullRequest:
    """A batch of keys, and after them the keys of lines that are renewed beside it (`extend`).

    keys            the tensor that names the batch
    num             how many keys it has; the arrays below have n >= num entries, the first num for the batch
    array, route    all keys (n,) int64, and their owners; batch_route: the owners of the batch alone
    is_remote       which keys ranks of other nodes own: (n,) bool
    slots           line of each key, (n,) int64, -1 for none
    clocks          its owner's clock when it was read, (n,) int32
    phase           slots and clocks are those of the read in phase READ alone, as no other read or write has followed
    ticket          what other nodes were asked, in phases ASKED and ORDERED
    is_counted      whether the bytes of what the ticket brings are counted
    in_transit      keys whose sums were on their way to owners when clocks were asked for, (m,) int64
    """

    def __init__(self, keys: Keys, partition: _C.Partition, remote_ranks: np.ndarray, empty=np.empty):
        """remote_ranks: ranks of other nodes, (size,) bool. empty(n, dtype): memory for what the cache reads and
        writes."""
        self.keys, self.num = keys.tensor, len(keys.array)
        self._partition, self._remote_ranks, self._empty = partition, remote_ranks, empty
        self.batch_route = Route.of_keys(partition, keys.array)
        self._over(keys.array, self.batch_route)

    def _over(self, array: np.ndarray, route: Route):
        self.array, self.route, self.is_remote = (
            self._empty(len(array), np.int64),
            route,
            route.held_by(self._remote_ranks),
        )
        self.slots, self.clocks = self._empty(len(array), np.int64), self._empty(len(array), np.int32)
        self.array[:], self.slots[:], self.clocks[:] = array, -1, 0
        self.phase = Phase.NEW
        self.ticket: Ticket | None = None
        self.is_counted = False
        self.in_transit = NO_KEYS

    def is_of(self, keys: Keys) -> bool:
        """Whether it is the request of these keys: the same tensor, not filled anew."""
        return self.keys is keys.tensor and np.array_equal(self.array[: self.num], keys.array)

    def extend(self, keys: np.ndarray):
        """Adds keys (m,) int64 that are not in the batch."""
        self.require("extend", Phase.NEW)
        if len(keys):
            array = np.concatenate([self.array[: self.num], keys])
            self._over(array, Route.of_keys(self._partition, array))

    def reset(self):
        """Forgets all but the batch. REQUIRES: nothing is on its way."""
        self._over(self.array[: self.num], self.batch_route)

    def enter(self, phase: Phase, *before: Phase):
        """Goes to a phase from one of those before it. Raises RuntimeError from another one."""
        self.require(phase.name.lower(), *before)
        self.phase = phase

    def require(self, call: str, *phases: Phase):
        """Raises RuntimeError unless the request is in one of these phases."""
        if self.phase not in phases:
            expected = " or ".join(f"{phase.name} ({phase.value})" for phase in phases)
            raise RuntimeError(
                f"PullRequest: {call} takes a request that is {expected}, this one is {self.phase.name} "
                f"({self.phase.value})"
            )

    @property
    def fetched(self) -> np.ndarray:
        """Rows that come by the ticket: (n,) bool."""
        return self.ticket.fetched
