"""Task: what is learnt from a source's samples: which tables a model reads, its loss, how it is judged.

Any class that keeps this protocol is one. Hydra builds the one that conf/task/*.yaml names, as
Class(source=..., loss=..., and the file's other keys): the source is prepared, the loss is the module of
conf/loss/*.yaml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hetmpi.table.group import TableSpec


class Task(Protocol):
    """U unique keys of a table in a batch; samples and batches are of the task's own types.

    A batch has `on(device)`, which returns it with what a model reads of it on that device.

    sample_bytes     memory of a sample in a batch, without the rows it looks up
    keys_per_sample  table -> the most keys that one sample looks up"""

    sample_bytes: int
    keys_per_sample: dict[str, int]

    def model_arguments(self, dim: int) -> dict[str, int]:
        """What the model's constructor is told beside its own settings. dim: table.dim of the settings."""

    def tables(self, model: torch.nn.Module) -> dict[str, TableSpec]:
        """The tables that a model reads, by name. Raises UserError for a model that does not say what it wants."""

    def batches(self, device: torch.device) -> Callable[[Any], Any]:
        """What makes a batch of samples for this device; thread-safe. Raises UserError for samples that are not as they
        should be."""

    def keys(self, batch) -> dict[str, Tensor]:
        """table -> the batch's unique keys, (U,) int64 on the CPU."""

    def loss(self, forward: Callable, rows: dict[str, Tensor], batch) -> Tensor:
        """The mean loss of a batch, (). forward(rows, batch): the model. rows: table -> (U, dim) float32, to be
        differentiated. Raises UserError if the model returns something else than the task takes."""

    def predict(self, forward: Callable, rows: dict[str, Tensor], batch) -> tuple[np.ndarray, ...]:
        """What a held-out batch is judged by: columns (n, ...), in the order of its samples."""

    def figures(self, columns: list[np.ndarray]) -> dict[str, float | None]:
        """Metrics of the columns of all held-out batches, [] if there are none; None for one that is not defined."""

    def without_figures(self, columns: list[np.ndarray]) -> str | None:
        """Why a metric is not defined, in one sentence; None if all are."""

    def not_finite(self, batch) -> str | None:
        """What of a batch is NaN or infinite, in one sentence; None if nothing is."""
