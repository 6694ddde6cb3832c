"""Rounds: messages between nodes that several tables share.

A round has two messages for each partner (rails.py): a request to every server, and a reply to every client. Each holds
a section per table. In a round all ranks send their requests before any of them waits for a reply.

A table joins the open round with `begin`. The round is sent when all tables have joined it, or when one of them needs
its replies: so tables that make their calls in turns, as in a TableGroup, share the messages. All ranks make the same
calls in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hetmpi.comm.mpi import MPI
from hetmpi.comm.rails import Rails
from hetmpi.comm.waiting import ranks_text, wait_for
from hetmpi.comm.world import World

REQUEST, REPLY = 1, 2  # tags

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
    """A table that takes part in rounds; the owners' side."""

    def serve(self, one: Round, requests: list[Section]) -> list[int]:
        """Applies the pushes of all clients, and returns the length of the reply to each in words."""

    def write_replies(self, messages: list[np.ndarray], begins: list[int], words: list[int]) -> None:
        """Writes the reply to each client at its place in the message."""


class Round:
    """A round and its letters; its steps follow one another by Rounds."""

    def __init__(self):
        self.letters: dict[Member, Letter] = {}
        self.is_sent = self.is_served = self.is_received = False


class Rounds:
    """The rounds of several tables, on one rank.

    is_broken      ranks have made different calls, so that no message is awaited any more
    num_messages, num_bytes  sent so far"""

    def __init__(self, world: World, rails: Rails):
        """Collective."""
        self.world, self.rails = world, rails
        self.comm = world.comm.Dup()  # separates these messages from others
        self.members: list[Member] = []
        self._rounds: deque[Round] = deque()  # not received yet; the last one may be open
        self._sends: list[tuple[MPI.Request, np.ndarray]] = []  # with the buffers that MPI uses until completion
        self.is_broken = False
        self.num_messages = self.num_bytes = 0

    def begin(self, member: Member, letter: Letter) -> Round:
        """Joins the open round, and sends it if it is complete."""
        if not self._rounds or self._rounds[-1].is_sent or member in self._rounds[-1].letters:
            self.send()
            self._rounds.append(Round())
        one = self._rounds[-1]
        one.letters[member] = letter
        if len(one.letters) == len(self.members):
            self.send()
        return one

    def send(self):
        """Sends the requests of the open round, if there is one."""
        if self._rounds and not self._rounds[-1].is_sent:
            one = self._rounds[-1]
            lengths = [one.letters[member].words() if member in one.letters else [] for member in self.members]
            messages, begins = self._messages(lengths, len(self.rails.servers))
            for member, places in zip(self.members, begins):
                if member in one.letters:
                    one.letters[member].write(messages, places)
            self.send_to(self.rails.servers, messages, REQUEST)
            one.is_sent = True

    def serve(self, one: Round):
        """Serves the requests of all clients in this round and those before it."""
        if one.is_served:
            return
        if not one.is_sent:
            self.send()
        for earlier in list(self._rounds):
            if not earlier.is_served:
                self._serve(earlier)
            if earlier is one:
                return

    def _serve(self, one: Round):
        clients = self.rails.clients
        sections = self._sections(self.receive_from(clients, REQUEST))
        lengths = []
        for member, requests in zip(self.members, sections):
            if self._agrees(one, member, requests):
                lengths.append(member.serve(one, requests))
            else:
                lengths.append([])
        messages, begins = self._messages(lengths, len(clients))
        for member, places, words in zip(self.members, begins, lengths):
            if member in one.letters:
                member.write_replies(messages, places, words)
        self.send_to(clients, messages, REPLY)
        one.is_served = True

    def _agrees(self, one: Round, member: Member, requests: list[Section]) -> bool:
        """Whether the table takes part in this round. Raises RuntimeError if only some ranks have it so."""
        is_part = member in one.letters
        for client, (_, begin, end) in zip(self.rails.clients, requests):
            if (end > begin) != is_part:
                self.refuse(client, "uses" if end > begin else "does not use", "does not" if end > begin else "does")
        return is_part

    def refuse(self, client: int, theirs: str, mine: str):
        """Raises RuntimeError: this rank and a client make different calls."""
        self.is_broken = True
        raise RuntimeError(
            f"EmbeddingTable: rank {client} {theirs} while rank {self.world.rank} {mine}: with table.exchange=alltoall "
            "all ranks must read, announce, write and flush alike"
        )

    def receive(self, one: Round):
        """Receives the replies of this round and those before it."""
        self.serve(one)
        while not one.is_received:
            earlier = self._rounds[0]
            sections = self._sections(self.receive_from(self.rails.servers, REPLY))
            for member, replies in zip(self.members, sections):
                if member in earlier.letters:
                    earlier.letters[member].read(replies)
            earlier.is_received = True
            self._rounds.popleft()

    def leave(self, member: Member):
        """Takes a table out; the last one waits until the others have received this rank's last messages.
        Collective."""
        self.members.remove(member)
        if not self.members and not self.is_broken:
            sent = [request for request, _ in self._sends]
            wait_for(
                self.world,
                lambda: MPI.Request.Testall(sent),
                "for other ranks to receive its last message about the table",
            )
            self.comm.Free()

    # A message: the number of words of each table's section, then the sections.

    def _messages(self, lengths: list[list[int]], num: int) -> tuple[list[np.ndarray], list[list[int]]]:
        """Messages to `num` partners, to be filled, and for each table the begin of its section in each message.
        lengths[member][partner], [] for a table that takes no part."""
        table = np.array([of_member or [0] * num for of_member in lengths], np.int64).reshape(len(lengths), num)
        begins = np.concatenate([np.zeros((1, num), np.int64), np.cumsum(table, 0)]) + len(lengths)
        messages = []
        for column, size in zip(table.T, begins[-1]):
            message = np.empty(size, np.int64)
            message[: len(lengths)] = column
            messages.append(message)
        self.num_messages += len(messages)
        self.num_bytes += sum(message.nbytes for message in messages)
        return messages, begins[:-1].tolist()

    def _sections(self, messages: Sequence[np.ndarray]) -> list[list[Section]]:
        """The section of each table in each message: [member][partner]."""
        num = len(self.members)
        found: list[list[Section]] = [[] for _ in range(num)]
        for message in messages:
            begin = num
            for of_member, length in zip(found, message[:num].tolist()):
                of_member.append((message, begin, begin + length))
                begin += length
        return found

    def send_to(self, partners: list[int], messages: list[np.ndarray], tag: int):
        """Sends each partner its message."""
        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        for partner, message in zip(partners, messages):
            self._sends.append((self.comm.Isend([message, MPI.INT64_T], partner, tag), message))

    def receive_from(self, partners: list[int], tag: int) -> list[np.ndarray]:
        """The next message of each partner."""
        found: dict[int, np.ndarray] = {}
        status = MPI.Status()

        def look() -> bool:
            for partner in partners:
                if partner not in found and (matched := self.comm.Improbe(partner, tag, status)) is not None:
                    found[partner] = message = np.empty(status.Get_count(MPI.INT64_T), np.int64)
                    matched.Recv([message, MPI.INT64_T])
            return len(found) == len(partners)

        def what() -> str:
            missing = [partner for partner in partners if partner not in found]
            return f"for {ranks_text(missing)} to read or write the table as often as it does"

        wait_for(self.world, look, what)
        return [found[partner] for partner in partners]


def share(tables: Sequence):
    """Lets tables with `rounds` (TwoSided) that are used together share theirs: those of the first one. Collective."""
    first, *others = tables
    for other in others:
        other.rounds.leave(other)
        other.rounds = first.rounds
        first.rounds.members.append(other)
