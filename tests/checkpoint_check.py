"""Loads a checkpoint of any number of ranks, partitioned otherwise, and compares rows, state and clocks with its files; run by
test_checkpoint.py. Exit code 1 if they differ.

    mpiexec -n 2 python tests/checkpoint_check.py PATH PARTITION
"""

import json
import sys
from pathlib import Path

import numpy as np

from hetmpi.checkpoint import ARRAYS, Checkpoints
from hetmpi.optim import RowOptimizer
from hetmpi.partition import make_partition
from hetmpi.table import EmbeddingTable
from hetmpi.world import launch


def by_key(path: Path, manifest: dict) -> dict:
    """Each array of all rows in the order of their keys, as one who knows only docs/design.md would read them."""
    num_rows, size = manifest["num_rows"], manifest["size"]
    shards = [{name: np.load(path / f"shard-{rank:05d}.{name}.npy") for name in ARRAYS} for rank in range(size)]
    wholes = {name: np.full((num_rows, *shard.shape[1:]), -7, shard.dtype) for name, shard in shards[0].items()}
    partition = make_partition(manifest["partition"], num_rows, size)
    for rank, shard in enumerate(shards):
        keys = partition.keys_of(rank, 0, partition.num_local_rows(rank))
        for name, whole in wholes.items():
            whole[keys] = shard[name]
    return wholes


def main(world):
    path, partition = Path(sys.argv[1]), sys.argv[2]
    manifest = json.loads((path / "manifest.json").read_text())
    table = EmbeddingTable(world, manifest["num_rows"], manifest["dim"], RowOptimizer(manifest["rule"]), partition)
    checkpoints = Checkpoints(world, path.parent)
    assert checkpoints.newest() == path
    checkpoints.load(path, table)
    whole, keys = by_key(path, manifest), table.keys().numpy()
    same = all(np.array_equal(getattr(table.shard, name), whole[name][keys]) for name in ARRAYS)
    same = same and whole["clock"].max() > 0 and table.step == manifest["step"]
    everywhere = all(world.comm.allgather(bool(same)))
    table.close()
    sys.exit(not everywhere)


launch(main)
