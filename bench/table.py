"""Times EmbeddingTable at s = 0: read, write and settle of one step, on one node (shared memory) and between nodes
(MPI).

    ./run.sh bench table [ranks=2] [dim=32] [rows=400000] [keys=20000] [steps=20]

Starts its own mpiexec. First checks that reads return the written rows, then prints the median milliseconds of the
slowest rank and, last, one JSON line: {"near": {"read_ms": x, "write_ms": x, "settle_ms": x, "read_mrow_s": x}, "far":
...}.
"""

import json
import sys
import time

import numpy as np
from workload import start_ranks

SETTINGS = {"ranks": 2, "dim": 32, "rows": 400_000, "keys": 20_000, "steps": 20}


def main():
    """Reads the settings and starts the ranks, or is one of them."""
    settings = parse(sys.argv[1:])
    if "--rank" in sys.argv:
        return measure(settings)
    sys.exit(start_ranks(__file__, settings["ranks"], sys.argv[1:]))


def parse(arguments):
    """The settings, with KEY=VALUE of the command line."""
    settings = dict(SETTINGS)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in settings and value.isdigit() and int(value) > 0:
            settings[key] = int(value)
        elif argument != "--rank":
            sys.exit(f"bench table: {argument} is not one of {', '.join(f'{k}=N' for k in SETTINGS)}, N at least 1")
    if settings["keys"] > settings["rows"] * settings["ranks"]:
        sys.exit("bench table: keys must be at most rows * ranks, they are unique")
    return settings


def measure(settings):
    """One rank: checks both placements, then times them."""
    from hetmpi.world.launch import launch

    def run(world):
        from hetmpi.world.world import World

        world.start_horovod()  # its thread makes MPI progress between nodes, as in training
        result = {name: time_steps(World(world.comm, n), settings) for name, n in (("near", None), ("far", 1))}
        if world.rank == 0:
            for name, row in result.items():
                print(f"{name:<5}", "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
            print(json.dumps(result))

    launch(run)


def time_steps(world, settings):
    """Median milliseconds over steps, of the slowest rank: read, write and settle of `keys` random rows."""
    import torch

    from hetmpi.table.optim import RowOptimizer
    from hetmpi.table.table import EmbeddingTable

    num_rows = settings["rows"] * world.size
    table = EmbeddingTable(world, num_rows, settings["dim"], RowOptimizer("sgd", 1.0), init_std=0.0)
    check(table, torch)
    generator, times = np.random.default_rng(world.rank), []
    for _ in range(settings["steps"]):
        keys = torch.from_numpy(generator.choice(num_rows, settings["keys"], replace=False))
        grads = torch.ones(len(keys), settings["dim"])
        world.comm.Barrier()
        marks = [time.perf_counter()]
        for action in (lambda: table.read(keys), lambda: table.write(keys, grads), table.flush):
            action()
            marks.append(time.perf_counter())
        times.append(world.comm.allgather(np.diff(marks)))
    table.close()
    read, write, settle = 1000 * np.median(np.max(times, axis=1), axis=0)
    return {"read_ms": read, "write_ms": write, "settle_ms": settle, "read_mrow_s": settings["keys"] / read / 1000}


def check(table, torch):
    """Every rank pushes gradients of 1 for the first rows; all ranks must read minus the number of ranks."""
    keys = torch.arange(min(1000, table.num_rows))
    table.write(keys, torch.ones(len(keys), table.dim))
    if not (table.read(keys) == -table.world.size).all():
        raise RuntimeError("rows read are not those written")
    table.flush()


if __name__ == "__main__":
    main()
