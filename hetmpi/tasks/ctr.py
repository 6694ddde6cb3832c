"""Click-through rate: the probability of label 1 of a sample with categorical and numeric features."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetmpi.data.batch import Batch, Samples, to_batch
from hetmpi.data.gpu_batch import GpuBatches
from hetmpi.data.source import Source
from hetmpi.errors import UserError, doing
from hetmpi.metrics import auc, log_loss, without_auc
from hetmpi.table.group import TableSpec

TABLE = "table"


class ClickSource(Source, Protocol):
    """Requirements of this task on a source. Samples are hetmpi.data.batch.Samples.

    num_rows    rows of the embedding table
    num_fields, num_dense  categorical and numeric features
    field_rows  (F,) rows of each field, which sum to num_rows"""

    num_rows: int
    num_fields: int
    num_dense: int
    field_rows: list[int]


class ClickThroughRate:
    """See hetmpi/tasks/task.py, Task. One table, with separate rows for each field.

    A model is constructed with num_fields, num_dense and dim. Its `row_dim` (int) is the width of its rows, and
    `forward(rows, batch)` maps rows (U, row_dim) float32 and a hetmpi.data.batch.Batch to logits (B,) float32."""

    def __init__(self, source: ClickSource, loss: torch.nn.Module):
        """loss(logits (B,), labels (B,)) -> ()."""
        self.source, self.criterion = source, loss
        self.sample_bytes = 16 * source.num_fields + 4 * source.num_dense + 4  # ids, their indices among the keys, ...
        self.keys_per_sample = {TABLE: source.num_fields}

    def model_arguments(self, dim: int) -> dict[str, int]:
        return {"num_fields": self.source.num_fields, "num_dense": self.source.num_dense, "dim": dim}

    def tables(self, model: torch.nn.Module) -> dict[str, TableSpec]:
        name, row_dim = type(model).__name__, getattr(model, "row_dim", None)
        if not isinstance(row_dim, int):
            raise UserError(f"{name}: set self.row_dim to the width of the table rows that the model reads (int)")
        return {TABLE: TableSpec(self.source.num_rows, row_dim, self.source.field_rows)}

    def batches(self, device: torch.device) -> Callable[[Samples], Batch]:
        return to_batch if device.type == "cpu" else GpuBatches(device, self.source.num_rows)

    def keys(self, batch: Batch) -> dict[str, Tensor]:
        return {TABLE: batch.keys}

    def loss(self, forward: Callable, rows: dict[str, Tensor], batch: Batch) -> Tensor:
        logits = self._logits(forward, rows, batch)
        with doing(f"the loss {type(self.criterion).__name__}"):
            loss = self.criterion(logits, batch.label)
        if not torch.is_tensor(loss) or loss.shape != ():
            kind = f"shape {tuple(loss.shape)}" if torch.is_tensor(loss) else type(loss).__name__
            raise UserError(f"the loss {type(self.criterion).__name__} must return one number, the mean, got {kind}")
        return loss

    def predict(self, forward: Callable, rows: dict[str, Tensor], batch: Batch) -> tuple[np.ndarray, ...]:
        """(label, logit) or (label, logit, teacher), each (B,) float32."""
        label, logit = batch.label.cpu().numpy(), self._logits(forward, rows, batch).cpu().numpy()
        return (label, logit) if batch.teacher is None else (label, logit, batch.teacher.numpy())

    def figures(self, columns: list[np.ndarray]) -> dict[str, float | None]:
        """auc, log_loss, and teacher_auc if the true probabilities are known."""
        label, logit, *teacher = columns or [np.empty(0, np.float32)] * 2
        figures = {"auc": auc(label, logit), "log_loss": log_loss(label, logit)}
        figures["teacher_auc"] = auc(label, teacher[0]) if teacher else None
        return {name: None if value is None or math.isnan(value) else value for name, value in figures.items()}

    def without_figures(self, columns: list[np.ndarray]) -> str | None:
        cause = without_auc(*(columns or [np.empty(0, np.float32)] * 2)[:2])
        return f"no AUC: {cause}" if cause else None

    def not_finite(self, batch: Batch) -> str | None:
        num = len(batch.label)
        if num == 0:
            return "the batch is empty: the data's train(start, stop) returned no samples"
        dense = {f"dense feature {i}": column for i, column in enumerate(batch.dense.unbind(1))}
        for name, values in {"label": batch.label, **dense}.items():
            wrong = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
            if wrong:
                return (
                    f"the data give {name} = {values[wrong[0]].item()} in {len(wrong)} of the {num} samples of this "
                    f"rank's batch, first in sample {wrong[0]}"
                )
        return None

    def _logits(self, forward: Callable, rows: dict[str, Tensor], batch: Batch) -> Tensor:
        """The model's logits (B,). Raises UserError for another shape."""
        logits = forward(rows[TABLE], batch)
        if logits.shape != batch.label.shape:
            raise UserError(
                f"the model's forward must return logits of shape {tuple(batch.label.shape)}, got {tuple(logits.shape)}"
            )
        return logits
