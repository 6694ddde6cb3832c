"""HostCache: a RowCache in host memory."""

from __future__ import annotations

import numpy as np
import torch

from hetmpi import _C


class HostCache(_C.RowCache):
    """hetmpi/table/cache.py, RowCache, by cpp/cache/row_cache.h. Rows and tensors share host memory."""

    computes_beside = False
    device = torch.device("cpu")
    empty = staticmethod(np.empty)

    def deliver(self, slots: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """The rows (n, dim) of a batch: from lines, or from rows (n, dim) for keys without a line. The result uses the
        memory of `rows`."""
        self.gather(slots, rows)
        return torch.from_numpy(rows)

    def as_input(self, rows: torch.Tensor) -> np.ndarray:
        """Rows, or gradients (n, dim), as arguments of the other methods."""
        return rows.numpy()

    delivered = as_input
