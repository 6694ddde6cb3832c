"""Channel: messages of any length arrive whole and in order, whether their receives are posted before or not. Run at 2
and 3 ranks."""

import numpy as np
import pytest

from hetmpi.comm.channel import Receiving, Sending
from hetmpi.comm.waiting import wait_for

pytestmark = pytest.mark.mpi
LENGTHS = [1, 5, 4, 20_000, 20_000, 25_000, 25_001, 31_300, 3, 1, 1, 200_000, 2]


def lengths_of(rank):
    return np.random.default_rng(rank).permutation(LENGTHS * 2).tolist()


def message_of(rank, number, length):
    """Its first word is its length."""
    message = np.random.default_rng((rank, number)).integers(0, 1 << 40, length)
    message[0] = length
    return message


@pytest.mark.parametrize("expects", [False, True])
def test_messages_arrive_whole_and_in_order(world, expects):
    if world.size < 2:
        pytest.skip("takes 2 ranks")
    comm, others = world.comm.Dup(), [rank for rank in range(world.size) if rank != world.rank]
    sending = {rank: Sending(comm, rank, 1) for rank in others}
    receiving = {rank: Receiving(comm, rank, 1) for rank in others}
    for number, length in enumerate(lengths_of(world.rank)):
        for rank in others:
            if expects:
                receiving[rank].expect()
            sending[rank].send(message_of(world.rank, number, length))
        for rank in others:
            found = []

            def look():
                message = receiving[rank].arrived(lambda piece: piece[0] if len(piece) else None)
                found.extend([] if message is None else [message])
                return bool(found)

            wait_for(world, look, "for a message")
            expected = message_of(rank, number, lengths_of(rank)[number])
            assert np.array_equal(found[0], expected)
    wait_for(world, lambda: all(channel.is_done for channel in sending.values()), "for messages to be received")
    comm.Free()
