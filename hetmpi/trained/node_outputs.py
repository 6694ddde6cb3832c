"""Outputs of a checkpoint's model for all nodes of its graph, over all their neighbours: classes, and activations of
the last hidden layer, by the ids of nodes in the user's data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hetmpi.checkpoint.dense_state import attempt
from hetmpi.checkpoint.manifest import DENSE, read_manifest, tables_of
from hetmpi.checkpoint.shard_files import shards_of
from hetmpi.data.graph.trained_inputs import TrainedInputs
from hetmpi.errors import UserError
from hetmpi.run.output import cannot_write, part_of
from hetmpi.tasks.inference import Inference, activation_bytes
from hetmpi.trained.saved_data import source_of
from hetmpi.trained.saved_model import Saved, check_graph, dense_layers, dense_state
from hetmpi.world.memory import refuse_if_short, size_text
from hetmpi.world.world import World

CHUNK = 4096  # nodes that a rank computes at a time


def is_of_nodes(manifest: dict) -> bool:
    """Whether a checkpoint is of task=node."""
    sizes = manifest.get("model_sizes")
    return isinstance(sizes, dict) and "num_layers" in sizes


class NodeOutputs:
    """The outputs of one checkpoint. Each rank computes those of its share of the nodes; rank 0 writes all of them in
    the order of the nodes' numbers."""

    def __init__(
        self, world: World, checkpoint: Path, overrides: list[str], config_dir: str | None = None,
        allow: Sequence[str] = (), new_nodes: bool = False,
    ):  # fmt: skip
        """overrides: Hydra overrides of data settings. allow: as for dense_layers. new_nodes: whether the graph may be
        another one than that of the training, whose nodes, words and numbers are found by their names. Collective.
        Raises UserError for an incomplete checkpoint, data of another shape, and if memory is short."""
        self.world, manifest = world, read_manifest(checkpoint)
        shards = shards_of(checkpoint, manifest)
        for shard in (shard for of_table in shards.values() for shard in of_table):
            shard.check()
        [(name, table)] = tables_of(manifest).items()
        self.saved = Saved(table, shards[name])
        state = dense_state(checkpoint, manifest)
        self.model, _ = dense_layers(checkpoint, manifest, state, allow)
        self.source = source_of(world, manifest, overrides, config_dir)
        self.class_names = getattr(self.source, "class_names", [])
        if new_nodes:
            self._take_inputs(checkpoint, state, table["num_rows"], manifest["model_sizes"]["num_classes"])
        trained, found = {**manifest["model_sizes"], "num_rows": table["num_rows"]}, self._sizes()
        for name, size in found.items():
            if size != trained[name]:
                raise UserError(f"{checkpoint} was trained on data with {name}={trained[name]}, here it is {size}")
        if not new_nodes:
            check_graph(checkpoint, manifest, self.source)
        self.inference = Inference(world, self.source, self.model, CHUNK, torch.device("cpu"))

        def message(need, place, free):
            return (
                f"the layers of all nodes need {size_text(need)} on {world.host}, {size_text(free)} are free in {place}"
            )

        need = activation_bytes(self.source, self.inference.sizes) if world.node.rank == 0 else 0
        refuse_if_short(world, need, world.node.size > 1, message)

    def _take_inputs(self, checkpoint: Path, state: dict, num_rows: int, num_classes: int):
        """Gives the nodes of another graph the rows of the training's. Raises UserError."""
        data, source = state.get("data") or {}, self.source
        if "key_hashes" not in data or not hasattr(source, "take_inputs"):
            raise UserError(
                f"new_nodes=true: {checkpoint} is not of tables of nodes and edges, whose nodes and words have names"
            )
        arrays, made = {name: tensor.numpy() for name, tensor in data.items()}, []
        attempt(f"{checkpoint / DENSE}: data", lambda: made.append(TrainedInputs.from_arrays(arrays, num_rows)))
        [trained] = made
        bare, unknown = source.take_inputs(trained)
        if bare and not source.num_dense and source.node_ids and len(source.field_rows_of_files) == 1:
            raise UserError(
                f"new_nodes=true: the model knows a node by its own row alone, which {bare:,} nodes lack: train with "
                "words or numbers of the nodes, so that new ones have an input"
            )
        self.class_names, source.num_classes = trained.class_names, num_classes
        if self.world.rank == 0:
            print(
                f"hetmpi: {unknown:,} ids of nodes and words came after the training and have no row; {bare:,} of "
                f"{source.num_nodes:,} nodes have none at all",
                flush=True,
            )

    def _sizes(self) -> dict:
        source = self.source
        if not hasattr(source, "fanout"):
            raise UserError(f"{source.name} is no graph")
        return {
            "num_dense": source.num_dense,
            "num_classes": source.num_classes,
            "num_layers": len(source.fanout),
            "num_rows": source.num_rows,
        }

    def write(self, out: Path, with_hidden: bool, with_classes: bool = True) -> int:
        """Writes a Parquet file; returns the number of nodes on rank 0. Collective. Raises UserError on rank 0 if it
        cannot be written."""
        tables = self._in_order(self._tables(with_hidden, with_classes))
        if self.world.rank > 0:
            return len(list(tables))
        with part_of(out) as part, cannot_write(out):
            write_parquet(part, tables)
        return self.source.num_nodes

    def _tables(self, with_hidden: bool, with_classes: bool) -> Iterator[pa.Table]:
        """Of this rank's share, in chunks."""
        for nodes, hidden, logits in self.inference.outputs(self._read):
            columns = {"node": pa.array(self.source.names(nodes))}
            if with_classes:
                columns |= dict(zip(("prediction", "probability"), self._classes(logits)))
            if with_hidden:
                width = hidden.shape[1]
                columns["hidden"] = pa.FixedSizeListArray.from_arrays(pa.array(hidden.reshape(-1).copy()), width)
            yield pa.table(columns)

    def _classes(self, logits: Tensor) -> tuple[pa.Array, pa.Array]:
        """The predicted classes of each node, by name, and their probabilities."""
        names = np.array(self.class_names or range(self.source.num_classes))
        if not self.source.is_multilabel:
            probability, prediction = torch.softmax(logits, 1).max(1)
            return pa.array(names[prediction.numpy()]), pa.array(probability.numpy())
        is_predicted = logits > 0
        offsets = pa.array(np.concatenate([[0], is_predicted.sum(1).cumsum(0).numpy()]).astype(np.int32))
        values = names[is_predicted.nonzero()[:, 1].numpy()], torch.sigmoid(logits)[is_predicted].numpy()
        prediction, probability = (pa.ListArray.from_arrays(offsets, pa.array(value)) for value in values)
        return prediction, probability

    def _read(self, keys: Tensor) -> Tensor:
        rows = np.empty((len(keys), self.saved.dim), np.float32)
        self.saved.read(keys.numpy(), rows)
        return torch.from_numpy(rows)

    def _in_order(self, mine: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """On rank 0 the tables of all shares in order; other ranks send theirs. Collective."""
        world = self.world
        if world.rank > 0:
            sent = [world.comm.isend(table, dest=0) for table in mine]
            for request in [*sent, world.comm.isend(None, dest=0)]:
                request.wait()
            return
        yield from mine
        for rank in self.inference.order[1:]:
            while (table := world.comm.recv(source=rank)) is not None:
                yield table


def write_parquet(path: Path, tables: Iterator[pa.Table]):
    """Writes tables of one schema, at least one."""
    first = next(tables)
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table.cast(first.schema))
