"""Checkpoints of whole models, written by hand in one process: as the trainer writes them, to be changed."""

import numpy as np
import pyarrow as pa
import torch
from crafted import write_checkpoint

from hetmpi.data.synthetic import Synthetic
from hetmpi.data.tabular import Tabular
from hetmpi.models.wdl import WDL

MODEL = {"_target_": "hetmpi.models.wdl.WDL", "hidden": [4]}
SYNTHETIC = {"_target_": "hetmpi.data.synthetic.Synthetic", "scale": 0.0001, "zipf": 1.05, "num_train": 100}
TABULAR = {"label": "click", "valid": 0.25}


def write_model(path, num_fields, num_dense, num_rows, dim=3, config=MODEL, data=None, about=None):
    """A checkpoint of a new model at step 2 on two ranks. data: what encodes files, as arrays."""
    sizes = {"num_fields": num_fields, "num_dense": num_dense, "dim": dim}
    model = WDL(**sizes, hidden=[4])
    dense = {"model": model.state_dict()} | ({} if data is None else {"data": data})
    about = {"model": "wdl", "model_config": config, "model_sizes": sizes, "seed": 0, **(about or {})}
    write_checkpoint(path, 2, 2, num_rows, dim, dense=dense, about=about)


def write_synthetic(path, config=MODEL):
    """The checkpoint of a model of synthetic data."""
    source = Synthetic(0, SYNTHETIC["scale"], num_train=100, num_valid=60)
    about = {"data": "synthetic", "data_config": {**SYNTHETIC, "seed": 0, "num_valid": 60}}
    write_model(path, source.num_fields, source.num_dense, source.num_rows, config=config, about=about)


def write_open(path, folder):
    """As write_tabular, of a model of the users alone, without a vocabulary: three of them have a row."""
    rules = {"columns": [{"name": "user", "rows": "open", "max_rows": 9}, {"name": "item", "kind": "drop"}]}
    write_tabular(path, folder, rules, lambda source: {"ids of ": entries_of(source, ["a", "b", "c"])}, num_rows=4)


def entries_of(source, values):
    ids = np.sort(source.encoder.ids_of("user", pa.array(values)))
    return torch.tensor([[one, place + 1, 5, 1] for place, one in enumerate(ids.tolist())])


def write_tabular(path, folder, rules=None, more=lambda source: {}, num_rows=None):
    """Writes clicks.csv into `folder`, and the checkpoint of a model of it. more: of its data, by the source."""
    lines = [f"{i % 2},{'abc'[i % 3]},{i * i % 7},{i / 3:.2f}" for i in range(80)]
    (folder / "clicks.csv").write_text("\n".join(["click,user,item,price", *lines]) + "\n")
    said = {**TABULAR, **(rules or {})}
    source = Tabular(str(folder / "clicks.csv"), 0, cache=str(folder / "prepared"), **said)
    source.prepare(0, 1, lambda: None, lambda line: None)
    data = {name: torch.from_numpy(array.copy()) for name, array in source.encoder.to_arrays().items()}
    data |= more(source)
    about = {"data": "tabular", "data_config": {**said, "seed": 0}}
    write_model(path, source.num_features, source.num_dense, num_rows or source.num_rows, data=data, about=about)
