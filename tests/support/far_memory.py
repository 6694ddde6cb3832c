"""Run by test_train.py: reads, prefetches and writes rows of other nodes for many steps; fails if memory grows."""

import sys
from pathlib import Path

import torch

from hetmpi.table.optim import RowOptimizer
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.launch import launch
from hetmpi.world.world import World

WARM_STEPS, STEPS, LIMIT_KB_A_STEP = 300, 1000, 2


def main(world):
    world.start_horovod()
    place, exchange = World(world.comm, ranks_per_node=1), sys.argv[1]
    table = EmbeddingTable(place, 5000, 16, RowOptimizer(), inbox_bytes=100_000, exchange=exchange)
    generator = torch.Generator().manual_seed(world.rank)
    keys = torch.randperm(5000, generator=generator)[:300]
    for step in range(STEPS):
        table.read(keys)
        later = torch.randperm(5000, generator=generator)[:300]
        table.prefetch(later)
        table.write(keys, torch.ones(300, 16))
        keys = later
        if step == WARM_STEPS:
            before = resident_kb()
    table.flush()
    growth = [kb / (STEPS - WARM_STEPS) for kb in world.comm.allgather(resident_kb() - before)]
    if world.rank == 0:
        print("kB a step by rank:", *(f"{kb:.2f}" for kb in growth))
    table.close()
    sys.exit(max(growth) > LIMIT_KB_A_STEP)


def resident_kb():
    """Anonymous memory of this process in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    launch(main)
