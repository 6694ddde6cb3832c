"""A board's messages are those that the ranks of a node posted, whatever their sizes. Run at 1, 2 and 3 ranks."""

import numpy as np
import pytest

from hetmpi.comm import board
from hetmpi.comm.board import LEAST_WORDS, Board
from hetmpi.in_flight import finish

pytestmark = pytest.mark.mpi


def message_of(turn, rank):
    """Every seventh turn some rank has a message that needs more memory than there was."""
    random = np.random.default_rng([turn, rank])
    most = LEAST_WORDS * (turn // 7 + 1) * 2 if turn % 7 == 6 else 50
    return random.integers(-(1 << 62), 1 << 62, random.integers(0, most + 1))


def test_all_ranks_of_a_node_read_what_each_posted_while_memory_grows(placed):
    boards = Board(placed), Board(placed)  # in turns: a rank has read the one when it posts on the other
    for turn in range(30):
        mine = message_of(turn, placed.rank)
        found = finish(boards[turn % 2].posting(len(mine), lambda message: np.copyto(message, mine)))
        assert len(found) == placed.node.size
        for rank, message in zip(placed.node_ranks, found):
            assert np.array_equal(message, message_of(turn, rank))
    for one in boards:
        one.free()


def test_a_board_for_which_memory_is_short_is_refused(placed, monkeypatch):
    monkeypatch.setattr(board, "free_memory", lambda shared: ("/dev/shm", 1000))
    with pytest.raises(board.ShortOnNode, match=r"messages of \d rank.* are free in /dev/shm"):
        finish(Board(placed).posting(1, lambda message: message.fill(0)))


def test_ranks_that_see_different_free_memory_refuse_a_board_together(world, monkeypatch):
    """Only the last rank's limit is too small; all name it."""
    limit = 1000 if world.rank == world.size - 1 else 1 << 40
    monkeypatch.setattr(board, "free_memory", lambda shared: (f"memory of rank {world.rank}", limit))
    with pytest.raises(board.ShortOnNode, match=f"are free in memory of rank {world.size - 1}"):
        finish(Board(world).posting(1, lambda message: message.fill(0)))
