"""Costs of staleness: held-out AUC over samples, and bytes per sample (HET, Table 2).

    ./run.sh bench staleness [workload=synthetic|hot] [optimizer=sgd|adagrad|rowwise_adagrad|adam] [ranks=8]
                             [batch=128] [dim=128] [scale=0.1] [cache=10] [seeds=3] [steps=700] [eval_every=70]
                             [variants=0,10,100,1000,null,100+g25,10+a1,100+a1,1000+a1,null+a1] [picture=staleness.png]

Trains once per variant and seed, on the same samples from the same start: WDL on synthetic data, or an MLP on few, hot
rows (hot.py). A variant is a staleness s; +aX anticipates X ranks (1: HET's own rule; default: all ranks); +gN
increases s by one every N steps; +dX limits the drift of a line to X sizes of a row. The target is 99.9 % of the gain
of s = 0 over 0.5 after `steps` steps. Runs that miss it continue until they reach it, at most `patience` times as long.
AUC is that of the owners' rows after a flush. First checks, on a small table, that s = 0 gives the same bits with and
without a cache.

Last, one JSON line, means over seeds: {"auc": {"0": x, ...}, "samples_to_target": {...}, "spread": {...},
"bytes_per_sample": {...}, "growth": the same three for +g variants, "plain": for +a1, "drift": for +d}. Samples are
null if the target is not reached.
"""

import dataclasses
import json
import sys
import time

import numpy as np
from workload import parse, start_ranks

SETTINGS = {
    "workload": "synthetic", "optimizer": "sgd", "ranks": 8, "batch": 128, "dim": 128, "scale": 0.1, "zipf": 1.05,
    "cache": 10.0, "seeds": 3, "first_seed": 0, "steps": 700, "eval_every": 70, "eval_samples": 32768, "rows_lr": 5.0,
    "dense": "sgd", "dense_lr": 0.1, "patience": 1.5,
    "variants": ["0", "10", "100", "1000", "null", "100+g25", "10+a1", "100+a1", "1000+a1", "null+a1"],
    "picture": "staleness.png",
}  # fmt: skip
HOT = {
    "ranks": 4, "batch": 256, "dim": 12, "cache": 50.0, "steps": 600, "eval_every": 60, "dense": "adam",
    "dense_lr": 0.002,
}  # fmt: skip
ROWS_LR = {
    "synthetic": {"sgd": 5.0, "adagrad": 0.02, "rowwise_adagrad": 0.02, "adam": 0.001},
    "hot": {"sgd": 20.0, "adagrad": 0.1, "rowwise_adagrad": 0.1, "adam": 0.005},
}
GAIN_SHARE = 0.999


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train: staleness, anticipated ranks, growth of s, limit of drift."""

    name: str
    staleness: int | None
    anticipate: float | None = None
    growth: float | None = None
    drift: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """Raises ValueError for an invalid variant."""
        staleness, *rest = text.split("+")
        factors = {part[:1]: float(part[1:]) for part in rest}
        if not set(factors) <= {"a", "g", "d"}:
            raise ValueError(f"{text}: after + comes aX, gN or dX")
        bound = None if staleness == "null" else int(staleness)
        return cls(text, bound, factors.get("a"), factors.get("g"), factors.get("d", 0.0))


@dataclasses.dataclass
class Curve:
    """AUC over samples, and the bytes that the table sent between ranks."""

    samples: list
    auc: list
    pulled_bytes: float = 0.0
    pushed_bytes: float = 0.0
    seconds: float = 0.0

    def auc_at(self, samples: int) -> float:
        return float(np.interp(samples, self.samples, self.auc))

    def samples_to(self, target: float) -> float | None:
        """Samples at which the curve first reaches `target`, interpolated linearly; None if it never does."""
        for i, auc in enumerate(self.auc):
            if auc >= target:
                if i == 0:
                    return float(self.samples[0])
                (x0, x1), (y0, y1) = self.samples[i - 1 : i + 1], self.auc[i - 1 : i + 1]
                return x0 + (x1 - x0) * (target - y0) / (y1 - y0)
        return None

    @property
    def bytes_per_sample(self) -> float:
        return (self.pulled_bytes + self.pushed_bytes) / self.samples[-1]


def main():
    """Reads the settings and starts the ranks, or is one of them."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--rank"]
    settings = parse("staleness", defaults(arguments), arguments)
    try:
        variants = [Variant.parse(text) for text in settings["variants"]]
    except ValueError as error:
        sys.exit(f"bench staleness: {error}")
    if variants[0].staleness != 0:
        sys.exit("bench staleness: the first variant must be 0, which sets the target")
    if settings["eval_every"] < 1 or settings["steps"] < 1 or settings["steps"] % settings["eval_every"]:
        sys.exit(
            f"bench staleness: steps must be a multiple of eval_every, got {settings['steps']} and "
            f"{settings['eval_every']}"
        )
    if "--rank" not in sys.argv:
        sys.exit(start_ranks(__file__, settings["ranks"], arguments))
    from hetmpi.comm.launch import launch

    launch(lambda world: measure(world, settings, variants))


