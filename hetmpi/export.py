"""Takes a checkpoint out of hetmpi: rows by key for numpy or Parquet, the dense layers as TorchScript.

    python -m hetmpi.export CHECKPOINT OUT [rows=npy|parquet|none] [dense=torchscript|onnx|none]

    OUT/rows.npy         (num_rows, dim) float32, row k of key k; numpy.load(..., mmap_mode="r") opens what is larger than memory
    OUT/rows.parquet     columns key (int64) and weight (fixed-size list of float32), in the order of keys
    OUT/dense.torchscript  forward(rows (U, dim), index (B, F) int64 into them, dense (B, num_dense)) -> logits (B,)
    OUT/dense.onnx       the same for any B and U, inputs rows, index, dense, output logits; takes pip install onnx onnxscript

One process without MPI, in memory for some rows at a time.
"""

from __future__ import annotations

import logging
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from hetmpi.checkpoint import CHUNK_ROWS, files_of, gathered, open_shards, read_manifest
from hetmpi.data.batch import Batch
from hetmpi.partition import make_partition
from hetmpi.world import Refused

CHOICES = {"rows": ("npy", "parquet", "none"), "dense": ("torchscript", "onnx", "none")}


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
    """Writes what is asked for into `out`. Raises Refused for what is no whole checkpoint, has no model that can be built, or takes a package that
    is not there."""
    missing = [name for name in ("onnx", "onnxscript") if dense == "onnx" and find_spec(name) is None]
    if missing:
        raise Refused(f"dense=onnx takes packages that are not there: pip install {' '.join(missing)}")
    files_of(checkpoint)  # raises for what it builds on
    manifest = read_manifest(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    if rows == "npy":
        write_npy(out / "rows.npy", checkpoint, manifest)
    if rows == "parquet":
        write_parquet(out / "rows.parquet", checkpoint, manifest)
    if dense != "none":
        model, inputs = dense_layers(checkpoint, manifest)
        {"torchscript": write_torchscript, "onnx": write_onnx}[dense](out / f"dense.{dense}", model, inputs)


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


def dense_layers(checkpoint: Path, manifest: dict) -> tuple[OfTensors, tuple]:
    """The dense layers of a checkpoint that the trainer wrote, and inputs that fit them: two samples."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    if "model_config" not in manifest:
        raise Refused(f"{checkpoint} does not say which model it is of: export its rows alone by dense=none")
    sizes = manifest["model_sizes"]
    model = instantiate(OmegaConf.create(manifest["model_config"]), **sizes)
    model.load_state_dict(torch.load(checkpoint / "dense.pt", map_location="cpu", weights_only=True)["model"])
    rows = torch.zeros(sizes["num_fields"] + 1, manifest["dim"])  # one field would make one row, which ONNX takes for a constant
    index = torch.arange(sizes["num_fields"]).repeat(2, 1)
    return OfTensors(model).eval(), (rows, index, torch.zeros(2, sizes["num_dense"]))


def write_torchscript(path: Path, model: OfTensors, inputs: tuple):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.trace", DeprecationWarning)  # TorchScript is what is asked for
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module=r"models\.ctr")  # its checks of shapes, which hold for any B, U
        torch.jit.trace(model, inputs).save(str(path))


def write_onnx(path: Path, model: OfTensors, inputs: tuple):
    num_samples = torch.export.Dim("B")
    shapes = {"rows": {0: torch.export.Dim("U")}, "index": {0: num_samples}, "dense": {0: num_samples}}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of torchvision, which is not needed
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its own code
        torch.onnx.export(
            model, inputs, path, input_names=list(shapes), output_names=["logits"], dynamic_shapes=shapes, dynamo=True, external_data=False,
            verbose=False,
        )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
