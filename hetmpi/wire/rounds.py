"""Rounds: the messages of several tables between nodes, on a wire (wire.py), by rails (rails.py).

    round   a request to every server, and a reply to every client
    post    a message to every server, with gradients; if tables announce batches by it, with replies as well

A message has a section of each table (sections.py). A table joins the next round, or post, with `begin`, or `post`. It
is sent when all tables have joined it, or when one of them cannot wait any longer: so tables that make their calls in
turns, as in a TableGroup, share the messages.

A server (cpp/wire/server.h) answers the messages of this rank's clients. Where the wire has no thread that runs it, all
ranks make the same calls in the same order, and every wait receives and answers. In a round all ranks send their
requests before any of them waits for a reply.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

import numpy as np

from hetmpi import _C
from hetmpi.wire.rails import Rails
from hetmpi.wire.sections import Sections
from hetmpi.wire.wire import Lines, Wire
from hetmpi.world.waiting import ranks_text
from hetmpi.world.world import World

REQUEST, REPLY, POST = 1, 2, 3  # tags

MakeWire = Callable[[Lines], Wire]


class Round:
    """A message of several tables to every server, and the one that they await from it. Its steps follow one another by
    Rounds.

    tag       REQUEST or POST, of the message that is answered
    requests  table -> _C.RoundRequest
    replies   table -> Reply, of those that await one
    number    of those before it
    arrived   server -> its reply"""

    def __init__(self, tag: int, number: int = 0, replies: dict | None = None):
        """replies: to a message that is sent already."""
        self.tag, self.requests, self.replies, self.is_sent = tag, {}, replies or {}, replies is not None
        self.number, self.arrived = number, {}
        self.is_served = self.is_received = False
        for reply in self.replies.values():
            reply.round = self

    @property
    def reasons(self) -> dict:
        """table -> reason of its request."""
        return {table: reply.reason for table, reply in self.replies.items()}


class Rounds:
    """The messages of several tables (requests.py, Requests), on one rank.

    sections       of the messages: its tables, and what was sent so far
    rails          the partners of this rank
    clients        those whose messages this rank receives itself
    wire           carries the messages
    server         answers those of clients
    is_broken      an error, or different calls of ranks, has ended the messages: none is awaited any more"""

    def __init__(self, world: World, make_wire: MakeWire):
        """Collective."""
        self.world, self.rails, self.sections = world, Rails(world), Sections()
        self.server = _C.Server(self.rails.clients, world.rank, not make_wire.has_thread)
        lines = Lines(world, self.rails, (REQUEST, POST), (REPLY,), self.sections.length, self.server)
        self.wire = make_wire(lines)
        if not world.is_one_node:
            world.wires.add(self.wire)
            world.receivers[self] = None
        self.clients = [] if self.wire.has_thread else self.rails.clients
        self.is_broken = False
        self._rounds: deque[Round] = deque()  # not received yet; the last one may be open
        self._num_rounds = 0  # begun
        self._post = Round(POST)  # the open one
        self._tags: deque[int] = deque()  # of this rank's messages of which not all clients' are received
        self._num_received = [0] * len(self.clients)  # of these

    def join(self, table):
        """Adds a table. REQUIRES: no message is under way, on any rank."""
        self.sections.tables.append(table)
        self._is_exact = table.is_exact  # as of all that share messages
        self._set_tables()

    def _set_tables(self):
        self.server.set_tables([table and table.server for table in self.sections.tables])

    def awaits(self, table) -> bool:
        """Whether replies to a table are not received yet."""
        return not self.is_broken and any(table in round_.replies for round_ in self._rounds)

    @property
    def num_tables(self) -> int:
        """Tables that have not left."""
        return sum(table is not None for table in self.sections.tables)

    def leave(self, table):
        """Takes a table out, whose replies nobody makes any more; the last one receives its own, and waits until other
        ranks have received this rank's last messages. REQUIRES: at s = 0 it is settled. Collective."""
        tables = self.sections.tables
        if self.num_tables > 1:
            tables[tables.index(table)] = None
            self._set_tables()  # the table's memory is not used any more
            return
        if not self.is_broken:
            self.finish(receives=True)
            what = "for other ranks to receive its last message about the table"
            self.world.wait(lambda: self.poll() and self.wire.publish() and self.wire.is_idle, what)
        # A wire may reach a rank that makes no call. Also where the messages are broken, as others may not know it.
        self.world.meet("for all ranks to close the table")
        self.world.wires.discard(self.wire)
        self.world.receivers.pop(self, None)
        if not self.is_broken:
            self.wire.free()
        tables.clear()  # breaks the reference cycle, which frees the table's memory at once

    @contextlib.contextmanager
    def _breaking(self):
        """A context in which an error leaves the messages broken: what was read is gone, so none can be awaited."""
        try:
            yield
        except Exception:
            self.is_broken = True
            raise

    # Messages.

    def _send(self, round_: Round):
        """Sends every server the requests of all tables that have joined."""
        requests, round_.is_sent = round_.requests, True
        lengths = [requests[table].words() if table in requests else [] for table in self.sections.tables]
        messages, begins = self.sections.new(lengths, len(self.rails.servers))
        for table, places in zip(self.sections.tables, begins):
            if table in requests:
                requests[table].write(messages, places)
        for server, message in zip(self.rails.servers, messages):
            self.wire.send(server, round_.tag, message)
        if self.clients:
            self._tags.append(round_.tag)
            if self._is_exact:
                self._expect(round_.reasons)
        for client in self.clients:
            self.wire.expect(client, round_.tag)

    def _expect(self, reasons: dict):
        """Lets the server answer the next message of each client, which must be for the same reasons."""
        self.server.expect([reasons.get(table, _C.NO_SECTION) for table in self.sections.tables])

    def poll(self) -> bool:
        """Lets messages leave, and receives and answers those of clients. Returns whether all that this rank has sent
        have come from each client too."""
        self.wire.publish()
        for i, client in enumerate(self.clients):
            while self._num_received[i] < len(self._tags) and not self.is_broken:
                message = self.wire.arrived(client, self._tags[self._num_received[i]])
                if message is None:
                    break
                self._num_received[i] += 1
                self.server.put(i, message)
        if self.clients and not self.is_broken:
            while self._tags and min(self._num_received):
                self._tags.popleft()
                self._num_received = [num - 1 for num in self._num_received]
            with self._breaking():
                for i, reply in self.server.proceed():
                    self.sections.count(reply)
                    self.wire.send(self.clients[i], REPLY, reply)
        return not self._tags

    receive_pending = poll

    def missing(self) -> list[int]:
        """The clients from whom fewer messages have come than this rank has sent."""
        return [client for i, client in enumerate(self.clients) if self._num_received[i] < len(self._tags)]

    # Posts.

    def post(self, table, reply):
        """Joins the open post with the request of a Reply, and sends it if it is complete; send_post() must follow. All
        ranks post equally often."""
        self._post.requests[table], self._post.replies[table] = reply.packed, reply
        if len(self._post.requests) == self.num_tables:
            self.send_post()

    def send_post(self):
        """Sends the open post, if there is one."""
        replies, post = self._post.replies, self._post
        if not post.requests:
            return
        self._post = Round(POST)
        self._send(post)
        awaited = {table: reply for table, reply in replies.items() if reply.reason != _C.PUSHES}
        if awaited:
            self._begin(Round(POST, self._num_rounds, awaited))
        for reply in replies.values():
            reply.packed.forget_pushes()

    # Rounds.

    def begin(self, table, reply) -> Round:
        """Joins the open round with a request, that of a Reply, and sends it if it is complete. Raises as check()."""
        self.check()
        round_ = self._rounds[-1] if self._rounds else None
        if round_ is not None and not round_.is_sent and table in round_.requests:
            self._send(round_)
        if round_ is None or round_.is_sent:
            round_ = self._begin(Round(REQUEST, self._num_rounds))
        round_.requests[table], round_.replies[table] = reply.packed, reply
        if len(round_.requests) == self.num_tables:
            self._send(round_)
        return round_

    def _begin(self, round_: Round) -> Round:
        self._rounds.append(round_)
        self._num_rounds += 1
        return round_

    def check(self):
        """Raises RuntimeError if ranks have made different calls before."""
        if self.is_broken:
            raise RuntimeError("EmbeddingTable: an error has ended the messages between nodes: close the table")

    def finish(self, receives: bool):
        """Serves all rounds, and receives their replies if asked to."""
        if self._rounds:
            (self.receive if receives else self.serve)(self._rounds[-1])

    def serve(self, round_: Round):
        """Answers all clients in this round and those before it."""
        if round_.is_served:
            return
        if not round_.is_sent:
            self._send(round_)
        for earlier in list(self._rounds):
            if not earlier.is_served:
                self._serve(earlier)
                for server in self.rails.servers:
                    self.wire.expect(server, REPLY)
                earlier.is_served = True
            if earlier is round_:
                return

    def _serve(self, round_: Round):
        if not self.clients:
            return
        if not self._is_exact:  # the pushes of its clients are applied now, at this place of the rank's step
            self._expect(round_.reasons)
        self.world.wait(lambda: self.poll() and self.server.num_answered > round_.number, self._unserved)

    def _unserved(self) -> str:
        missing = self.missing()
        if missing:
            return f"for {ranks_text(missing)} to read or write the table as often as it does"
        others = [rank for rank in self.world.node_ranks if rank != self.world.rank]
        return f"for {ranks_text(others)} to apply gradients"

    def receive(self, round_: Round):
        """Receives the replies of this round and those before it."""
        self.serve(round_)
        while not round_.is_received:
            earlier = self._rounds[0]
            replies = [
                self.sections.of(message) for message in self._receive_from(self.rails.servers, REPLY, earlier.arrived)
            ]
            for i, table in enumerate(self.sections.tables):
                if table in earlier.replies:
                    earlier.replies[table].read([of_server[i] for of_server in replies])
            earlier.is_received = True
            earlier.requests, earlier.replies = {}, {}  # breaks the reference cycle, which frees their memory at once
            self._rounds.popleft()
        # Another rank may need the reply before it can come to this rank's next call.
        self.world.wait(self.wire.publish, "for other ranks to make room for its messages")

    def _receive_from(self, partners: list[int], tag: int, found: dict[int, np.ndarray]) -> list[np.ndarray]:
        """The next message of each partner. found: those that are here already; has all that came after an error."""

        def missing() -> list[int]:
            return [partner for partner in partners if partner not in found]

        def look() -> bool:
            for partner in missing():
                message = self.wire.arrived(partner, tag)
                if message is not None:
                    found[partner] = message
            return len(found) == len(partners)

        what = "to read or write the table as often as it does"
        self.world.wait(look, lambda: f"for {ranks_text(missing())} {what}")
        return [found[partner] for partner in partners]
