"""Two-sided transport of SSP: messages between nodes in collective rounds (rounds.py), by rails (rails.py).

    begin     sends every server the pushes held since the last round, and a request for the rows that a batch reads on
              its node, each with the clock of the local copy
    advance   applies the pushes received from all clients, then replies with clocks and the wanted rows
    receive   receives the replies

In a round all ranks send before any of them waits: no rank waits for room in rings of another node, or for more than
its message. A reply reflects all pushes that the requester sent before its request. Later pushes are held
(`HoldingMailbox.held`) for the next round.

The messages are packed and unpacked in C++ (cpp/wire/round.h). A server writes the pushes to other owners of its node
into its rings there, reads their shards, and waits in between until these owners have applied the pushes.
"""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.comm.board import Board
from hetmpi.comm.collective import RailReader, arrays_of, opened_server
from hetmpi.comm.mailbox import NO_KEYS, Mailbox, Message
from hetmpi.comm.rounds import Round, Rounds, Section, Shared, share
from hetmpi.comm.route import Route
from hetmpi.comm.shards import NodeShardReader
from hetmpi.comm.transport import Endpoint, Pull
from hetmpi.comm.waiting import ranks_text, wait_for
from hetmpi.comm.window import RmaWindow
from hetmpi.in_flight import finish

UNANNOUNCED, ANNOUNCED, FLUSH = range(3)
REASONS = ("reads a batch that was not announced", "announces a batch", "flushes")  # of a round
MAX_IDLE_WRITES = 8  # successive writes without a round


class HoldingMailbox(Mailbox):
    """A Mailbox to the owners on this node, which holds messages for other nodes until the next round."""

    def __init__(self, window: RmaWindow, record: _C.RecordFormat):
        super().__init__(window, record, reaches_remote=False)
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


class TwoSided:
    """See hetmpi/comm/transport.py, Transport. Collective: all calls on all ranks in the same order.

    rounds   its rounds, which it may share with other tables"""

    carries_pushes = is_collective = True

    def __init__(self, endpoint: Endpoint):
        """Collective."""
        self.name: str | None = "messages"
        self.window, self.world, self._record = endpoint.window, endpoint.window.world, endpoint.record
        self.reader = NodeShardReader(endpoint.window, endpoint.applier)
        self._peeks = RailReader(endpoint.window, endpoint.applier)
        self.mailbox = HoldingMailbox(endpoint.window, endpoint.record)
        self.arrays = endpoint.arrays
        self._widths = [self.reader.shape(array)[0] for array in self.arrays]
        rings = [self.mailbox.rings.get(rank) for rank in self.world.node_ranks]
        self._num_idle = 0  # writes since the last round
        self.rounds = self.open_rounds()
        self.rounds.members.append(self)
        owners = [list(range(self.world.node.size))] * len(self.rounds.rails.clients)
        self._server = opened_server(
            endpoint.window, endpoint.record, self.arrays, owners, [[rings]], endpoint.applier, True
        )

    def open_rounds(self) -> Rounds:
        """The rounds of this table alone. Collective."""
        return Rounds(self.world)

    @property
    def boards(self) -> tuple[Board, ...]:
        return self._peeks.boards

    @property
    def shared(self) -> tuple[Shared, ...]:
        return (self.rounds,)

    def begin(self, pull: Pull) -> RoundTicket:
        return RoundTicket(self, pull)

    def peek(self, array: str, route: Route, out: np.ndarray):
        finish(self._peeks.reading(array, route, out))

    def idle(self) -> bool:
        """Counts a write. Returns whether MAX_IDLE_WRITES were made without a round, which bounds the held messages."""
        self._num_idle += 1
        return self._num_idle == MAX_IDLE_WRITES

    def flush(self, bound: int):
        """A round without requests, which sends the held messages to their owners. REQUIRES: no round of this table is
        open."""
        no_route = Route(NO_KEYS, NO_KEYS, np.zeros(self.world.size + 1, np.int64))
        no_clocks, no_rows = np.empty(0, np.int32), np.empty(0, bool)
        RoundTicket(self, Pull(no_route, no_clocks, lambda: no_clocks, lambda: no_rows, bound, FLUSH)).drop()

    def close(self):
        self._peeks.close()
        self.rounds.leave(self)

    @staticmethod
    def share(transports: list[TwoSided]):
        """Lets tables that are used together share their messages. Collective."""
        share(transports, "rounds")
        share([transport._peeks for transport in transports], "rounds")

    # A round: the requester's and the owners' side.

    def request(self, pull: Pull, held: list[Message]) -> _C.RoundRequest:
        """The pull and the held pushes, for all servers."""
        self._num_idle = 0
        return _C.RoundRequest(
            self.rounds.rails.owners, arrays_of(pull.route), len(pull.versions), pull.known(), pull.reason, pull.bound,
            [_C.PushArrays(m.step, arrays_of(m.route), m.values, m.clocks, m.counts, m.steps, False) for m in held],
            self._record, self._widths,
        )  # fmt: skip

    def serve(self, one: Round, requests: list[Section]) -> list[int]:
        mine = one.letters[self].pull.reason
        clients = self.rounds.rails.clients
        for client, reason in zip(clients, self._server.take(range(len(clients)), requests)):
            if reason != mine:
                self.rounds.refuse(client, REASONS[reason], REASONS[mine])
        if not self._server.apply():
            wait_for(self.world, self._server.apply, f"for {self._neighbours()} to make room for gradients")
        if not self._server.is_applied():
            wait_for(self.world, self._server.is_applied, f"for {self._neighbours()} to apply gradients")
        return self._server.reply_words()

    def write_replies(self, one: Round, messages: list[np.ndarray], begins: list[int], words: list[int]):
        self._server.write_replies(messages, begins, words)

    def _neighbours(self) -> str:
        return ranks_text([rank for rank in self.world.node_ranks if rank != self.world.rank])


class RoundTicket:
    """See hetmpi/comm/transport.py, Ticket; and rounds.py, Letter."""

    def __init__(self, transport: TwoSided, pull: Pull):
        self.pull, self.fetched, self._rounds = pull, None, transport.rounds
        self._request = transport.request(pull, transport.mailbox.take_held())
        self.words, self.write = self._request.words, self._request.write
        self._replies: list[Section] = []
        self._round = self._rounds.begin(transport, self)

    def read(self, replies: list[Section]):
        self._replies, fetched = replies, np.zeros(len(self.pull.versions), bool)
        self._request.read_clocks(replies, self.pull.versions, fetched)
        self.fetched = fetched

    def advance(self):
        self._rounds.serve(self._round)

    def receive(self):
        self._rounds.receive(self._round)

    def place(self, *outs: np.ndarray):
        self._request.place(self._replies, list(outs))
        self._replies = []

    def drop(self):
        """Completes the round: the other ranks wait for this rank's replies, and their replies must be received."""
        if not self._rounds.is_broken:
            self.receive()
