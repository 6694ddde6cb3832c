"""The cache of a GPU without a GPU: which host memory it keeps, and which tensors its stream waits for."""

import weakref

import numpy as np
import pytest
import torch

from hetmpi import _C
from hetmpi.gpu import Gpu
from hetmpi.table.cache import CacheSettings
from hetmpi.table.gpu_cache import GpuCache, HostArrays
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.table.table import MOST_KNOWN, EmbeddingTable
from hetmpi.world.world import World

DIM = 8


class CountingGpu(Gpu):
    """A GPU whose memory is the host's, and whose calls are synchronous. Knows the pinned memory that is in use, and
    the tensors for whose stream it has waited."""

    stream = 0

    def __init__(self):
        self.device, self._pinned, self._alive, self.taken = torch.device("cpu"), set(), [], []

    def empty(self, shape, dtype=torch.float32):
        return torch.full(shape, 77, dtype=dtype)

    def sent(self, array):
        return torch.from_numpy(array.copy())

    def give(self, tensor):
        pass

    def give_back(self):
        pass

    def take(self, tensor):
        self.taken.append(tensor.data_ptr())

    def pinned(self, shape, dtype):
        array = torch.empty(shape, dtype=dtype).numpy()
        self._alive.append(weakref.ref(array))  # the tensor keeps it
        self._pinned.add(array.ctypes.data)
        return torch.from_numpy(array)

    def can_use(self, tensor):
        return tensor.data_ptr() in self._pinned

    def array(self, tensor):
        return tensor.numpy()

    def wait(self):
        pass

    @property
    def pinned_bytes(self) -> int:
        return sum(array.nbytes for array in (one() for one in self._alive) if array is not None)


class NoLines:
    """A CudaRowCache without lines."""

    capacity_rows = num_released = 0

    def set_step(self, lr, step):
        pass

    def set_drift(self, most, others):
        pass

    def look_up(self, keys, slots, stream):
        slots[:] = -1

    def gather(self, slots, out, stream, rows):
        assert (slots < 0).all()
        out[:] = rows

    def validate(self, slots, clocks, staleness, is_stale, counts_lags, stream):
        is_stale[:] = False

    def update(self, slots, grads, anticipate, stream):
        pass

    def push_directly(self, keys, slots, clocks, grads, stream):
        pass

    def take_due(self, slots, staleness, stream):
        pass

    def clocks_within(self, slots, will_write, staleness, out, stream):
        out[:] = _C.NO_LINE


class OnCountingGpu(CacheSettings):
    def open(self, world, num_rows, dim, optimizer, device):
        return GpuCache(NoLines(), optimizer.core(dim), CountingGpu())


@pytest.fixture(params=[0, 5])
def table(request):
    table = EmbeddingTable(
        World(), 200, DIM, RowOptimizer(), staleness=Staleness(request.param), cache=OnCountingGpu(capacity_rows=0)
    )
    yield table
    table.close()


def test_without_lines_steps_pin_no_more_memory_than_the_first_ones(table):
    used = []
    for _ in range(3 * MOST_KNOWN):
        keys = torch.randperm(200)[:50]
        table.write(keys, torch.ones_like(table.read(keys)))
        used.append(table.cache._gpu.pinned_bytes)
    assert max(used) <= used[MOST_KNOWN]  # of the last batches it keeps the keys


def test_the_stream_waits_for_gradients_written_into_the_rows_that_were_read():
    gpu = CountingGpu()
    cache = GpuCache(NoLines(), RowOptimizer().core(DIM), gpu)
    keys, slots, clocks = np.arange(5), np.full(5, -1), np.zeros(5, np.int32)
    rows = cache.rows(slots, np.ones((5, DIM), np.float32))
    cache.insert(keys, np.zeros(5, bool), rows, np.ones((5, 0), np.float32), clocks, slots)
    assert not gpu.taken
    cache.update(keys, slots, clocks, rows.mul_(2), 1.0)
    assert gpu.taken == [rows.data_ptr()]


class FullLines(NoLines):
    """Has a line for every key. Calls after which the host waits for the gradients fail."""

    capacity_rows = 64

    def look_up(self, keys, slots, stream):
        slots[:] = keys

    def gather(self, slots, out, stream, rows):
        out[:] = 1

    def use(self, slots, num_keys, stream):
        pass

    def _waits(self, *_):
        raise AssertionError("the host would wait for the gradients")

    push_directly = take_due = validate = insert_and_evict = refresh = _waits


class OnFullGpu(CacheSettings):
    def open(self, world, num_rows, dim, optimizer, device):
        return GpuCache(FullLines(), optimizer.core(dim), CountingGpu())


class LateLines(FullLines):
    """Its updates run at any later time: they find the slots that they were given."""

    def __init__(self):
        self.given = []

    def update(self, slots, grads, anticipate, stream):
        self.given.append((slots, slots.copy()))

    def look_up(self, keys, slots, stream):
        assert all(np.array_equal(now, before) for now, before in self.given)
        super().look_up(keys, slots, stream)


class OnLateGpu(CacheSettings):
    def open(self, world, num_rows, dim, optimizer, device):
        return GpuCache(LateLines(), optimizer.core(dim), CountingGpu())


def test_slots_are_kept_for_updates_that_have_not_run_when_keys_are_read_or_written_again():
    settings = OnLateGpu(capacity_rows=64, admit="all")
    table = EmbeddingTable(World(), 64, DIM, RowOptimizer(), staleness=Staleness(None), cache=settings)
    keys, grads = torch.randperm(64)[:20], torch.ones(20, DIM)
    for is_read in (True, True, False, False, True):
        if is_read:
            table.read(keys)
        table.write(keys, grads)
    assert len(table.cache._lines.given) == 5
    table.close()


def test_an_empty_array_makes_no_address_one_of_pinned_memory():
    gpu = CountingGpu()
    arrays = HostArrays(gpu)
    arrays.empty((5, 0), np.float32)
    assert not arrays._addresses
    other = np.ones(3)
    assert arrays.use(other) is not other and arrays.use(arrays.empty(3, np.float64)) is not None


def test_without_a_bound_a_step_with_all_rows_cached_does_not_wait_for_its_gradients():
    world, settings = World(), OnFullGpu(capacity_rows=64, admit="all")
    table = EmbeddingTable(world, 64, DIM, RowOptimizer(), staleness=Staleness(None), cache=settings)
    for _ in range(3):
        keys = torch.randperm(64)[:20]
        table.write(keys, torch.ones_like(table.read(keys)))
    assert table.counters.hits == 60
    table.close()
