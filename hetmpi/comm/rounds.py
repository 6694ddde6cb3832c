"""Messages between nodes that several tables share, by rails (rails.py).

Rounds   a request to every server, and a reply to every client
Posts    a message to every server, without a reply

A message has a section per table. A table joins the next message with `begin`. It is sent when all tables have joined
it, or when one of them cannot wait any longer: so tables that make their calls in turns, as in a TableGroup, share the
messages. All ranks make the same calls in the same order. In a round all ranks send their requests before any of them
waits for a reply.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from hetmpi import _C
from hetmpi.comm.rails import Rails
from hetmpi.comm.waiting import ranks_text, wait_for
from hetmpi.comm.wire import Lines, Wire
from hetmpi.comm.world import World

REQUEST, REPLY, POST = 1, 2, 3  # tags
ALL_ALIKE = "with table.exchange=messages all ranks must read, announce, write and flush alike"

MakeWire = Callable[[Lines], Wire]
Section = tuple[np.ndarray, int, int]  # words [begin, end) of a message (n,) int64


class Letter(Protocol):
    """A table's part of a round, on the requester's side. A message consists of words of 8 bytes."""

    def words(self) -> list[int]:
        """Length of the request to each server."""

    def write(self, messages: list[np.ndarray], begins: list[int]) -> None:
        """Writes the request to each server at its place in the message."""

    def read(self, replies: list[Section]) -> None:
        """Reads the reply of each server."""


class Member(Protocol):
    """A table that takes part in rounds; the owners' side.

    server   answers its requests where the wire has a thread"""

    server: _C.RoundServer | None

    def serve(self, one: Round, requests: list[Section]) -> list[int]:
        """Applies the pushes of all clients, and returns the length of the reply to each in words."""

    def write_replies(self, one: Round, messages: list[np.ndarray], begins: list[int], words: list[int]) -> None:
        """Writes the reply to each client at its place in the message."""


class Sink(Protocol):
    """A table that receives posts."""

    def take(self, client: int, section: Section) -> None:
        """Takes the section of the `client`-th client."""


class Shared:
    """What Rounds and Posts have in common: tables, and messages of a section per table.

    members        the tables, in the order of their sections; None for one that has left, whose section stays empty
    rails          the partners of this rank
    clients        those that this rank answers itself
    wire           carries the messages
    is_broken      ranks have made different calls, so that no message is awaited any more
    num_messages, num_bytes  sent so far"""

    def __init__(self, world: World, make_wire: MakeWire, to_servers: int, to_clients: tuple[int, ...] = ()):
        """to_servers, to_clients: tags of the messages. Collective."""
        self.world, self.rails = world, Rails(world)
        self.wire = make_wire(Lines(world, self.rails, (to_servers,), to_clients, self._length))
        self.clients = [] if self.wire.has_thread else self.rails.clients
        self.members: list = []
        self.is_broken = False
        self.num_messages = self.num_bytes = 0

    def join(self, member):
        """Adds a table. REQUIRES: no message is under way, on any rank."""
        self.members.append(member)
        self._serve_members()

    def _serve_members(self):
        """Tells the wire which tables it may answer for."""
        self.wire.serve([None if member is None else member.server for member in self.members])

    @property
    def num_members(self) -> int:
        """Tables that have not left."""
        return sum(member is not None for member in self.members)

    def leave(self, member):
        """Takes a table out; the last one waits until the others have received this rank's last messages.
        Collective."""
        self.members[self.members.index(member)] = None
        if self.num_members:
            self._serve_members()  # a thread must not touch the table's memory any more
            return
        if not self.is_broken:
            wait_for(
                self.world,
                lambda: self.wire.publish() and self.wire.is_idle,
                "for other ranks to receive its last message about the table",
            )
        # A wire may reach a rank that makes no call. Also where the messages are broken, as others may not know it.
        self.world.meet("for all ranks to close the table")
        if not self.is_broken:
            self.wire.free()

    @contextlib.contextmanager
    def breaking(self):
        """A context in which an error leaves the messages broken: what was read is gone, so none can be awaited."""
        try:
            yield
        except Exception:
            self.is_broken = True
            raise

    def send_letters(self, letters: dict, tag: int):
        """Sends every server the letters of all tables that have one."""
        lengths = [letters[member].words() if member in letters else [] for member in self.members]
        messages, begins = self.messages(lengths, len(self.rails.servers))
        for member, places in zip(self.members, begins):
            if member in letters:
                letters[member].write(messages, places)
        self.send_to(self.rails.servers, messages, tag)

    # A message: the number of words of each table's section, then the sections.

    def messages(self, lengths: list[list[int]], num: int) -> tuple[list[np.ndarray], list[list[int]]]:
        """Messages to `num` partners, to be filled, and for each table the begin of its section in each message.
        lengths[member][partner], [] for a table that takes no part."""
        messages, begins, num_words = _C.new_messages(lengths, num)
        self.num_messages += num
        self.num_bytes += 8 * num_words
        return messages, begins

    def sections(self, message: np.ndarray) -> list[Section]:
        """The section of each table."""
        begin, found = len(self.members), []
        for length in message[:begin].tolist():
            found.append((message, begin, begin + length))
            begin += length
        return found

    def send_to(self, partners: list[int], messages: list[np.ndarray], tag: int):
        """Sends each partner its message."""
        for partner, message in zip(partners, messages):
            self.wire.send(partner, tag, message)

    def expect_from(self, partners: list[int], tag: int):
        """Lets the next message of each partner arrive while this rank computes."""
        for partner in partners:
            self.wire.expect(partner, tag)

    def _length(self, piece: np.ndarray) -> int | None:
        """Words of the message that begins with this piece; None if the piece does not say it."""
        num = len(self.members)
        return num + sum(piece[:num].tolist()) if len(piece) >= num else None


class Round:
    """A round and its letters; its steps follow one another by Rounds."""

    def __init__(self):
        self.letters: dict[Member, Letter] = {}
        self.is_sent = self.is_served = self.is_received = False


class Rounds(Shared):
    """The rounds of several tables, on one rank.

    deadline   a time.monotonic() after which a wait for messages raises TimeoutError; what it waits for may still be
               received later"""

    deadline = float("inf")

    def __init__(self, world: World, make_wire: MakeWire):
        """Collective."""
        super().__init__(world, make_wire, REQUEST, (REPLY,))
        self._rounds: deque[Round] = deque()  # not received yet; the last one may be open

    def begin(self, member: Member, letter: Letter) -> Round:
        """Joins the open round, and sends it if it is complete."""
        if not self._rounds or self._rounds[-1].is_sent or member in self._rounds[-1].letters:
            self.send()
            self._rounds.append(Round())
        one = self._rounds[-1]
        one.letters[member] = letter
        if len(one.letters) == self.num_members:
            self.send()
        return one

    def send(self):
        """Sends the requests of the open round, if there is one."""
        if self._rounds and not self._rounds[-1].is_sent:
            one = self._rounds[-1]
            self.send_letters(one.letters, REQUEST)
            self.expect_from(self.clients, REQUEST)
            one.is_sent = True

    def send_alone(self, member: Member, letter: Letter):
        """Sends a letter at once, which gets no reply. REQUIRES: the wire has a thread."""
        self.send_letters({member: letter}, POST)

    def serve(self, one: Round):
        """Serves the requests of all clients in this round and those before it."""
        if one.is_served:
            return
        if not one.is_sent:
            self.send()
        for earlier in list(self._rounds):
            if not earlier.is_served:
                with self.breaking():
                    self._serve(earlier)
            if earlier is one:
                return

    def _serve(self, one: Round):
        clients = self.clients
        if not clients:
            self.expect_from(self.rails.servers, REPLY)
            one.is_served = True
            return
        requests = [self.sections(message) for message in self.receive_from(clients, REQUEST)]
        lengths = []
        for i, member in enumerate(self.members):
            of_member = [of_client[i] for of_client in requests]
            lengths.append(member.serve(one, of_member) if self._agrees(one, member, of_member) else [])
        messages, begins = self.messages(lengths, len(clients))
        for member, places, words in zip(self.members, begins, lengths):
            if member in one.letters:
                member.write_replies(one, messages, places, words)
        self.send_to(clients, messages, REPLY)
        self.expect_from(self.rails.servers, REPLY)
        one.is_served = True

    def _agrees(self, one: Round, member: Member, requests: Sequence[Section]) -> bool:
        """Whether the table takes part in this round. Raises RuntimeError if only some ranks have it so."""
        is_part = member in one.letters
        for client, (_, begin, end) in zip(self.clients, requests):
            if (end > begin) != is_part:
                self.refuse(client, "uses" if end > begin else "does not use", "does not" if end > begin else "does")
        return is_part

    def refuse(self, client: int, theirs: str, mine: str):
        """Raises RuntimeError: this rank and a client make different calls."""
        self.is_broken = True
        raise RuntimeError(f"EmbeddingTable: rank {client} {theirs} while rank {self.world.rank} {mine}: {ALL_ALIKE}")

    def receive(self, one: Round):
        """Receives the replies of this round and those before it."""
        self.serve(one)
        while not one.is_received:
            earlier = self._rounds[0]
            replies = [self.sections(message) for message in self.receive_from(self.rails.servers, REPLY)]
            for i, member in enumerate(self.members):
                if member in earlier.letters:
                    earlier.letters[member].read([of_server[i] for of_server in replies])
            earlier.is_received = True
            earlier.letters = {}  # breaks the reference cycle, so that their memory is freed at once
            self._rounds.popleft()
        if not self.wire.publish():  # another rank may need the reply before it can come to this rank's next call
            wait_for(self.world, self.wire.publish, "for other ranks to make room for its messages")

    def receive_from(self, partners: list[int], tag: int) -> list[np.ndarray]:
        """The next message of each partner."""
        found: dict[int, np.ndarray] = {}

        def missing() -> list[int]:
            return [partner for partner in partners if partner not in found]

        def look() -> bool:
            if time.monotonic() > self.deadline:
                raise TimeoutError(f"{ranks_text(missing())} did not apply the gradients sent to them in time")
            for partner in missing():
                message = self.wire.arrived(partner, tag)
                if message is not None:
                    found[partner] = message
            return len(found) == len(partners)

        wait_for(
            self.world, look, lambda: f"for {ranks_text(missing())} to read or write the table as often as it does"
        )
        return [found[partner] for partner in partners]


class Posts(Shared):
    """The posts of several tables, on one rank: each rank sends as many as every other. Nothing waits here."""

    def __init__(self, world: World, make_wire: MakeWire):
        """Collective."""
        super().__init__(world, make_wire, POST)
        self._open: dict[Sink, Letter] = {}
        self._num_sent = 0
        self._num_received = [0] * len(self.clients)

    def begin(self, member: Sink, letter: Letter):
        """Joins the open post, and sends it if it is complete."""
        if member in self._open:
            self.send()
        self._open[member] = letter
        if len(self._open) == self.num_members:
            self.send()

    def send(self):
        """Sends the open post, if there is one."""
        if self._open:
            self.send_letters(self._open, POST)
            self.expect_from(self.clients, POST)
            self._open = {}
            self._num_sent += 1

    def poll(self) -> bool:
        """Takes what has arrived. Returns whether every client's messages are here, as many as this rank has sent."""
        self.wire.publish()
        for i, client in enumerate(self.clients):
            while self._num_received[i] < self._num_sent:
                message = self.wire.arrived(client, POST)
                if message is None:
                    break
                self._num_received[i] += 1
                with self.breaking():
                    for member, section in zip(self.members, self.sections(message)):
                        if section[2] > section[1]:
                            member.take(i, section)
        return all(num == self._num_sent for num in self._num_received)


def share(tables: Sequence, name: str):
    """Lets tables that are used together share the rounds, or posts, which they have as attribute `name`: those of the
    first one. Collective."""
    first, *others = tables
    for other in others:
        getattr(other, name).leave(other)
        setattr(other, name, getattr(first, name))
        getattr(first, name).join(other)
    first.window.world.meet("for all tables to share their messages")
