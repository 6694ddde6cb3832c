"""The emulated GPU (tests/cpp/cuda_on_cpu/emulator.cpp), for a hetmpi._C that is built with it (emulated.py).

Torch computes on the CPU, where its operations have run when a call returns; on a GPU they run later. So that what
hetmpi leaves out between torch's stream and its own is found all the same, torch's stream is emulated, too:
- before torch reads what another stream has made, only what its stream waits for has run;
- a gradient has its values only when torch's stream comes to the place where it was computed;
- rows and batches are read once more when torch's stream comes to where they were used."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from collections import deque

import numpy as np
import torch

from hetmpi import _C
from hetmpi.gpu import Gpu
from hetmpi.table.cache import CacheSettings
from hetmpi.table.group import TableGroup
from hetmpi.table.table import EmbeddingTable

HOST, DEVICE, TO_GPU, TO_HOST = 1, 2, 0, 1  # as in cuda_runtime.h


class Counts(ctypes.Structure):
    """CudaOnCpuCounts (cuda_runtime.h)."""

    NAMES = (
        *("launches", "waits", "stream_waits", "records", "allocations", "memsets"),
        *("copies_to_gpu", "bytes_to_gpu", "copies_to_host", "bytes_to_host", "copies_on_gpu"),
    )
    _fields_ = tuple((name, ctypes.c_int64) for name in NAMES)


class Cuda:
    """CUDA's calls, and those of the emulator, by name; addresses and streams are integers."""

    def __init__(self):
        self._calls = ctypes.CDLL(_C.__file__)
        self._calls.cuda_on_cpu_take.restype = self._calls.cuda_on_cpu_take_pinned.restype = ctypes.c_void_p
        self._calls.cuda_on_cpu_spent.restype = ctypes.c_int64

    def __getattr__(self, name: str):
        call = getattr(self._calls, name)

        def checked(*arguments):
            found = call(*(ctypes.c_void_p(one) if isinstance(one, int) else one for one in arguments))
            assert name.startswith("cuda_on_cpu") or found == 0, f"{name}: error {found}"
            return found

        return checked

    def made(self, name: str, *arguments) -> int:
        """What a call returns through its first argument."""
        made = ctypes.c_void_p()
        getattr(self, name)(ctypes.byref(made), *arguments)
        return made.value or 0

    def counts(self) -> dict[str, int]:
        """Since the last call."""
        counts = Counts()
        self.cuda_on_cpu_counts(ctypes.byref(counts))
        return {name: getattr(counts, name) for name in Counts.NAMES}

    def kind(self, address: int) -> int:
        about = (ctypes.c_int * 2)()
        self.cudaPointerGetAttributes(ctypes.byref(about), address)
        return about[0]

    def stream(self) -> int:
        return self.made("cudaStreamCreateWithFlags", 1)


CUDA = Cuda()
TORCH = CUDA.stream()  # torch's
LATE: deque[torch.Tensor] = deque(maxlen=8)  # the last gradients


class Outside:
    """Processor time of Python's part of the emulation, in nanoseconds."""

    ns, depth = 0, 0

    def __call__(self, call):
        @functools.wraps(call)
        def timed(*arguments):
            self.depth += 1
            began, emulated = time.thread_time_ns(), CUDA.cuda_on_cpu_spent()
            try:
                return call(*arguments)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.ns += time.thread_time_ns() - began - (CUDA.cuda_on_cpu_spent() - emulated)

        return timed


OUTSIDE = Outside()


class Memory:
    """Memory that numpy reads, freed with the last array of it."""

    def __init__(self, address: int, shape, dtype: torch.dtype, free):
        self._address, self._free = address, free
        kind = torch.empty(0, dtype=dtype).numpy().dtype.str
        self.__array_interface__ = {"data": (address, False), "shape": tuple(shape), "typestr": kind, "version": 3}

    def __del__(self):
        if not sys.is_finalizing():
            self._free(self._address)

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self))


def bytes_of(shape, dtype: torch.dtype) -> int:
    return max(1, int(np.prod(shape)) * dtype.itemsize)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return CUDA.kind(tensor.data_ptr()) == DEVICE


def on_gpu(stream: int, shape, dtype: torch.dtype) -> torch.Tensor:
    """Memory of torch's allocator, for a stream."""
    shape = (shape,) if isinstance(shape, int) else shape
    address = CUDA.cuda_on_cpu_take(bytes_of(shape, dtype), stream)
    return Memory(address, shape, dtype, CUDA.cuda_on_cpu_give_back).tensor()


def pinned(shape, dtype: torch.dtype) -> torch.Tensor:
    """Pinned memory of torch's allocator."""
    address = CUDA.cuda_on_cpu_take_pinned(bytes_of(shape, dtype))
    return Memory(address, shape, dtype, CUDA.cuda_on_cpu_give_back).tensor()


def late(values: torch.Tensor) -> torch.Tensor:
    """What torch's stream has computed when it comes to here."""
    tensor, values = on_gpu(TORCH, values.shape, values.dtype), values.contiguous()
    CUDA.cuda_on_cpu_write(tensor.data_ptr(), values.data_ptr(), values.nbytes, TORCH)
    return tensor


