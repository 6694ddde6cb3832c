"""Predicts the time of a training step by a formula: measures its constants here, compares it with real runs, then
applies it to larger clusters.

    ./run.sh bench model [net=het] [dim=128] [batches=128,2048] [scale=0.1] [zipf=1.05] [s=100] [cache=10] [rate=1gbit]
                         [hosts=2,4] [steps=100] [warmup=50] [repeats=1] [ranks=8,64,256,1024] [ranks_per_node=8]
                         [rates=10,100,400]

    step(P) = k (local + far (N - 2)) + alone / rate + max(0, allreduce(P) + beside / rate - k write)

for P ranks on N nodes. The ranks of a node share its link of `rates` Gb/s; rate is one rank's part of that.

    local       the rank's own work, on 2 hosts with links as fast as memory: the floor's, a + b B for B samples, and
                hetmpi's addition, c + d K for K keys (s = 0: of other ranks). The floor is the dense network with all
                rows in memory
    far         processor time per further node to exchange messages with (hetmpi/wire/rails.py), without the polling
                of ranks that wait for each other: 3 hosts against 2, with almost no samples
    allreduce   the larger of its time per doubling of ranks, without a slow link, times k log2 P, and 2 (N - 1) / N of
                the dense gradients' bytes over the link; if ranks outnumber cores, and so sleep while they wait, it is
                taken from 3 hosts
    alone       bytes that one rank receives while it only waits for them: at s = 0 the rows that it reads
    beside      bytes that it receives during the allreduce of the dense gradients: at s = 0 other ranks' gradients, at
                s >= 1 rows and clocks for the next reads, m times as much in one step of m and none in the others.
                Requests, and pushes at s >= 1, are sent during computation
    write       the time of a write to the table, which overlaps with the allreduce
    m           steps that one round serves (table.batches_per_pull): 1 at s = 0
    k           ranks per core where ranks outnumber cores, as on the hosts of this machine; 1 on a cluster

Both exchanges are by messages. K keys of a batch, rows fetched and gradient sums pushed per step are expected values
under the distribution of ids; the cache is assumed to hold the most used lines, in sets of 32. The check runs the
contenders of `bench cluster`. Needs root and MPICH. Last, one JSON line: {"worst": largest |predicted / measured - 1|
of a step, "worst_bytes": the same of bytes, "constants": {...}, "checked": [...], "predicted": [...]}.
"""

import functools
import json
import math
import re
import sys
from dataclasses import dataclass

import numpy as np
from race import problem
from race.turns import made_problem, median_ms, median_of, on_hosts, race
from workload import key_of, parse

from hetmpi import _C
from hetmpi.data.synthetic import Synthetic, Zipf
from hetmpi.run.build import default_per_pull
from hetmpi.spans import PARTS
from hetmpi.world.cores import usable_cores

SETTINGS = {
    "net": "het",
    "dim": 128,
    "batches": [128, 2048],
    "scale": 0.1,
    "zipf": 1.05,
    "s": 100,
    "cache": 10.0,
    "rate": "1gbit",
    "hosts": [2, 4],
    "steps": 100,
    "warmup": 50,
    "repeats": 1,
    "ranks": [8, 64, 256, 1024],
    "ranks_per_node": 8,
    "rates": [10.0, 100.0, 400.0],
}
KINDS = ("floor", "hetmpi s = 0", "hetmpi s >= 1")
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
RATE = rf"([0-9.]+)({'|'.join(BITS)})"
CPU = ("main_cpu_ms", "polled_cpu_ms")
FEW = 8  # samples of a batch whose cost is almost only messages


def main():
    settings = checked_settings(parse("model", SETTINGS, sys.argv[1:]))
    on_node = settings["ranks_per_node"]
    law, runs = Law(settings), measured(settings)
    model = Model(settings, law, runs)
    checked = [model.check(key, name) for key in runs if key[1] != "none" for name in runs[key]]
    show_check(checked)
    predicted = [
        {
            "ranks": ranks,
            "gbit": rate,
            "batch": batch,
            **{name: model.step_ms(name, ranks, batch, 1e9 * rate / 8, on_node) for name in KINDS},
        }
        for batch in settings["batches"]
        for rate in settings["rates"]
        for ranks in settings["ranks"]
    ]
    show_predicted(predicted)
    print(
        json.dumps(
            {
                "worst": max(abs(check["step_ms"] / check["measured_ms"] - 1) for check in checked),
                "worst_bytes": max(
                    abs(check["bytes"] / check["measured_bytes"] - 1) for check in checked if check["measured_bytes"]
                ),
                "constants": model.constants,
                "runs": {" ".join(map(str, key)): kinds for key, kinds in runs.items()},
                "checked": checked,
                "predicted": predicted,
                "settings": settings,
            }
        )
    )


