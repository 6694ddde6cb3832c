"""Reads the contents of checkpoints file by file, to compare them."""

import itertools
import json

import numpy as np
import torch

from hetmpi.checkpoint.manifest import ARRAYS, tables_of
from hetmpi.owner.route import make_partition


def contents(path):
    """The complete content of a checkpoint, incremental or not: rows, dense layers, and ids of rows."""
    tables = tables_of(json.loads((path / "manifest.json").read_text()))
    arrays = {f"{table} {name}".strip(): rows for table in tables for name, rows in by_key(path, table).items()}
    dense = torch.load(path / "dense.pt", weights_only=True)
    state = {
        f"optimizer {i} {name}": value
        for i, kept in dense["optimizer"]["state"].items()
        for name, value in kept.items()
    }
    ids = {name: value for name, value in dense.get("data", {}).items() if name.startswith("ids of ")}
    return arrays | {name: np.asarray(value) for name, value in (dense["model"] | state | ids).items()}


def by_key(path, table=""):
    """Each array of all rows of a table in key order, read only by the documentation of
    hetmpi/checkpoint/checkpoints.py."""
    manifest = json.loads((path / "manifest.json").read_text())
    about, prefix = tables_of(manifest)[table], f"{table}{'.' if table else ''}"
    wholes, partition = {}, make_partition(about["partition"], about["num_rows"], manifest["size"])
    for rank, name in itertools.product(range(manifest["size"]), ARRAYS):
        file = f"{prefix}shard-{rank:05d}.{name}.npy"
        shard = np.load(path / file)
        if "base" in manifest:
            newer, shard = shard, np.load(path.parent / manifest["base"] / file)
            shard[np.load(path / f"{prefix}shard-{rank:05d}.rows.npy")] = newer
        whole = wholes.setdefault(name, np.full((about["num_rows"], *shard.shape[1:]), -7, shard.dtype))
        whole[partition.keys_of(rank, 0, partition.num_local_rows(rank))] = shard
    return wholes


def assert_same_rows(one, other):
    one, other = by_key(one), by_key(other)
    assert one["clock"].max() > 0
    for name, whole in one.items():
        assert np.array_equal(whole, other[name]), name


def assert_same_bits(one, other):
    one, other = contents(one), contents(other)
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert np.array_equal(array, other[name]), name
