"""Task: the protocol of a learning objective: tables of the model, batches, loss and metrics.

Any class that implements it is a task. Hydra builds the class that conf/task/*.yaml names as Class(source=...,
loss=..., further keys of the file), with the prepared source and the module of conf/loss/*.yaml as loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hetmpi.table.spec import TableSpec
from hetmpi.table.table import EmbeddingTable
from hetmpi.tasks.evaluation import Evaluation


class Task(Protocol):
    """U unique keys of a table in a batch; the types of samples and batches are the task's own.

    A task inherits this class, whose methods with a body are defaults. A batch has `on(device)`, which returns it with
    the tensors that a model reads on that device.

    sample_bytes      memory of a sample in a batch, without the rows it looks up
    keys_per_sample   table -> maximum number of keys that one sample looks up, for the default of most_keys()
    has_dense_layers  whether a model must have parameters besides its rows

    Optional:
    lower_is_better  names of the metrics of which a smaller value is better, for eval.patience and checkpoint.best.
                     Default: those with the word loss, error, mae, mse or rmse, as in log_loss. Of all others a larger
                     value is better
    measured         how metrics are measured, in a few words, for those that settings change: best values of
                     checkpoints are compared with equal ones alone
    best_at          metric -> its best value, for metrics that may be too small and too large"""

    sample_bytes: int
    keys_per_sample: dict[str, int]
    has_dense_layers: bool = True

    def most_keys(self, num_samples: int) -> dict[str, int]:
        """table -> largest number of keys of a batch of so many samples, before equal ones are merged."""
        return {name: num_samples * num for name, num in self.keys_per_sample.items()}

    def model_arguments(self, dim: int) -> dict[str, int]:
        """Arguments of the model's constructor in addition to its own settings. dim: table.dim of the settings."""

    def complete(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with layers that the task adds to it."""
        return model

    def tables(self, model: torch.nn.Module) -> dict[str, TableSpec]:
        """The tables that a model reads, by name. Raises UserError for a model that does not specify them."""

    def opened(self, tables: Mapping[str, EmbeddingTable]) -> None:
        """Called once, when the tables are open and no batch is made yet. Collective."""

    def batches(self, device: torch.device) -> Callable[[Any], Any]:
        """A thread-safe function that makes a batch of samples for this device. It raises UserError for invalid
        samples."""

    def keys(self, batch) -> dict[str, Tensor]:
        """table -> the batch's unique keys, (U,) int64 on the CPU."""

    def split(self, batch, num: int) -> list[tuple[Any, float]]:
        """At most `num` parts of a batch, with the same keys, and the share that the loss of each has in that of the
        batch, for train.accumulate. A task that does not define it computes a batch at once."""
        raise NotImplementedError

    def loss(self, forward: Callable, rows: dict[str, Tensor], batch) -> Tensor:
        """The mean loss of a batch, (). forward(rows, batch): the model. rows: table -> (U, dim) float32, which require
        gradients. Raises UserError if the model returns an unexpected value."""

    def predict(self, forward: Callable, rows: dict[str, Tensor], batch) -> tuple[np.ndarray, ...]:
        """Inputs of the metrics for a held-out batch: columns (n, ...), in the order of its samples."""

    def evaluate(self, evaluation: Evaluation, step: int) -> list[np.ndarray] | None:
        """The columns of all held-out samples after `step` steps, for figures(): on rank 0, None on other ranks; [] if
        there are no samples. By default those of predict(), each rank with a share of the samples. Collective."""
        return evaluation.columns(self, step)

    def figures(self, columns: list[np.ndarray]) -> dict[str, float | None]:
        """Metrics of the columns of all held-out batches, [] if there are none; None for an undefined metric."""

    def curves(self, columns: list[np.ndarray]) -> dict[str, list]:
        """Curves of the columns of figures() for the report (hetmpi/tasks/curves.py), {} without."""
        return {}

    def without_figures(self, columns: list[np.ndarray]) -> str | None:
        """Reason in one sentence why a metric is undefined; None if all are defined."""

    def not_finite(self, batch) -> str | None:
        """Description in one sentence of NaN or infinite values in a batch; None if there are none."""

    def final_figures(self, evaluation: Evaluation) -> dict[str, float | None]:
        """Metrics of the trained model for the end of a run, on rank 0, under other names than those of figures().
        REQUIRES: a flush since the last write. Collective."""
        return {}

    def predict_settings(self, is_of_files: bool) -> str | None:
        """What `hetmpi predict CHECKPOINT` takes for a model of this task, as `data.path=FILES out=OUT.parquet`; None
        if it has no predictions. is_of_files: whether the data come from files, so that others can be read."""
        return None

    def final_bytes(self, model: torch.nn.Module) -> int:
        """Memory of a cluster node for final_figures()."""
        return 0
