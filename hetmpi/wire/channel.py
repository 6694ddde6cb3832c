"""Channel: the requests of one table to owners on other nodes, and their replies, on any wire.

An Exchange (exchange.py) asks and posts for all tables that are used together, and a Reply is what a table gets:

    ask      sends every server the pushes in front, and asks for the rows of its node; at s >= 1 each with the clock of
             the local copy
    post     sends the gradients of a step; at s = 0, where a request for a later batch may go with them
    serve    where the wire has no thread: answers all clients
    receive  receives the replies

The server decides, by the clocks of the owners, when it replies and which rows a reply has (cpp/wire/round.h). At
s >= 1 it replies once it has applied the pushes in front of the request, with the clocks of all keys and the rows that
must_send() names. At s = 0 it replies once all owners of its node have applied the step that the request names, as
they note in shared memory, with all rows.

Messages are packed and unpacked in C++. A server reads the shards of its node, and writes pushes into rings of the
owners there: at s = 0 into the client's, so the step reducer treats all ranks alike; at s >= 1 into rings of its own,
and it applies pushes to its own shard directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetmpi import _C
from hetmpi.owner.node_memory import NodeMemory
from hetmpi.wire.exchange import Exchange, MakeWire, Round

UNANNOUNCED, ANNOUNCED, FLUSH, PEEK = range(4)  # reasons, whose texts are in cpp/wire/round.h


@dataclass(frozen=True)
class Request:
    """What a rank asks of the owners on other nodes.

    reason   as above, or _C.PUSHES for gradients alone
    route    the requested keys, at their positions in a batch
    step     at s = 0: steps that the rows must have
    known    at s >= 1: (n,) int32, the clock of this rank's copy of each row, NO_LINE if it has no usable copy
    bound    how far an owner's clock may be ahead of `known` without a need for the row, as of TableContext
    pushes   the gradients that the owners apply first"""

    reason: int
    route: _C.Route
    step: int = 0
    known: np.ndarray | None = None
    bound: int = 0
    pushes: Sequence[_C.Message] = ()


class Channel:
    """One table's part of the messages, on this rank.

    name            messages or windows, or the path of a class; None if all ranks share a node
    width           numbers of a row; num_bytes: of all its arrays in a reply
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
        self.name, self.world, self.is_exact = name, memory.world, applier is None
        self._memory, self._record = memory, record
        self._widths = [memory.local.in_memory[array].shape[1] for array in arrays]
        self.width, self.num_bytes = self._widths[0], 4 * sum(self._widths)
        self.exchange = Exchange(self.world, make_wire)
        self.is_collective = not self.exchange.wire.has_thread and not self.world.is_one_node
        self.server = self._opened_server(arrays, applier)
        self.exchange.join(self)

    def _rings_of_server(self) -> list[list[_C.RingProducer | None]]:
        """For the pushes of each client, a ring to each owner of the node; None where the applier takes them."""
        world, clients = self.world, self.exchange.rails.clients
        if self.is_exact:
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
            self._rings_of_server(),
            self._record,
            [shard.applied for shard in shards] if self.is_exact else [],
        )

    # The requester's side.

    def must_ask(self, route: _C.Route) -> bool:
        """Whether anybody needs a request for a route's keys, all of other nodes: at s = 0 not without keys, unless
        others wait for it."""
        return not self.is_exact or self.is_collective or len(route) > 0

    def fetch(self, route: _C.Route, out: np.ndarray, step: int = 0):
        """Copies the rows (weight) of a route's keys, all of other nodes, to their positions in out (n, dim). step: as
        in Request."""
        if self.world.is_one_node:
            return
        known, clocks = None, None
        if not self.is_exact:
            known, clocks = np.full(len(out), _C.NO_LINE, np.int32), np.empty(len(out), np.int32)
        if self.must_ask(route):
            reply = Reply(self, Request(PEEK, route, step, known), clocks)
            self.exchange.ask({self: reply})
            reply.receive()
            reply.place(out, *(np.empty((len(out), width), np.float32) for width in self._widths[1:]))

    def packed(self, request: Request) -> _C.RoundRequest:
        """The request, for all servers."""
        return _C.RoundRequest(
            self.exchange.rails.owners, request.route, request.known, request.reason, request.bound, request.step,
            request.pushes, self._record, self._widths,
        )  # fmt: skip

    # The owners' side.

    def has_applied(self, step: int) -> bool:
        """Whether all owners of this node have applied so many steps; at s = 0."""
        return self.server.has_applied(step)

    def close(self):
        self.exchange.leave(self)


class Reply:
    """The replies of all servers to a request, which ask() or post() of the exchange sends.

    fetched     (n,) bool: the rows that they bring; None until they are received, and at s = 0, where they bring all
    num_bytes   of these rows; 0 until they are received
    reason, step  of the request
    packed      the request
    round       that awaits it, once the request is sent"""

    def __init__(self, channel: Channel, request: Request, clocks: np.ndarray | None = None):
        """request: must not be changed any more. clocks (n,) int32: at s >= 1, for the owners' clocks of the
        requested keys, by position, once the reply is received."""
        self.reason, self.step = request.reason, request.step
        self._clocks, self._exchange = clocks, channel.exchange
        self.fetched: np.ndarray | None = None
        self.num_bytes, self._row_bytes = 0, channel.num_bytes
        self.packed = channel.packed(request)
        self.round: Round | None = None

    def read(self):
        """Reads the clocks. REQUIRES: the messages of all servers are here (RoundRequest.set_replies)."""
        if self._clocks is not None:
            fetched = np.zeros(len(self._clocks), bool)
            self.packed.read_clocks(self._clocks, fetched)
            self.fetched, self.num_bytes = fetched, self._row_bytes * int(np.count_nonzero(fetched))

    def serve(self):
        """Answers the requests of other ranks in this round, if no thread does."""
        self._exchange.serve(self.round)

    def receive(self):
        """Waits for the clocks and for `fetched`."""
        self._exchange.receive(self.round)

    def place(self, *outs: np.ndarray):
        """Copies the rows to their positions: one out (num, width) per array of the table."""
        self.packed.place(list(outs))

    def drop(self):
        """Ends it in any state. Completes the round: other ranks wait for this rank's replies, and theirs must be
        received."""
        if self.round is not None and not self._exchange.is_broken:
            self.receive()
