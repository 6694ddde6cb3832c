"""Gpu: a GPU's memory, and a CUDA stream beside torch's, for caches, batches and losses.

Operations of a stream run in its order, concurrent with those of other streams and with the host, so what one stream
has made is handed over: the taker waits for the maker, and the memory is not used again before the taker is done.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hetmpi import _C


class Gpu:
    """One GPU and a stream of its own."""

    def __init__(self, device: torch.device):
        """device: without an index the current GPU."""
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self.index)
        self._stream = torch.cuda.Stream(self.device)

    def use_in_this_thread(self):
        """Makes this GPU the current one, for a thread that uses no other: calls of hetmpi._C then need not change it
        and back, which would make a context on the other GPU too."""
        torch.cuda.set_device(self.index)

    def empty(self, shape, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory of the GPU, for this stream."""
        with torch.cuda.stream(self._stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def sent(self, array: np.ndarray) -> Tensor:
        """A copy on the GPU, for this stream, which the host does not wait for."""
        with torch.cuda.stream(self._stream):
            return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def fetched(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory of the host. Waits for this stream."""
        with torch.cuda.stream(self._stream):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        self.wait()
        return copy

    def wait(self):
        """Waits for this stream."""
        self._stream.synchronize()

    def rows(self, num: int, dim: int) -> Tensor:
        """Memory (num, dim) float32 for rows that this stream writes; then torch's uses them."""
        rows = self.empty((num, dim))
        rows.record_stream(torch.cuda.current_stream(self.device))
        return rows

    @staticmethod
    def torchs_stream_on(device: torch.device) -> int:
        """Torch's stream as an integer for hetmpi._C."""
        return torch.cuda.current_stream(device).cuda_stream

    @staticmethod
    def torchs_memory(shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory of a GPU, for torch's stream."""
        return torch.empty(shape, dtype=dtype, device=device)

    def torchs_rows(self, num: int, dim: int) -> Tensor:
        """Memory (num, dim) float32 for rows that torch's stream writes and uses."""
        return self.torchs_memory((num, dim), torch.float32, self.device)

    @staticmethod
    def finish(device: torch.device):
        """Waits until a GPU has done all that it was given."""
        torch.cuda.synchronize(device)

    @staticmethod
    def free_bytes(device: torch.device) -> int:
        """Memory that torch can take of a GPU."""
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved

    @staticmethod
    def name(device: torch.device) -> str:
        """The UUID of a GPU."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def pin(self, array: np.ndarray):
        """Lets kernels of this GPU use memory of the host in place, until unpin(). Raises RuntimeError."""
        _C.pin(array.ctypes.data, array.nbytes, self.index)

    @staticmethod
    def unpin(array: np.ndarray):
        _C.unpin(array.ctypes.data)

    @property
    def torchs_stream(self) -> int:
        return self.torchs_stream_on(self.device)

    @property
    def stream(self) -> int:
        """This stream as an integer for hetmpi._C."""
        return self._stream.cuda_stream

    @staticmethod
    def used_by_torch(tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor on `device`, for torch's stream. REQUIRES: the host has waited for the stream that made it."""
        sent = tensor.to(device, non_blocking=True)
        sent.record_stream(torch.cuda.current_stream(device))
        return sent

    @classmethod
    def sum_by_row(cls, values: Tensor, index: Tensor, shape: tuple[int, int], order: Tensor | None = None) -> Tensor:
        """As _C.sum_by_row, in torch's stream: values (k, m * dim) float32, whose rows may lie apart, index (k * m,)
        int64 below num_rows -> sums of this shape, (num_rows, dim). order: what order_of() said of the index."""
        (num_rows, dim), n, device = shape, len(index), values.device
        sums, later = (cls.torchs_memory((num, dim), torch.float32, device) for num in (num_rows, _C.num_later_sums(n)))
        where = device.index or 0, cls.torchs_stream_on(device)
        if order is None:
            order = cls.torchs_memory(_C.row_order_size(n, num_rows), torch.int32, device)
            scratch = cls.torchs_memory(_C.row_order_scratch(n, num_rows, where[0]), torch.uint8, device)
            _C.order_rows(index.data_ptr(), n, num_rows, order.data_ptr(), scratch.data_ptr(), *where)
        parts = len(values), n // max(len(values), 1), values.stride(0)
        addresses = (one.data_ptr() for one in (order, later, sums))
        _C.sum_by_row_on_gpu(values.data_ptr(), parts, tuple(shape), *addresses, *where)
        return sums

    class Later:
        """A number () that torch's stream computes, on its way to the host."""

        def __init__(self, number: Tensor):
            self._copy, self._is_there = number.to("cpu", non_blocking=True), torch.cuda.Event()
            self._is_there.record(torch.cuda.current_stream(number.device))

        def value(self) -> float:
            """Waits for it."""
            self._is_there.synchronize()
            return self._copy.item()


def keep_order(index: Tensor, order: Tensor, num_rows: int):
    """Keeps the order of an index by row, as _C.CudaUnique made it for so many keys, for look_up(rows, index)."""
    if not index.is_inference():  # which cannot tell whether it changes
        index.row_order = order, num_rows, index._version


def order_of(index: Tensor, num_rows: int | None = None) -> Tensor | None:
    """What keep_order() was told of this index, unless it has changed since. num_rows: None for any."""
    kept = getattr(index, "row_order", None)
    if kept is None or kept[2] != index._version or num_rows not in (None, kept[1]):
        return None
    return kept[0]


def gpu_of(device: torch.device) -> type[Gpu] | None:
    """How a device is used: as a GPU, None for the host's processors."""
    return None if device.type == "cpu" else Gpu


def gpu_with(tensor: Tensor) -> type[Gpu] | None:
    """As gpu_of() the device of the tensor."""
    return gpu_of(tensor.device)