def measured(settings: dict) -> dict:
    """(hosts, rate, batch) -> kind -> figures. Runs for constants and for the check take turns, as this machine's speed
    varies."""
    few = [(hosts, "none", FEW) for hosts in (2, 3)]
    links = [(2, "none"), *((hosts, settings["rate"]) for hosts in settings["hosts"])]
    results = {
        key: {kind: [] for kind in KINDS}
        for key in [*few, *((*link, batch) for batch in settings["batches"] for link in links)]
    }
    for turn in range(settings["repeats"]):
        for hosts, rate, batch in results:
            print(f"\n{turn + 1}/{settings['repeats']}: {hosts} hosts, links: {rate}, batch {batch}", flush=True)
            chosen = {**settings, "batch": batch, "repeats": 1}
            with made_problem(chosen, hosts) as folder:
                raced = race(on_hosts(hosts, rate), folder, contenders_of(settings), chosen)
            for kind, result in raced.items():
                results[hosts, rate, batch][kind] += result
    return {key: {kind: figures(result, settings) for kind, result in kinds.items()} for key, kinds in results.items()}


def checked_settings(settings: dict) -> dict:
    """The settings. Exits if nothing can be measured with them."""
    batches = settings["batches"]
    wrong = {
        "batches must be two or more, the smallest first": len(batches) < 2 or sorted(set(batches)) != batches,
        "cache must be above 0": settings["cache"] <= 0,
        "s must be at least 1, or null": settings["s"] is not None and settings["s"] < 1,
        f"rate must be a number and one of {', '.join(BITS)}": not re.fullmatch(RATE, settings["rate"]),
        "hosts must be 2 or more": min(settings["hosts"]) < 2,
        "ranks_per_node must be 1 or more": settings["ranks_per_node"] < 1,
    }
    if any(wrong.values()):
        sys.exit("bench model: " + "; ".join(text for text, is_wrong in wrong.items() if is_wrong))
    return settings


def contenders_of(settings: dict) -> dict[str, list[str]]:
    """Kind -> settings of the trainer."""
    cached = [
        "table.cache.admit=all",
        f"table.cache.capacity_fraction={settings['cache'] / 100}",
        f"table.staleness={key_of(settings['s'])}",
        "table.drift=0",
    ]
    floor, exact, stale = KINDS
    return {floor: [], exact: ["table.exchange=messages"], stale: ["table.exchange=messages", *cached]}


def figures(results: list[dict], settings: dict) -> dict:
    """Figures of one contender per step."""
    kept = {name: median_of(results, name, settings) for name in (*(f"{part}_ms" for part in PARTS), *CPU)}
    counted = (
        [median_of(results, name, settings) for name in ("pulled_bytes", "pushed_bytes")]
        if "wait_ms" in results[0]
        else []
    )
    return {"step_ms": median_ms(results, settings), **kept, "bytes": sum(counted)}


@dataclass
class Traffic:
    """Bytes that one rank receives in a step: those that hetmpi counts (without ids), and of all bytes those that it
    waits for alone, and those received during the allreduce of the dense gradients."""

    counted: float
    alone: float
    beside: float