def late_rows(values: torch.Tensor) -> torch.Tensor:
    """As late(), of a matrix whose rows lie apart, if what lies between them is known."""
    num, width, stride = *values.shape, values.stride(0)
    room = values.untyped_storage().nbytes() // values.itemsize - values.storage_offset()
    if not (values.stride(1) == 1 and width < stride and num * stride <= room):
        return late(values)
    return late(values.as_strided((num, stride), (stride, 1)))[:, :width]


@OUTSIDE
def read_by_torch(tensor: torch.Tensor):
    """Now, and at any time until torch's stream comes to here."""
    CUDA.cuda_on_cpu_run(TORCH)
    CUDA.cuda_on_cpu_read(tensor.data_ptr(), tensor.nbytes, TORCH)


class GpuOnCpu(Gpu):
    """See above. Tensors on it are on torch's CPU."""

    index = 0

    def __init__(self, device: torch.device | None = None):
        self.device, self._own, self._sent = torch.device("cpu"), CUDA.stream(), []

    def use_in_this_thread(self):
        pass

    @OUTSIDE
    def empty(self, shape, dtype=torch.float32):
        return on_gpu(self._own, shape, dtype)

    @OUTSIDE
    def sent(self, array):
        staged = pinned(array.shape, torch.from_numpy(array).dtype)
        staged.numpy()[...] = array
        sent = self.empty(array.shape, staged.dtype)
        CUDA.cudaMemcpyAsync(sent.data_ptr(), staged.data_ptr(), staged.nbytes, TO_GPU, self._own)
        self._sent.append(staged)  # torch keeps pinned memory that a copy of its own reads
        return sent

    @OUTSIDE
    def fetched(self, tensor):
        copy = pinned(tensor.shape, tensor.dtype)
        CUDA.cudaMemcpyAsync(copy.data_ptr(), tensor.data_ptr(), copy.nbytes, TO_HOST, self._own)
        self.wait()
        return copy

    @OUTSIDE
    def wait(self):
        CUDA.cudaStreamSynchronize(self._own)
        self._sent.clear()

    @OUTSIDE
    def rows(self, num, dim):
        rows = self.empty((num, dim))
        self._record(rows)
        return rows

    @staticmethod
    def _record(tensor):
        CUDA.cuda_on_cpu_record(tensor.data_ptr(), TORCH)

    @property
    def stream(self):
        return self._own

    @classmethod
    def used_by_torch(cls, tensor, device):
        if is_on_gpu(tensor):
            cls._record(tensor)
            read_by_torch(tensor)
        return tensor

    @staticmethod
    def torchs_stream_on(device):
        return TORCH

    @staticmethod
    def finish(device):
        CUDA.cuda_on_cpu_run(TORCH)

    @staticmethod
    def name(device):
        return "emulated"

    @staticmethod
    def free_bytes(device):
        return int(os.environ.get("HETMPI_TEST_GPU_BYTES", 1 << 30))

    @staticmethod
    def torchs_memory(shape, dtype, device):
        return on_gpu(TORCH, shape, dtype)

    @classmethod
    @OUTSIDE
    def sum_by_row(cls, values, index, shape, order=None):
        sums = super().sum_by_row(late_rows(values), late(index), shape, order)
        CUDA.cuda_on_cpu_run(TORCH)
        return sums

    class Later:
        def __init__(self, number):
            self._number = number

        def value(self):
            return self._number.item()


class OnGpu(CacheSettings):
    """Settings of a cache with lines on the emulated GPU."""

    def open(self, world, num_rows, dim, optimizer, device):
        capacity_rows = self.rows(num_rows, world, device)
        return _C.GpuLines(capacity_rows, optimizer.core(dim), self.policy, self.dtype, GpuOnCpu())


@OUTSIDE
def computed(values: torch.Tensor, table: EmbeddingTable) -> torch.Tensor:
    """Gradients (U, dim) as torch's stream computes them."""
    values = late(values)
    LATE.append(values)
    if table.staleness.is_exact and table.shard.device_rows is None:  # the core copies them to the host, by torch
        CUDA.cuda_on_cpu_run(TORCH)
    return values


def gradients(table, keys, grads, of_table=EmbeddingTable.gradients):
    """As EmbeddingTable's, with gradients that torch's stream computes."""
    values = of_table(table, keys, grads)
    return computed(values, table) if table.cache.computes_beside else values


def read(table, keys, of_table=EmbeddingTable.read):
    rows = of_table(table, keys)
    if table.cache.computes_beside:
        read_by_torch(rows)
    return rows


def read_group(group, keys, of_group=TableGroup.read):
    rows = of_group(group, keys)
    for name, table in group.items():
        if table.cache.computes_beside:
            read_by_torch(rows[name])
    return rows


read_unseen, read_table_unseen = TableGroup.read, EmbeddingTable.read  # into rows that torch does not read
EmbeddingTable.gradients, EmbeddingTable.read, TableGroup.read = gradients, read, read_group
