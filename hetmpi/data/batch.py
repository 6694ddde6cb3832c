"""Samples of a data set, and batches for model and table.

B samples, F features of one value and G of several values per sample, U unique keys of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hetmpi import _C
from hetmpi.errors import UserError


@dataclass
class Bag:
    """The values of a feature with several values per sample: sample b has values[offsets[b] : offsets[b + 1]]."""

    values: np.ndarray  # (n,) int64 keys
    offsets: np.ndarray  # (B + 1,) int64, from 0 to n

    def __getitem__(self, rows: slice | np.ndarray) -> Bag:
        """The values of the samples at `rows`."""
        starts, sizes = self.offsets[:-1][rows], np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
        return Bag(self.values[places], offsets)


@dataclass
class Samples:
    """Raw samples."""

    ids: np.ndarray  # (B, F) int64 keys, 0 <= key < num_rows of the feature's table
    dense: np.ndarray  # (B, num_dense) float32
    label: np.ndarray  # (B,) float32; for click-through 0 or 1
    teacher: np.ndarray | None = None  # (B,) float32, true probability of label 1, if known
    bags: tuple[Bag, ...] = ()  # (G,)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, rows: slice | np.ndarray) -> Samples:
        """The samples at `rows`."""
        teacher = None if self.teacher is None else self.teacher[rows]
        return Samples(self.ids[rows], self.dense[rows], self.label[rows], teacher, tuple(b[rows] for b in self.bags))


def concatenate(parts: Sequence[Samples]) -> Samples:
    """The samples of all parts, at least one, in order. Without `teacher`."""
    ids, dense, label = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "dense", "label"))
    return Samples(ids, dense, label, bags=tuple(map(concatenate_bags, zip(*(part.bags for part in parts)))))


def concatenate_bags(parts: Sequence[Bag]) -> Bag:
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    return Bag(np.concatenate([part.values for part in parts]), np.concatenate([[0], np.cumsum(sizes)]))


@dataclass
class Batch:
    """Samples with their keys made unique, as torch tensors."""

    keys: Tensor  # (U,) int64, unique, in order of first appearance
    index: Tensor  # (B, F) int64 into keys
    dense: Tensor  # (B, num_dense) float32
    label: Tensor  # (B,) float32
    teacher: Tensor | None = None  # (B,) float32

    def on(self, device: torch.device) -> Batch:
        """The batch with the tensors that a model reads on `device`, for use in its current stream."""
        parts = {name: getattr(self, name).to(device, non_blocking=True) for name in ("index", "dense", "label")}
        if device.type == "cuda":
            # Another stream may have created the tensors: their memory must not be reused before this one is done.
            for part in parts.values():
                part.record_stream(torch.cuda.current_stream(device))
        return replace(self, **parts)


class SamplesError(UserError, TypeError):
    """Samples whose arrays have a wrong dtype or shape."""


def check_samples(samples: Samples):
    """Raises SamplesError if an array has another dtype or shape than Samples documents."""
    ids, num = samples.ids, len(samples.ids)
    if ids.dtype != np.int64 or ids.ndim != 2:
        raise SamplesError(f"Samples: ids must be int64 of shape (B, F), got {ids.dtype} {ids.shape}")
    for name, array, num_axes in (("dense", samples.dense, 2), ("label", samples.label, 1)):
        if array.dtype != np.float32 or array.ndim != num_axes or len(array) != num:
            shape = f"({num}, num_dense)" if num_axes == 2 else f"({num},)"
            raise SamplesError(f"Samples: {name} must be float32 of shape {shape}, got {array.dtype} {array.shape}")


def to_batch(samples: Samples) -> Batch:
    """The batch of `samples`. Raises SamplesError as check_samples."""
    check_samples(samples)
    ids = samples.ids
    keys, index = _C.unique(np.ascontiguousarray(ids).reshape(-1))
    return Batch(
        keys=torch.from_numpy(keys),
        index=torch.from_numpy(index).view(ids.shape),
        dense=torch.from_numpy(samples.dense),
        label=torch.from_numpy(samples.label),
        teacher=None if samples.teacher is None else torch.from_numpy(samples.teacher),
    )
