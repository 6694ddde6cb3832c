"""Windows: a Wire by one-sided calls, MPI_Put and MPI_Get, and a thread that answers requests.

Both ways between a rank and a server are pipes (cpp/wire/pipe.h) in the server's memory, of which the rank has mirrors:
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
from hetmpi.wire.wire import Pipes
from hetmpi.world.at_exit import at_exit, free_window
from hetmpi.world.memory import refuse_if_short, size_text
from hetmpi.world.mpi import MPI

MEMORY_BYTES = 8 << 20  # of a rank's pipes to all its clients
LEAST_PIPE_BYTES = 1 << 14
SOON_S = 3e-4  # after a request: its reply is hardly there
PAUSE_S = 1e-4  # between two looks for a reply: each takes time of its server too
WORD, ALIGN = 8, 64  # bytes; of a pipe's header


class Windows:
    """See hetmpi/wire/wire.py, Wire: one pipe to each server, and one back."""

    has_thread = True

    def __init__(self, pipes: Pipes):
        """Collective. Raises UserError on all ranks if this MPI makes no window over several nodes."""
        world, rails = pipes.world, pipes.rails
        clients_of = world.comm.allgather(rails.clients)
        pipe_bytes = max(LEAST_PIPE_BYTES, MEMORY_BYTES // (2 * max(1, *map(len, clients_of))))
        capacity = pipe_bytes // ALIGN * (ALIGN // WORD)
        pipe_bytes = _C.PIPE_HEADER_BYTES + WORD * capacity
        self._window = opened(world, 2 * pipe_bytes * max(1, len(rails.clients)))
        memory = np.frombuffer(self._window.tomemory(), np.uint8) if rails.clients else np.empty(0, np.uint8)
        memory[:] = 0
        world.meet("for all ranks to open their windows")
        self._servers = {
            server: ClientPipes(server, 2 * pipe_bytes * clients_of[server].index(world.rank), capacity)
            for server in rails.servers
        }
        self._core = _C.WindowThread(pipes.server, memory, capacity)
        weakref.finalize(self, self._core.stop)  # of a table that is dropped without close()
        self._free = at_exit(world, partial(free_window, self._window), self._core.stop)
        self._has_failed = False  # the thread has, and this rank has raised its error
        self._world = world
        world.receivers[self] = None
        self._is_posted = False  # operations since the last flush

    def send(self, tag: int, messages: Mapping[int, np.ndarray]):
        self.receive_pending()
        now, pipes = time.monotonic(), [self._servers[partner] for partner in messages]
        for pipe, message in zip(pipes, messages.values()):
            pipe.unsent.append([message, 0])
            pipe.next_look_at = now + SOON_S
        self._put(pipes)

    def expect(self, tag: int, partners: Sequence[int]):
        self._fetch([self._servers[partner] for partner in partners])

    def arrived(self, tag: int, partners: Sequence[int]) -> dict[int, np.ndarray]:
        self.receive_pending()
        self._fetch([self._servers[partner] for partner in partners])
        fetching = [partner for partner in partners if self._servers[partner].is_fetching]
        if not fetching:
            return {}
        self._is_posted = True
        self.publish()
        return self._taken(fetching)

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
        waiting = [pipe for pipe in self._servers.values() if pipe.unsent]
        if waiting:
            self._look_at_room(waiting)
            self._put(waiting)
        return not self._is_posted

    @property
    def is_idle(self) -> bool:
        self._is_posted = True  # what take() has posted is not flushed by publish()
        return self.publish()

    def free(self):
        self._world.receivers.pop(self, None)
        self._free()

    # Operations on several pipes: a call for each would be the larger part of a step on many nodes.

    def _put(self, pipes: Sequence[ClientPipes]):
        """Writes messages as far as there is room, and posts the copies of the written words."""
        self._is_posted = True
        for pipe in pipes:
            writer, unsent, capacity = pipe.writer, pipe.unsent, len(pipe.requests)
            begin = writer.head
            while unsent:
                message, num_written = unsent[0]
                num_written += writer.write(message, num_written)
                if num_written < len(message):
                    unsent[0][1] = num_written
                    break
                unsent.popleft()
            left, at = writer.head - begin, begin % capacity
            for offset, num in ((at, min(left, capacity - at)), (0, left - min(left, capacity - at))):
                if num > 0:
                    place = pipe.requests_begin + _C.PIPE_HEADER_BYTES + WORD * offset
                    words = pipe.requests[offset : offset + num]
                    self._window.Put([words, num, MPI.INT64_T], pipe.server, (place, num, MPI.INT64_T))

    def _look_at_room(self, pipes: Sequence[ClientPipes]):
        """REQUIRES: all operations are complete."""
        for pipe in pipes:
            self._window.Get_accumulate(
                [pipe.tail, 0, MPI.INT64_T], [pipe.tail, 1, MPI.INT64_T], pipe.server,
                (pipe.requests_begin, 1, MPI.INT64_T), op=MPI.NO_OP,
            )  # fmt: skip
        self._window.Flush_all()
        for pipe in pipes:
            pipe.writer.set_tail(int(pipe.tail[0]))

    def _fetch(self, pipes: Sequence[ClientPipes]):
        """Posts a get, unless one is posted: of the next reply, or, while that is not there, of its first words."""
        now = time.monotonic()
        for pipe in pipes:
            if pipe.is_fetching or now < pipe.next_look_at:
                continue
            wanted = pipe.reader.next_words or (_C.PIPE_ALIGN_WORDS if pipe.was_early else pipe.guess)
            offset = pipe.reader.tail % len(pipe.replies)
            num = min(wanted, len(pipe.replies) - offset)
            place = pipe.replies_begin + _C.PIPE_HEADER_BYTES + WORD * offset
            self._window.Get([pipe.replies[offset:], num, MPI.INT64_T], pipe.server, (place, num, MPI.INT64_T))
            pipe.is_fetching = self._is_posted = True

    def _taken(self, partners: Sequence[int]) -> dict[int, np.ndarray]:
        """The next reply (n,) int64 of each partner from whom it was fetched."""
        found = {}
        for partner in partners:
            pipe = self._servers[partner]
            pipe.is_fetching, before = False, pipe.reader.tail
            message = pipe.reader.read()
            if pipe.reader.tail > before:
                pipe.taken = np.array([pipe.reader.tail])  # not the memory that MPI may still read
                self._window.Accumulate(
                    [pipe.taken, 1, MPI.INT64_T], pipe.server, (pipe.replies_begin, 1, MPI.INT64_T), op=MPI.REPLACE
                )
            pipe.was_early = message is None
            if pipe.was_early:
                pipe.next_look_at = time.monotonic() + PAUSE_S
            else:
                pipe.guess = _C.PIPE_ALIGN_WORDS + len(message) + len(message) // 4
                found[partner] = message
        return found


class ClientPipes:
    """The pipes between this rank and one of its servers.

    requests, replies  mirrors of their rings
    *_begin      of these pipes in the server's memory, in bytes
    unsent       messages that have not left, each with the words that have
    is_fetching  a get is posted
    guess        words of the next reply
    was_early    the last look came before the reply
    next_look_at  a time.monotonic(), before which a look for a reply would be in vain"""

    def __init__(self, server: int, begin: int, capacity: int):
        """begin: of the pipes in the server's memory, in bytes. capacity: words of each ring."""
        self.server, self.requests_begin = server, begin
        self.replies_begin = begin + _C.PIPE_HEADER_BYTES + WORD * capacity
        self.requests, self.replies = np.zeros((2, capacity), np.int64)
        self.writer, self.reader = _C.PipeWriter(self.requests), _C.PipeReader(self.replies)
        self.tail, self.taken = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.unsent: deque[list] = deque()
        self.guess, self.next_look_at = _C.PIPE_ALIGN_WORDS, 0.0
        self.was_early = self.is_fetching = False


def opened(world, nbytes: int) -> MPI.Win:
    """A window over all ranks, locked. Collective. Raises UserError if this MPI makes none over several nodes, or none
    of unified memory, and if memory is short."""

    def message(need, place, free):
        return (
            f"windows to other nodes need {size_text(need)} for the {world.node.size} rank(s) on {world.host}, "
            f"{size_text(free)} are free in {place}: set table.exchange=messages"
        )

    refuse_if_short(world, 2 * nbytes, world.node.size > 1, message)  # and the mirrors of pipes of other ranks
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
