"""Messages: a Wire by MPI_Isend and MPI_Irecv.

MPI moves a long message while both ranks compute only if its receive was posted before (`expect`), and a receive needs
a length. Lengths vary little from step to step, and both sides know that of the message before: a message goes in one
piece of at most a quarter more than that, and what exceeds it in a second.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetmpi.wire.wire import Lines
from hetmpi.world.mpi import MPI

SECOND = 16  # added to the tag of a first piece


class Messages:
    """See hetmpi/wire/wire.py, Wire."""

    has_thread = False

    def __init__(self, lines: Lines):
        # A communicator of their own separates these messages from others.
        comm = self._comm = None if lines.world.is_one_node else lines.world.comm.Dup()
        self._sending = {line: Sending(comm, *line) for line in lines.outgoing}
        self._receiving = {line: Receiving(comm, *line, lines.length_of) for line in lines.incoming}

    def send(self, partner: int, tag: int, message: np.ndarray):
        self._sending[partner, tag].send(message)

    def expect(self, partner: int, tag: int):
        self._receiving[partner, tag].expect()

    def arrived(self, partner: int, tag: int) -> np.ndarray | None:
        return self._receiving[partner, tag].arrived()

    def publish(self) -> bool:
        return True

    @property
    def is_idle(self) -> bool:
        return all(line.is_done for line in self._sending.values())

    def free(self):
        if self._comm is not None:
            self._comm.Free()


class Sending:
    """The sender's end of a line."""

    def __init__(self, comm, partner: int, tag: int):
        self._comm, self._partner, self._tag = comm, partner, tag
        self._most = 0  # words of the next first piece
        self._posted: list[tuple[MPI.Request, np.ndarray]] = []  # with the memory that MPI uses until completion

    def send(self, message: np.ndarray):
        """message: (n,) int64; not to be changed any more."""
        self._posted = [(request, kept) for request, kept in self._posted if not request.Test()]
        self._post(message[: self._most], self._tag)
        if len(message) > self._most:
            self._post(message[self._most :], self._tag + SECOND)
        self._most = room(len(message))

    def _post(self, piece: np.ndarray, tag: int):
        self._posted.append((self._comm.Isend([piece, MPI.INT64_T], self._partner, tag), piece))

    @property
    def is_done(self) -> bool:
        """Whether the partner has received all that was sent."""
        return MPI.Request.Testall([request for request, _ in self._posted])


class Receiving:
    """The receiver's end of a line."""

    def __init__(self, comm, partner: int, tag: int, length_of: Callable[[np.ndarray], int | None]):
        """length_of: as in Lines."""
        self._comm, self._partner, self._tag, self._length_of = comm, partner, tag, length_of
        self._most = 0  # words of the next first piece
        self._first: tuple[MPI.Request, np.ndarray] | None = None  # the receive posted, and its memory
        self._num_received: int | None = None  # words of the first piece, once it is here

    def expect(self):
        """Posts the receive of the next message, unless one is posted."""
        if self._first is None:
            memory = np.empty(self._most, np.int64)
            self._first = self._comm.Irecv([memory, MPI.INT64_T], self._partner, self._tag), memory

    def arrived(self) -> np.ndarray | None:
        """The next message (n,) int64, if it is here."""
        self.expect()
        request, memory = self._first
        status = MPI.Status()
        if self._num_received is None:
            if not request.Test(status):
                return None
            self._num_received = status.Get_count(MPI.INT64_T)
        message = memory[: self._num_received]
        if self._length_of(message) != len(message):
            matched = self._comm.Improbe(self._partner, self._tag + SECOND, status)
            if matched is None:
                return None
            second = np.empty(status.Get_count(MPI.INT64_T), np.int64)
            matched.Recv([second, MPI.INT64_T])
            message = np.concatenate([message, second])
        self._first = self._num_received = None
        self._most = room(len(message))
        return message


def room(length: int) -> int:
    """Words of the first piece of the message after one of `length`."""
    return length + length // 4
