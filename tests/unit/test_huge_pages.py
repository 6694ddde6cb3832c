"""A second mapping of memory that processes share (cpp/owner/huge_pages.h)."""

import mmap
import resource

import numpy as np
import pytest

from hetmpi import _C

PAGE, SIZE = 4096, 8 << 20


@pytest.fixture
def shared(tmp_path):
    """Memory (n,) uint8 of a file."""
    with open(tmp_path / "memory", "w+b") as file:
        file.truncate(2 * SIZE)
        yield np.frombuffer(mmap.mmap(file.fileno(), 2 * SIZE), np.uint8)


@pytest.mark.parametrize("populates", [False, True])
@pytest.mark.parametrize("begin", [0, 3 * PAGE, 3 * PAGE + 64])
def test_a_view_is_the_same_memory(shared, begin, populates):
    memory = shared[begin : begin + SIZE]
    view = _C.aligned_view(memory, populates)
    assert view.shape == memory.shape and view.ctypes.data != memory.ctypes.data
    memory[:] = np.arange(SIZE) % 251
    assert np.array_equal(view, memory)
    view[-5:] = 255
    assert (memory[-5:] == 255).all() and not shared[begin + SIZE :].any() and not shared[:begin].any()


def test_a_view_outlives_the_memory(tmp_path):
    with open(tmp_path / "memory", "w+b") as file:
        file.truncate(SIZE)
        memory = np.frombuffer(mmap.mmap(file.fileno(), SIZE), np.uint8)
    view = _C.aligned_view(memory, True)
    del memory
    view[:] = 7
    assert (view == 7).all()


def test_memory_of_one_process_is_its_own_view():
    memory = np.empty(SIZE, np.uint8)
    view = _C.aligned_view(memory, True)
    assert view.ctypes.data == memory.ctypes.data and len(view) == SIZE


def test_a_limit_of_addresses_leaves_the_memory_as_it_is(shared):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 45, limits[1]))
    try:
        assert _C.aligned_view(shared, True).ctypes.data == shared.ctypes.data
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
