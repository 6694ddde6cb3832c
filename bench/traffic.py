"""Bytes sent between ranks per training step, compared with no cache (HET, Fig. 7 and 8).

    ./run.sh bench traffic [workload=synthetic|reddit|amazon|mag|kg] [ranks=8] [batch=128] [dim=128] [scale=0.1]
                           [cache=10] [steps=600] [warmup=200] [staleness=10,100,null] [caches=3,5,10,15]
                           [policies=lru,lfu,lfuopt] [policy=lfu] [metis=0|1] [negatives=256] [local=0|1]
                           [optimizer=sgd|adagrad|rowwise_adagrad|adam|momentum|ftrl]

The keys are those of Criteo's shape, or of the subgraphs sampled around 128 nodes of a graph of HET's
(conf/experiment/het_mag.yaml); metis=1: each rank gets nodes of its own part of the graph, as in HET; or kg, the
entities of triples and `negatives` shared by a batch, with local=1 of the rank's own shard (links.py). Every rank reads
and writes the keys of its batches through the real table, in lockstep, so the figures are the same in every run.
Gradients are ones: the counts do not depend on values. With SGD it checks that after a flush the owners hold exactly
the sum of all gradients. `cache` and `caches` are per cent of the table's rows, on each rank; rows of the same rank are
cached too (admit: all), but only bytes sent between ranks are counted. Miss rates are of unique keys per batch, at s =
100.

Last, one JSON line: {"reduction": {"10": x, "100": x, "null": x}, "miss_rate": {"lru": {"3": x, ...}, ...},
"bytes_per_step": {"uncached": n, "10": n, ...}, ...}.
"""

import json
import sys

import numpy as np
from workload import GRAPHS, Keys, graph_of, key_of, parse, start_ranks

SETTINGS = {
    "workload": "synthetic",
    "ranks": 8,
    "batch": 128,
    "dim": 128,
    "scale": 0.1,
    "zipf": 1.05,
    "cache": 10.0,
    "steps": 600,
    "warmup": 200,
    "seed": 0,
    "staleness": [10, 100, None],
    "caches": [3, 5, 10, 15],
    "policies": ["lru", "lfu", "lfuopt"],
    "policy": "lfu",
    "optimizer": "sgd",
    "metis": 0,
    "negatives": 256,
    "local": 0,
}
MISS_STALENESS = 100
KINDS = ("clock_bytes", "row_bytes", "push_bytes")


