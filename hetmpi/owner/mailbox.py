"""Mailbox: the sending side of the inboxes. The owner's memory has one ring per origin (cpp/owner/ring.h), which the
origins on its node write in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetmpi import _C
from hetmpi.owner.node_memory import NodeMemory
from hetmpi.owner.route import Route
from hetmpi.world.waiting import ranks_text


@dataclass
class Message:
    """The gradients that one rank sends to the owners in one step: for each key of `route` a row of `values`; in
    SSP also its clock, the number of iterations summed, their first and last step unless the rule is plain SGD, and
    the key."""

    step: int
    route: Route
    values: np.ndarray  # (n, width) float32
    clocks: np.ndarray | None = None  # (n,) int32
    counts: np.ndarray | None = None  # (n,) int32
    steps: np.ndarray | None = None  # (n, 2) int32
    keys: np.ndarray | None = None  # (n,) int64

    def packed(self, ends_step: bool) -> _C.PushArrays:
        """For the core. ends_step: the last message of its step, which owners without rows get too, as an empty
        record."""
        route = _C.RouteArrays(*self.route.arrays)
        return _C.PushArrays(self.step, route, self.values, self.clocks, self.counts, self.steps, ends_step)


class Mailbox:
    """This rank's rings to the other owners of its node, by owner, ascending: `rings`."""

    def __init__(self, memory: NodeMemory, record: _C.RecordFormat):
        world = memory.world
        self.memory, self.record = memory, record
        self.rings = {
            owner: _C.RingProducer(memory.local_ring(owner, world.rank), record)
            for owner in world.node_ranks
            if owner != world.rank
        }
        self._ends = [self.rings.get(rank) for rank in range(world.size)]

    def send(self, message: Message, ends_step: bool) -> int:
        """Sends every owner of the node its rows; waits while a ring is full. ends_step: as in Message.packed. Returns
        the bytes of the message for all other ranks."""
        route, world = message.route, self.memory.world
        if self.rings:
            sending = _C.RingWriter(self._ends, message.packed(ends_step), self.record)
            reason = f"in step {message.step + 1} for {{}} to make room for its gradients"
            world.wait(sending.proceed, lambda: reason.format(ranks_text(sending.full)))
        parts = route.order[: route.first[world.rank]], route.order[route.first[world.rank + 1] :]
        return sum(self.record.num_bytes(part, message.counts) for part in parts)

    def behind(self) -> list[int]:
        """Owners that have not applied everything sent, as far as this rank knows."""
        return [owner for owner, ring in self.rings.items() if not ring.is_drained]
