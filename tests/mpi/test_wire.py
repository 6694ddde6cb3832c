"""Wires: messages of any length arrive whole and in order, whether their receiver expects them or not. Run at 2 and 3
ranks, of a node each."""

import numpy as np
import pytest
import torch
from toy_wire import Pickled

from hetmpi import CacheSettings, EmbeddingTable, RowOptimizer, Staleness
from hetmpi.wire.messages import Messages
from hetmpi.wire.rails import Rails
from hetmpi.wire.wire import Pipes
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi
LENGTHS = [1, 5, 4, 20_000, 20_000, 25_000, 25_001, 31_300, 3, 1, 1, 200_000, 2]
ASK, ANSWER = 1, 2


def lengths_of(rank):
    return np.random.default_rng(rank).permutation(LENGTHS * 2).tolist()


def message_of(rank, number, length):
    """Its first word is its length."""
    message = np.random.default_rng((rank, number)).integers(0, 1 << 40, length)
    message[0] = length
    return message


@pytest.fixture
def far(world):
    if world.size < 2:
        pytest.skip("takes 2 ranks")
    return World(world.comm, ranks_per_node=1)


@pytest.mark.parametrize("expects", [False, True])
@pytest.mark.parametrize("make", [Messages, Pickled])
def test_messages_arrive_whole_and_in_order(far, make, expects):
    others = [rank for rank in range(far.size) if rank != far.rank]
    wire = make(Pipes(far, Rails(far), (ASK,), (ANSWER,), lambda words: words[0] if len(words) else None))
    for number, length in enumerate(lengths_of(far.rank)):
        for rank in others:
            for tag in (ASK, ANSWER):
                if expects:
                    wire.expect(tag, [rank])
                wire.send(tag, {rank: message_of(far.rank, tag * 1000 + number, length)})
        for rank in others:
            for tag in (ASK, ANSWER):
                found = wait_for_message(far, wire, rank, tag)
                assert np.array_equal(found, message_of(rank, tag * 1000 + number, lengths_of(rank)[number]))
    far.wait(lambda: wire.is_idle, "for messages to be received")
    far.meet("for all ranks to have received their messages")
    wire.free()


def wait_for_message(world, wire, rank, tag):
    found = []

    def look():
        found.extend(wire.arrived(tag, [rank]).values())
        return bool(found)

    world.wait(look, "for a message")
    return found[0]


@pytest.mark.parametrize("make", [Messages, Pickled])
def test_what_is_published_arrives_without_another_call_of_its_sender(far, make):
    wire = make(Pipes(far, Rails(far), (ASK,), (), lambda words: words[0] if len(words) else None))
    if far.rank == 0:
        wire.send(ASK, {rank: message_of(0, 0, 50) for rank in range(1, far.size)})
        far.wait(wire.publish, "for room")
    else:
        found = wait_for_message(far, wire, 0, ASK)
        assert np.array_equal(found, message_of(0, 0, 50))
    far.meet("for all ranks")
    assert wire.is_idle
    wire.free()


NUM_ROWS, DIM = 40_000, 8
NUMS = [0, 1, 5, 4, 30_000, 29_000, 3, 1, 0, 12_000]


@pytest.mark.parametrize("exchange", ["messages", "windows", "toy_wire.Pickled"])
@pytest.mark.parametrize("staleness", [0, 10])
def test_requests_of_any_length_bring_their_rows_by_every_wire(world, far, exchange, staleness):
    """Up to a megabyte, which windows send in pieces, and nothing at all; each rank in an order of its own."""
    made = {"optimizer": RowOptimizer("sgd", 0.5), "seed": 5, "init_std": 1.0, "cache": CacheSettings(0)}
    near = EmbeddingTable(world, NUM_ROWS, DIM, **made)
    table = EmbeddingTable(far, NUM_ROWS, DIM, staleness=Staleness(staleness), exchange=exchange, **made)
    random = np.random.default_rng(far.rank)
    for num in random.permutation(NUMS).tolist():
        keys = torch.from_numpy(random.permutation(NUM_ROWS)[:num])
        assert torch.equal(table.read(keys), near.peek(keys))
        table.write(keys[:0], torch.empty(0, DIM))  # the next read waits for the step of all ranks
    table.flush()
    table.close()
    near.close()
