"""Puts: a Wire by one-sided calls. A line is a ring of words in its receiver's memory.

The sender puts the words of a message, and before them their number, at the head of the ring; it stores the new head
when a flush has completed the puts, so that a receiver that sees the head sees the words. The flush is delayed until
`publish` or `arrived`: the transfer overlaps with computation. The receiver copies the words out as they come and moves
the tail, which the sender reads where the ring seems full: a message may be longer than the ring.

Invariants of a ring:
    head counts the words ever written, tail the words ever copied out; tail <= head <= tail + capacity;
    the sender alone writes words and head, the receiver alone the tail.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from hetmpi import _C
from hetmpi.comm.mpi import MPI
from hetmpi.comm.wire import Lines
from hetmpi.errors import UserError

WORD = 8  # bytes
HEADER_WORDS = _C.RING_HEADER_BYTES // WORD
HEAD, TAIL = 0, HEADER_WORDS // 2  # places of the two counters in the header, on cache lines of their own
LEAST_WORDS = 64  # of a ring


class Puts:
    """See hetmpi/comm/wire.py, Wire."""

    def __init__(self, lines: Lines, inbox_bytes: int = 1 << 22):
        """inbox_bytes: about, of this rank's rings."""
        self._world, incoming = lines.world, lines.incoming
        self._comm = self._world.comm.Dup()
        capacity = max(LEAST_WORDS, inbox_bytes // WORD // max(1, len(incoming)) - HEADER_WORDS)
        self._memory = np.zeros((len(incoming), HEADER_WORDS + capacity), np.int64)
        self._window = opened(self._memory, self._comm)
        self._incoming = {line: Incoming(ring, self._window) for line, ring in zip(incoming, self._memory)}
        told = [  # each sender learns where its ring begins, and how long it is
            self._comm.isend((ring.nbytes * number, capacity), *line)
            for number, (line, ring) in enumerate(zip(incoming, self._memory))
        ]
        self._outgoing = {
            line: Outgoing(self._window, line[0], *self._comm.recv(None, *line)) for line in lines.outgoing
        }
        MPI.Request.waitall(told)
        self._comm.Barrier()

    def send(self, partner: int, tag: int, message: np.ndarray):
        self._outgoing[partner, tag].send(message)

    def expect(self, partner: int, tag: int):
        """No effect: the sender needs no help to write."""

    def arrived(self, partner: int, tag: int) -> np.ndarray | None:
        message = self._incoming[partner, tag].take()
        if message is None:
            self.publish()
            self._world.progress()
        return message

    def publish(self) -> bool:
        for line in self._outgoing.values():
            line.publish()
        return all(line.is_published for line in self._outgoing.values())

    @property
    def is_idle(self) -> bool:
        return self.publish()

    def free(self):
        self._window.Unlock_all()
        self._window.Free()
        self._comm.Free()


def opened(memory: np.ndarray, comm) -> MPI.Win:
    """A window on this rank's memory, for access at any time. Collective. Raises UserError if this MPI has none that
    reaches other nodes, or keeps separate copies of its memory."""
    try:
        window = MPI.Win.Create(memory, 1, comm=comm)
    except MPI.Exception as problem:  # Open MPI 4.1 over TCP; on all ranks alike
        raise UserError(
            f"this MPI supports no one-sided window over several nodes: set table.exchange=messages ({problem})"
        ) from problem
    if window.Get_attr(MPI.WIN_MODEL) != MPI.WIN_UNIFIED:
        raise UserError(
            "this MPI keeps separate copies of window memory (not MPI_WIN_UNIFIED): set table.exchange=messages"
        )
    window.Lock_all(MPI.MODE_NOCHECK)
    return window


class Outgoing:
    """The sender's end of a line.

    is_published   whether all that was sent is in the ring, with its head"""

    def __init__(self, window: MPI.Win, partner: int, begin: int, capacity: int):
        """begin: of the ring in the partner's memory, in bytes. capacity: in words."""
        self._window, self._partner, self._begin, self._capacity = window, partner, begin, capacity
        self._waiting: deque[np.ndarray] = deque()  # what is not put yet
        self._put: list[np.ndarray] = []  # the memory that MPI reads until the next flush
        self._num_put = 0  # words
        self._head, self._tail = np.zeros(1, np.uint64), np.zeros(1, np.uint64)  # as stored, and as read last

    @property
    def is_published(self) -> bool:
        return not self._waiting and self._num_put == self._head[0] and not self._put

    def send(self, message: np.ndarray):
        self._waiting += [np.array([len(message)]), message]
        self._put_more()

    def publish(self):
        """Stores the head of what was put, and puts more if there is room again."""
        if self.is_published:
            return
        self._window.Flush(self._partner)
        self._put.clear()
        if self._num_put > self._head[0]:
            self._head[0] = self._num_put
            self._store(HEAD, self._head)
        if self._waiting:
            self._load(TAIL, self._tail)
            self._window.Flush(self._partner)
            self._put_more()
        else:
            self._window.Flush(self._partner)

    def _put_more(self):
        while self._waiting:
            words, place = self._waiting[0], self._num_put % self._capacity
            room = self._capacity - (self._num_put - int(self._tail[0]))
            num = min(len(words), room, self._capacity - place)
            if num == 0 and len(words) > 0:
                return
            if num > 0:
                at = self._begin + WORD * (HEADER_WORDS + place)
                self._window.Put([words, num, MPI.INT64_T], self._partner, (at, num, MPI.INT64_T))
                self._put.append(words)
                self._num_put += num
            if num == len(words):
                self._waiting.popleft()
            else:
                self._waiting[0] = words[num:]

    def _store(self, counter: int, value: np.ndarray):
        """Posts the atomic store of value (1,) uint64."""
        target = self._begin + WORD * counter, 1, MPI.UINT64_T
        self._window.Accumulate([value, 1, MPI.UINT64_T], self._partner, target, op=MPI.REPLACE)

    def _load(self, counter: int, out: np.ndarray):
        """Posts the atomic read of a counter to out (1,) uint64."""
        target = self._begin + WORD * counter, 1, MPI.UINT64_T
        self._window.Get_accumulate([out, 0, MPI.UINT64_T], [out, 1, MPI.UINT64_T], self._partner, target, op=MPI.NO_OP)


class Incoming:
    """The receiver's end of a line."""

    def __init__(self, ring: np.ndarray, window: MPI.Win):
        """ring: its memory, header and words (n,) int64."""
        self._counters, self._words, self._window = ring[:HEADER_WORDS], ring[HEADER_WORDS:], window
        self._num_taken = 0  # words
        self._message: np.ndarray | None = None  # the one that is coming, once its length is known
        self._num_filled = 0

    def take(self) -> np.ndarray | None:
        """The next message, if all of it is here; takes the words of it that are."""
        num = int(self._counters[HEAD]) - self._num_taken
        if num == 0:
            return None
        self._window.Sync()  # the words are read after the head
        if self._message is None:
            self._message, self._num_filled = np.empty(int(self._copy(1)[0]), np.int64), 0
            num -= 1
        num = min(num, len(self._message) - self._num_filled)
        while num > 0:
            part = self._copy(num)
            self._message[self._num_filled : self._num_filled + len(part)] = part
            self._num_filled += len(part)
            num -= len(part)
        self._window.Sync()  # the words are read before the tail is moved
        self._counters[TAIL] = self._num_taken
        if self._num_filled < len(self._message):
            return None
        message, self._message = self._message, None
        return message

    def _copy(self, num: int) -> np.ndarray:
        """The next at most `num` words, as far as the end of the ring."""
        place = self._num_taken % len(self._words)
        part = self._words[place : place + num]
        self._num_taken += len(part)
        return part