def main():
    """Reads the settings and starts the ranks, or is one of them."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--rank"]
    settings = parse("traffic", SETTINGS, arguments)
    if settings["workload"] not in ("synthetic", "kg", *GRAPHS):
        sys.exit(f"bench traffic: workload is one of synthetic, kg, {', '.join(GRAPHS)}, got {settings['workload']}")
    if not 0 <= settings["warmup"] < settings["steps"]:
        sys.exit(f"bench traffic: warmup must lie in [0, steps={settings['steps']}), got {settings['warmup']}")
    if "--rank" not in sys.argv:
        sys.exit(start_ranks(__file__, settings["ranks"], arguments))
    from hetmpi.world.launch import launch

    launch(lambda world: measure(world, settings))


def measure(world, settings: dict):
    """One rank: the uncached run, each staleness, each policy and capacity."""
    data = source_of(world, settings)
    keys = Keys(data, world.rank, world.size, settings["batch"])
    if world.rank == 0:
        print(
            f"{world.size} ranks, {settings['workload']}, batch {settings['batch']}, {data.num_rows:,} rows of dim "
            f"{settings['dim']}",
            flush=True,
        )
    uncached = count(world, data, keys, settings, 0, 0, "lfu")
    bytes_per_step, reduction = {"uncached": total(uncached)}, {}
    show(world, "no cache", uncached, uncached)
    for staleness in settings["staleness"]:
        counted = count(world, data, keys, settings, staleness, settings["cache"], settings["policy"])
        bytes_per_step[key_of(staleness)] = total(counted)
        reduction[key_of(staleness)] = 1 - total(counted) / total(uncached)
        show(world, f"s = {key_of(staleness)}", counted, uncached)
    miss_rate = {policy: {} for policy in settings["policies"]}
    for policy in settings["policies"]:
        for percent in settings["caches"]:
            counted = count(world, data, keys, settings, MISS_STALENESS, percent, policy)
            found = counted["hits"] + counted["stale"]
            miss_rate[policy][str(percent)] = counted["misses"] / (counted["misses"] + found)
        if world.rank == 0:
            print(
                f"miss rate {policy:<7}", "  ".join(f"{p} %: {m:.1%}" for p, m in miss_rate[policy].items()), flush=True
            )
    if world.rank == 0:
        print(
            json.dumps({"reduction": reduction, "miss_rate": miss_rate, "bytes_per_step": bytes_per_step, **settings})
        )


def source_of(world, settings: dict):
    """The samples of the workload. Collective."""
    from links import Links

    from hetmpi.data.synthetic import Synthetic

    if settings["workload"] in GRAPHS:
        return graph_of(world, settings, settings["seed"])[1]
    if settings["workload"] == "kg":
        of_batch = settings["negatives"], bool(settings["local"])
        return Links(settings["seed"], settings["scale"], settings["zipf"], *of_batch, world.rank, world.size)
    return Synthetic(settings["seed"], scale=settings["scale"], zipf=settings["zipf"])


def count(world, data, keys: Keys, settings: dict, staleness: int | None, percent: float, policy: str) -> dict:
    """Counts of the table over the steps after the warm-up, per step and summed over ranks."""
    import torch

    from hetmpi.table.cache import CacheSettings
    from hetmpi.table.optim import RowOptimizer
    from hetmpi.table.staleness import Staleness
    from hetmpi.table.table import EmbeddingTable

    cache = CacheSettings(capacity_fraction=percent / 100, policy=policy, admit="all")
    optimizer = RowOptimizer(settings["optimizer"], 1.0)
    table = EmbeddingTable(
        world,
        data.num_rows,
        settings["dim"],
        optimizer,
        partition="range" if settings["metis"] else "round_robin",
        init_std=0.0,
        staleness=Staleness(staleness, drift=0.0),
        cache=cache,
    )
    largest, written = max(len(keys.at(step)) for step in range(settings["steps"])), 0
    grads = torch.ones(largest, settings["dim"])
    for step in range(settings["steps"]):
        if step == settings["warmup"]:
            before = table.counters.copy()
        batch = torch.from_numpy(keys.at(step))
        table.read(batch)
        world.comm.Barrier()
        table.write(batch, grads[: len(batch)])
        written += len(batch)
        table.await_owners()
        world.comm.Barrier()
    counted = vars(table.counters.since(before))
    table.flush()
    if settings["optimizer"] == "sgd":
        check(world, table, written)
    table.close()
    summed = world.comm.allreduce(np.array(list(counted.values()), np.float64))
    return dict(zip(counted, summed / (settings["steps"] - settings["warmup"])))


def check(world, table, written: int):
    """Raises RuntimeError unless the owners hold exactly the negated sum of the gradients written."""
    held = -float(table.shard.weight[:, 0].sum(dtype=np.float64))
    held, written = world.comm.allreduce(np.array([held, written]))
    if held != written or not (table.shard.weight == table.shard.weight[:, :1]).all():
        raise RuntimeError(f"{written:,.0f} updates were written, the owners hold {held:,.0f}")


def total(counted: dict) -> float:
    return sum(counted[kind] for kind in KINDS)


def show(world, name: str, counted: dict, uncached: dict):
    """Prints one line of the table, on rank 0."""
    if world.rank == 0:
        kinds = "  ".join(f"{kind.split('_')[0]} {counted[kind] / 1e6:6.3f} MB" for kind in KINDS)
        keys = counted["hits"] + counted["stale"] + counted["misses"]
        rates = f"  hit {counted['hits'] / keys:.1%}  stale {counted['stale'] / keys:.1%}" if keys else ""
        saved = 1 - total(counted) / total(uncached)
        print(f"{name:<9} {total(counted) / 1e6:7.3f} MB/step  {saved:6.1%} fewer  {kinds}{rates}", flush=True)


if __name__ == "__main__":
    main()
