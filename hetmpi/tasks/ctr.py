"""Click-through rate: the probability of label 1 of a sample with categorical and numeric features; or, by the same
models, a number (data.label_kind=number)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetmpi.data.batch import NO_GROUP, Batch, FeatureBatches, Samples, to_batch
from hetmpi.data.features import SEQUENCE, TABLE, Feature, FeatureTable, num_fields_of, pools_of
from hetmpi.data.gpu_batch import GpuBatches, SentBatches
from hetmpi.data.source import Source
from hetmpi.errors import UserError, doing, one_line
from hetmpi.gpu import gpu_of
from hetmpi.layers import FeatureRows
from hetmpi.metrics import (
    accuracy,
    auc,
    calibration,
    class_log_loss,
    grouped_auc,
    log_loss,
    macro_auc,
    mae,
    normalised_entropy,
    rmse,
    soft_auc,
    soft_calibration,
    soft_grouped_auc,
    soft_log_loss,
    soft_normalised_entropy,
    without_auc,
)
from hetmpi.table.spec import TableSpec
from hetmpi.tasks.curves import curves
from hetmpi.tasks.losses import CLASSES, CLICK, NUMBER, PROBABILITY, ClassLoss, check_loss, check_weighted
from hetmpi.tasks.task import Task

METRICS = {"auc": auc, "log_loss": log_loss, "normalised_entropy": normalised_entropy, "calibration": calibration}
SOFT_METRICS = {  # of labels between 0 and 1, and of weighted samples
    "auc": soft_auc,
    "log_loss": soft_log_loss,
    "normalised_entropy": soft_normalised_entropy,
    "calibration": soft_calibration,
}
LOSSES = ("log_loss", "normalised_entropy", "rmse", "mae")  # metrics of which a smaller value is better


class ClickSource(Source, Protocol):
    """Requirements of this task on a source. Samples are hetmpi.data.batch.Samples.

    num_dense   numeric features

    and of its categorical features either, for one value each and one table,

    num_fields  their number
    num_rows    rows of the embedding table

    or

    features    those of one value first, in the order of Samples.ids, then those of several, in that of Samples.bags
    tables      their tables by name (hetmpi/data/features.py, arrange)

    Optional, of several labels:
    labels         their names, in the order of the columns of Samples.label
    label_weights  factors of their losses; None: 1 each

    Optional, of weighted samples:
    sample_weight  the column of the weights, which are Samples.weight; None: all are 1

    Optional, with label_kind "classes", where labels are numbers of classes, NaN for a class that is not known:
    classes        their names

    Optional, where several values may have one key:
    group_by(name)  from then on samples have the values of this feature as `group`"""

    num_dense: int
    num_fields: int
    num_rows: int
    features: list[Feature]
    tables: dict[str, FeatureTable]


class ClickThroughRate(Task):
    """See hetmpi/tasks/task.py, Task. Every categorical feature has its own rows, in one table or several.

    A model is constructed with num_fields, num_dense and dim. Its `row_dim` (int) is the width of its rows, and
    `forward(rows, batch)` maps rows (U, row_dim) float32 and a hetmpi.data.batch.Batch to logits (B,) float32. For
    several labels it is constructed with num_labels also, and the logits are (B, num_labels); of classes likewise with
    num_classes.

    The loss of several labels is the weighted sum of those of each, which is that of the samples that have it, times
    their share of the batch: so it is a mean over the samples of all ranks, whichever have a label.

    joins  whether a model reads joined rows (hetmpi/layers.py, FeatureRows): features with several values, several
           tables, or another width than the model's"""

    def __init__(self, source: ClickSource, loss: torch.nn.Module, group: str | None = None):
        """loss(logits (B,), labels (B,)) -> (), of weighted samples loss(logits, labels, weights (B,)), the mean.
        group: name of the feature, of one value, whose values are the groups of `gauc`, which leaves out samples
        without a value; None: it is not computed."""
        if not hasattr(source, "num_fields") and not hasattr(source, "features"):
            raise UserError(
                f"task=ctr needs samples of fields, {source.name} has none: choose other data, for a graph task=node"
            )
        if getattr(source, "label_kind", "click") == "none":
            raise UserError("data.label_kind=none: rows without a label are for task=retrieval")
        kind = getattr(source, "label_kind", CLICK)
        check_loss(loss, kind, f"task=ctr with data.label_kind={kind}")
        self.source, self.criterion = source, loss
        self.predicts_numbers, self.is_soft = kind == NUMBER, kind == PROBABILITY
        self.is_weighted = getattr(source, "sample_weight", None) is not None
        self.classes = tuple(source.classes) if kind == CLASSES else ()
        if self.is_weighted:
            check_weighted(loss)
        if self.classes and isinstance(loss, ClassLoss):
            loss.name_classes(self.classes)
        self.features: list[Feature] | None = getattr(source, "features", None)
        self.num_fields = source.num_fields if self.features is None else num_fields_of(self.features)
        self.labels = tuple(getattr(source, "labels", None) or ("label",))
        self.weights = getattr(source, "label_weights", None) or [1.0] * len(self.labels)
        self.lower_is_better = [name for one in LOSSES for name in self._of_labels(one)]
        self.best_at = dict.fromkeys(self._of_labels("calibration"), 1.0)
        # ids, their indices among the keys, ...
        self.sample_bytes = 16 * self.num_fields + 4 * source.num_dense + 4 * (len(self.labels) + self.is_weighted)
        self._on_gpu: GpuBatches | None = None  # one for all loaders of the run
        self._sent: SentBatches | None = None  # likewise
        self._group = None if group is None else self._place_of(group)
        if group is not None and hasattr(source, "group_by"):
            source.group_by(group)
        counted = Counter(feature.table for feature in self.features or [])
        self.keys_per_sample = {TABLE: self.num_fields} if self.features is None else dict(counted)
        self.joins = self.features is not None and (
            len(source.tables) > 1
            or any(table.open for table in source.tables.values())
            or any(feature.pool is not None for feature in self.features)
            or any(table.dim is not None for table in source.tables.values())
        )

    def _place_of(self, group: str) -> int:
        """The column of Samples.ids that holds a feature. Raises UserError if there is none, or one of several
        values."""
        if self.predicts_numbers or self.classes:
            kind = self.source.label_kind
            raise UserError(f"eval.group={one_line(group)} is for labels 0 or 1, data.label_kind is {kind}")
        names = [feature.name for feature in self.features or [] if feature.pool is None]
        if group not in names:
            known = ", ".join(names[:20]) or "none, as features have no names"
            raise UserError(
                f"eval.group={one_line(group)} must name a categorical column of one value: {self.source.name} "
                f"has {known}"
            )
        return names.index(group)

    def model_arguments(self, dim: int) -> dict[str, int]:
        several = {"num_labels": len(self.labels)} if len(self.labels) > 1 else {}
        several |= {"num_classes": len(self.classes)} if self.classes else {}
        return {"num_fields": self.num_fields, "num_dense": self.source.num_dense, "dim": dim, **several}

    def complete(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model behind the tables of its features, if they need to be joined. Raises UserError for a model that
        needs other features, or does not read the sequences that there are."""
        self._check_features(model)
        if not self.joins:
            return model
        row_dim = row_dim_of(model)
        dims = {name: row_dim if table.dim is None else table.dim for name, table in self.source.tables.items()}
        return FeatureRows(model, dims, pools_of(self.features), [feature.name for feature in self.features])

    def _check_features(self, model: torch.nn.Module):
        features = self.features or []
        sequences = [feature.name for feature in features if feature.pool == SEQUENCE]
        fields = [feature.name for feature in features if feature.pool != SEQUENCE]
        needed = getattr(model, "needed_sequences", None)
        if needed is None and sequences:
            raise UserError(
                f"{type(model).__name__} does not read {', '.join(sequences)}, of data.columns with pool: none: choose "
                "pool: mean, or a model of sequences, as model=din"
            )
        for wanted, known, kind in (
            (needed or [], sequences, "a column with pool: none"),
            (getattr(model, "needed_fields", []), fields, "a column of one value"),
        ):
            for name in wanted:
                if name not in known:
                    there = one_line(", ".join(known), 300) or "none"
                    raise UserError(
                        f"{type(model).__name__}: {one_line(name)} must be {kind}, and {self.source.name} has {there}"
                    )

    def tables(self, model: torch.nn.Module) -> dict[str, TableSpec]:
        row_dim = row_dim_of(model)
        if self.features is None:
            return {TABLE: TableSpec(self.source.num_rows, row_dim)}
        return {
            name: TableSpec(table.num_rows, table.dim or row_dim, table.optim, table.cache, open=table.open)
            for name, table in self.source.tables.items()
        }

    def batches(self, device: torch.device) -> Callable[[Samples], Batch]:
        if self._group is None:
            return self._maker(device)
        make, place = self._maker(device), self._group
        return lambda samples: replace(
            make(samples), group=samples.ids[:, place] if samples.group is None else samples.group
        )

    def _maker(self, device: torch.device) -> Callable[[Samples], Batch]:
        if self.joins:
            tables = self.source.tables
            of_open = [name for name, table in tables.items() if table.open]
            make = FeatureBatches(self.features, list(tables), of_open)
            if of_open or gpu_of(device) is None:  # ids of open tables are translated on the CPU, later
                return make
            if self._sent is None or self._sent.device != device:
                self._sent = SentBatches(device, make)
            return self._sent
        if gpu_of(device) is None:
            return to_batch
        made = self._on_gpu
        if made is None or (made.device, made.num_rows) != (device, self.source.num_rows):
            self._on_gpu = GpuBatches(device, self.source.num_rows)
        return self._on_gpu

    def keys(self, batch: Batch) -> dict[str, Tensor]:
        return batch.keys

    def split(self, batch: Batch, num: int) -> list[tuple[Batch, float]]:
        size = len(batch.label)
        ends = [size * i // num for i in range(num + 1)]
        return [(batch[slice(i, j)], (j - i) / size) for i, j in zip(ends, ends[1:]) if j > i] or [(batch, 1.0)]

    def loss(self, forward: Callable, rows: dict[str, Tensor], batch: Batch) -> Tensor:
        logits = self._logits(forward, rows, batch)
        if len(self.labels) == 1:
            return self._loss(logits, batch.label.long() if self.classes else batch.label, batch.weight)
        losses = []
        for logit, label, weight in zip(logits.unbind(1), batch.label.unbind(1), self.weights):
            has = ~label.isnan()
            of_samples = None if batch.weight is None else batch.weight[has]
            part = self._loss(logit[has], label[has], of_samples) if has.any() else logit.sum() * 0
            losses.append(part * (weight * has.float().mean()))
        return torch.stack(losses).sum()

    def _loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """The mean loss of samples (n,), ()."""
        with doing(f"the loss {type(self.criterion).__name__}"):
            loss = self.criterion(logits, labels, *([] if weights is None else [weights]))
        if not torch.is_tensor(loss) or loss.shape != ():
            kind = f"shape {tuple(loss.shape)}" if torch.is_tensor(loss) else type(loss).__name__
            raise UserError(f"the loss {type(self.criterion).__name__} must return one number, the mean, got {kind}")
        return loss

    def predict(self, forward: Callable, rows: dict[str, Tensor], batch: Batch) -> tuple[np.ndarray, ...]:
        """label and logit, (B,) or (B, K) of K labels, and (B,) and (B, C) of C classes, then the group if eval.group
        names one, the weights of weighted samples, and teacher if it is known: (B,) each."""
        label, logit = batch.label.cpu().numpy(), self._logits(forward, rows, batch).cpu().numpy()
        teacher = None if batch.teacher is None else batch.teacher.numpy()
        weight = None if batch.weight is None else batch.weight.cpu().numpy()
        return tuple(column for column in (label, logit, batch.group, weight, teacher) if column is not None)

    def figures(self, columns: list[np.ndarray]) -> dict[str, float | None]:
        """auc, log_loss, normalised_entropy and calibration, gauc over the groups of eval.group, and teacher_auc if the
        true probabilities are known; of numbers rmse and mae; of classes accuracy, log_loss and auc, the mean over the
        classes against all others. Of several labels the means of these over the labels, and
        then those of each, as auc_click."""
        of_labels = [self._figures(*one) for one in self._by_label(columns)]
        if len(of_labels) == 1:
            return of_labels[0]
        means, each = {}, {}
        for name in of_labels[0]:
            values = [figures[name] for figures in of_labels]
            mean, *names = self._of_labels(name)
            means[mean] = None if None in values else float(np.mean(values))
            each |= dict(zip(names, values))
        return means | each

    def _of_labels(self, metric: str) -> list[str]:
        """Names of a metric: that of the mean over the labels, and those of each of several."""
        return [metric, *(f"{metric}_{label}" for label in self.labels if len(self.labels) > 1)]

    def _by_label(self, columns: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Of each label the columns of the samples that have it: label (n,), logit (n,), others."""
        num = len(self.labels)
        if self.classes:
            label, *others = columns or [np.empty(0), np.empty((0, len(self.classes)), np.float32)]
            has = ~np.isnan(label)
            return [[label[has].astype(np.int64), *(column[has] for column in others)]]
        if num == 1:
            return [columns or [np.empty(0, np.float32)] * 2]
        label, logit, *others = columns or [np.empty((0, num), np.float32)] * 2
        found = []
        for i, has in enumerate(~np.isnan(label.T)):
            found.append([label[has, i], logit[has, i], *(column[has] for column in others)])
        return found

    def _figures(self, label: np.ndarray, logit: np.ndarray, *others: np.ndarray) -> dict[str, float | None]:
        """The metrics of one label."""
        rest = list(others)
        group = rest.pop(0) if self._group is not None and rest else None
        weight = rest.pop(0) if self.is_weighted and rest else None
        if self.predicts_numbers:
            figures = {"rmse": rmse(label, logit, weight), "mae": mae(label, logit, weight)}
        elif self.classes:
            figures = {
                "accuracy": accuracy(label, logit.argmax(1), weight),
                "log_loss": class_log_loss(label, logit, weight),
                "auc": macro_auc(label, logit, weight),
            }
        else:
            if weight is None and self.is_soft:
                weight = np.ones(len(label), np.float32)
            metrics = METRICS if weight is None else SOFT_METRICS
            weights = [] if weight is None else [weight]
            figures = {name: metric(label, logit, *weights) for name, metric in metrics.items()}
            if self._group is not None:
                figures["gauc"] = None if group is None else gauc(label, logit, weight, group)
            if len(self.labels) == 1:
                figures["teacher_auc"] = metrics["auc"](label, rest[0], *weights) if rest else None
        return {name: None if value is None or math.isnan(value) else value for name, value in figures.items()}

    def curves(self, columns: list[np.ndarray]) -> dict[str, list]:
        """Of several labels those of the first."""
        if self.predicts_numbers or self.classes:
            return {}
        label, logit, *others = self._by_label(columns)[0]
        weights = others[self._group is not None :] if self.is_weighted else []
        return curves(label, logit, *weights[:1])

    def without_figures(self, columns: list[np.ndarray]) -> str | None:
        for name, (label, logit, *others) in zip(self.labels, self._by_label(columns)):
            of_label = f" of {one_line(name)}" if len(self.labels) > 1 else ""
            metric = "RMSE" if self.predicts_numbers else "AUC"
            cause = None if self.predicts_numbers or self.classes else without_auc(label, logit)
            if self.classes and len(label) and label.min() == label.max():
                cause = f"all {len(label):,} held-out samples have the class {one_line(self.classes[label[0]])}"
            elif np.isnan(logit).any():
                cause = f"{int(np.isnan(logit).sum()):,} of {logit.size:,} predictions are NaN"
            elif cause is None and self.is_weighted and self._figures(label, logit, *others)[metric.lower()] is None:
                cause = "the weights of the held-out samples, or of all with one label, are 0"
            if not len(label):
                cause = "no held-out sample has this label" if of_label else "there are no held-out samples"
            if cause:
                return f"no {metric}{of_label}: {cause}"
        return None

    def predict_settings(self, is_of_files: bool) -> str | None:
        return "data.path=FILES out=OUT.parquet" if is_of_files else "out=OUT.parquet"

    def not_finite(self, batch: Batch) -> str | None:
        num = len(batch.label)
        if num == 0:
            return "the batch is empty: the data's train(start, stop) returned no samples"
        dense = {f"dense feature {i}": column for i, column in enumerate(batch.dense.unbind(1))}
        if batch.label.dim() == 1:
            label = {"label": batch.label}
        else:  # where NaN is a label that is missing
            label = {f"label {name}": one[~one.isnan()] for name, one in zip(self.labels, batch.label.unbind(1))}
        for name, values in {**label, **dense}.items():
            wrong = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
            if wrong:
                return (
                    f"the data give {name} = {values[wrong[0]].item()} in {len(wrong)} of the {num} samples of this "
                    f"rank's batch, first in sample {wrong[0]}"
                )
        return None

    def _logits(self, forward: Callable, rows: dict[str, Tensor], batch: Batch) -> Tensor:
        """The model's logits, (B,), (B, K) or (B, C). Raises UserError for another shape."""
        logits = forward(rows if self.joins else rows[TABLE], batch)
        expected = (len(batch.label), len(self.classes)) if self.classes else tuple(batch.label.shape)
        if tuple(logits.shape) != expected:
            raise UserError(f"the model's forward must return logits of shape {expected}, got {tuple(logits.shape)}")
        return logits


def gauc(label: np.ndarray, logit: np.ndarray, weight: np.ndarray | None, group: np.ndarray) -> float:
    """grouped_auc() or soft_grouped_auc() of the samples (n,) that are in a group."""
    has = group != NO_GROUP
    if weight is None:
        return grouped_auc(label[has], logit[has], group[has])
    return soft_grouped_auc(label[has], logit[has], weight[has], group[has])


def row_dim_of(model: torch.nn.Module) -> int:
    """The width of the rows that a model reads. Raises UserError for a model that does not say it."""
    row_dim = getattr(model, "row_dim", None)
    if not isinstance(row_dim, int):
        name = type(model).__name__
        raise UserError(f"{name}: set self.row_dim to the width of the table rows that the model reads (int)")
    return row_dim
