"""Time of a training step on several hosts with a slow network, compared with the floor and with peers.

    ./run.sh bench cluster [hosts=4] [ranks_per_host=1] [rate=1gbit] [net=het] [dim=128] [batch=128] [scale=0.1]
                           [zipf=1.05] [steps=300] [warmup=150] [repeats=5] [peers=none] [cache=10] [bounds=10,100]
                           [exchange=auto] [settings=table.cache.admit=all] [fanout=2,2]

The hosts are network namespaces of this machine (tools/hosts.sh), with links shaped to `rate`, in the syntax of tc;
needs root and MPICH. net: as of `bench step`. Contenders: the floor (the dense network with all rows in memory), its
gradients summed as hetmpi sums them or by Horovod; hetmpi without a cache at s = 0, without look-ahead (late) and with
it (uncached), and with a cache at each of `bounds`; peers as in `bench step`. Losses after equal samples are compared
first, except at s >= 1.

Last, one JSON line: {"s100_vs_floor": x (step time, 1 is best), "s100_vs_floor_by_horovod": x, "s100_wait_vs_uncached":
x, "s100_vs_torchrec": x (samples/s, above 1 is faster here), ..., "bytes_per_step": {"uncached": n, "10": n, ...},
"step_ms": {...}, "wait_ms": {...}, "processor_ms": {...}, "split": {contender: {part: ms}}, "exchange": {contender:
[name, ...]}}, where s100 is the last of `bounds`, and exchange is the transport in use, which each run with auto
selects again. Bytes are those of all ranks, processor times those of one rank. A peer that fails, of memory for
example, is skipped with its reason.
"""

import json
import sys
from importlib.util import find_spec

from race.turns import check_losses, chosen, made_problem, median_ms, median_of, on_hosts, race
from workload import key_of, parse

from hetmpi.spans import PARTS

SETTINGS = {
    "hosts": 4,
    "ranks_per_host": 1,
    "rate": "1gbit",
    "net": "het",
    "dim": 128,
    "batch": 128,
    "scale": 0.1,
    "zipf": 1.05,
    "steps": 300,
    "warmup": 150,
    "repeats": 5,
    "peers": ["none"],
    "cache": 10.0,
    "bounds": [10, 100],
    "exchange": "auto",
    "settings": ["table.cache.admit=all"],
    "fanout": [2, 2],
}


def main():
    """Generates the problem, runs the contenders in turns, compares them."""
    settings = parse("cluster", SETTINGS, sys.argv[1:])
    peers = chosen(settings["peers"])
    launcher = on_hosts(settings["hosts"], settings["rate"], settings["ranks_per_host"])
    with made_problem(settings, settings["hosts"] * settings["ranks_per_host"]) as folder:
        runs = race(launcher, folder, contenders_of(settings, peers), settings)
    check_losses(runs, settings)
    show(runs, settings)
    show_ahead(runs, settings)
    print(json.dumps(figures(runs, settings, peers)))


def contenders_of(settings: dict, peers: list[str]) -> dict[str, list[str]]:
    """Contender -> settings of the trainer."""
    exchange, dense = f"table.exchange={settings['exchange']}", "optim.dense_exchange="
    ours = [exchange, *settings["settings"]]
    cached = [*ours, f"table.cache.capacity_fraction={settings['cache'] / 100}"]
    of_floor = [setting for setting in settings["settings"] if setting.startswith(dense)]
    return {
        "floor": of_floor,
        **({"floor by Horovod": [f"{dense}horovod"]} if find_spec("horovod") else {}),
        "hetmpi late": [*ours, "table.look_ahead=false"],
        "hetmpi uncached": [*ours, "table.look_ahead=true"],
        **{f"hetmpi s = {key_of(s)}": [f"table.staleness={key_of(s)}", *cached] for s in settings["bounds"]},
        **{peer: of_floor if peer == "local" else [] for peer in peers},
    }


def show(runs: dict, settings: dict):
    """Prints times and bytes of all contenders, and the parts of hetmpi's steps."""
    samples = settings["hosts"] * settings["ranks_per_host"] * settings["batch"]
    print(
        f"\n{'':<18}{'ms a step':>10}{'samples/s':>11}{'to the floor':>14}"
        f"{'processor, ms':>15}{'waiting, ms':>13}{'MB a step':>11}"
    )
    floor = median_ms(runs["floor"], settings)
    for name, results in runs.items():
        ms = median_ms(results, settings)
        line = f"{name:<18}{ms:10.2f}{1000 * samples / ms:11,.0f}{ms / floor:14.2f}"
        if "main_cpu_ms" in results[0]:
            line += f"{processor_ms(results, settings):15.2f}"
        if "wait_ms" in results[0]:
            line += f"{median_of(results, 'wait_ms', settings):13.2f}{num_bytes(results, settings) / 1e6:11.3f}"
        print(line)
    ours = {name: results for name, results in runs.items() if "wait_ms" in results[0]}
    print(f"\n{'part, ms':<12}" + "".join(f"{name.removeprefix('hetmpi '):>11}" for name in ours))
    for part in PARTS:
        print(
            f"{part:<12}" + "".join(f"{median_of(results, f'{part}_ms', settings):11.2f}" for results in ours.values())
        )


def show_ahead(runs: dict, settings: dict):
    """Prints what look-ahead brings at s = 0."""
    late, ahead = (
        sum(median_of(runs[name], f"{part}_ms", settings) for part in ("drain", "fetch", "allreduce"))
        for name in ("hetmpi late", "hetmpi uncached")
    )
    print(f"\nwaits for rows, gradients and the allreduce: {late:.2f} ms without look-ahead, {ahead:.2f} with it")


def processor_ms(results: list[dict], settings: dict) -> float:
    """Processor time of one rank per step, all threads."""
    return sum(median_of(results, f"{part}_cpu_ms", settings) for part in ("main", "other"))


def num_bytes(results: list[dict], settings: dict) -> float:
    return median_of(results, "pulled_bytes", settings) + median_of(results, "pushed_bytes", settings)


def figures(runs: dict, settings: dict, peers: list[str]) -> dict:
    """The JSON line."""
    ours = {name.removeprefix("hetmpi ").removeprefix("s = "): runs[name] for name in runs if name.startswith("hetmpi")}
    times = {name: median_ms(results, settings) for name, results in runs.items()}
    last = key_of(settings["bounds"][-1])
    label, ms = f"s{last}", times[f"hetmpi s = {last}"]
    waits = {name: median_of(results, "wait_ms", settings) for name, results in ours.items()}
    by_horovod = times.get("floor by Horovod")  # None where there is no Horovod
    return {
        f"{label}_vs_floor": ms / times["floor"],
        f"{label}_vs_floor_by_horovod": by_horovod and ms / by_horovod,
        f"{label}_wait_vs_uncached": waits[last] / waits["uncached"],
        **{f"{label}_vs_{peer}": times[peer] / ms for peer in peers if peer in times},
        "bytes_per_step": {name: num_bytes(results, settings) for name, results in ours.items()},
        "step_ms": times,
        "wait_ms": waits,
        "processor_ms": {
            name: processor_ms(results, settings) for name, results in runs.items() if "main_cpu_ms" in results[0]
        },
        "split": {name: {part: median_of(r, f"{part}_ms", settings) for part in PARTS} for name, r in ours.items()},
        "exchange": {name: sorted({result["exchange"] for result in results}) for name, results in ours.items()},
        "settings": settings,
    }


if __name__ == "__main__":
    main()
