"""Tables with cache lines on an emulated GPU (tests/cpp/cuda_on_cpu), for a hetmpi._C built for it
(tests/cpp/test_cuda.py)."""

import numpy as np
import torch

from hetmpi import _C
from hetmpi.table.cache import CacheSettings
from hetmpi.table.gpu_cache import Gpu, GpuCache


class GpuOnCpu(Gpu):
    """Its memory is the host's, and calls are synchronous. Arrays that `pinned` did not allocate cannot be used."""

    stream = 0

    def __init__(self):
        self.device, self._pinned = torch.device("cpu"), set()

    def empty(self, shape):
        return torch.full(shape, 77.0)

    def give(self, tensor):
        pass

    take = give

    def give_back(self):
        pass

    def pinned(self, shape, dtype):
        tensor = torch.full(shape if isinstance(shape, (tuple, torch.Size)) else (shape,), 77, dtype=dtype)
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def can_use(self, tensor):
        return tensor.untyped_storage().data_ptr() in self._pinned

    def array(self, tensor):
        return tensor.numpy()

    def wait(self):
        pass


class EmulatedCache(GpuCache):
    """With what tests ask of lines."""

    def look_up(self, keys, slots):
        self.ask(keys, slots, None, False, 0)

    def clocks(self, slots):
        """c_c of slots (n,), -1 for none."""
        clocks, counts = (self.empty(len(slots), np.int32) for _ in range(2))
        self._lines.look_at(self._use(slots), clocks, counts, self._gpu.stream)
        return clocks


class OnGpu(CacheSettings):
    """Settings of a cache with lines on the emulated GPU."""

    def open(self, world, num_rows, dim, optimizer, device):
        capacity_rows = self.rows(num_rows, world, device)
        rule, gpu = optimizer.core(dim), GpuOnCpu()
        return EmulatedCache(_C.CudaRowCache(capacity_rows, rule, self.policy, self.dtype, 0), rule, gpu)
