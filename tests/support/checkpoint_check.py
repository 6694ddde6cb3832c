"""Loads a checkpoint of any number of ranks with another partition, and compares rows, state and clocks with its files;
run by test_checkpoint.py. Exit code 1 if they differ.

    mpiexec -n 2 python tests/support/checkpoint_check.py PATH PARTITION
"""

import json
import sys
from pathlib import Path

import numpy as np
from saved_files import by_key

from hetmpi.checkpoint.checkpoints import Checkpoints
from hetmpi.checkpoint.manifest import ARRAYS
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.launch import launch


def main(world):
    path, partition = Path(sys.argv[1]), sys.argv[2]
    manifest = json.loads((path / "manifest.json").read_text())
    table = EmbeddingTable(world, manifest["num_rows"], manifest["dim"], RowOptimizer(manifest["rule"]), partition)
    checkpoints = Checkpoints(world, path.parent)
    assert checkpoints.newest() == path
    checkpoints.load(path, table)
    whole, keys = by_key(path), table.keys().numpy()
    same = all(np.array_equal(getattr(table.shard, name), whole[name][keys]) for name in ARRAYS)
    same = same and whole["clock"].max() > 0 and table.step == manifest["step"]
    everywhere = all(world.comm.allgather(bool(same)))
    table.close()
    sys.exit(not everywhere)


launch(main)
