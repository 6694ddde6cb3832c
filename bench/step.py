"""Time of a training step by part, compared with the same dense network with all rows in memory (the floor), and with
peers.

    ./run.sh bench step [net=mlp] [dim=32] [batch=2048] [ranks=2] [scale=0.1] [zipf=1.05] [steps=60] [warmup=20]
                        [repeats=5] [peers=none] [rate=none] [device=cpu] [settings=table.staleness=0]
                        [tables=1] [fanout=2,2] [distinct=0]

net: mlp (embeddings and dense features through three layers of 256, plus a linear term) or het (HET's WDL), on
Criteo's field sizes times `scale`; sage (GraphSAGE with `fanout` on a synthetic graph of ogbn-mag's shape times
`scale`); or complex (ComplEx, 256 negatives, on a synthetic knowledge graph of 400,000 entities times `scale`). Plain
SGD, one thread per rank. rate: none for one node, or a rate in the syntax of tc (1gbit): each rank on a host of its own
with such a link, as in `bench cluster`; needs root and MPICH. device: cuda for GPUs, with no peer but torchrec, which
must be in this environment then. distinct: steps with samples of their own, which later ones repeat, so that a cache of
all rows finds them all; 0: all steps. settings: of a run, separated by commas. peers: all, none, or some of local (a
table that is not shared, see bench/race/rank.py), torchrec, allgather and horovod (bench/peers/); torchrec gets its own
environment on first use. tables: above 1, a further contender has the same fields dealt to so many tables. Contenders
take turns; losses after equal samples are compared first.

Last, one JSON line: {"step_vs_floor": x (step time, 1 is best), "vs_local": x, "vs_torchrec": x, "vs_allgather": x,
"vs_horovod": x (samples/s, above 1 is faster here), "step_ms": {contender: x, ...}, "split": {part: ms, ...},
"settings": {...}}.
"""

import json
import os
import sys

from race.problem import SAMPLED
from race.turns import check_losses, chosen, made_problem, median_ms, median_of, on_hosts, race
from workload import mpiexec, naps, parse

from hetmpi.spans import PARTS
from hetmpi.world.cores import usable_cores

SETTINGS = {
    "net": "mlp", "dim": 32, "batch": 2048, "ranks": 2, "scale": 0.1, "zipf": 1.05, "steps": 60, "warmup": 20,
    "repeats": 5, "peers": ["none"], "rate": "none", "device": "cpu", "settings": ["table.staleness=0"],
    "tables": 1, "fanout": [2, 2], "distinct": 0,
}  # fmt: skip


def main():
    """Generates the problem, runs the contenders in turns, compares them."""
    settings = parse("step", SETTINGS, sys.argv[1:])
    peers, device = chosen(settings["peers"]), f"device={settings['device']}"
    if settings["net"] in SAMPLED and (peers or settings["tables"] > 1):
        sys.exit(f"bench step: net={settings['net']} has no peers, and its own tables")
    if settings["net"] in SAMPLED and settings["distinct"]:
        sys.exit(f"bench step: distinct= is of samples on file, net={settings['net']} draws them")
    if settings["device"] != "cpu" and set(peers) - {"torchrec"}:
        sys.exit("bench step: on GPUs the only peer is torchrec: give peers=torchrec, peers=none or device=cpu")
    launcher = (
        on_hosts(settings["ranks"], settings["rate"]) if settings["rate"] != "none" else on_node(settings["ranks"])
    )
    with made_problem(settings, settings["ranks"]) as folder:
        contenders = {"floor": [device], "hetmpi": [device, *settings["settings"]], **dict.fromkeys(peers, [device])}
        if settings["tables"] > 1:
            contenders[f"tables={settings['tables']}"] = contenders["hetmpi"]
        runs = race(launcher, folder, contenders, settings)
    check_losses(runs, settings)
    times = {name: median_ms(results, settings) for name, results in runs.items()}
    split = {part: median_of(runs["hetmpi"], f"{part}_ms", settings) for part in PARTS}
    show(times, split, {part: median_of(runs["floor"], f"{part}_ms", settings) for part in PARTS})
    print(json.dumps({
        "step_vs_floor": times["hetmpi"] / times["floor"],
        **{f"vs_{peer}": times[peer] / times["hetmpi"] for peer in peers if peer in times},
        **{name: times[name] / times["hetmpi"] for name in times if name.startswith("tables=")},
        "step_ms": times, "split": split, "settings": settings,
    }))  # fmt: skip


def on_node(ranks: int) -> list[str]:
    """Command that starts the ranks on this machine, bound to cores if there are enough: peers too, as hetmpi binds
    itself."""
    os.environ.update(naps(ranks))
    return [*mpiexec(ranks), *(["--bind-to", "core"] if ranks <= usable_cores() else [])]


def show(times: dict, split: dict, floor: dict):
    """Both tables."""
    print(f"\n{'':<16}{'ms a step':>10}{'to the floor':>14}")
    for name, ms in times.items():
        print(f"{name:<16}{ms:10.2f}{ms / times['floor']:14.2f}")
    print(f"\n{'part':<16}{'hetmpi, ms':>12}{'floor, ms':>12}")
    for part, ms in split.items():
        print(f"{part:<16}{ms:12.2f}" + (f"{floor[part]:12.2f}" if floor[part] else ""))


if __name__ == "__main__":
    main()