class Law:
    """Expected requests of a batch under the distribution of ids."""

    def __init__(self, settings: dict):
        rows = Synthetic(0, settings["scale"], settings["zipf"], num_valid=1).field_rows
        self.chance = np.sort(np.concatenate([Zipf(np.array([n]), settings["zipf"]).chances(0) for n in rows]))[::-1]
        self.lines = round(settings["cache"] / 100 * len(self.chance))
        self.settings, self.num_fields = settings, len(rows)

    def batches_per_pull(self, batch: int) -> int:
        """Steps that one round serves."""
        return default_per_pull(self.settings["s"], self.lines, batch * self.num_fields)

    @functools.cache
    def used(self, batch: int) -> np.ndarray:
        """Probability of each row to be in a batch of one rank, (rows,), descending."""
        return -np.expm1(batch * np.log1p(-self.chance))

    @functools.cache
    def cached(self, batch: int, step: int) -> tuple[float, float]:
        """At s >= 1, per step: rows fetched, and gradient sums pushed. A line is fetched again after s own updates,
        when its sum is pushed too. A row without a line is fetched, and evicts a line with its sum if the set is
        full."""
        used, s = self.used(batch), math.inf if self.settings["s"] is None else self.settings["s"]
        new = np.exp(step * np.log1p(-np.minimum(used, 1 - 1e-12)))  # probability that this rank has never read it
        seen = float((1 - new).sum())
        is_full = over(_C.WAYS, _C.WAYS * seen / self.lines)
        missing = used * new
        missing[self.lines :] = used[self.lines :] * (is_full + (1 - is_full) * new[self.lines :])
        renewed = float((used * (used * step > s)).sum()) / (s + 1)
        return renewed + missing.sum(), renewed + missing.sum() * is_full


def over(ways: int, mean: float) -> float:
    """Probability that a set of `ways` lines, of which `mean` would be used, is full."""
    terms = np.arange(ways) * math.log(max(mean, 1e-9)) - mean - np.array([math.lgamma(i + 1) for i in range(ways)])
    return float(1 - np.exp(terms).sum())


class Model:
    """The formula. runs: (hosts, rate, batch) -> kind -> figures."""

    def __init__(self, settings: dict, law: Law, runs: dict):
        self.settings, self.law, self.runs, self.dim = settings, law, runs, settings["dim"]
        self.middle = (settings["warmup"] + settings["steps"]) // 2  # of the steps measured
        self.dense_bytes = 4 * sum(parameter.numel() for parameter in self.network().parameters())
        few, many = settings["batches"][0], settings["batches"][-1]
        two = {batch: runs[2, "none", batch] for batch in (few, many)}
        own = {
            batch: {kind: run["step_ms"] - run["allreduce_ms"] for kind, run in kinds.items()}
            for batch, kinds in two.items()
        }
        crowded = runs[3, "none", FEW]["floor"]["allreduce_ms"] / (crowd_of(3) * math.log2(3))
        alone = runs[2, "none", FEW]["floor"]["allreduce_ms"]  # longer steps include waiting for the slower rank
        self.constants = {"allreduce_ms": alone, "crowded_allreduce_ms": crowded}
        for kind in KINDS:
            added = {batch: own[batch][kind] - (own[batch]["floor"] if kind != "floor" else 0) for batch in own}
            begin, end = self.load(kind, few, 2), self.load(kind, many, 2)
            each = max(0.0, (added[many] - added[few]) / (end - begin))
            self.constants[kind] = {
                "ms": max(0.0, added[few] - each * begin),
                "ms_each": each,
                "far_ms": self.far_ms(kind),
            }

    def network(self):
        """The dense network of the problem."""
        return problem.NETWORKS[self.settings["net"]](self.law.num_fields, self.dim)

    def load(self, kind: str, batch: int, ranks: int, on_node: int = 1) -> float:
        """The variable of a rank's work: samples for the floor, keys for hetmpi, at s = 0 those of other nodes."""
        if kind == "floor":
            return batch
        keys = self.law.used(batch).sum()
        return keys * max(ranks - on_node, 1) / ranks if kind == "hetmpi s = 0" else keys

    def far_ms(self, kind: str) -> float:
        """Processor time of one more node to communicate with, without the floor's."""
        three, two = (
            {name: run["main_cpu_ms"] - run["polled_cpu_ms"] for name, run in self.runs[hosts, "none", FEW].items()}
            for hosts in (3, 2)
        )
        return max(0.0, three[kind] - three["floor"] - (two[kind] - two["floor"]))

    def step_ms(
        self,
        kind: str,
        ranks: int,
        batch: int,
        link: float,
        on_node: int = 1,
        crowd: float = 1.0,
        step: int | None = None,
    ) -> float:
        """link: bytes per second of a node. on_node: its ranks. crowd: ranks per core. step: position in the run, None
        for the steady state."""
        on_node = min(on_node, ranks)
        nodes, rate = math.ceil(ranks / on_node), link / on_node
        local = sum(
            self.constants[part]["ms"]
            + self.constants[part]["ms_each"] * self.load(part, batch, ranks, on_node)
            + self.constants[part]["far_ms"] * (nodes - 2)
            for part in dict.fromkeys(["floor", kind])
        )
        reduced = 2 * (nodes - 1) / nodes * self.dense_bytes / link * 1000
        each = self.constants["crowded_allreduce_ms" if crowd > 1 else "allreduce_ms"]
        allreduce = max(crowd * each * math.log2(ranks), reduced)
        traffic, write = self.traffic(kind, batch, ranks, on_node, step), self.write_ms(kind, batch, ranks, on_node)
        steps = self.law.batches_per_pull(batch) if kind == "hetmpi s >= 1" else 1
        with_rows, without = (
            max(0.0, allreduce + 1000 * num_bytes / rate - crowd * write) for num_bytes in (steps * traffic.beside, 0)
        )
        return crowd * local + 1000 * traffic.alone / rate + (with_rows + (steps - 1) * without) / steps

    def write_ms(self, kind: str, batch: int, ranks: int, on_node: int) -> float:
        """Time of a write to the table, measured on two hosts, scaled by the bytes written."""
        known = min((self.settings["batches"][0], self.settings["batches"][-1]), key=lambda b: abs(math.log(b / batch)))
        return (
            self.runs[2, "none", known][kind]["push_ms"]
            * self.load(kind, batch, ranks, on_node)
            / self.load(kind, known, 2)
        )

    def traffic(self, kind: str, batch: int, ranks: int, on_node: int, step: int | None) -> Traffic:
        """Bytes that one rank receives in a step from other nodes."""
        share, keys, row = (ranks - on_node) / ranks, self.law.used(batch).sum(), 4 * self.dim
        if kind == "floor":
            return Traffic(0, 0, 0)
        if kind == "hetmpi s = 0":  # a key of several ranks of a node crosses once
            keys = self.law.used(batch * on_node).sum() / on_node
            return Traffic(share * keys * (row + 8 + row), share * keys * row, share * keys * (8 + row))
        fetched, left = self.law.cached(batch, 10**6 if step is None else step)
        steps = self.law.batches_per_pull(batch)
        clocks = 4 * self.law.used(batch * steps).sum() / steps
        return Traffic(share * (clocks + row * fetched + (16 + row) * left), 0, share * (clocks + row * fetched))

    def check(self, key: tuple, kind: str) -> dict:
        """Prediction and measurement of one run."""
        hosts, rate, batch = key
        measured = self.runs[key][kind]
        return {
            "hosts": hosts, "batch": batch, "kind": kind,
            "step_ms": self.step_ms(kind, hosts, batch, bytes_per_second(rate), 1, crowd_of(hosts), self.middle),
            "measured_ms": measured["step_ms"],
            "bytes": hosts * self.traffic(kind, batch, hosts, 1, self.middle).counted,
            "measured_bytes": measured["bytes"],
        }  # fmt: skip


