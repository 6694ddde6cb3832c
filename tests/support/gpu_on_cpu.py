"""pytest -p gpu_on_cpu: tables keep their lines on a GPU that the CPU plays (tests/cpp/cuda_on_cpu). For a hetmpi._C
built so (tests/cpp/test_cuda.py)."""

import torch

import hetmpi.table.table
from hetmpi.table.gpu_cache import Gpu, GpuCache


class GpuOnCpu(Gpu):
    """Its memory is the host's, and nothing is under way when a call returns. Arrays that `pinned` did not make cannot
    be used."""

    stream = 0

    def __init__(self):
        self.device, self._pinned = torch.device("cpu"), set()

    def empty(self, shape):
        return torch.full(shape, 77.0)

    def give(self, tensor):
        pass

    take = give

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


def make_cache(world, settings, num_rows, dim, optimizer, device):
    return GpuCache(
        settings.rows(num_rows, world, device), optimizer.core(dim), settings.policy, settings.dtype, GpuOnCpu()
    )


hetmpi.table.table.make_cache = make_cache
