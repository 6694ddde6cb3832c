"""Board: a message of every rank of a node to all its ranks, in memory that they share (cpp/wire/board.h)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetmpi import _C
from hetmpi.comm.memory import free_memory, size_text
from hetmpi.comm.mpi import MPI
from hetmpi.comm.node_memory import aligned
from hetmpi.comm.rounds import ALL_ALIKE
from hetmpi.comm.waiting import wait_for
from hetmpi.comm.world import World
from hetmpi.errors import UserError
from hetmpi.in_flight import InFlight

LEAST_WORDS = 1 << 13  # 64 KiB
WORD = 8  # bytes


class ShortOnNode(UserError):
    """The ranks of one node lack memory. Those of other nodes do not know it: nothing collective may follow."""


def boards_bytes(num_read: int, num_written: int, dim: int) -> int:
    """Most memory of a rank for a table's boards of keys, rows and, if any are written, gradients. num_read,
    num_written: most keys of other nodes that a rank reads and writes at a time."""
    lengths = [num_read * WORD, num_read * (4 + 4 * dim)] + [num_written * (WORD + 4 * dim)] * (num_written > 0)
    return sum(max(LEAST_WORDS * WORD, nbytes + nbytes // 4) for nbytes in lengths)  # as Board.posting takes it


class Board:
    """The messages consist of words of 8 bytes. The memory is taken at the first message. REQUIRES: a rank posts its
    next message when all ranks of the node have read its last one, as it knows from what they have posted since on
    another board, or in a collective call."""

    def __init__(self, world: World):
        self._world, self._turn, self._num_words = world, 0, 0
        self._window: MPI.Win | None = None

    def _open(self, num_words: int):
        """Takes the memory, in place of a smaller one. Collective over the node. Raises ShortOnNode if memory is
        short."""
        self._world.meet_on_node("for the ranks of its node to take memory for messages")
        self.free()
        node, nbytes = self._world.node, aligned(_C.BOARD_HEADER_BYTES + WORD * num_words)
        free, place = node.allreduce(free_memory(shared=True)[::-1], MPI.MIN)  # all ranks refuse, or none
        if node.size * nbytes > free:
            raise ShortOnNode(
                f"the messages of {node.size} ranks on {self._world.host} need {size_text(node.size * nbytes)}, "
                f"{size_text(free)} are free in {place}: use a smaller batch_size or table.dim, or fewer ranks per node"
            )
        self._num_words = num_words
        self._window = MPI.Win.Allocate_shared(nbytes, 1, comm=node)
        areas = [np.frombuffer(self._window.Shared_query(place)[0], np.uint8)[:nbytes] for place in range(node.size)]
        areas[node.rank][: _C.BOARD_HEADER_BYTES] = 0
        self._messages = [area[_C.BOARD_HEADER_BYTES :].view(np.int64)[:num_words] for area in areas]
        self._core = _C.Board(areas, node.rank)
        self._world.meet_on_node("for the ranks of its node to open their memory for messages")

    def posting(self, num_words: int, write: Callable[[np.ndarray], None], kind: int = 0) -> InFlight[list[np.ndarray]]:
        """Posts a message (num_words,) int64, which write() fills, and returns those of all ranks of the node, in the
        order of the ranks. Collective over the node. Raises RuntimeError if they are not all of one kind, ShortOnNode
        if memory is short."""
        if self._window is None:
            self._open(LEAST_WORDS)
        self._turn += 1
        self._post(num_words, write, kind)
        yield
        lengths = self._await_all()
        if max(lengths) > self._num_words:  # on all ranks alike
            self._open(max(lengths) + max(lengths) // 4)
            self._post(num_words, write, kind)
            self._await_all()
        return [message[:length] for message, length in zip(self._messages, lengths)]

    def _post(self, num_words: int, write: Callable[[np.ndarray], None], kind: int):
        """Posts the message, or only its length if there is no room for it."""
        if num_words <= self._num_words:
            write(self._messages[self._world.node.rank][:num_words])
        self._core.post(self._turn, num_words, kind)

    def _await_all(self) -> list[int]:
        """Words of each message of this turn."""
        if not self._core.is_posted(self._turn):
            wait_for(
                self._world,
                lambda: self._core.is_posted(self._turn),
                "for the ranks of its node to read or write the table as often as it does",
            )
        if not self._core.is_of_one_kind():
            raise RuntimeError(f"EmbeddingTable: the ranks of {self._world.host} make different calls: {ALL_ALIKE}")
        return self._core.num_words()

    @property
    def num_bytes(self) -> int:
        """Memory of this rank."""
        return 0 if self._window is None else _C.BOARD_HEADER_BYTES + WORD * self._num_words

    def free(self):
        """Collective over the node."""
        if self._window is not None:
            self._core, self._messages = None, []
            self._window.Free()
            self._window = None
