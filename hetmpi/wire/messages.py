"""Messages: a Wire by MPI_Isend and MPI_Irecv.

MPI moves a long message while both ranks compute only if its receive was posted before (`expect`), and a receive needs
a length. Lengths vary little from step to step, and both sides know that of the message before: a message goes in one
piece of at most a quarter more than that, and what exceeds it in a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hetmpi.wire.wire import Pipes
from hetmpi.world.mpi import MPI

SECOND = 16  # added to the tag of a first piece
QUARTERS = 5  # of the words of the message before: the most of a first piece


class Messages:
    """See hetmpi/wire/wire.py, Wire."""

    has_thread = False

    def __init__(self, pipes: Pipes):
        # A communicator of their own separates these messages from others.
        self._comm = None if pipes.world.is_one_node else pipes.world.comm.Dup()
        self._length_of = pipes.length_of
        # By tag and partner: words of the next first piece, as both sides know them.
        self._to_send = {(tag, partner): 0 for partner, tag in pipes.outgoing}
        self._to_receive = {(tag, partner): 0 for partner, tag in pipes.incoming}
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []  # with the memory that MPI uses until completion
        self._posted: dict[tuple[int, int], tuple[MPI.Request, np.ndarray]] = {}  # receives of first pieces
        self._firsts: dict[tuple[int, int], np.ndarray] = {}  # first pieces, whose second ones are under way

    def send(self, tag: int, messages: Mapping[int, np.ndarray]):
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        for partner, message in messages.items():
            most, num = self._to_send[tag, partner], len(message)
            for piece, its_tag in ((message[:most], tag), (message[most:], tag + SECOND))[: 1 + (num > most)]:
                self._sent.append((self._comm.Isend([piece, MPI.INT64_T], partner, its_tag), piece))
            self._to_send[tag, partner] = num * QUARTERS // 4

    def expect(self, tag: int, partners: Sequence[int]):
        for partner in partners:
            pipe = tag, partner
            if pipe not in self._posted and pipe not in self._firsts:
                memory = np.empty(self._to_receive[pipe], np.int64)
                self._posted[pipe] = self._comm.Irecv([memory, MPI.INT64_T], partner, tag), memory

    def arrived(self, tag: int, partners: Sequence[int]) -> dict[int, np.ndarray]:
        self.expect(tag, partners)
        found, status = {}, MPI.Status()
        for partner in partners:
            pipe = tag, partner
            if pipe in self._posted:
                request, memory = self._posted[pipe]
                if not request.Test(status):
                    continue
                del self._posted[pipe]
                self._firsts[pipe] = memory[: status.Get_count(MPI.INT64_T)]
            message = self._firsts[pipe]
            if self._length_of(message) != len(message):
                matched = self._comm.Improbe(partner, tag + SECOND, status)
                if matched is None:
                    continue
                second = np.empty(status.Get_count(MPI.INT64_T), np.int64)
                matched.Recv([second, MPI.INT64_T])
                message = np.concatenate([message, second])
            del self._firsts[pipe]
            self._to_receive[pipe] = len(message) * QUARTERS // 4
            found[partner] = message
        return found

    def publish(self) -> bool:
        return True

    @property
    def is_idle(self) -> bool:
        return not self._sent or MPI.Request.Testall([request for request, _ in self._sent])

    def free(self):
        if self._comm is not None:
            self._comm.Free()
