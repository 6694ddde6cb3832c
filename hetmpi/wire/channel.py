"""Channel: the requests of one table to owners on other nodes, and their replies, on any wire.

An Exchange (exchange.py) asks and posts for all tables that are used together; a table's _C.Request has what it asks,
and the replies (cpp/wire/exchange.h). The server decides, by the clocks of the owners, when it replies and which rows a
reply has (cpp/wire/round.h). At s >= 1 it replies once it has applied the pushes in front of the request, with the
clocks of all keys and the rows that must_send() names. At s = 0 it replies once all owners of its node have applied the
step that the request names, as they note in shared memory, with all rows.

A server reads the shards of its node, and writes pushes into rings of the owners there: at s = 0 into the client's, so
the step reducer treats all ranks alike; at s >= 1 into rings of its own, and it applies pushes to its own shard
directly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetmpi import _C
from hetmpi.owner.node_memory import NodeMemory
from hetmpi.wire.exchange import Exchange, MakeWire

UNANNOUNCED, ANNOUNCED, FLUSH, PEEK = range(4)  # reasons of requests, whose texts are in cpp/wire/round.h


class Channel(_C.Channel):
    """One table's part of the messages, on this rank.

    name            messages or windows, or the path of a class; None if all ranks share a node
    width           numbers of a row
    is_exact        whether the table is read at s = 0
    is_collective   whether all ranks must make the same calls in the same order
    exchange        the messages, which it may share with other tables
    server          answers the requests of this rank's clients"""

    def __init__(
        self, memory: NodeMemory, record: _C.RecordFormat, arrays: Sequence[str], applier: _C.PushApplier | None,
        name: str | None, make_wire: MakeWire,
    ):  # fmt: skip
        """memory: the shards, and the rings of the inboxes. record: format of a pushed record. arrays: (n, width)
        float32 each, those that a reply has of each row: weight, or weight and mean_square. applier: applies gradients
        to this rank's shard; None at s = 0, where the step reducer does. Collective. Raises UserError where the wire
        does."""
        self.name, self.world, self._memory, self._record = name, memory.world, memory, record
        self._widths = [memory.local.in_memory[array].shape[1] for array in arrays]
        self.width = self._widths[0]
        self.exchange = Exchange(self.world, make_wire)
        self.is_collective = not self.exchange.wire.has_thread and not self.world.is_one_node
        self.server = self._opened_server(arrays, applier)
        super().__init__(self.server, self.exchange.rails.owners, record, self._widths, applier is None)
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

    def _opened_server(self, arrays: Sequence[str], applier: _C.PushApplier | None) -> _C.RoundServer:
        world = self.world
        shards = [self._memory.on_node[rank] for rank in world.node_ranks]
        return _C.RoundServer(
            applier,
            world.node.rank,
            [
                _C.ShardArrays(shard.clock, [shard.in_memory[array] for array in arrays], shard.directory, shard.file)
                for shard in shards
            ],
            self._rings_of_server(applier is None),
            self._record,
            [shard.applied for shard in shards] if applier is None else [],
        )

    # The requester's side.

    def must_ask(self, route: _C.Route) -> bool:
        """Whether anybody needs a request for a route's keys, all of other nodes: at s = 0 not without keys, unless
        others wait for it."""
        return not self.is_exact or self.is_collective or len(route) > 0

    def fetch(self, route: _C.Route, out: np.ndarray, step: int = 0):
        """Copies the rows (weight) of a route's keys, all of other nodes, to their positions in out (n, dim). step: as
        of a Request."""
        if self.world.is_one_node:
            return
        known, clocks = None, None
        if not self.is_exact:
            known, clocks = np.full(len(out), _C.NO_LINE, np.int32), np.empty(len(out), np.int32)
        if self.must_ask(route):
            request = _C.Request(self, PEEK, route, step=step, known=known, versions=clocks)
            self.exchange.ask([request])
            request.receive()
            request.place([out, *(np.empty((len(out), width), np.float32) for width in self._widths[1:])])

    # The owners' side.

    def has_applied(self, step: int) -> bool:
        """Whether all owners of this node have applied so many steps; at s = 0."""
        return self.server.has_applied(step)

    def close(self):
        self.exchange.leave(self)
