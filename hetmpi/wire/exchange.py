"""Exchange: the messages of several tables between nodes, on a wire (wire.py), by rails (rails.py).

    round   a request to every server, and a reply to every client
    post    a message to every server, with gradients; if tables announce batches by it, with replies as well

A message has a section of each table (cpp/wire/sections.h); tables that are used together share it.

A server (cpp/wire/server.h) answers the messages of this rank's clients. Where the wire has no thread that runs it, all
ranks make the same calls in the same order, and every wait receives and answers. In a round all ranks send their
requests before any of them waits for a reply. A rank leaves a write only after it has answered every client in all
rounds that it has begun by then: what follows, such as a sum over all ranks, may receive nothing. Nor may a sum between
read and write: a round begun there is awaited by nobody before its own write.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from hetmpi import _C
from hetmpi.wire.rails import Rails
from hetmpi.wire.wire import Lines, Wire
from hetmpi.world.waiting import ranks_text
from hetmpi.world.world import World

REQUEST, REPLY, POST = 1, 2, 3  # tags

MakeWire = Callable[[Lines], Wire]


class Round:
    """The replies that this rank awaits from every server to one of its messages.

    number    of the rounds before it
    replies   channel -> Reply
    arrived   server -> its message, as long as not all are here"""

    def __init__(self, number: int, replies: Mapping):
        self.number, self.replies, self.arrived = number, replies, {}
        self.is_served = self.is_received = False
        for reply in replies.values():
            reply.round = self


class Exchange:
    """The messages of several tables (channel.py, Channel), on one rank.

    channels       in the order of their sections; None for one that has left, whose section stays empty
    rails          the partners of this rank
    clients        those whose messages this rank receives itself
    wire           carries the messages
    server         answers those of clients
    num_messages, num_bytes   sent so far
    is_broken      an error, or different calls of ranks, has ended the messages: none is awaited any more"""

    def __init__(self, world: World, make_wire: MakeWire):
        """Collective."""
        self.world, self.rails, self.channels = world, Rails(world), []
        self.num_messages = self.num_bytes = 0
        self.server = _C.Server(self.rails.clients, world.rank, not make_wire.has_thread)
        lines = Lines(world, self.rails, (REQUEST, POST), (REPLY,), self._words_of, self.server)
        self.wire = make_wire(lines)
        if not world.is_one_node:
            world.wires.add(self.wire)
            world.receivers[self] = None
        self.clients = [] if self.wire.has_thread else self.rails.clients
        self.is_broken = False
        self._rounds: deque[Round] = deque()  # not received yet
        self._num_rounds = 0
        self._tags: deque[int] = deque()  # of this rank's messages of which not all clients' are received
        self._num_received = [0] * len(self.clients)  # of these

    def join(self, channel):
        """Adds a channel. REQUIRES: no message is under way, on any rank."""
        self.channels.append(channel)
        self._is_exact = channel.is_exact  # as of all that share messages
        self._set_tables()

    def _set_tables(self):
        self.server.set_tables([channel and channel.server for channel in self.channels])

    def _words_of(self, piece: np.ndarray) -> int | None:
        """Lines.length_of."""
        return _C.message_words(piece, len(self.channels))

    def awaits(self, channel) -> bool:
        """Whether replies to a channel are not received yet."""
        return not self.is_broken and any(channel in round_.replies for round_ in self._rounds)

    def leave(self, channel):
        """Removes a channel. The last one first receives its replies, then waits until its messages are delivered.
        REQUIRES: at s = 0 its table is settled. Collective."""
        if sum(other is not None for other in self.channels) > 1:
            self.channels[self.channels.index(channel)] = None
            self._set_tables()  # the table's memory is not used any more
            return
        if not self.is_broken:
            self.receive_all()
            what = "for other ranks to receive its last message about the table"
            self.world.wait(lambda: self.poll() and self.wire.publish() and self.wire.is_idle, what)
        # A wire may reach a rank that makes no call. Also where the messages are broken, as others may not know it.
        self.world.meet("for all ranks to close the table")
        self.world.wires.discard(self.wire)
        self.world.receivers.pop(self, None)
        if not self.is_broken:
            self.wire.free()
        self.channels.clear()  # breaks the reference cycle, which frees the table's memory at once

    @contextlib.contextmanager
    def _breaking(self):
        """A context in which an error leaves the messages broken: what was read is gone, so none can be awaited."""
        try:
            yield
        except Exception:
            self.is_broken = True
            raise

    # Messages.

    def check(self):
        """Raises RuntimeError if an error has ended the messages."""
        if self.is_broken:
            raise RuntimeError("EmbeddingTable: an error has ended the messages between nodes: close the table")

    def _check_channels(self, channels: Iterable):
        """Raises RuntimeError for one of another exchange."""
        if not all(map(self.channels.__contains__, channels)):
            raise RuntimeError("TableGroup: a table of this group was put into another group since: use that one")

    def ask(self, replies: Mapping):
        """Sends every server the requests of channels: channel -> the Reply that it will have. Raises as check()."""
        self.check()
        if replies:
            self._send(REQUEST, replies)

    def post(self, replies: Mapping):
        """Sends every server gradients of channels, and what those request that are for another reason than PUSHES.
        All ranks post equally often. replies: as in ask()."""
        self._send(POST, replies)
        for reply in replies.values():
            reply.packed.forget_pushes()

    def _send(self, tag: int, replies: Mapping):
        """Sends a message to every server, and begins a round if it awaits replies."""
        self._check_channels(replies)
        awaited = {channel: reply for channel, reply in replies.items() if reply.reason != _C.PUSHES}
        if awaited:
            self._rounds.append(Round(self._num_rounds, awaited))
            self._num_rounds += 1
        messages = _C.RoundRequest.messages_of(self._by_section(replies), len(self.rails.servers))
        self.num_messages += len(messages)
        self.num_bytes += 8 * sum(map(len, messages))
        self.wire.send(tag, dict(zip(self.rails.servers, messages)))
        if self.clients:
            self._tags.append(tag)
            if self._is_exact:
                self._expect(replies)
            self.wire.expect(tag, self.clients)

    def _by_section(self, replies: Mapping) -> list[_C.RoundRequest | None]:
        """The request of each channel, None for one that has no part."""
        return [replies[channel].packed if channel in replies else None for channel in self.channels]

    def _expect(self, replies: Mapping):
        """Lets the server answer the next message of each client, which must be for the same reasons."""
        reasons = [replies[channel].reason if channel in replies else _C.NO_SECTION for channel in self.channels]
        self.server.expect(reasons)

    def poll(self) -> bool:
        """Lets messages leave, and receives and answers those of clients. Returns whether all that this rank has sent
        have come from each client too."""
        self.wire.publish()
        if self.clients and not self.is_broken:
            while self._take_messages():
                pass
            with self._breaking():
                for i, reply in self.server.proceed():
                    self.num_messages += 1
                    self.num_bytes += reply.nbytes
                    self.wire.send(REPLY, {self.clients[i]: reply})
        return not self._tags

    def _take_messages(self) -> bool:
        """Gives the server the next message of each client from whom it is here. Returns whether there was one."""
        num_found, awaited = 0, {}
        for i, num in enumerate(self._num_received):
            if num < len(self._tags):
                awaited.setdefault(self._tags[num], []).append(i)
        for tag, places in awaited.items():
            found = self.wire.arrived(tag, [self.clients[i] for i in places])
            num_found += len(found)
            for i in places:
                if self.clients[i] in found:
                    self._num_received[i] += 1
                    self.server.put(i, found[self.clients[i]])
        while self._tags and min(self._num_received):
            self._tags.popleft()
            self._num_received = [num - 1 for num in self._num_received]
        return num_found > 0

    receive_pending = poll

    def missing(self) -> list[int]:
        """The clients from whom fewer messages have come than this rank has sent."""
        return [client for i, client in enumerate(self.clients) if self._num_received[i] < len(self._tags)]

    # Rounds.

    def receive_all(self):
        """Receives the replies of all rounds."""
        if self._rounds:
            self.receive(self._rounds[-1])

    def serve(self, round_: Round):
        """Answers all clients in this round and those before it."""
        if round_.is_served:
            return
        for earlier in list(self._rounds):
            if not earlier.is_served:
                self._serve(earlier)
                self.wire.expect(REPLY, self.rails.servers)
                earlier.is_served = True
            if earlier is round_:
                return

    def _serve(self, round_: Round):
        if not self.clients:
            return
        if not self._is_exact:  # the pushes of its clients are applied now, at this place of the rank's step
            self._expect(round_.replies)
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
            messages = self._receive_from(self.rails.servers, REPLY, earlier.arrived)
            _C.RoundRequest.set_replies(self._by_section(earlier.replies), messages)
            for channel in self.channels:
                if channel in earlier.replies:
                    earlier.replies[channel].read()
            earlier.is_received, earlier.replies = True, {}  # breaks the reference cycle, which frees memory at once
            self._rounds.popleft()
        # Another rank may need the reply before it can come to this rank's next call.
        self.world.wait(self.wire.publish, "for other ranks to make room for its messages")

    def _receive_from(self, partners: list[int], tag: int, found: dict[int, np.ndarray]) -> list[np.ndarray]:
        """The next message of each partner. found: those that are here already; has all that came after an error."""

        def missing() -> list[int]:
            return [partner for partner in partners if partner not in found]

        def look() -> bool:
            found.update(self.wire.arrived(tag, missing()))
            return len(found) == len(partners)

        what = "to read or write the table as often as it does"
        self.world.wait(look, lambda: f"for {ranks_text(missing())} {what}")
        return [found[partner] for partner in partners]
