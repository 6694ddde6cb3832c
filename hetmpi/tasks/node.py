"""Classes of the nodes of a graph: one class per node, or several labels, from a node's ids and numbers and those of
its neighbours, near and far."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from operator import mul
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetmpi.data.batch import Bag
from hetmpi.data.features import TABLE
from hetmpi.data.graph.samples import NodeBatch, NodeSamples, check_samples, to_batch
from hetmpi.data.source import Source
from hetmpi.errors import UserError, doing
from hetmpi.layers import segment_mean
from hetmpi.metrics import accuracy, macro_f1, micro_f1
from hetmpi.table.spec import TableSpec
from hetmpi.tasks.ctr import row_dim_of
from hetmpi.tasks.evaluation import Evaluation
from hetmpi.tasks.inference import Inference, activation_bytes, output_sizes
from hetmpi.tasks.losses import CLASSES, LABELS, ClassLoss, check_loss
from hetmpi.tasks.task import Task

TRAIN, VALID, TEST = 0, 1, 2  # parts of a split


class GraphSource(Source, Protocol):
    """Requirements of this task on a source. Samples are hetmpi.data.graph.samples.NodeSamples, whose heads are the
    samples that the trainer counts. Nodes are numbered from 0.

    num_nodes, num_classes
    num_dense      numbers of a node, 0 for none
    is_multilabel  whether a node has several labels: `num_classes` of 0 and 1
    num_rows       rows of the embedding table
    max_ids        most ids of a node
    fanout         neighbours sampled per node in each hop from the heads outwards: one layer of the model for each
    labels         (num_nodes,) int64, -1 for none; of several labels (num_nodes, num_classes) float32, NaN for none
    split          (num_nodes,) int8: 0 train, 1 valid, 2 test, -1 none
    class_names    (num_classes,) texts of the classes in the user's data; empty where they are numbers

    Optional:
    edge_weights(first, last)  weights (e,) float32 of neighbours(first, last), or None if all are 1
    digests        part of the graph -> its hash, in checkpoints, which other graphs are then refused with"""

    num_nodes: int
    num_classes: int
    num_dense: int
    is_multilabel: bool
    num_rows: int
    max_ids: int
    fanout: list[int]
    labels: np.ndarray
    split: np.ndarray
    class_names: list[str]

    def inputs(self, nodes: np.ndarray) -> tuple[Bag, np.ndarray]:
        """The ids of nodes (n,) int64, as keys, and their numbers (n, num_dense) float32."""

    def neighbours(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """All neighbours of nodes [first, last): offsets (last - first + 1,) int64 from 0, nodes (e,) int64."""

    def names(self, nodes: np.ndarray) -> np.ndarray:
        """The user's own ids of nodes (n,) int64: (n,) int64 or texts."""


