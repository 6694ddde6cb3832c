"""Trains at s = 100 with a cache far smaller than the working set and prints the growth of memory; run by test_soak.py
and tools/gpu_check.sh. Exit code 1 if an update is lost.

    mpiexec -n 4 python tests/support/cache_soak.py RANKS_PER_NODE STEPS [cuda]
"""

import sys

import numpy as np
import torch

from hetmpi.run.device import choose_device
from hetmpi.table.cache import CacheSettings
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.launch import launch
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

NUM_ROWS, DIM, KEYS, WARMUP_STEPS = 200_000, 8, 300, 500


def main(world):
    """Reads, prefetches and writes random rows. Rank 0 prints the largest growth of a rank after the warm-up, in kB: in
    total, and in the best of three equal periods, which shows a leak but not a pool that grew once. Then it prints the
    updates written, those that the owners hold, and the evicted lines."""
    ranks_per_node, steps, device = int(sys.argv[1]), int(sys.argv[2]), choose_device(world, *(sys.argv[3:] or ["cpu"]))
    world.start_horovod()  # its thread makes MPI progress between nodes, as in training
    world = World(world.comm, ranks_per_node)
    settings = CacheSettings(capacity_rows=1000, admit="all")
    table = EmbeddingTable(
        world, NUM_ROWS, DIM, RowOptimizer("sgd", 1.0), init_std=0.0, staleness=Staleness(100), cache=settings,
        device=device,
    )  # fmt: skip
    generator, written, later = np.random.default_rng(world.rank), 0, None
    marks, resident = [WARMUP_STEPS + (steps - WARMUP_STEPS) * i // 3 for i in range(3)], []
    for step in range(steps):
        if step in marks:
            resident.append(resident_kb())
        keys, later = later if later is not None else draw(generator), draw(generator)
        table.read(keys)
        table.prefetch(later)
        table.write(keys, torch.ones(len(keys), DIM, device=device))
        written += len(keys)
    resident.append(resident_kb())
    grown = world.comm.allreduce(resident[-1] - resident[0], op=MPI.MAX)
    steadily = world.comm.allreduce(int(np.diff(resident).min()), op=MPI.MAX)
    table.flush()
    held = -float(table.shard.weight[:, 0].sum(dtype=np.float64))
    written, held, evicted = world.comm.allreduce(np.array([written, held, table.counters.evicted]))
    if world.rank == 0:
        print(
            f"soak: grown {grown} kB, in each third {steadily} kB, written {written:.0f} held {held:.0f} evicted "
            f"{evicted:.0f}",
            flush=True,
        )
    table.close()
    sys.exit(bool(written != held))


def draw(generator) -> torch.Tensor:
    """Unique keys, skewed."""
    return torch.from_numpy(np.unique((NUM_ROWS * generator.random(KEYS) ** 3).astype(np.int64)))


def resident_kb() -> int:
    """Memory of this process that is neither shared nor backed by files."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


launch(main)
