"""PullRequest: the state of one batch of keys through announce, read and write."""

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
    """Keys of a call, checked.

    tensor  (U,) int64 on the CPU, which identifies the batch in later calls; may be overwritten afterwards
    array   its values (U,) int64, not overwritten
    route   their owners"""

    tensor: torch.Tensor
    array: np.ndarray
    route: Route


class Phase(Enum):
    """Progress of a request; the value is its description in messages."""

    NEW = "not requested"
    CLOCKS_REQUESTED = "clocks are requested"
    ROWS_REQUESTED = "rows are requested"
    READ = "read"
    WRITTEN = "written"


class PullRequest:
    """A batch of keys, followed by keys of lines that are refreshed with it (`extend`).

    keys            the tensor that identifies the batch
    num             number of keys in the batch; the arrays below have n >= num entries, the first num for the batch
    array, route    all keys (n,) int64, and their owners; batch_route: the owners of the batch without the extension
    is_remote       mask of the keys owned on other nodes: (n,) bool
    slots           cache line of each key, (n,) int64, -1 for none
    clocks          owner's clock at the time of the read, (n,) int32
    phase           in phase READ, slots and clocks are those of the read, and no other read or write has followed
    ticket          the pull in progress, in phases CLOCKS_REQUESTED and ROWS_REQUESTED
    is_counted      whether the bytes received by the ticket are counted
    in_transit      keys whose gradients were in transit to owners when clocks were requested, (m,) int64
    """

    def __init__(self, keys: Keys, partition: _C.Partition, remote_ranks: np.ndarray, empty=np.empty):
        """remote_ranks: mask of the ranks on other nodes, (size,) bool. empty(n, dtype): allocates memory that the
        cache reads and writes."""
        self.keys, self.num = keys.tensor, len(keys.array)
        self._partition, self._remote_ranks, self._empty = partition, remote_ranks, empty
        self.batch_route = keys.route
        self._over(keys.array, self.batch_route)

    def _over(self, array: np.ndarray, route: Route):
        self.array, self.route = self._empty(len(array), np.int64), route
        self.is_remote = route.held_by(self._remote_ranks)
        self.slots, self.clocks = self._empty(len(array), np.int64), self._empty(len(array), np.int32)
        self.array[:], self.slots[:], self.clocks[:] = array, -1, 0
        self.phase = Phase.NEW
        self.ticket: Ticket | None = None
        self.is_counted = False
        self.in_transit = NO_KEYS

    def is_of(self, keys: Keys) -> bool:
        """Whether this is the request of these keys: the same tensor with the same values."""
        return self.keys is keys.tensor and np.array_equal(self.array[: self.num], keys.array)

    def extend(self, keys: np.ndarray):
        """Adds keys (m,) int64 that are not in the batch."""
        self.require("extend", Phase.NEW)
        if len(keys):
            array = np.concatenate([self.array[: self.num], keys])
            self._over(array, Route.of_keys(self._partition, array))

    def reset(self):
        """Resets everything but the batch. REQUIRES: no transfer is in progress."""
        self._over(self.array[: self.num], self.batch_route)

    def enter(self, phase: Phase, *before: Phase):
        """Changes to `phase` from one of the phases `before`. Raises RuntimeError in any other phase."""
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
        """Mask of the rows fetched by the ticket: (n,) bool."""
        return self.ticket.fetched
