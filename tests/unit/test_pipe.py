"""Pipes (cpp/wire/pipe.h): messages arrive whole and in order, however the bytes of their frames do."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetmpi import _C


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32), capacity=st.sampled_from([16, 20, 64, 4096]), num=st.integers(1, 20))
def test_messages_arrive_whole_and_in_order_whatever_is_copied_first(seed, capacity, num):
    draw = random.Random(seed)
    mirror, ring = np.zeros((2, capacity), np.int64)
    writer, reader = _C.PipeWriter(mirror), _C.PipeReader(ring)
    sent = [np.array([draw.choice([0, 1, draw.getrandbits(62)]) for _ in range(draw.choice([1, 5, 40, 3 * capacity]))])
            for _ in range(num)]  # fmt: skip
    unsent, found, on_the_way = [[message, 0] for message in sent], [], []
    while len(found) < len(sent):
        while unsent and draw.random() < 0.7:
            message, begin = unsent[0]
            before = writer.head
            unsent[0][1] += writer.write(message, begin)
            on_the_way += [place % capacity for place in range(before, writer.head)]
            if unsent[0][1] < len(message):
                break
            unsent.pop(0)
        draw.shuffle(on_the_way)
        arrived = draw.randint(0, len(on_the_way))
        ring[on_the_way[:arrived]] = mirror[on_the_way[:arrived]]
        on_the_way = on_the_way[arrived:]
        while (message := reader.read()) is not None:
            found.append(message)
        if not on_the_way:
            writer.set_tail(reader.tail)
    assert len(found) == len(sent) and all(map(np.array_equal, found, sent))


def test_a_changed_word_of_a_frame_is_not_taken():
    ring = np.zeros(64, np.int64)
    writer, message = _C.PipeWriter(ring), np.arange(20)
    writer.write(message, 0)
    written = ring.copy()
    for word in range(4 + len(message)):
        for bit in (0, 31, 63):
            ring[:] = written
            ring[word] ^= np.int64(1 << 62) << 1 if bit == 63 else np.int64(1 << bit)
            assert _C.PipeReader(ring).read() is None
    ring[:] = written
    assert np.array_equal(_C.PipeReader(ring).read(), message)


@pytest.mark.parametrize("capacity", [0, 12, 17])
def test_a_ring_without_room_for_a_frame_is_refused(capacity):
    for end in (_C.PipeWriter, _C.PipeReader):
        with pytest.raises(ValueError, match="at least 16 words, in multiples of 4"):
            end(np.zeros(capacity, np.int64))
