"""Time that training waits for a checkpoint, and write rate compared with dd.

    ./run.sh bench checkpoint [gb=2.0] [dim=32] [ranks=2] [repeats=5] [dir=/tmp]

A table of `gb` gigabytes in total, rows and clocks, under SGD. First checks that a second table loaded from a
checkpoint has the same rows. Then times Checkpoints.save until it returns, when training may continue, and until all
files are written; with and without concurrent training steps. dd writes the same number of bytes to the same disk
(bs=16M conv=fsync), in turns with the checkpoints. The memory for copies is reserved before, as a run does in its
set-up; the first checkpoint is reported separately. Then the same for incremental checkpoints, each after 20 steps of
20,000 random keys per rank.

Last, one JSON line: {"stall_s": x, "first_stall_s": x, "write_s": x, "dd_s": x, "rate_vs_dd": x, "step_ms": x,
"step_ms_beside": x, "reserve_s": x, "incremental_stall_s": x, "incremental_write_s": x, "incremental_rows": x,
"settings": {...}}; medians, of the slowest rank.
"""

import collections
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from workload import parse, start_ranks

SETTINGS = {"gb": 2.0, "dim": 32, "ranks": 2, "repeats": 5, "dir": "/tmp"}
KEYS, STEPS = 20_000, 20


def main():
    """Reads the settings and starts the ranks, or is one of them."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--rank"]
    settings = parse("checkpoint", SETTINGS, arguments)
    if "--rank" not in sys.argv:
        sys.exit(start_ranks(__file__, settings["ranks"], arguments))
    from hetmpi.world.launch import launch

    launch(lambda world: measure(world, settings))


def measure(world, settings: dict):
    """One rank."""
    import torch

    from hetmpi.checkpoint.checkpoints import Checkpoints, Position
    from hetmpi.table.optim import RowOptimizer
    from hetmpi.table.table import EmbeddingTable

    torch.set_num_threads(1)
    world.start_horovod()
    num_rows = int(settings["gb"] * 1e9 / (4 * settings["dim"] + 4))
    table = EmbeddingTable(world, num_rows, settings["dim"], RowOptimizer("sgd", 1.0))
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    folder = Path(
        world.comm.bcast(tempfile.mkdtemp(prefix="hetmpi-bench-", dir=settings["dir"]) if world.rank == 0 else None)
    )
    checkpoints = Checkpoints(world, folder, keep=1)
    train = Steps(table, world)
    try:
        world.comm.Barrier()
        began = time.perf_counter()
        checkpoints.reserve(table)
        reserve_s = slowest(world, time.perf_counter() - began)
        train.run(STEPS)
        world.comm.Barrier()
        began = time.perf_counter()
        checkpoints.save(Position(0, 0), table, model, optimizer, {})
        first_stall = slowest(world, time.perf_counter() - began)
        checkpoints.wait()
        check(world, table, checkpoints, settings)
        times = collections.defaultdict(list)
        steps = itertools.count(1)
        for _ in range(settings["repeats"]):
            world.comm.Barrier()
            began = time.perf_counter()
            checkpoints.save(Position(next(steps), 0), table, model, optimizer, {})
            times["stall_s"].append(slowest(world, time.perf_counter() - began))
            checkpoints.wait()
            times["write_s"].append(slowest(world, time.perf_counter() - began))
            times["dd_s"].append(world.comm.bcast(dd(folder, table, world) if world.rank == 0 else None))
            times["step_ms"].append(train.run(STEPS))
            checkpoints.save(Position(next(steps), 0), table, model, optimizer, {})
            times["step_ms_beside"].append(train.run(STEPS))
            checkpoints.wait()
        checkpoints.full_every = sys.maxsize
        for _ in range(settings["repeats"]):
            train.run(STEPS)
            world.comm.Barrier()
            began = time.perf_counter()
            checkpoints.save(Position(next(steps), 0), table, model, optimizer, {})
            times["incremental_stall_s"].append(slowest(world, time.perf_counter() - began))
            checkpoints.wait()
            times["incremental_write_s"].append(slowest(world, time.perf_counter() - began))
            times["incremental_rows"].append(world.comm.allreduce(int(table.shard.touched.sum())))
        check(world, table, checkpoints, settings)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    table.close()
    if world.rank == 0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        rate_vs_dd = medians["dd_s"] / medians["write_s"]
        medians |= {"first_stall_s": first_stall, "reserve_s": reserve_s, "rate_vs_dd": rate_vs_dd}
        for name, value in medians.items():
            print(f"{name:<21}{value:12,.3f}")
        print(json.dumps({**medians, "settings": settings}))


class Steps:
    """Training steps that only read and write the table."""

    def __init__(self, table, world):
        import torch

        self.table, self.world, self.torch = table, world, torch
        self.random = np.random.default_rng(world.rank)

    def run(self, num: int) -> float:
        """Time per step in ms, of the slowest rank."""
        batches = [
            self.torch.from_numpy(np.unique(self.random.integers(0, self.table.num_rows, KEYS))) for _ in range(num)
        ]
        began = time.perf_counter()
        for keys in batches:
            rows = self.table.read(keys)
            self.table.write(keys, rows)
        self.table.flush()
        return slowest(self.world, 1000 * (time.perf_counter() - began) / num)


def check(world, table, checkpoints, settings: dict):
    """Raises UserError unless a table filled from the checkpoint has the rows of this one."""
    from hetmpi.errors import UserError
    from hetmpi.table.optim import RowOptimizer
    from hetmpi.table.table import EmbeddingTable

    other = EmbeddingTable(world, table.num_rows, table.dim, RowOptimizer("sgd", 1.0), "range", name="other")
    checkpoints.load(checkpoints.newest(), other)
    keys = table.keys()[:: max(1, len(table.keys()) // 100_000)].clone()
    same = bool(np.array_equal(other.peek(keys).numpy(), table.peek(keys).numpy()))
    if not all(world.comm.allgather(same)):
        raise UserError("bench checkpoint: the loaded rows differ from the saved ones")
    other.close()


def dd(folder: Path, table, world) -> float:
    """Seconds in which dd writes as many bytes as the table has."""
    count = round(table.num_rows * (4 * table.dim + 4) / (16 << 20))
    began = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={folder}/dd", "bs=16M", f"count={count}", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - began
    (folder / "dd").unlink()
    return seconds


def slowest(world, value: float) -> float:
    return max(world.comm.allgather(value))


if __name__ == "__main__":
    main()
