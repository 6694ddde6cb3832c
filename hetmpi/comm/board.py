"""Board: a message of every rank of a node to all its ranks, in memory that they share (cpp/wire/board.h)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetmpi import _C
from hetmpi.comm.mpi import MPI
from hetmpi.comm.waiting import wait_for
from hetmpi.comm.world import World
from hetmpi.in_flight import InFlight

LEAST_WORDS = 1 << 13  # 64 KiB
WORD = 8  # bytes


class Board:
    """The messages consist of words of 8 bytes. REQUIRES: a rank posts its next message when all ranks of the node have
    read its last one, as it knows from what they have posted since on another board, or in a collective call."""

    def __init__(self, world: World):
        """Collective over the node."""
        self._world, self._turn = world, 0
        self._open(LEAST_WORDS)

    def _open(self, num_words: int):
        """Collective over the node."""
        node, nbytes = self._world.node, _C.BOARD_HEADER_BYTES + WORD * num_words
        self._num_words = num_words
        self._window = MPI.Win.Allocate_shared(nbytes, 1, comm=node)
        areas = [np.frombuffer(self._window.Shared_query(place)[0], np.uint8)[:nbytes] for place in range(node.size)]
        areas[node.rank][: _C.BOARD_HEADER_BYTES] = 0
        self._messages = [area[_C.BOARD_HEADER_BYTES :].view(np.int64) for area in areas]
        self._core = _C.Board(areas, node.rank)
        self._world.meet_on_node("for the ranks of its node to open their memory for messages")

    def posting(self, num_words: int, write: Callable[[np.ndarray], None]) -> InFlight[list[np.ndarray]]:
        """Posts a message (num_words,) int64, which write() fills, and returns those of all ranks of the node, in the
        order of the ranks. Collective over the node."""
        self._turn += 1
        self._post(num_words, write)
        yield
        lengths = self._await_all()
        if max(lengths) > self._num_words:  # on all ranks alike
            self._world.meet_on_node("for the ranks of its node to enlarge their memory for messages")
            self.free()
            self._open(max(lengths) + max(lengths) // 4)
            self._post(num_words, write)
            self._await_all()
        return [message[:length] for message, length in zip(self._messages, lengths)]

    def _post(self, num_words: int, write: Callable[[np.ndarray], None]):
        """Posts the message, or only its length if there is no room for it."""
        if num_words <= self._num_words:
            write(self._messages[self._world.node.rank][:num_words])
        self._core.post(self._turn, num_words)

    def _await_all(self) -> list[int]:
        """Words of each message of this turn."""
        if not self._core.is_posted(self._turn):
            wait_for(
                self._world,
                lambda: self._core.is_posted(self._turn),
                "for the ranks of its node to read or write the table as often as it does",
            )
        return self._core.num_words()

    def free(self):
        """Collective over the node."""
        self._core, self._messages = None, []
        self._window.Free()
