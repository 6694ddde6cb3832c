"""Requests and replies at s >= 1, by a wire between a rank and its server on each other node (rails.py).

    ask      sends every server the pushes held since the last request, and asks for the rows that a batch reads on its
             node, each with the clock of the local copy
    serve    where the wire has no thread: applies the pushes received from all clients, then replies with clocks and
             the wanted rows
    receive  receives the replies

The owner decides which rows a reply has (cpp/wire/round.h, is_wanted). A reply reflects all pushes that the requester
sent before its request; later pushes are held (`HoldingMailbox.held`) for the next one.

Without a thread requests are sent and served in collective rounds (rounds.py). In a round all ranks send before any of
them waits: no rank waits for room in rings of another node, or for more than its message. With one (windows.py) a
server answers each request as it comes, and no rank waits for a call of another.

The messages are packed and unpacked in C++ (cpp/wire/round.h). A server writes the pushes to other owners of its node
into its rings there, reads their shards, and waits in between until these owners have applied the pushes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from hetmpi import _C
from hetmpi.comm.collective import arrays_of, opened_server
from hetmpi.comm.mailbox import LocalRing, Mailbox, Message
from hetmpi.comm.node_memory import NodeMemory
from hetmpi.comm.rounds import MakeWire, Round, Rounds, Section, Shared, share
from hetmpi.comm.route import Route
from hetmpi.comm.shards import ShardReader
from hetmpi.comm.transport import Endpoint
from hetmpi.comm.waiting import ranks_text, wait_for

UNANNOUNCED, ANNOUNCED, FLUSH, PEEK = range(4)
REASONS = ("reads a batch that was not announced", "announces a batch", "flushes", "peeks")  # of a request
MAX_IDLE_WRITES = 8  # successive writes without a round


@dataclass(frozen=True)
class Request:
    """What a rank asks of the owners on other nodes.

    route    the requested keys, at their positions in a batch of n
    known    (n,) int32: the clock of this rank's copy of each row, NO_LINE if it has no usable copy
    bound    how far an owner's clock may be ahead of `known` without a need for the row, as of Parts
    reason   an index of REASONS
    pushes   the gradients that the owners apply first"""

    route: Route
    known: np.ndarray
    bound: int
    reason: int
    pushes: list[Message]


class HoldingMailbox(Mailbox):
    """A Mailbox to the owners on this node, which holds messages for other nodes until the next round."""

    def __init__(self, window: NodeMemory, record: _C.RecordFormat):
        super().__init__(window, record)
        self._near = frozenset(window.world.node_ranks)
        self.held: list[Message] = []

    def send(self, message: Message, to_all: bool, while_waiting) -> int:
        """As Mailbox.send; the returned bytes include held messages."""
        if not self._near.issuperset(message.route.owners):
            self.held.append(message)
        return super().send(message, to_all, while_waiting)

    @property
    def num_held(self) -> int:
        """Upper bound of the number of pending gradients that have not left this node."""
        return sum(len(message.keys) for message in self.held)

    def take_held(self) -> list[Message]:
        """Removes and returns the held messages."""
        held, self.held = self.held, []
        return held


class Requests:
    """See hetmpi/comm/transport.py, Transport.

    rounds   its messages, which it may share with other tables
    server   answers the requests of this rank's clients"""

    def __init__(self, endpoint: Endpoint, name: str | None, make_wire: MakeWire):
        """name: of the wire. Collective. Raises UserError where the wire does."""
        self.name = name
        self.window, self.world, self._record = endpoint.window, endpoint.window.world, endpoint.record
        self.reader = ShardReader(endpoint.window, endpoint.applier)
        self.mailbox = HoldingMailbox(endpoint.window, endpoint.record)
        self.arrays = endpoint.arrays
        self._widths = [self.reader.shape(array)[0] for array in self.arrays]
        self._num_idle = 0  # writes since the last request
        self.rounds = Rounds(self.world, make_wire)
        self.is_collective = not self.rounds.wire.has_thread and not self.world.is_one_node
        owners = [list(range(self.world.node.size))] * len(self.rounds.rails.clients)
        self._rings = self._rings_of_server(self.rounds.wire.has_thread)  # must live as long as the server
        self.server = opened_server(
            endpoint.window, endpoint.record, self.arrays, owners, [[self._rings]], endpoint.applier, True
        )
        self.rounds.join(self)

    def _rings_of_server(self, has_thread: bool) -> list[LocalRing | None]:
        """The rings by which the server passes pushes on to each owner of this node; those of this rank's mailbox, or,
        for a thread, others, as a ring has one writer."""
        world = self.world
        if not has_thread:
            return [self.mailbox.rings.get(rank) for rank in world.node_ranks]
        return [
            None
            if rank == world.rank
            else LocalRing(self.window.local_ring(rank, world.size + world.rank), self._record)
            for rank in world.node_ranks
        ]

    @property
    def shared(self) -> tuple[Shared, ...]:
        return (self.rounds,)

    def ask(self, route: Route, known: np.ndarray, bound: int, reason: int, clocks: np.ndarray) -> Reply:
        """Sends a request with the pushes held. Arguments as in Request; clocks (n,) int32: for the owners' clocks of
        the requested keys, by position, once the reply is received."""
        self._num_idle = 0
        return Reply(self, Request(route, known, bound, reason, self.mailbox.take_held()), clocks)

    def peek(self, route: Route, out: np.ndarray):
        num, remote = len(out), route.remote(self.world.is_remote)
        no_lines = np.full(num, _C.NO_LINE, np.int32)
        reply = Reply(self, Request(remote, no_lines, 0, PEEK, []), np.empty(num, np.int32))
        self.reader.read_local("weight", route, out)
        reply.receive()
        others = [np.empty((num, width), np.float32) for width in self._widths[1:]]
        reply.place(out, *others)

    def idle(self) -> bool:
        """Counts a write that no request preceded. Returns whether MAX_IDLE_WRITES were made so, which bounds the held
        messages: flush() must follow."""
        self._num_idle += 1
        return self._num_idle == MAX_IDLE_WRITES and not self.world.is_one_node

    @contextlib.contextmanager
    def until(self, deadline: float):
        """A context in which a wait for replies raises TimeoutError after the deadline, a time.monotonic()."""
        self.rounds.deadline = deadline
        try:
            yield
        finally:
            self.rounds.deadline = float("inf")

    def flush(self, bound: int):
        """Sends the held messages to their owners, and waits until these have applied them. REQUIRES: no request of
        this table is under way."""
        if self.world.is_one_node:
            return
        no_clocks = np.empty(0, np.int32)
        self.ask(Route.empty(self.world.size), no_clocks, bound, FLUSH, no_clocks).drop()

    def close(self):
        self.rounds.leave(self)

    @staticmethod
    def share(transports: list[Requests]):
        """Lets tables that are used together share their messages. Collective."""
        share(transports, "rounds")

    # A round: the requester's and the owners' side.

    def packed(self, request: Request) -> _C.RoundRequest:
        """The request, for all servers."""
        return _C.RoundRequest(
            self.rounds.rails.owners, arrays_of(request.route), len(request.known), request.known, request.reason,
            request.bound, 0,
            [
                _C.PushArrays(m.step, arrays_of(m.route), m.values, m.clocks, m.counts, m.steps, False)
                for m in request.pushes
            ],
            self._record, self._widths,
        )  # fmt: skip

    def serve(self, one: Round, requests: list[Section]) -> list[int]:
        mine, server, clients = one.letters[self].reason, self.server, self.rounds.clients
        for client, reason in zip(clients, server.take(range(len(clients)), requests)):
            if reason != mine:
                self.rounds.refuse(client, REASONS[reason], REASONS[mine])
        if not server.apply():
            wait_for(self.world, server.apply, f"for {self._neighbours()} to make room for gradients")
        if not server.is_applied():
            wait_for(self.world, server.is_applied, f"for {self._neighbours()} to apply gradients")
        return server.reply_words()

    def write_replies(self, one: Round, messages: list[np.ndarray], begins: list[int], words: list[int]):
        self.server.write_replies(messages, begins, words)

    def _neighbours(self) -> str:
        return ranks_text([rank for rank in self.world.node_ranks if rank != self.world.rank])


