"""Batches for a GPU: GpuBatches, whose ids are made unique there; SentBatches, made on the CPU and sent there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hetmpi import _C
from hetmpi.data.batch import Batch, Samples, check_samples
from hetmpi.data.features import TABLE
from hetmpi.gpu import Gpu, gpu_of, keep_order


class Workspace:
    """A stream, and memory in which ids are made unique."""

    def __init__(self, device: torch.device):
        self.gpu = gpu_of(device)(device)
        self.core = _C.CudaUnique(self.gpu.index)


class Spare:
    """What one thread uses at a time. Torch keeps memory for each stream, so it outlives threads. Thread-safe."""

    def __init__(self, make: Callable):
        self._make, self._unused = make, []

    @contextlib.contextmanager
    def one(self) -> Iterator:
        try:
            taken = self._unused.pop()
        except IndexError:
            taken = self._make()
        try:
            yield taken
        finally:
            self._unused.append(taken)


class GpuBatches:
    """Makes batches on a GPU, as to_batch does on the CPU: keys are copied back to the host, the other tensors stay on
    the GPU. Each call uses a stream that no other one uses meanwhile, beside the stream of the model. Thread-safe."""

    def __init__(self, device: torch.device, num_rows: int):
        """num_rows: upper bound of the ids."""
        self.device, self.num_rows = device, num_rows
        self._spare = Spare(lambda: Workspace(device))

    def __call__(self, samples: Samples) -> Batch:
        """The batch of `samples`. Raises SamplesError as to_batch does."""
        check_samples(samples)
        with self._spare.one() as workspace:
            return self._made(samples, workspace.gpu, workspace.core)

    def _made(self, samples: Samples, gpu: Gpu, core: _C.CudaUnique) -> Batch:
        gpu.use_in_this_thread()
        ids, dense, label = map(gpu.sent, (samples.ids.reshape(-1), samples.dense, samples.label))
        n = len(ids)
        keys, index = (gpu.empty(n, torch.int64) for _ in range(2))
        order = gpu.empty(_C.row_order_size(n, n), torch.int32)
        addresses = (one.data_ptr() for one in (keys, index, order))
        num = core.unique(ids.data_ptr(), n, self.num_rows, *addresses, gpu.stream)
        index = index.view(samples.ids.shape)
        keep_order(index, order, num)
        on_host = gpu.fetched(keys[:num])
        _C.note_distinct(on_host.numpy())
        teacher, weight = (None if one is None else torch.from_numpy(one) for one in (samples.teacher, samples.weight))
        return Batch({TABLE: on_host}, index, dense, label, teacher, weight=weight)


class SentBatches:
    """Batches of `make`, whose tensors for the model are sent to a GPU by the thread that makes them, so that the main
    thread need not copy. Thread-safe."""

    def __init__(self, device: torch.device, make: Callable[[Samples], Batch]):
        self.device, self._make, self._spare = device, make, Spare(lambda: gpu_of(device)(device))

    def __call__(self, samples: Samples) -> Batch:
        batch = self._make(samples)
        with self._spare.one() as gpu:
            gpu.use_in_this_thread()

            def sent(tensor: Tensor | None) -> Tensor | None:
                return None if tensor is None else gpu.sent(tensor.numpy())

            found = replace(
                batch, index=sent(batch.index), dense=sent(batch.dense), label=sent(batch.label),
                bags=tuple((sent(index), sent(offsets)) for index, offsets in batch.bags), weight=sent(batch.weight),
                bag_weights=tuple(map(sent, batch.bag_weights)),
            )  # fmt: skip
            gpu.wait()
        return found
