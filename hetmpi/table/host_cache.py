"""HostCache: a RowCache in the host's memory."""

from __future__ import annotations

import numpy as np
import torch

from hetmpi import _C


class HostCache(_C.RowCache):
    """hetmpi/table/cache.py, RowCache, by cpp/cache/row_cache.h; and how rows get from its memory to tensors: here both
    are in the host's.

    computes_beside   whether the network is computed by another processor, while the host may decide about the next
                      batch"""

    computes_beside = False
    device = torch.device("cpu")
    empty = staticmethod(np.empty)

    def deliver(self, slots: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """The rows (n, dim) of a batch: its lines', and those in rows (n, dim) of keys without one, whose memory it
        takes."""
        self.gather(slots, rows)
        return torch.from_numpy(rows)

    def local(self, rows: torch.Tensor) -> np.ndarray:
        """Rows or gradients (n, dim) as the calls take them."""
        return rows.numpy()

    def on_host(self, rows: torch.Tensor) -> np.ndarray:
        return rows.numpy()

    def on_device(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows)