def defaults(arguments: list[str]) -> dict:
    """The settings without those of the command line, which choose the workload and the optimizer."""
    chosen = dict(argument.partition("=")[::2] for argument in arguments)
    workload, rule = (chosen.get(key, SETTINGS[key]) for key in ("workload", "optimizer"))
    if workload not in ROWS_LR or rule not in ROWS_LR[workload]:
        sys.exit(f"bench staleness: workload is one of {', '.join(ROWS_LR)}, optimizer of {', '.join(ROWS_LR['hot'])}")
    return {**SETTINGS, **(HOT if workload == "hot" else {}), "rows_lr": ROWS_LR[workload][rule]}


def measure(world, settings: dict, variants: list[Variant]):
    """One rank: every seed and variant."""
    import torch

    torch.set_num_threads(1)
    hvd = world.start_horovod()
    check_exact(world)
    curves = {variant.name: [] for variant in variants}
    for seed in range(settings["first_seed"], settings["first_seed"] + settings["seeds"]):
        batches, target = Batches(world, settings, seed), None
        for variant in variants:
            curve = train(world, hvd, settings, variant, batches, target)
            if variant.staleness == 0:
                target = target_of(curve)
            curves[variant.name].append(curve)
            if world.rank == 0:
                print(line(seed, variant, curve, target, num_samples(world, settings)), flush=True)
    if world.rank == 0:
        report(world, settings, variants, curves)


def num_samples(world, settings: dict) -> int:
    """Number of samples of the run with s = 0."""
    return settings["steps"] * world.size * settings["batch"]


def target_of(curve: Curve) -> float:
    return 0.5 + GAIN_SHARE * (curve.auc[-1] - 0.5)


