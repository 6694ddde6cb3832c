"""Takes a checkpoint out of hetmpi: rows by key for numpy or Parquet, the dense layers as TorchScript.

    python -m hetmpi.export CHECKPOINT OUT [rows=npy|parquet|none] [dense=torchscript|none]

    OUT/rows.npy         (num_rows, dim) float32, row k of key k; numpy.load(..., mmap_mode="r") opens what is larger than memory
    OUT/rows.parquet     columns key (int64) and weight (fixed-size list of float32), in the order of keys
    OUT/dense.torchscript  forward(rows (U, dim), index (B, F) int64 into them, dense (B, num_dense)) -> logits (B,)

One process without MPI, in memory for some rows at a time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from hetmpi.checkpoint import CHUNK_ROWS, gathered, open_shards, read_manifest
from hetmpi.data.batch import Batch
from hetmpi.partition import make_partition
from hetmpi.world import Refused

CHOICES = {"rows": ("npy", "parquet", "none"), "dense": ("torchscript", "none")}


def main(arguments: list[str]):
    """Reads the command line, exports."""
    if len(arguments) < 2 or {"-h", "--help"} & set(arguments):
        sys.exit(__doc__)
    checkpoint, out = map(Path, arguments[:2])
    chosen = {"rows": "npy", "dense": "torchscript"}
    for argument in arguments[2:]:
        name, _, value = argument.partition("=")
        if value not in CHOICES.get(name, ()):
            sys.exit(f"hetmpi.export: cannot take {argument}; what can be said: " + ", ".join(f"{k}={'|'.join(v)}" for k, v in CHOICES.items()))
        chosen[name] = value
    try:
        export(checkpoint, out, **chosen)
    except Refused as refusal:
        sys.exit(f"hetmpi: {refusal}")


def export(checkpoint: Path, out: Path, rows: str = "npy", dense: str = "torchscript"):
    """Writes what is asked for into `out`. Raises Refused for what is no whole checkpoint, or has no model that can be built."""
    manifest = read_manifest(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    if rows == "npy":
        write_npy(out / "rows.npy", checkpoint, manifest)
    if rows == "parquet":
        write_parquet(out / "rows.parquet", checkpoint, manifest)
    if dense == "torchscript":
        traced(checkpoint, manifest).save(str(out / "dense.torchscript"))


def chunks(checkpoint: Path, manifest: dict):
    """(first key, rows (n, dim)) in the order of keys."""
    partition, shards = make_partition(manifest["partition"], manifest["num_rows"], manifest["size"]), open_shards(checkpoint, manifest, "weight")
    for begin in range(0, manifest["num_rows"], CHUNK_ROWS):
        keys = np.arange(begin, min(begin + CHUNK_ROWS, manifest["num_rows"]))
        yield begin, gathered(shards, *partition.locate(keys))


def write_npy(path: Path, checkpoint: Path, manifest: dict):
    whole = np.lib.format.open_memmap(path, "w+", np.float32, (manifest["num_rows"], manifest["dim"]))
    for begin, rows in chunks(checkpoint, manifest):
        whole[begin : begin + len(rows)] = rows
    whole.flush()


def write_parquet(path: Path, checkpoint: Path, manifest: dict):
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("key", pa.int64()), ("weight", pa.list_(pa.float32(), manifest["dim"]))])
    with pq.ParquetWriter(path, schema) as writer:
        for begin, rows in chunks(checkpoint, manifest):
            weights = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), manifest["dim"])
            writer.write_table(pa.table([pa.array(np.arange(begin, begin + len(rows))), weights], schema=schema))


class OfTensors(torch.nn.Module):
    """A model as a function of tensors alone."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, rows, index, dense):
        return self.model(rows, Batch(None, index, dense, None))


def traced(checkpoint: Path, manifest: dict) -> torch.jit.ScriptModule:
    """The dense layers of a checkpoint that the trainer wrote, as TorchScript."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    if "model_config" not in manifest:
        raise Refused(f"{checkpoint} does not say which model it is of: export its rows alone by dense=none")
    sizes = manifest["model_sizes"]
    model = instantiate(OmegaConf.create(manifest["model_config"]), **sizes)
    model.load_state_dict(torch.load(checkpoint / "dense.pt", map_location="cpu", weights_only=True)["model"])
    rows = torch.zeros(sizes["num_fields"], manifest["dim"])
    index = torch.arange(sizes["num_fields"]).repeat(2, 1)
    with torch.no_grad():
        return torch.jit.trace(OfTensors(model.eval()), (rows, index, torch.zeros(2, sizes["num_dense"])))


if __name__ == "__main__":
    main(sys.argv[1:])
