"""Windows: a Wire by one-sided calls, MPI_Put and MPI_Get, and a thread that answers requests.

Both ways between a rank and a server are lines (cpp/wire/line.h) in the server's memory, of which the rank has mirrors:
it puts its requests, and gets the replies. So a server calls MPI for nobody: a thread (cpp/wire/window_thread.h) takes
requests from memory and writes replies into memory. A frame carries its checksum, so no head follows its bytes, and
what is fetched too early is fetched again.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.wire.wire import Lines
from hetmpi.world.at_exit import at_exit, free_window
from hetmpi.world.memory import refuse_if_short, size_text
from hetmpi.world.mpi import MPI

MEMORY_BYTES = 8 << 20  # of a rank's lines to all its clients
LEAST_LINE_BYTES = 1 << 14
SOON_S = 3e-4  # after a request: its reply is hardly there
PAUSE_S = 1e-4  # between two looks for a reply: each takes time of its server too
WORD, ALIGN = 8, 64  # bytes; of a line's header


class Windows:
    """See hetmpi/wire/wire.py, Wire: one line to each server, and one back."""

    has_thread = True

    def __init__(self, lines: Lines):
        """Collective. Raises UserError on all ranks if this MPI makes no window over several nodes."""
        world, rails = lines.world, lines.rails
        clients_of = world.comm.allgather(rails.clients)
        line_bytes = max(LEAST_LINE_BYTES, MEMORY_BYTES // (2 * max(1, *map(len, clients_of))))
        capacity = line_bytes // ALIGN * (ALIGN // WORD)
        line_bytes = _C.LINE_HEADER_BYTES + WORD * capacity
        self._window = opened(world, 2 * line_bytes * max(1, len(rails.clients)))
        memory = np.frombuffer(self._window.tomemory(), np.uint8) if rails.clients else np.empty(0, np.uint8)
        memory[:] = 0
        world.meet("for all ranks to open their windows")
        self._servers = {
            server: ClientLines(self._window, server, 2 * line_bytes * clients_of[server].index(world.rank), capacity)
            for server in rails.servers
        }
        self._core = _C.WindowThread(lines.server, memory, capacity)
        weakref.finalize(self, self._core.stop)  # of a table that is dropped without close()
        self._free = at_exit(world, partial(free_window, self._window), self._core.stop)
        self._has_failed = False  # the thread has, and this rank has raised its error
        self._world = world
        world.receivers[self] = None
        self._is_posted = False  # operations since the last flush

    def send(self, tag: int, messages: Mapping[int, np.ndarray]):
        self.receive_pending()
        self._is_posted = True
        for partner, message in messages.items():
            self._servers[partner].send(message)

    def expect(self, tag: int, partners: Sequence[int]):
        self._is_posted = True
        for partner in partners:
            self._servers[partner].fetch()

    def arrived(self, tag: int, partners: Sequence[int]) -> dict[int, np.ndarray]:
        self.receive_pending()
        lines = {partner: self._servers[partner] for partner in partners}
        for line in lines.values():
            line.fetch()
        if not any(line.is_fetching for line in lines.values()):
            return {}
        self._is_posted = True
        self.publish()
        found = {partner: line.take() for partner, line in lines.items() if line.is_fetching}
        return {partner: message for partner, message in found.items() if message is not None}

    def receive_pending(self):
        """Raises the error that has ended the thread, once. Every wait calls it (World.receive_pending)."""
        if not self._has_failed:
            try:
                self._core.check()
            except Exception:
                self._has_failed = True
                raise

    def publish(self) -> bool:
        if self._is_posted:
            self._window.Flush_all()
            self._is_posted = False
        num_left = 0
        for line in self._servers.values():
            if line.unsent:
                num_left += not line.proceed()
                self._is_posted = True
        return num_left == 0 and not self._is_posted

    @property
    def is_idle(self) -> bool:
        self._is_posted = True  # what take() has posted is not flushed by publish()
        return self.publish()

    def free(self):
        self._world.receivers.pop(self, None)
        self._free()


class ClientLines:
    """The lines between this rank and one of its servers.

    unsent      messages that have not left, each with the words that have
    is_fetching  a get is posted
    next_look_at  a time.monotonic(), before which a look for a reply would be in vain"""

    def __init__(self, window: MPI.Win, server: int, begin: int, capacity: int):
        """begin: of the lines in the server's memory, in bytes. capacity: words of each ring."""
        self._window, self._server, self._capacity = window, server, capacity
        self._requests_begin = begin
        self._replies_begin = begin + _C.LINE_HEADER_BYTES + WORD * capacity
        self._requests, self._replies = np.zeros((2, capacity), np.int64)  # mirrors of the rings
        self._writer, self._reader = _C.LineWriter(self._requests), _C.LineReader(self._replies)
        self._tail, self._taken = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.unsent: deque[list] = deque()
        self._guess = _C.LINE_ALIGN_WORDS  # words of the next reply
        self.next_look_at = 0.0
        self._was_early = False  # the last look came before the reply
        self.is_fetching = False

    def send(self, message: np.ndarray):
        self.unsent.append([message, 0])
        self.next_look_at = time.monotonic() + SOON_S
        self._put()

    def proceed(self) -> bool:
        """Sends more, after a look at the room. Returns whether all has left. REQUIRES: all operations are complete."""
        self._window.Get_accumulate(
            [self._tail, 0, MPI.INT64_T], [self._tail, 1, MPI.INT64_T], self._server,
            (self._requests_begin, 1, MPI.INT64_T), op=MPI.NO_OP,
        )  # fmt: skip
        self._window.Flush_all()
        self._writer.set_tail(int(self._tail[0]))
        self._put()
        return not self.unsent

    def _put(self):
        """Writes messages as far as there is room, and posts the copy of the written words."""
        begin = self._writer.head
        while self.unsent:
            message, num_written = self.unsent[0]
            num_written += self._writer.write(message, num_written)
            if num_written < len(message):
                self.unsent[0][1] = num_written
                break
            self.unsent.popleft()
        left, at = self._writer.head - begin, begin % self._capacity
        for offset, num in ((at, min(left, self._capacity - at)), (0, left - min(left, self._capacity - at))):
            if num > 0:
                place = self._requests_begin + _C.LINE_HEADER_BYTES + WORD * offset
                words = self._requests[offset : offset + num]
                self._window.Put([words, num, MPI.INT64_T], self._server, (place, num, MPI.INT64_T))

    def fetch(self):
        """Posts a get, unless one is posted: of the next reply, or, while that is not there, of its first words."""
        if self.is_fetching or time.monotonic() < self.next_look_at:
            return
        wanted = self._reader.next_words or (_C.LINE_ALIGN_WORDS if self._was_early else self._guess)
        offset = self._reader.tail % self._capacity
        num = min(wanted, self._capacity - offset)
        place = self._replies_begin + _C.LINE_HEADER_BYTES + WORD * offset
        self._window.Get([self._replies[offset:], num, MPI.INT64_T], self._server, (place, num, MPI.INT64_T))
        self.is_fetching = True

    def take(self) -> np.ndarray | None:
        """The next reply (n,) int64, if it was fetched."""
        self.is_fetching = False
        before = self._reader.tail
        message = self._reader.read()
        if self._reader.tail > before:
            self._taken = np.array([self._reader.tail])  # not the memory that MPI may still read
            self._window.Accumulate(
                [self._taken, 1, MPI.INT64_T], self._server, (self._replies_begin, 1, MPI.INT64_T), op=MPI.REPLACE
            )
        self._was_early = message is None
        if self._was_early:
            self.next_look_at = time.monotonic() + PAUSE_S
        if message is not None:
            self._guess = _C.LINE_ALIGN_WORDS + len(message) + len(message) // 4
        return message


def opened(world, nbytes: int) -> MPI.Win:
    """A window over all ranks, locked. Collective. Raises UserError if this MPI makes none over several nodes, or none
    of unified memory, and if memory is short."""

    def message(need, place, free):
        return (
            f"windows to other nodes need {size_text(need)} for the {world.node.size} rank(s) on {world.host}, "
            f"{size_text(free)} are free in {place}: set table.exchange=messages"
        )

    refuse_if_short(world, 2 * nbytes, world.node.size > 1, message)  # and the mirrors of lines of other ranks
    try:
        window = MPI.Win.Allocate(nbytes, 1, comm=world.comm)
    except MPI.Exception as error:  # Open MPI 4.1 over TCP; on all ranks alike
        raise UserError(
            "this MPI supports no one-sided window over several nodes: set table.exchange=messages"
        ) from error
    if window.Get_attr(MPI.WIN_MODEL) != MPI.WIN_UNIFIED:
        window.Free()
        raise UserError(
            "this MPI keeps separate copies of window memory (not MPI_WIN_UNIFIED): use another MPI library"
        )
    window.Lock_all(MPI.MODE_NOCHECK)
    return window
