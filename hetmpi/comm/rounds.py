"""Rounds: requests, replies and posts of several tables (mail.py).

    round   a request to every server, and a reply to every client
    post    a message to every server, without a reply

A table joins the next round, or post, with `begin`, or `post`. It is sent when all tables have joined it, or when one
of them cannot wait any longer: so tables that make their calls in turns, as in a TableGroup, share the messages.

Where the wire has no thread that answers, all ranks make the same calls in the same order. In a round all ranks send
their requests before any of them waits for a reply. Posts are received in every wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hetmpi import _C
from hetmpi.comm.mail import POST, REPLY, REQUEST, Letter, Mail, MakeWire, Section
from hetmpi.comm.waiting import ranks_text, wait_for
from hetmpi.comm.world import World

ALL_ALIKE = "with table.exchange=messages all ranks must read, announce, write and flush alike"


class RoundLetter(Letter, Protocol):
    """A table's part of a round, on the requester's side."""

    def read(self, replies: list[Section]) -> None:
        """Reads the reply of each server."""


class Member(Protocol):
    """A table that takes part; the owners' side.

    server   answers its requests where the wire has a thread"""

    server: _C.RoundServer

    def serve(self, one: Round, requests: list[Section]) -> list[int]:
        """Applies the pushes of all clients, and returns the length of the reply to each in words."""

    def write_replies(self, one: Round, messages: list[np.ndarray], begins: list[int], words: list[int]) -> None:
        """Writes the reply to each client at its place in the message."""

    def take(self, client: int, section: Section) -> None:
        """Takes the section of a post of the `client`-th client."""


class Round:
    """A round and its letters; its steps follow one another by Rounds."""

    def __init__(self):
        self.letters: dict[Member, RoundLetter] = {}
        self.is_sent = self.is_served = self.is_received = False


class Rounds(Mail):
    """The rounds of several tables, on one rank.

    deadline   a time.monotonic() after which a wait for messages raises TimeoutError; what it waits for may still be
               received later"""

    deadline = float("inf")

    def __init__(self, world: World, make_wire: MakeWire):
        """Collective."""
        super().__init__(world, make_wire)
        self._rounds: deque[Round] = deque()  # not received yet; the last one may be open
        self._post: dict[Member, Letter] = {}  # the open post
        self._num_posted = 0
        self._num_received = [0] * len(self.clients)  # of the posts of each client

    def begin(self, member: Member, letter: RoundLetter) -> Round:
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

    # Posts.

    def post(self, member: Member, letter: Letter):
        """Joins the open post, and sends it if it is complete. Every rank posts as often as every other."""
        if member in self._post:
            self.send_post()
        self._post[member] = letter
        if len(self._post) == self.num_members:
            self.send_post()

    def send_post(self):
        """Sends the open post, if there is one."""
        if self._post:
            letters, self._post = self._post, {}
            self.send_letters(letters, POST)
            self.expect_from(self.clients, POST)
            self._num_posted += 1

    def poll(self) -> bool:
        """Lets messages leave, and takes the posts that have arrived. Returns whether those of all clients have, as
        many as this rank has sent."""
        self.wire.publish()
        for i, client in enumerate(self.clients):
            while self._num_received[i] < self._num_posted and not self.is_broken:
                message = self.wire.arrived(client, POST)
                if message is None:
                    break
                self._num_received[i] += 1
                with self.breaking():
                    for member, section in zip(self.members, self.sections(message)):
                        if section[2] > section[1] and member is not None:
                            member.take(i, section)
        return all(num == self._num_posted for num in self._num_received)

    def is_done(self) -> bool:
        return self.poll() and super().is_done()

    # Rounds.

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


def share(tables: Sequence):
    """Lets tables that are used together share the rounds of the first one. Collective."""
    first, *others = tables
    if not others:
        return
    for other in others:
        other.rounds.leave(other)
        other.rounds = first.rounds
        first.rounds.join(other)
    first.world.meet("for all tables to share their messages")
