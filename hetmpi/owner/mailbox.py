"""Mailbox: the sending side of the inboxes. The owner's memory has one ring per origin (cpp/owner/ring.h), which the
origins on its node write in place.
"""

from __future__ import annotations

from hetmpi import _C
from hetmpi.owner.node_memory import NodeMemory
from hetmpi.world.waiting import ranks_text


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

    def send(self, message: _C.Message) -> int:
        """Sends every owner of the node its rows; waits while a ring is full. Returns the bytes of the message for all
        other ranks."""
        world = self.memory.world
        if self.rings:
            sending = _C.RingWriter(self._ends, message, self.record)
            reason = f"in step {message.step + 1} for {{}} to make room for its gradients"
            world.wait(sending.proceed, lambda: reason.format(ranks_text(sending.full)))
        return message.num_bytes_elsewhere(self.record, world.rank)

    def behind(self) -> list[int]:
        """Owners that have not applied everything sent, as far as this rank knows."""
        return [owner for owner, ring in self.rings.items() if not ring.is_drained]
