"""Time of a training step by part, compared with the same dense network with all rows in memory (the floor), and with
peers.

    ./run.sh bench step [net=mlp] [dim=32] [batch=2048] [ranks=2] [scale=0.1] [zipf=1.05] [steps=60] [warmup=20]
                        [repeats=5] [peers=none] [rate=none] [device=cpu] [settings=table.staleness=0]
                        [tables=1] [fanout=2,2] [distinct=0] [bounds=none]

net: mlp (embeddings and dense features through three layers of 256, plus a linear term) or het (HET's WDL), on
Criteo's field sizes times `scale`; sage (GraphSAGE with `fanout` on a synthetic graph of ogbn-mag's shape times
`scale`); or complex (ComplEx, 256 negatives, on a synthetic knowledge graph of 400,000 entities times `scale`). Plain
SGD, one thread per rank. rate: none for one node, or a rate in the syntax of tc (1gbit): each rank on a host of its own
with such a link, as in `bench cluster`; needs root and MPICH. device: cuda for GPUs, with no peer but torchrec, which
must be in this environment then. distinct: steps with samples of their own, which later ones repeat, so that a cache of
all rows finds them all; 0: all steps. settings: of a run, separated by commas. peers: all, none, or some of local (a
table that is not shared, see bench/race/rank.py), torchrec, allgather and horovod (bench/peers/); torchrec gets its own
environment on first use. tables: above 1, a further contender has the same fields dealt to so many tables, and one more
if local is a peer. bounds: further contenders with the same settings and these bounds on staleness, as in
bounds=null,100. Contenders take turns; losses after equal samples are compared first.

Last, one JSON line: {"step_vs_floor": x (step time, 1 is best), "vs_local": x, "vs_torchrec": x, "vs_allgather": x,
"vs_horovod": x (samples/s, above 1 is faster here), "tables=N": x (step time over that of one table), "step_ms":
{contender: x, ...}, "split": {contender: {part: ms, ...}, ...}, "settings": {...}}.
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
    "tables": 1, "fanout": [2, 2], "distinct": 0, "bounds": ["none"],
}  # fmt: skip


def main():
    """Generates the problem, runs the contenders in turns, compares them."""
    settings = parse("step", SETTINGS, sys.argv[1:])
    peers = chosen(settings["peers"])
    if settings["net"] in SAMPLED and (peers or settings["tables"] > 1):
        sys.exit(f"bench step: net={settings['net']} has no peers, and its own tables")
    if settings["net"] in SAMPLED and settings["distinct"]:
        sys.exit(f"bench step: distinct= is of samples on file, net={settings['net']} draws them")
    if settings["device"] != "cpu" and set(peers) - {"local", "torchrec"}:
        sys.exit("bench step: on GPUs the peers are local and torchrec: give peers=local,torchrec or device=cpu")
    launcher = (
        on_hosts(settings["ranks"], settings["rate"]) if settings["rate"] != "none" else on_node(settings["ranks"])
    )
    with made_problem(settings, settings["ranks"]) as folder:
        runs = race(launcher, folder, contenders_of(settings, peers), settings)
    check_losses(runs, settings)
    times = {name: median_ms(results, settings) for name, results in runs.items()}
    split = {
        name: {part: median_of(results, f"{part}_ms", settings) for part in PARTS}
        for name, results in runs.items()
        if "forward_ms" in results[0]
    }
    show(times, split)
    print(json.dumps({
        "step_vs_floor": times["hetmpi"] / times["floor"],
        **{f"vs_{peer}": times[peer] / times["hetmpi"] for peer in peers if peer in times},
        **{name: times[name] / times["hetmpi"] for name in times if name.startswith("tables=")},
        "step_ms": times, "split": split, "settings": settings,
    }))  # fmt: skip


def contenders_of(settings: dict, peers: list[str]) -> dict[str, list[str]]:
    """Contender -> its settings."""
    device = f"device={settings['device']}"
    ours = [device, *settings["settings"]]
    bounds = [bound for bound in settings["bounds"] if bound != "none"]
    return {
        "floor": [device],
        "hetmpi": ours,
        **{f"hetmpi s = {bound}": at_bound(ours, bound) for bound in bounds},
        **dict.fromkeys(peers, [device]),
        **({f"local={settings['tables']}": [device]} if settings["tables"] > 1 and "local" in peers else {}),
        **({f"tables={settings['tables']}": ours} if settings["tables"] > 1 else {}),
    }


def at_bound(settings: list[str], bound: str) -> list[str]:
    """The same settings with another bound on staleness; without a cache at 0, which takes none."""
    others = ("table.staleness=", "table.cache.") if bound == "0" else ("table.staleness=",)
    return [*(setting for setting in settings if not setting.startswith(others)), f"table.staleness={bound}"]


def on_node(ranks: int) -> list[str]:
    """Command that starts the ranks on this machine, bound to cores if there are enough: peers too, as hetmpi binds
    itself."""
    os.environ.update(naps(ranks))
    return [*mpiexec(ranks), *(["--bind-to", "core"] if ranks <= usable_cores() else [])]


def show(times: dict, split: dict):
    """Both tables."""
    print(f"\n{'':<16}{'ms a step':>10}{'to the floor':>14}")
    for name, ms in times.items():
        print(f"{name:<16}{ms:10.2f}{ms / times['floor']:14.2f}")
    print(f"\n{'part, ms':<16}" + "".join(f"{name:>16}" for name in split))
    for part in PARTS:
        cells = (f"{parts[part]:16.2f}" if parts[part] else " " * 16 for parts in split.values())
        print((f"{part:<16}" + "".join(cells)).rstrip())


if __name__ == "__main__":
    main()