class Reply:
    """The replies of all servers to a request. A Letter of rounds.py.

    fetched   (n,) bool: the rows that they bring; None until they are received"""

    def __init__(self, transport: Requests, request: Request, clocks: np.ndarray):
        """Sends the request. clocks: as in Requests.ask."""
        self.reason, self._clocks, self._rounds = request.reason, clocks, transport.rounds
        self.fetched: np.ndarray | None = None
        self._packed = transport.packed(request)
        self.words, self.write = self._packed.words, self._packed.write
        self._sections: list[Section] = []
        self._round = self._rounds.begin(transport, self)

    def read(self, replies: list[Section]):
        self._sections, fetched = replies, np.zeros(len(self._clocks), bool)
        self._packed.read_clocks(replies, self._clocks, fetched)
        self.fetched = fetched

    def serve(self):
        """Answers the requests of other ranks in this round, if no thread does."""
        self._rounds.serve(self._round)

    def receive(self):
        """Waits for the clocks and for `fetched`."""
        self._rounds.receive(self._round)

    def place(self, *outs: np.ndarray):
        """Copies the rows to their positions: one out (n, width) per array of the transport."""
        self._packed.place(self._sections, list(outs))
        self._sections = []

    def drop(self):
        """Ends it in any state. Completes the round: other ranks wait for this rank's replies, and theirs must be
        received."""
        if not self._rounds.is_broken:
            self.receive()