def crowd_of(ranks: int) -> float:
    """Ranks per core of this machine, at least 1."""
    return max(1.0, ranks / usable_cores())


def bytes_per_second(rate: str) -> float:
    """Bytes per second of a rate in the syntax of tc."""
    number, unit = re.fullmatch(RATE, rate).groups()
    return float(number) * BITS[unit] / 8


def show_check(checked: list[dict]):
    print(
        f"\n{'hosts':>5}{'batch':>7}  "
        f"{'':<15}{'predicted':>10}{'measured':>10}{'ratio':>7}{'MB, predicted':>15}{'measured':>10}"
    )
    for c in checked:
        ratio, sizes = c["step_ms"] / c["measured_ms"], f"{c['bytes'] / 1e6:15.3f}{c['measured_bytes'] / 1e6:10.3f}"
        print(
            f"{c['hosts']:5}{c['batch']:7}  "
            f"{c['kind']:<15}{c['step_ms']:10.2f}{c['measured_ms']:10.2f}{ratio:7.2f}{sizes}"
        )


def show_predicted(predicted: list[dict]):
    print(
        f"\n{'ranks':>5}{'Gb/s':>6}{'batch':>7}"
        + "".join(f"{kind:>15}" for kind in KINDS)
        + "   ms a step, one rank per core, nodes with a link each"
    )
    for p in predicted:
        print(f"{p['ranks']:5}{p['gbit']:6.0f}{p['batch']:7}" + "".join(f"{p[kind]:15.2f}" for kind in KINDS))


if __name__ == "__main__":
    main()
