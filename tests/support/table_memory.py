"""Prints the memory that a plan says tables need, and that they take, over all ranks: table_memory.py SETTING ..."""

import ctypes
import gc
import json
import sys

import torch

from hetmpi.run import build
from hetmpi.run.config import compose
from hetmpi.run.plan import Plan
from hetmpi.schedule import Schedule
from hetmpi.spans import Spans
from hetmpi.world.launch import launch

CPU = torch.device("cpu")


def resident_bytes(world) -> int:
    """Memory of all ranks without what is free in their heaps; pages that ranks share count once."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as lines:
        mine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return world.comm.allreduce(mine)


def main(world):
    plan = Plan(world, compose(world, sys.argv[1:]), CPU)
    predicted, before = world.comm.allreduce(plan.memory().tables), resident_bytes(world)
    most_keys = build.most_keys_of(plan.config, plan.task, plan.specs)
    tables = build.make_tables(plan.config, world, plan.specs, most_keys, Schedule(), CPU, Spans())
    (table,) = tables.values()
    for begin in range(0, table.num_rows, 2_000):  # touches all memory
        keys = torch.arange(begin, min(begin + 2_000, table.num_rows))
        table.write(keys, torch.zeros_like(table.read(keys)))
    table.settle()
    grown = resident_bytes(world) - before
    tables.close()
    if world.rank == 0:
        print(json.dumps({"predicted": predicted, "grown": grown}), flush=True)


launch(main)
