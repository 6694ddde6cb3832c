"""Reads a trained model from a checkpoint, without MPI: rows by key, and the dense layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hetmpi.checkpoint.dense_state import attempt, read_state
from hetmpi.checkpoint.manifest import DENSE, Entries, brief
from hetmpi.checkpoint.shard_files import ShardFiles, collect
from hetmpi.comm.route import Route, make_partition
from hetmpi.data.batch import Batch
from hetmpi.errors import UserError

MOST_FIELDS = 1 << 20  # also the maximum for numbers in a row
BLOCK_BYTES = 256 << 20  # rows in memory at a time; for each block the files of all shards are opened once


class Saved:
    """A table in a checkpoint. table: its entry in the manifest; shards: the files of each rank's shard."""

    def __init__(self, table: dict, shards: list[ShardFiles]):
        self.num_rows, self.dim, self.shards = table["num_rows"], table["dim"], shards
        self.partition = make_partition(table["partition"], table["num_rows"], len(shards))

    def blocks(self):
        """(first key, rows (n, dim) float32) in the order of keys."""
        num = max(1, BLOCK_BYTES // (4 * self.dim))
        for begin in range(0, self.num_rows, num):
            keys = np.arange(begin, min(begin + num, self.num_rows))
            rows = np.empty((len(keys), self.dim), np.float32)
            self.read(keys, rows)
            yield begin, rows

    def read(self, keys: np.ndarray, rows: np.ndarray):
        """Reads the rows of keys (n,) int64 into rows (n, dim) float32."""
        collect(self.shards, Route.of_keys(self.partition, keys), "weight", rows)


class OfTensors(torch.nn.Module):
    """A model whose inputs are only tensors, without a Batch."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, rows, index, dense):
        return self.model(rows, Batch(None, index, dense, None))


def dense_layers(checkpoint: Path, manifest: dict, dim: int) -> tuple[OfTensors, tuple]:
    """The dense layers of a checkpoint that the trainer wrote, and example inputs: two samples with rows of `dim`.
    Raises UserError if the manifest does not describe the model, or describes one that does not fit the weights in
    dense.pt."""
    if "model_config" not in manifest:
        raise UserError(f"{checkpoint} does not describe its model: export only its rows with dense=none")
    said = Entries(f"{checkpoint}: manifest.json", manifest)
    config, sizes = said.part("model_config"), said.part("model_sizes")
    arguments = {name: sizes.integer(name, 0, MOST_FIELDS) for name in ("num_fields", "num_dense", "dim")}
    state = read_state(checkpoint / DENSE, manifest["size"])
    if "model" not in state:
        raise UserError(f"{checkpoint / DENSE} has no model: export only the rows with dense=none")
    rows = torch.zeros(arguments["num_fields"] + 1, dim)  # at least 2 rows: ONNX would export a size of 1 as constant
    index = torch.arange(arguments["num_fields"]).repeat(2, 1)
    inputs = rows, index, torch.zeros(2, arguments["num_dense"])
    made = []

    def build():
        model = instantiate_model(config.values, arguments)
        model.load_state_dict(state["model"])
        made.append(OfTensors(model).eval())
        with torch.no_grad():
            made[0](*inputs)

    attempt(f"{checkpoint}: the model in its manifest", build)
    return made[0], inputs


def instantiate_model(config: dict, arguments: dict) -> torch.nn.Module:
    """hydra.utils.instantiate restricted to subclasses of torch.nn.Module, as the manifest is not trusted and its
    `_target_` could be any function. Raises UserError for other targets."""
    from hydra.utils import get_class, instantiate
    from omegaconf import OmegaConf

    parts = [config]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if "_target_" in part and not issubclass(get_class(part["_target_"]), torch.nn.Module):
                raise UserError(f"_target_ must be a torch.nn.Module, got {brief(part['_target_'])}")
            parts += part.values()
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, str) and "${" in part:  # an interpolation could produce another _target_
            raise UserError(f"values must be plain, got {brief(part)}")
    model = instantiate(OmegaConf.create(config), **arguments)
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"it makes a {type(model).__name__}, which is not a torch.nn.Module")
    return model