class NodeClassification(Task):
    """See hetmpi/tasks/task.py, Task. A node's input is the mean of the rows of its ids beside its numbers.

    A model is constructed with dim, num_dense, num_classes and num_layers. Its `row_dim` (int) is the width of its
    rows; models/graph.py, NodeModel, describes `forward(x, blocks)` and `layer(number, x, block)`. `layer` is needed
    for `exact` and `hetmpi predict` only."""

    def __init__(self, source: GraphSource, loss: torch.nn.Module, exact: bool = True):
        """loss(logits (n, C), label (n,) or (n, C)) -> (), the mean. exact: whether a run ends with the metrics of the
        test nodes, with all neighbours in place of samples."""
        missing = [name for name in ("num_nodes", "fanout", "max_ids") if not hasattr(source, name)]
        if missing:
            raise UserError(
                f"task=node needs data of a graph, {source.name} has no {missing[0]}: choose other data, or task=ctr"
            )
        if not isinstance(exact, bool):
            raise UserError(f"task.exact must be true or false, got {exact}")
        check_loss(
            loss,
            LABELS if source.is_multilabel else CLASSES,
            f"task=node of {'several labels' if source.is_multilabel else 'one class'} per node",
        )
        if isinstance(loss, ClassLoss):
            names = [str(number) for number in range(source.num_classes)]
            loss.name_classes(list(getattr(source, "class_names", [])) or names)
        self.source, self.criterion, self.exact = source, loss, exact
        edges = list(accumulate(source.fanout, mul))
        num_nodes = min(1 + sum(edges), source.num_nodes)
        of_node = 8 + 8 + 16 * source.max_ids + 4 * source.num_dense  # its number, offset, ids and their places
        self.sample_bytes = (
            num_nodes * of_node + 8 * sum(edges) + (4 * source.num_classes if source.is_multilabel else 8)
        )
        self.keys_per_sample = {TABLE: num_nodes * source.max_ids}

    def model_arguments(self, dim: int) -> dict[str, int]:
        source = self.source
        return {
            "dim": dim,
            "num_dense": source.num_dense,
            "num_classes": source.num_classes,
            "num_layers": len(source.fanout),
        }

    def tables(self, model: torch.nn.Module) -> dict[str, TableSpec]:
        return {TABLE: TableSpec(self.source.num_rows, row_dim_of(model))}

    def batches(self, device: torch.device) -> Callable[[NodeSamples], NodeBatch]:
        source = self.source

        def made(samples: NodeSamples) -> NodeBatch:
            check_samples(samples, len(source.fanout), source.num_dense, source.num_classes, source.is_multilabel)
            return to_batch(samples)

        return made

    def keys(self, batch: NodeBatch) -> dict[str, Tensor]:
        return batch.keys

    def loss(self, forward: Callable, rows: dict[str, Tensor], batch: NodeBatch) -> Tensor:
        """The sum over the heads with a label, divided by the number of all heads, so that the mean over ranks is that
        of the global batch; 0 without heads."""
        logits, is_known = self._logits(forward, rows, batch), has_label(batch.label)
        num = int(is_known.sum())
        if num == 0:
            return 0.0 * logits.sum()
        if num < len(is_known):
            logits = logits[is_known]
        with doing(f"the loss {type(self.criterion).__name__}"):
            loss = self.criterion(logits, batch.label[is_known])
        if not torch.is_tensor(loss) or loss.shape != ():
            kind = f"shape {tuple(loss.shape)}" if torch.is_tensor(loss) else type(loss).__name__
            raise UserError(f"the loss {type(self.criterion).__name__} must return one number, the mean, got {kind}")
        return loss * (num / len(is_known))

    def predict(self, forward: Callable, rows: dict[str, Tensor], batch: NodeBatch) -> tuple[np.ndarray, ...]:
        """(label, prediction) of the heads with a label: as label_and_prediction."""
        return self._compared(batch.label.cpu(), self._logits(forward, rows, batch).cpu())

    def _compared(self, label: Tensor, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """label and predicted class of those with a label, (n,) int64; of several labels (n, C) bool."""
        is_known = has_label(label)
        label, logits = label[is_known], logits[is_known]
        if self.source.is_multilabel:
            return label.numpy() > 0.5, logits.numpy() > 0
        return label.numpy(), logits.argmax(1).numpy()

    def figures(self, columns: list[np.ndarray]) -> dict[str, float | None]:
        """accuracy and macro_f1; of several labels micro_f1 and macro_f1."""
        label, predicted = columns or [self._none()] * 2
        if self.source.is_multilabel:
            return {"micro_f1": micro_f1(label, predicted), "macro_f1": macro_f1(label, predicted)}
        return {"accuracy": accuracy(label, predicted), "macro_f1": macro_f1(label, predicted)}

    def _none(self) -> np.ndarray:
        """A column without nodes."""
        return np.empty((0, self.source.num_classes), bool) if self.source.is_multilabel else np.empty(0, np.int64)

    def without_figures(self, columns: list[np.ndarray]) -> str | None:
        missing = [name for name, value in self.figures(columns).items() if value is None]
        return f"no {missing[0]}: there are no held-out nodes with a label" if missing else None

    def final_bytes(self, model: torch.nn.Module) -> int:
        return activation_bytes(self.source, output_sizes(model, self.source)) if self._has_final() else 0

    def final_figures(self, evaluation: Evaluation) -> dict[str, float | None]:
        """The metrics of the test nodes, as test_accuracy, with all neighbours."""
        if not self._has_final():
            return {}
        world, mine = evaluation.world, []
        inference = Inference(
            world, self.source, evaluation.model, evaluation.batch_size, evaluation.device, evaluation.spans
        )
        for nodes, logits in inference.logits(evaluation.tables[TABLE].peek):
            is_test = self.source.split[nodes] == TEST
            label = torch.from_numpy(np.ascontiguousarray(self.source.labels[nodes][is_test]))
            mine.append(self._compared(label, logits[torch.from_numpy(is_test)]))
        gathered = world.comm.gather([np.concatenate(column) for column in zip(*mine)] if mine else [])
        if world.rank > 0:
            return {}
        columns = [np.concatenate(parts) for parts in zip(*(of_rank for of_rank in gathered if of_rank))]
        return {f"test_{name}": value for name, value in self.figures(columns).items()}

    def _has_final(self) -> bool:
        return self.exact and bool((self.source.split == TEST).any())

    def predict_settings(self, is_of_files: bool) -> str | None:
        return "out=OUT.parquet"

    def not_finite(self, batch: NodeBatch) -> str | None:
        wrong = torch.nonzero(~torch.isfinite(batch.dense))
        if len(wrong) == 0:
            return None
        node, column = wrong[0].tolist()
        return (
            f"the data give number {column} = {batch.dense[node, column].item()} in one of the {len(batch.dense):,} "
            f"nodes of this rank's batch, {len(wrong):,} times in all"
        )

    def _logits(self, forward: Callable, rows: dict[str, Tensor], batch: NodeBatch) -> Tensor:
        """The model's logits (B, C). Raises UserError for another shape."""
        x = torch.cat([segment_mean(rows[TABLE], batch.index, batch.offsets), batch.dense], dim=1)
        logits, expected = forward(x, batch.blocks), (len(batch.label), self.source.num_classes)
        if tuple(logits.shape) != expected:
            raise UserError(f"the model's forward must return logits of shape {expected}, got {tuple(logits.shape)}")
        return logits


def has_label(label: Tensor) -> Tensor:
    """Mask of the nodes with a label, (n,) bool. label (n,) int64 or (n, C) float32."""
    return ~label.isnan().any(1) if label.is_floating_point() else label >= 0
