"""Exchange: the messages of several tables between nodes (cpp/wire/exchange.h), on a wire (wire.py), by rails
(rails.py)."""

from __future__ import annotations

from collections.abc import Callable

from hetmpi import _C
from hetmpi.wire.rails import Rails
from hetmpi.wire.wire import Pipes, Wire
from hetmpi.world.world import World

MakeWire = Callable[[Pipes], Wire]


class Exchange(_C.Exchange):
    """The messages of some tables, on one rank.

    channels       in the order of their sections; None for one that has left
    rails          the partners of this rank
    wire           carries the messages
    server         answers those of clients"""

    receive_pending = _C.Exchange.poll  # for World.wait

    def __init__(self, world: World, make_wire: MakeWire):
        """Collective."""
        self.world, self.rails, self.channels = world, Rails(world), []
        self.server = _C.Server(self.rails.clients, world.rank, not make_wire.has_thread)
        tags = (_C.REQUEST_TAG, _C.POST_TAG), (_C.REPLY_TAG,)
        self.wire = make_wire(Pipes(world, self.rails, *tags, self.server.length_of, self.server))
        received = [] if self.wire.has_thread else self.rails.clients
        super().__init__(world, self.wire, self.server, self.rails.servers, received)
        if not world.is_one_node:
            world.wires.add(self.wire)
            world.receivers[self] = None

    def join(self, channel: _C.Channel):
        """Adds a channel. REQUIRES: no message is under way, on any rank."""
        self.channels.append(channel)  # keeps it
        super().join(channel)

    def leave(self, channel: _C.Channel):
        """Removes a channel. The last one first receives its replies, then waits until its messages are delivered.
        REQUIRES: at s = 0 its table is settled. Collective."""
        if self.remove(channel):
            self.channels[self.channels.index(channel)] = None
            return
        if not self.is_broken:
            self.receive_all()
            what = "for other ranks to receive its last message about the table"
            self.world.wait(lambda: self.poll() and self.wire.publish() and self.wire.is_idle, what)
        # A wire may reach a rank that makes no call. Also where the messages are broken, as others may not know it.
        self.world.meet("for all ranks to close the table")
        self.world.wires.discard(self.wire)
        self.world.receivers.pop(self, None)
        if self.wire.has_thread or not self.is_broken:
            self.wire.free()  # by windows of all ranks, and it ends the thread
        self.channels.clear()  # breaks the reference cycle, which frees the table's memory at once
