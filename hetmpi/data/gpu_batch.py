"""GpuBatches: batches whose ids are made unique on a GPU."""

from __future__ import annotations

import threading

import torch

from hetmpi import _C
from hetmpi.data.batch import Batch, Samples, check_samples
from hetmpi.data.features import TABLE
from hetmpi.gpu import Gpu, gpu_of


class GpuBatches:
    """Makes batches on a GPU, as to_batch does on the CPU: keys are copied back to the host, the other tensors stay on
    the GPU. Each thread uses its own stream, concurrent with the stream of the model."""

    def __init__(self, device: torch.device, num_rows: int):
        """num_rows: upper bound of the ids."""
        self.device, self.num_rows, self._mine = device, num_rows, threading.local()

    def __call__(self, samples: Samples) -> Batch:
        """The batch of `samples`. Raises SamplesError as to_batch does."""
        check_samples(samples)
        gpu, core = self._workspace()
        ids, dense, label = map(gpu.sent, (samples.ids.reshape(-1), samples.dense, samples.label))
        keys, index = (gpu.empty(len(ids), torch.int64) for _ in range(2))
        num = core.unique(ids.data_ptr(), len(ids), self.num_rows, keys.data_ptr(), index.data_ptr(), gpu.stream)
        on_host = gpu.fetched(keys[:num])
        teacher, weight = (None if one is None else torch.from_numpy(one) for one in (samples.teacher, samples.weight))
        return Batch({TABLE: on_host}, index.view(samples.ids.shape), dense, label, teacher, weight=weight)

    def _workspace(self) -> tuple[Gpu, _C.CudaUnique]:
        """Stream and unique-key workspace of this thread."""
        if not hasattr(self._mine, "gpu"):
            self._mine.gpu = gpu_of(self.device)(self.device)
            self._mine.core = _C.CudaUnique(self._mine.gpu.index)
        return self._mine.gpu, self._mine.core
