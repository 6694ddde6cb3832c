"""Channel: the requests of one table to owners on other nodes, and their replies, on any wire (cpp/wire/exchange.h).

The server decides, by the clocks of the owners, when it replies and which rows a reply has (cpp/wire/request.h). At
s >= 1 it replies once it has applied the pushes in front of the request, with the clocks of all keys and the rows that
must_send() names. At s = 0 it replies once all owners of its node have applied the step that the request names, as they
note in shared memory, with all rows.

A server reads the shards of its node, and writes pushes into rings of the owners there: at s = 0 into the client's, so
the step reducer treats all ranks alike; at s >= 1 into rings of its own, and it applies pushes to its own shard
directly.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetmpi import _C
from hetmpi.owner.node_memory import NodeMemory
from hetmpi.wire.exchange import Exchange, MakeWire


class Channel(_C.Channel):
    """One table's part of the messages, on this rank.

    name            messages or windows, or the path of a class; None if all ranks share a node
    width           numbers of a row
    exchange        the messages, which it may share with other tables"""

    def __init__(
        self, memory: NodeMemory, record: _C.RecordFormat, node: _C.NodeRows, exact: Sequence[_C.ShardArrays],
        name: str | None, make_wire: MakeWire,
    ):  # fmt: skip
        """memory: the rings of the inboxes. record: format of a pushed record. node: the rows that replies have. exact:
        at s = 0 the shards of the node, else none. Collective. Raises UserError where the wire does."""
        self.name, self.world, self._memory, self._record = name, memory.world, memory, record
        self.width, is_exact = node.dims[0], bool(exact)
        self.exchange = Exchange(self.world, make_wire)
        is_collective = not self.exchange.wire.has_thread and not self.world.is_one_node
        server = _C.TableServer(node, self._rings_of_server(is_exact), record, exact)
        super().__init__(server, self.exchange.rails.owners, record, node.dims, is_exact, is_collective)
        self.exchange.join(self)

    def _rings_of_server(self, is_exact: bool) -> list[list[_C.RingProducer | None]]:
        """For the pushes of each client, a ring to each owner of the node; None where the applier takes them."""
        world, clients = self.world, self.exchange.rails.clients
        if is_exact:
            return [[self._ring(owner, client) for owner in world.node_ranks] for client in clients]
        if not clients:
            return []
        origin = world.size + world.rank  # as a server
        rings = [None if owner == world.rank else self._ring(owner, origin) for owner in world.node_ranks]
        return [rings] * len(clients)

    def _ring(self, owner: int, origin: int) -> _C.RingProducer:
        return _C.RingProducer(self._memory.local_ring(owner, origin), self._record)

    def close(self):
        self.exchange.leave(self)
