"""GpuBatches: batches whose ids are made unique on a GPU."""

from __future__ import annotations

import threading

import numpy as np
import torch

from hetmpi import _C
from hetmpi.data.batch import Batch, Samples, check_samples
from hetmpi.data.features import TABLE


class GpuBatches:
    """Makes batches on a GPU, as to_batch does on the CPU: keys are copied back to the host, the other tensors stay on
    the GPU. Each thread uses its own stream, concurrent with the stream of the model."""

    def __init__(self, device: torch.device, num_rows: int):
        """num_rows: upper bound of the ids."""
        self.device, self.num_rows, self._mine = device, num_rows, threading.local()

    def __call__(self, samples: Samples) -> Batch:
        """The batch of `samples`. Raises SamplesError as to_batch does."""
        check_samples(samples)
        stream = self._stream()
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            ids, dense, label = map(self._sent, (samples.ids.reshape(-1), samples.dense, samples.label))
            keys, index = torch.empty_like(ids), torch.empty_like(ids)
            num = self._mine.core.unique(ids, self.num_rows, keys, index, stream.cuda_stream)
            on_host = torch.empty(num, dtype=torch.int64, pin_memory=True)
            on_host.copy_(keys[:num], non_blocking=True)
            stream.synchronize()
        teacher, weight = (None if one is None else torch.from_numpy(one) for one in (samples.teacher, samples.weight))
        return Batch({TABLE: on_host}, index.view(samples.ids.shape), dense, label, teacher, weight=weight)

    def _stream(self) -> torch.cuda.Stream:
        """Stream and unique-key workspace of this thread."""
        if not hasattr(self._mine, "stream"):
            with torch.cuda.device(self.device):
                self._mine.stream, self._mine.core = torch.cuda.Stream(self.device), _C.CudaUnique(self.device.index)
        return self._mine.stream

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        """Starts the copy of the array to the GPU."""
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)