class Batches:
    """This rank's batches of one seed, kept for the next variant."""

    def __init__(self, world, settings: dict, seed: int):
        from hetmpi.data.batch import to_batch

        self.world, self.settings, self.seed, self.to_batch = world, settings, seed, to_batch
        self.data = source_of(settings, seed)
        self.made = []
        begin, end = (settings["eval_samples"] * r // world.size for r in (world.rank, world.rank + 1))
        self.held_out = [to_batch(self.data.valid(at, min(at + 2048, end))) for at in range(begin, end, 2048)]

    def at(self, step: int):
        """The batch of a step; steps must be requested in order."""
        size = self.settings["batch"]
        while len(self.made) <= step:
            begin = (len(self.made) * self.world.size + self.world.rank) * size
            self.made.append(self.to_batch(self.data.train(begin, begin + size)))
        return self.made[step]


def source_of(settings: dict, seed: int):
    """The samples of a seed."""
    from hot import Hot

    from hetmpi.data.synthetic import Synthetic

    num_valid = settings["eval_samples"]
    if settings["workload"] == "hot":
        return Hot(seed, num_valid)
    return Synthetic(seed, scale=settings["scale"], zipf=settings["zipf"], num_valid=num_valid)


def model_of(settings: dict, data):
    """The network of the workload."""
    from hot import Deep

    from hetmpi.models.wdl import WDL

    if settings["workload"] == "hot":
        return Deep(data.num_fields, settings["dim"])
    return WDL(data.num_fields, data.num_dense, settings["dim"], [256, 256, 256])


def train(world, hvd, settings: dict, variant: Variant, batches: Batches, target: float | None) -> Curve:
    """One run: `steps` steps, then until it reaches the target."""
    import torch

    from hetmpi.dense import DenseOptimizer
    from hetmpi.table.cache import CacheSettings, Staleness
    from hetmpi.table.optim import RowOptimizer, Schedule
    from hetmpi.table.table import EmbeddingTable

    data = batches.data
    torch.manual_seed(batches.seed)
    model = model_of(settings, data)
    optimizer = RowOptimizer(settings["optimizer"], settings["rows_lr"])
    table = EmbeddingTable(
        world, data.num_rows, settings["dim"], optimizer, seed=batches.seed,
        staleness=Staleness(variant.staleness, variant.growth, variant.anticipate, variant.drift),
        cache=CacheSettings(capacity_fraction=settings["cache"] / 100 if variant.staleness != 0 else 0.0, admit="all"),
    )  # fmt: skip
    dense = DenseOptimizer(hvd, model, settings["dense"], settings["dense_lr"], 0.0, Schedule())
    criterion, curve, began = torch.nn.BCEWithLogitsLoss(), Curve([], []), time.perf_counter()
    last_step = settings["steps"] if target is None else int(settings["patience"] * settings["steps"])
    for step in range(last_step):
        batch = batches.at(step)
        rows = table.read(batch.keys).requires_grad_()
        criterion(model(rows, batch), batch.label).backward()
        table.write(batch.keys, rows.grad / world.size)
        dense.step(step)
        if (step + 1) % settings["eval_every"] == 0:
            curve.samples.append((step + 1) * world.size * settings["batch"])
            curve.auc.append(evaluate(world, table, model, batches))
            if target is not None and step + 1 >= settings["steps"] and max(curve.auc) >= target:
                break
    moved = world.comm.allreduce(np.array([table.counters.pulled_bytes, table.counters.push_bytes], np.float64))
    curve.pulled_bytes, curve.pushed_bytes = map(float, moved)
    curve.seconds = time.perf_counter() - began
    table.close()
    return curve


def evaluate(world, table, model, batches: Batches) -> float:
    """AUC on the held-out samples with the owners' rows; the same on every rank. Collective."""
    import torch

    from hetmpi.metrics import auc

    table.flush()
    with torch.no_grad():
        parts = [(batch.label.numpy(), model(table.peek(batch.keys), batch).numpy()) for batch in batches.held_out]
    gathered = world.comm.gather([np.concatenate(column) for column in zip(*parts)])
    score = auc(*[np.concatenate(column) for column in zip(*gathered)]) if world.rank == 0 else None
    return world.comm.bcast(score)


def check_exact(world):
    """Raises RuntimeError unless s = 0 gives the same bits with and without a cache."""
    import torch

    from hetmpi.table.cache import CacheSettings
    from hetmpi.table.optim import RowOptimizer
    from hetmpi.table.table import EmbeddingTable

    shards = []
    for capacity in (0, 100):
        cache = CacheSettings(capacity_rows=capacity, admit="all")
        table = EmbeddingTable(world, 1000, 8, RowOptimizer("sgd", 0.1), cache=cache)
        generator = torch.Generator().manual_seed(world.rank)
        for _ in range(20):
            keys = torch.randperm(1000, generator=generator)[:200]
            table.write(keys, table.read(keys) + torch.randn(200, 8, generator=generator))
        table.flush()
        shards.append(table.shard.weight.copy())
        table.close()
    if not (shards[0] == shards[1]).all():
        raise RuntimeError("s = 0 with a cache does not give the bits of s = 0 without")


def line(seed: int, variant: Variant, curve: Curve, target: float, samples: int) -> str:
    """The result of one run in a line."""
    reached = curve.samples_to(target)
    reached_text = f"{reached / 1e6:6.3f} M" if reached else "   none "
    return (
        f"seed {seed}  s = {variant.name:<8} auc {curve.auc_at(samples):.4f}  to target {reached_text}  "
        f"{curve.bytes_per_sample:8,.0f} B/sample  {curve.seconds:5.1f} s"
    )


def report(world, settings: dict, variants: list[Variant], curves: dict):
    """The table over seeds, the picture, the JSON line."""
    samples, targets = num_samples(world, settings), [target_of(curve) for curve in curves[variants[0].name]]
    figures = {name: summary(runs, targets, samples) for name, runs in curves.items()}
    zero = figures[variants[0].name]
    print(f"\n{'s':<10}{'auc':>8}{'+-':>8}{'to s=0':>9}{'samples to target':>19}{'growth':>8}{'B/sample':>10}")
    for name, row in figures.items():
        reached = row["samples_to_target"]
        reached_text = f"{reached / 1e6:.3f} M" if reached else "not reached"
        growth = f"{reached / zero['samples_to_target'] - 1:+.1%}" if reached else ""
        print(
            f"{name:<10}{row['auc']:8.4f}{row['spread']:8.4f}{row['auc'] - zero['auc']:+9.4f}"
            f"{reached_text:>19}{growth:>8}{row['bytes_per_sample']:10,.0f}"
        )
    draw(settings["picture"], curves, figures, targets)
    print(f"picture: {settings['picture']}")
    print(json.dumps({**grouped(variants, figures), "settings": settings}))


def summary(runs: list[Curve], targets: list[float], samples: int) -> dict:
    """Means over seeds; `spread` is the range of the final AUC over the variant's own runs."""
    aucs = [run.auc_at(samples) for run in runs]
    reached = [run.samples_to(target) for run, target in zip(runs, targets)]
    return {
        "auc": float(np.mean(aucs)),
        "spread": float(np.max(aucs) - np.min(aucs)),
        "samples_to_target": float(np.mean(reached)) if None not in reached else None,
        "bytes_per_sample": float(np.mean([run.bytes_per_sample for run in runs])),
    }


def grouped(variants: list[Variant], figures: dict) -> dict:
    """The figures by s: with anticipation at the top level, HET's rule under `plain`, growing s under `growth`."""
    fields = ("auc", "samples_to_target", "spread", "bytes_per_sample")
    groups = {"": {f: {} for f in fields}, "growth": {f: {} for f in fields}, "plain": {f: {} for f in fields}}
    for variant in variants:
        is_plain = variant.anticipate == 1 or variant.staleness == 0
        places = ["plain"] if is_plain and variant.staleness != 0 else ["", "plain"] if is_plain else [""]
        if variant.drift:
            places = ["drift"]
        elif variant.growth is not None:
            places = ["growth"]
        elif variant.anticipate not in (None, 1):
            places = [variant.name]
        for place in places:
            group = groups.setdefault(place, {f: {} for f in fields})
            for field in fields:
                group[field][variant.name.split("+")[0]] = figures[variant.name][field]
    return {**groups.pop(""), **groups}


def draw(path: str, curves: dict, figures: dict, targets: list[float]):
    """Draws two charts: AUC over samples, and samples to target over bytes per sample."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    for i, (name, runs) in enumerate(curves.items()):
        style = "--" if "+a1" in name else ":" if "+" in name else "-"
        shortest = min((run.samples for run in runs), key=len)
        mean = np.mean([run.auc[: len(shortest)] for run in runs], axis=0)
        left.plot(np.array(shortest) / 1e6, mean, style, color=f"C{i % 10}", label=f"s = {name}")
        row = figures[name]
        if row["samples_to_target"]:
            right.plot(row["bytes_per_sample"], row["samples_to_target"] / 1e6, "o", color=f"C{i % 10}")
            right.annotate(name, (row["bytes_per_sample"], row["samples_to_target"] / 1e6), xytext=(5, 5),
                           textcoords="offset points")  # fmt: skip
    left.axhline(np.mean(targets), color="grey", linewidth=0.8)
    left.set(xlabel="samples (millions)", ylabel="held-out AUC", title="AUC over samples; grey: the target")
    left.legend(fontsize=8)
    right.set(xlabel="bytes between ranks per sample", ylabel="samples to target (millions)", xscale="log")
    right.set_title("samples to target against bytes; +a1: HET's rule, +gN: growing s, +dX: drift")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
