"""What a rank's table costs as ranks are added: the table alone, without a network, on nodes of a few ranks each, whose
ranks exchange messages as ranks of different machines do.

    ./run.sh bench scale [ranks=2,4,8,16,32] [ranks_per_node=4] [s=0,100] [tables=1] [batch=128] [dim=32] [scale=0.1]
                         [steps=40] [warmup=20] [exchange=messages] [batches_per_pull=4]

ranks_per_node: 0 for the nodes as they are: slurm/scale.sbatch measures so on a cluster.

A step reads the keys of a batch of Criteo's shape, announces a later one and writes a gradient of every row.
tables: the fields are dealt to so many tables, read and written together. Processor time per step and rank is that of
the main thread without its polling, that in polls while it waits, and that of all threads; so ranks may outnumber
cores. At the end it checks that no gradient was lost.

Last, one JSON line: {"main_ms": {s: {ranks: x}}, "messages": ..., "node_bytes": ... (sent to other nodes per step and
rank), "mailbox_bytes": ... (memory of a rank), "poll_ms", "all_ms", "start_s" (from launch to the first step), "calls"
(of Python functions per step and rank, without those of waits), "growth": {s: main_ms at the most ranks over that at
4}, "settings": {...}}.
"""

import json
import os
import subprocess
import sys
import time

import numpy as np
from workload import mpiexec, naps, parse

SETTINGS = {
    "ranks": [2, 4, 8, 16, 32], "ranks_per_node": 4, "s": [0, 100], "tables": 1, "batch": 128, "dim": 32, "scale": 0.1,
    "steps": 40, "warmup": 20, "exchange": "messages", "batches_per_pull": 4,
}  # fmt: skip
BASE = 4  # ranks that growth is relative to
FIGURES = ("main_ms", "poll_ms", "all_ms", "messages", "node_bytes", "mailbox_bytes", "start_s", "calls")
COUNTED = 8  # steps whose Python calls are counted, after those that are timed
TOLD = "bench scale: "
HEADER = f"{'s':>4} {'ranks':>6} " + " ".join(f"{name:>13}" for name in FIGURES)


def main():
    """Starts the ranks for each number of them, or is one of them."""
    settings = parse("scale", SETTINGS, sys.argv[1:])
    if "SCALE_BEGAN" in os.environ:
        return measure(settings)
    found = {name: {str(s): {} for s in settings["s"]} for name in FIGURES}
    print(HEADER)
    for ranks in settings["ranks"]:
        for s, row in run(ranks).items():
            for name in FIGURES:
                found[name][s][ranks] = row[name]
            print(line_of(s, ranks, row), flush=True)
    growth = {s: growth_of(of_ranks) for s, of_ranks in found["main_ms"].items()}
    print(json.dumps({**found, "growth": growth, "settings": settings}))


