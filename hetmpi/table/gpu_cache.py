"""GpuCache: lines in a GPU's memory (cpp/client/lines.h).

The host makes all decisions about a batch: keys, slots, clocks and masks are numpy arrays. The GPU reads them in place
if `empty` allocated them in pinned memory, otherwise from a copy there. Rows to train on, and their gradients, are
tensors on the GPU. Fetched rows are in pinned memory of the host; the GPU reads the new ones, once. Gradient sums are
copied to the host when they are ready to be sent.

Operations on lines run in a CUDA stream of their own, concurrent with torch's stream: so the decisions about the next
batch do not wait for the network's kernels. Torch's stream waits for delivered rows, the cache's stream for gradients.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.gpu import Gpu, gpu_of
from hetmpi.table.client import check_finite
from hetmpi.world.world import World


class HostArrays:
    """Arrays in host memory that the GPU reads and writes."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._used: list[np.ndarray] = []  # by kernels that may still run
        self._addresses: set[int] = set()  # of what `empty` has returned: torch keeps memory pinned when it is freed

    def empty(self, shape, dtype) -> np.ndarray:
        """An uninitialised array in pinned memory."""
        array = self._gpu.pinned(shape, torch_type(dtype)).numpy()
        if array.nbytes:  # an empty one lies anywhere
            self._addresses.add(address_of(array))
        return array

    def use(self, array: np.ndarray) -> np.ndarray:
        """The array, or a copy that the GPU can read; kept alive until wait()."""
        if address_of(array) not in self._addresses:
            tensor = torch.from_numpy(array)
            if not self._gpu.can_use(tensor):
                array = self._gpu.pinned(tensor.shape, tensor.dtype).copy_(tensor).numpy()
        self._used.append(array)
        return array

    def filling(self, array: np.ndarray, call):
        """Calls call(array, or a copy that the GPU can write) and waits for its result in the array."""
        used = self.use(array)
        call(used)
        self.wait()
        if used.ctypes.data != array.ctypes.data:
            array[...] = used

    def wait(self):
        """Waits until the GPU has finished with all these arrays."""
        self._gpu.wait()
        self._used.clear()


@functools.cache
def torch_type(dtype) -> torch.dtype:
    """torch's name of a dtype of numpy."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class GpuCache(_C.Lines):
    """See above; the core calls it. device: of the rows."""

    def __init__(self, lines: _C.CudaRowCache, rule: _C.RowOptimizer, gpu: Gpu):
        """lines: in the memory of `gpu`."""
        super().__init__(lines.capacity_rows, rule)
        self._gpu, self.device, self._lines = gpu, gpu.device, lines
        self._arrays = HostArrays(gpu)
        self.empty, self._use, self._filling = self._arrays.empty, self._arrays.use, self._arrays.filling
        self._num_evicted, self._has_drift = 0, False

    def set_step(self, lr: float, step: int):
        self._lines.set_step(lr, step)

    def set_drift(self, most: float, others: int):
        self._has_drift = most > 0
        self._lines.set_drift(most, others)

    def ask(self, keys, slots, known, will_write: bool, bound: int):
        self._filling(slots, lambda out: self._lines.look_up(self._use(keys), out, self._gpu.stream))
        if known is not None:
            used = self._use(slots), will_write, bound
            self._filling(known, lambda out: self._lines.clocks_within(*used, out, self._gpu.stream))

    def judge(self, slots, is_fetched, clocks, num_keys: int, bound: int, is_stale):
        self._lines.use(self._use(slots), num_keys, self._gpu.stream)
        if bound == _C.UNBOUNDED:  # no clock is compared
            is_stale[:] = False
            return
        used = self._use(np.where(is_fetched, -1, slots) if is_fetched.any() else slots), self._use(clocks)
        self._filling(is_stale, lambda out: self._lines.validate(*used, bound, out, True, self._gpu.stream))

    def accept(self, slots, chosen, weights, states, clocks, anticipate: float):
        used = map(self._use, (slots, chosen, weights, states, clocks))
        self._lines.refresh(*used, anticipate, self._gpu.stream)

    def rows(self, slots, weights) -> torch.Tensor:
        """slots: None for keys without a line."""
        if self.capacity_rows == 0:  # no search of lines waits, and frees the arrays of the last read
            self._arrays.wait()
        if slots is None:
            slots = self.empty(len(weights), np.int64)
            slots[:] = -1
        out = self._gpu.empty(weights.shape)
        self._lines.gather(self._use(slots), self._gpu.array(out), self._gpu.stream, self._use(weights))
        self._gpu.give(out)
        return out

    def moved(self, weights) -> torch.Tensor:
        return self._gpu.sent(weights)

    def insert(self, keys, chosen, weights: torch.Tensor, states, clocks, slots) -> tuple[int, int]:
        """weights: from rows(), and nothing has written them since, or from moved()."""
        num_missing = int(np.count_nonzero((slots < 0) & chosen))
        if num_missing == 0:
            return 0, 0
        used = self._use(keys), self._use(chosen), self._gpu.array(weights), self._use(states), self._use(clocks)
        self._filling(slots, lambda out: self._lines.insert_and_evict(*used, out, self._gpu.stream))
        before, self._num_evicted = self._num_evicted, self._lines.counts(self._gpu.stream)["evicted"]
        return num_missing, self._num_evicted - before

    def forget(self, keys: np.ndarray):
        slots = self.empty(len(keys), np.int64)
        self.ask(keys, slots, None, False, 0)
        self._lines.forget(self._use(slots), self._gpu.stream)

    def update(self, keys, slots, clocks, grads: torch.Tensor, anticipate: float):
        self._gpu.take(grads)
        values, slots = self._gpu.array(grads), self._use(slots)
        self._lines.update(slots, values, anticipate, self._gpu.stream)
        self._gpu.give_back()
        if (slots < 0).any():  # else no need to wait for the gradients
            self._lines.push_directly(self._use(keys), slots, self._use(clocks), values, self._gpu.stream)

    def due(self, slots, bound: int):
        if bound == _C.UNBOUNDED and not self._has_drift:  # none is due, and the host need not wait
            return
        self._lines.take_due(self._use(slots), bound, self._gpu.stream)

    def due_all(self):
        self._lines.take_all(self._gpu.stream)

    def take(self) -> _C.ReleasedSums:
        released = self._lines.take(self._gpu.stream)
        check_finite(released.keys, released.sums)
        return released

    def num_released(self) -> int:
        return self._lines.num_released

    @property
    def lags(self) -> np.ndarray:
        return self._lines.lags(self._gpu.stream)


def open_gpu_cache(
    world: World, device: torch.device, capacity_rows: int, rule: _C.RowOptimizer, dim: int, policy: str, dtype: str
) -> GpuCache:
    """Creates a cache on `device`, without an index on the current GPU. Collective. Raises UserError on every rank if a
    GPU lacks memory for the caches of its ranks."""
    error = cache = None
    try:
        gpu = gpu_of(device)(device)
        cache = GpuCache(_C.CudaRowCache(capacity_rows, rule, policy, dtype, gpu.index), rule, gpu)
    except RuntimeError as problem:
        cure = (
            ": lower table.cache.capacity_rows or table.cache.capacity_fraction"
            if "out of memory" in str(problem)
            else ""
        )
        error = UserError(
            f"a cache of {capacity_rows:,} rows of dim {dim} in {dtype} cannot be made on {device} of {world.host}: "
            f"{problem}{cure}"
        )
    world.agree(error)
    return cache
