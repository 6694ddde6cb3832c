"""PullRequest: the state of one batch of keys through announce, read and write. JointRequest: of several batches whose
rows are requested together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from hetmpi import _C
from hetmpi.comm.mailbox import NO_KEYS
from hetmpi.comm.requests import Reply
from hetmpi.comm.route import Route

MOST_AHEAD = 4  # batches announced and not read yet
NO_ROWS = np.empty((0, 0), np.float32)


@dataclass
class Keys:
    """Keys of a call, checked, with all that depends on them alone (Parts.keys_of).

    tensor       (U,) int64 on the CPU, which identifies the batch in later calls; may be overwritten afterwards
    array        its values (U,) int64, not overwritten
    route        their owners; local_route, remote_route: its parts on this node and on other nodes
    is_remote    mask of the keys owned on other nodes, (U,) bool
    is_admitted  mask of the keys that may be cached, (U,) bool"""

    tensor: torch.Tensor
    array: np.ndarray
    route: Route
    local_route: Route
    remote_route: Route
    is_remote: np.ndarray
    is_admitted: np.ndarray

    def are(self, array: np.ndarray) -> bool:
        """Whether their values are array (n,) int64."""
        return _C.are_same(self.array, array)


class Phase(Enum):
    """Progress of a request; the value is its description in messages."""

    NEW = "not requested"
    REQUESTED = "requested"
    SERVED = "requested, and other ranks' requests of the same round are answered"
    READ = "read"
    WRITTEN = "written"


class PullRequest:
    """A batch of keys.

    keys            the tensor that identifies the batch
    num             number of keys
    array, route    the keys (num,) int64, and their owners
    local_route, remote_route, is_remote, is_admitted  as in Keys
    slots           cache line of each key, (num,) int64, -1 for none
    clocks          owner's clock at the time of the read, (num,) int32
    phase           in phase READ, slots and clocks are those of the read, and no other read or write has followed
    reply           of other nodes, in phases REQUESTED and SERVED
    is_counted      whether the bytes of the reply are counted
    in_transit      keys whose gradients were on their way to owners of this node when clocks were read, (m,) int64
    num_previewed   number of held messages whose gradients are previewed on the rows of the reply
    part            its part in a joint request; None if the batch has one of its own
    """

    def __init__(self, keys: Keys, empty=np.empty):
        """empty(n, dtype): allocates memory that the cache reads and writes."""
        self._batch = keys
        self.keys, self.num = keys.tensor, len(keys.array)
        self.array, self.route = keys.array, keys.route
        self.local_route, self.remote_route = keys.local_route, keys.remote_route
        self.is_remote, self.is_admitted = keys.is_remote, keys.is_admitted
        self.slots, self.clocks = empty(self.num, np.int64), empty(self.num, np.int32)
        self.reset()

    def reset(self):
        """Resets everything but the batch. REQUIRES: no transfer is in progress."""
        self.slots[:], self.clocks[:] = -1, 0
        self.phase = Phase.NEW
        self.reply: Reply | None = None
        self.is_counted = False
        self.in_transit = NO_KEYS
        self.num_previewed = 0
        self.part: Part | None = None

    @property
    def pull(self) -> PullRequest:
        """The request that has the reply with this batch's rows."""
        return self if self.part is None else self.part.joint

    def is_of(self, keys: Keys) -> bool:
        """Whether this is the request of these keys: the same tensor with the same values."""
        return self._batch is keys or (self.keys is keys.tensor and self._batch.are(keys.array))

    def enter(self, phase: Phase, *before: Phase):
        """Changes to `phase` from one of the phases `before`. Raises RuntimeError in any other phase."""
        if self.phase not in before:
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
        """Mask of the rows that the reply brings: (num,) bool."""
        return self.reply.fetched


class JointRequest(PullRequest):
    """The distinct keys of several batches.

    is_kept        once it is read: mask (n,) bool of the keys of other nodes without a line
    rows, states   of these keys: (n, dim) and (n, preview_dim) float32"""

    is_kept: np.ndarray
    rows: np.ndarray
    states: np.ndarray

    @classmethod
    def of(cls, batches: list[PullRequest], keys_of: Callable[[torch.Tensor, np.ndarray], Keys], empty) -> JointRequest:
        """batches: in the order of their reads. keys_of: as Parts.keys_of; empty: as of PullRequest."""
        keys, places = _C.unique(np.concatenate([batch.array for batch in batches]))
        joint, begin, num_before = cls(keys_of(torch.from_numpy(keys), keys), empty), 0, 0
        for batch in batches:
            batch.require("joined", Phase.NEW)
            end = begin + len(batch.array)
            batch.part = Part(joint, places[begin:end], num_before)
            begin, num_before = end, max(num_before, int(places[begin:end].max(initial=-1)) + 1)
        return joint

    def keep(self, rows: np.ndarray, states: np.ndarray):
        """Keeps the rows that were pulled."""
        self.rows, self.states, self.is_kept = rows, states, (self.slots < 0) & self.is_remote

    def free(self):
        """Frees the rows."""
        self.rows = self.states = NO_ROWS


@dataclass
class Part:
    """A batch's part in a joint request.

    joint       the request that pulls it
    places      of its keys among those of `joint`, (n,) int64
    num_before  keys from this place on are in none of the batches read before"""

    joint: JointRequest
    places: np.ndarray
    num_before: int
