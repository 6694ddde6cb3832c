"""Mail: messages between nodes that several tables share, on a wire (wire.py), by rails (rails.py).

A message is the number of words of each table's section, then the sections; a word has 8 bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from hetmpi import _C
from hetmpi.comm.rails import Rails
from hetmpi.comm.waiting import wait_for
from hetmpi.comm.wire import Lines, Wire
from hetmpi.comm.world import World

REQUEST, REPLY, POST = 1, 2, 3  # tags

MakeWire = Callable[[Lines], Wire]
Section = tuple[np.ndarray, int, int]  # words [begin, end) of a message (n,) int64


class Letter(Protocol):
    """A table's part of a request to every server."""

    def words(self) -> list[int]:
        """Length of the request to each server."""

    def write(self, messages: list[np.ndarray], begins: list[int]) -> None:
        """Writes the request to each server at its place in the message."""


class Mail:
    """The messages of several tables, on one rank.

    members        the tables, in the order of their sections; None for one that has left, whose section stays empty
    rails          the partners of this rank
    clients        those that this rank answers itself
    wire           carries the messages
    is_broken      ranks have made different calls, so that no message is awaited any more
    num_messages, num_bytes  sent so far"""

    def __init__(self, world: World, make_wire: MakeWire):
        """Collective."""
        self.world, self.rails = world, Rails(world)
        self.wire = make_wire(Lines(world, self.rails, (REQUEST, POST), (REPLY,), self._length))
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
            wait_for(self.world, self.is_done, "for other ranks to receive its last message about the table")
        # A wire may reach a rank that makes no call. Also where the messages are broken, as others may not know it.
        self.world.meet("for all ranks to close the table")
        if not self.is_broken:
            self.wire.free()

    def is_done(self) -> bool:
        """Whether everything sent has arrived."""
        return self.wire.publish() and self.wire.is_idle

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