def run(ranks: int) -> dict:
    """Figures of runs on so many ranks, by staleness."""
    command = [*mpiexec(ranks), sys.executable, __file__, *sys.argv[1:]]
    environment = {**os.environ, **naps(ranks), "SCALE_BEGAN": str(time.time()), "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if told.returncode != 0:
        sys.exit(f"bench scale: the run on {ranks} ranks failed")
    return json.loads(next(line for line in told.stdout.splitlines() if line.startswith(TOLD))[len(TOLD) :])


def line_of(s, ranks: int, row: dict[str, float]) -> str:
    """A line below HEADER."""
    return f"{s:>4} {ranks:>6} " + " ".join(f"{row[name]:>13,.2f}" for name in FIGURES)


def growth_of(main_ms: dict[int, float]) -> float | None:
    """Of the most ranks over BASE."""
    return main_ms[max(main_ms)] / main_ms[BASE] if BASE in main_ms else None


def measure(settings):
    """One rank."""
    from hetmpi.world.launch import launch

    def run(world):
        from hetmpi.world.world import World

        world.start_horovod()  # its thread makes MPI progress between nodes, as in training
        placed = World(world.comm, settings["ranks_per_node"]) if settings["ranks_per_node"] else world
        figures = {}
        for s in settings["s"]:
            mine = time_steps(placed, settings, s)
            all_ranks = placed.comm.allgather(mine)
            figures[s] = {name: float(np.mean([of_rank[name] for of_rank in all_ranks])) for name in FIGURES}
        if world.rank == 0:
            print(HEADER, *(line_of(s, world.size, row) for s, row in figures.items()), sep="\n")
            print(TOLD + json.dumps(figures), flush=True)

    launch(run)


def time_steps(world, settings, s) -> dict:
    """Figures of this rank per step."""
    import torch

    group, keys = made_tables(world, settings, s), batches(world, settings)
    ones = {name: torch.full((max(map(len, of_table)), settings["dim"]), 1 / 64) for name, of_table in keys.items()}
    step_keys = [{name: of_table[i] for name, of_table in keys.items()} for i in range(len(next(iter(keys.values()))))]

    ahead = settings["batches_per_pull"]

    def step(i):
        group.read(step_keys[i])
        for later in step_keys[1 : ahead + 1] if i == 0 else step_keys[i + ahead : i + ahead + 1]:
            group.prefetch(later) if s > 0 else None
        group.write(step_keys[i], {name: ones[name][: len(of)] for name, of in step_keys[i].items()})

    for i in range(settings["warmup"]):
        step(i)
    world.comm.Barrier()
    start_s = time.time() - float(os.environ["SCALE_BEGAN"])
    before, counted = marks(world), sent(group)
    for i in range(settings["warmup"], settings["warmup"] + settings["steps"]):
        step(i)
    main, polled, everything = (marks(world) - before) * 1000 / settings["steps"]
    messages, num_bytes = (np.array(sent(group)) - counted) / settings["steps"]
    calls = calls_of(lambda: [step(i) for i in range(len(step_keys) - COUNTED, len(step_keys))]) / COUNTED
    check(world, group, step_keys)
    layouts = [table.memory.layouts[world.rank] for table in group.values()]
    mailbox_bytes = sum(len(layout.origins) * layout.ring_bytes for layout in layouts)
    group.close()
    return {
        "main_ms": main - polled, "poll_ms": polled, "all_ms": everything, "messages": messages,
        "node_bytes": num_bytes, "mailbox_bytes": mailbox_bytes, "start_s": start_s,
        "calls": calls,
    }  # fmt: skip


def calls_of(run) -> int:
    """Python calls of run(), without those made in waits, whose number depends on other ranks."""
    from hetmpi.world.world import World

    num = depth = 0

    def see(frame, event, _):
        nonlocal num, depth
        if event == "call" and (depth or frame.f_code is World.wait.__code__):
            depth += 1
        elif event == "call":
            num += 1
        elif event == "return" and depth:
            depth -= 1

    sys.setprofile(see)
    run()
    sys.setprofile(None)
    return num


def marks(world) -> np.ndarray:
    """Processor seconds so far: main thread, its polling, all threads."""
    return np.array([time.thread_time(), world.notices.polled_s, time.process_time()])


def sent(group) -> tuple[int, int]:
    """Messages, or one-sided operations, to other nodes, and their bytes."""
    ways = {table.client.channel.exchange for table in group.values()}
    return sum(way.num_messages for way in ways), sum(way.num_bytes for way in ways)


def made_tables(world, settings, s):
    from hetmpi import CacheSettings, RowOptimizer, Staleness
    from hetmpi.table.group import TableGroup
    from hetmpi.table.table import EmbeddingTable

    cached = {} if s == 0 else {"cache": CacheSettings(capacity_fraction=0.1), "staleness": Staleness(s)}
    return TableGroup({
        name: EmbeddingTable(
            world, num_rows, settings["dim"], RowOptimizer("sgd", 1.0), init_std=0.0, name=name,
            exchange=settings["exchange"], batches_per_pull=settings["batches_per_pull"], **cached,
        )
        for name, num_rows in rows_of(settings).items()
    })  # fmt: skip


def rows_of(settings) -> dict[str, int]:
    """Rows of each table."""
    fields = data_of(settings).field_rows
    return {f"table{t}": sum(fields[t :: settings["tables"]]) for t in range(settings["tables"])}


def data_of(settings):
    from hetmpi.data.synthetic import Synthetic

    return Synthetic(seed=0, scale=settings["scale"])


def batches(world, settings) -> dict:
    """table -> this rank's keys of every step, each (U,) int64."""
    import torch

    data, num = data_of(settings), settings["tables"]
    first = np.cumsum(data.field_rows) - data.field_rows  # of each field's keys in all
    own = np.zeros(len(first), np.int64)  # and in its table
    for t in range(num):
        rows = np.array(data.field_rows[t::num])
        own[t::num] = np.cumsum(rows) - rows
    made = {f"table{t}": [] for t in range(num)}
    for step in range(settings["warmup"] + settings["steps"] + COUNTED):
        begin = (step * world.size + world.rank) * settings["batch"]
        ids = data.train(begin, begin + settings["batch"]).ids - first + own
        for t in range(num):
            made[f"table{t}"].append(torch.from_numpy(np.unique(ids[:, t::num])))
    return made


def check(world, group, steps):
    """Raises RuntimeError unless every gradient is in the rows: each key lost 1/64 per rank and step that wrote it."""
    from hetmpi.world.mpi import MPI

    group.flush()
    for name, table in group.items():
        written = np.zeros(table.num_rows, np.int64)
        for keys in steps:
            written[keys[name].numpy()] += 1
        world.comm.Allreduce(MPI.IN_PLACE, written)
        if not np.array_equal(table.shard.weight[:, 0] * -64, written[table.keys().numpy()]):
            raise RuntimeError(f"{name}: gradients were lost, or applied twice")


if __name__ == "__main__":
    main()
