"""Costs of staleness: held-out AUC, or accuracy, over samples, bytes and time (HET, Table 2).

    ./run.sh bench staleness [workload=synthetic|hot|criteo|reddit|amazon|mag] [ranks=8] [batch=128]
                             [optimizer=sgd|adagrad|rowwise_adagrad|adam|momentum|ftrl] [metis=0|1] [dim=128]
                             [scale=0.1] [cache=10] [seeds=3] [steps=700] [eval_every=70]
                             [variants=0,10,100,1000,null,10+a1,100+a1,1000+a1,null+a1] [picture=staleness.png]
                             [data=] [norm=0|1]

Trains once per variant and seed, on the same samples from the same start: WDL on synthetic data; an MLP on few, hot
rows (hot.py), with norm=1 with batch normalisation; WDL on the raw Criteo text in the file `data`, split anew for every
seed (criteo.py); or the GCN of a graph of HET's (conf/experiment/het_mag.yaml), whose score is accuracy in place of
AUC. A variant is a staleness s; +aX anticipates X ranks (1: HET's own rule; default: all ranks); +dX limits the drift
of a line to X sizes of a row. The target is the score that s = 0 has after 90 % of the samples. Runs that miss it
continue until they reach it, at most `patience` times as long. Scores are those of the owners' rows after a flush.

Prints, over the seeds, the mean score, its difference to s = 0 with the standard error of that difference, the same for
the samples to the target, bytes per sample and seconds. Last, one JSON line: {"score": {"0": x, ...},
"samples_to_target": {...}, "to_zero": {...}, "error": {...}, "bytes_per_sample": {...}, "seconds": {...}, "plain": the
same for +a1 variants, "drift": for +d, "curves": {variant: {"samples": [...], "score": [...],
"to_zero": [...], "error": [...]}}}. Samples are null if the target is not reached.
"""

import dataclasses
import json
import sys
import time

import numpy as np
from workload import GRAPHS, graph_of, parse, start_ranks

SETTINGS = {
    "workload": "synthetic", "optimizer": "sgd", "ranks": 8, "batch": 128, "dim": 128, "scale": 0.1, "zipf": 1.05,
    "cache": 10.0, "seeds": 3, "first_seed": 0, "steps": 700, "eval_every": 70, "eval_samples": 32768, "rows_lr": 5.0,
    "dense": "sgd", "dense_lr": 0.1, "init_std": 0.01, "patience": 1.5, "data": "",
    "metis": 0, "norm": 0,
    "variants": ["0", "10", "100", "1000", "null", "10+a1", "100+a1", "1000+a1", "null+a1"],
    "picture": "staleness.png",
}  # fmt: skip
HOT = {
    "ranks": 4, "batch": 256, "dim": 12, "cache": 50.0, "steps": 600, "eval_every": 60, "dense": "adam",
    "dense_lr": 0.002,
}  # fmt: skip
CRITEO = {
    "batch": 8, "dim": 16, "steps": 180, "eval_every": 30, "eval_samples": 3000, "dense": "adam", "dense_lr": 0.002,
    "seeds": 8,
}  # fmt: skip
GRAPH = {
    "scale": 0.02, "seeds": 1, "steps": 200, "eval_every": 20, "eval_samples": 4096, "dense_lr": 1.0,
    "init_std": 0.1,
}  # fmt: skip
WORKLOADS = {"synthetic": {}, "hot": HOT, "criteo": CRITEO, **dict.fromkeys(GRAPHS, GRAPH)}
ROWS_LR = {
    workload: {
        "sgd": sgd, "adagrad": adagrad, "rowwise_adagrad": adagrad, "adam": adam,
        "momentum": sgd / 10, "ftrl": adagrad,  # at the default momentum of 0.9, and without L1 and L2
    }
    for workload, (sgd, adagrad, adam) in {
        "synthetic": (5.0, 0.02, 0.001), "hot": (20.0, 0.1, 0.005), "criteo": (2.0, 0.02, 0.002),
        **dict.fromkeys(GRAPHS, (2000.0, 0.02, 0.002)),
    }.items()
}  # fmt: skip
TARGET_AT = 0.9  # of the samples


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train: staleness, anticipated ranks, limit of drift."""

    name: str
    staleness: int | None
    anticipate: float | None = None
    drift: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """Raises ValueError for an invalid variant."""
        staleness, *rest = text.split("+")
        factors = {part[:1]: float(part[1:]) for part in rest}
        if not set(factors) <= {"a", "d"}:
            raise ValueError(f"{text}: after + comes aX or dX")
        bound = None if staleness == "null" else int(staleness)
        return cls(text, bound, factors.get("a"), factors.get("d", 0.0))


@dataclasses.dataclass
class Curve:
    """Score at each evaluation, and by then: samples, bytes that the table sent between ranks, seconds of training."""

    samples: list
    scores: list
    bytes: list
    seconds: list

    def score_at(self, samples: int) -> float:
        return float(np.interp(samples, self.samples, self.scores))

    def samples_to(self, target: float) -> float | None:
        """Samples at which the curve first reaches `target`, interpolated linearly; None if it never does."""
        for i, score in enumerate(self.scores):
            if score >= target:
                if i == 0:
                    return float(self.samples[0])
                (x0, x1), (y0, y1) = self.samples[i - 1 : i + 1], self.scores[i - 1 : i + 1]
                return x0 + (x1 - x0) * (target - y0) / (y1 - y0)
        return None

    def bytes_per_sample(self, samples: int) -> float:
        return float(np.interp(samples, self.samples, self.bytes)) / samples


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
    if settings["workload"] == "criteo" and not settings["data"]:
        sys.exit("bench staleness: workload=criteo needs data=FILE, raw Criteo text")
    if "--rank" not in sys.argv:
        sys.exit(start_ranks(__file__, settings["ranks"], arguments))
    from hetmpi.world.launch import launch

    launch(lambda world: measure(world, settings, variants))


def defaults(arguments: list[str]) -> dict:
    """The settings without those of the command line, which choose the workload and the optimizer."""
    chosen = dict(argument.partition("=")[::2] for argument in arguments)
    workload, rule = (chosen.get(key, SETTINGS[key]) for key in ("workload", "optimizer"))
    if workload not in ROWS_LR or rule not in ROWS_LR[workload]:
        sys.exit(f"bench staleness: workload is one of {', '.join(ROWS_LR)}, optimizer of {', '.join(ROWS_LR['hot'])}")
    return {**SETTINGS, **WORKLOADS[workload], "rows_lr": ROWS_LR[workload][rule]}


def measure(world, settings: dict, variants: list[Variant]):
    """One rank: every seed and variant."""
    import torch

    torch.set_num_threads(1)
    hvd = world.start_horovod()
    curves = {variant.name: [] for variant in variants}
    for seed in range(settings["first_seed"], settings["first_seed"] + settings["seeds"]):
        batches, target = Batches(world, settings, seed), None
        for variant in variants:
            curve = train(world, hvd, settings, variant, batches, target)
            if variant.staleness == 0:
                target = target_of(curve, num_samples(world, settings))
            curves[variant.name].append(curve)
            if world.rank == 0:
                print(line(seed, variant, curve, target, num_samples(world, settings)), flush=True)
    if world.rank == 0:
        report(world, settings, variants, curves)


def num_samples(world, settings: dict) -> int:
    """Number of samples of the run with s = 0."""
    return settings["steps"] * world.size * settings["batch"]


def target_of(curve: Curve, samples: int) -> float:
    return curve.score_at(TARGET_AT * samples)


class Batches:
    """This rank's batches of one seed, kept for the next variant.

    task  hetmpi/tasks/task.py, Task"""

    def __init__(self, world, settings: dict, seed: int):
        import torch

        self.world, self.settings, self.seed = world, settings, seed
        self.data, self.task, self.model = learner_of(world, settings, seed)
        self.to_batch = self.task.batches(torch.device("cpu"))
        self.made = []
        num_valid = min(settings["eval_samples"], self.data.num_valid)
        begin, end = (num_valid * r // world.size for r in (world.rank, world.rank + 1))
        self.held_out = [self.to_batch(self.data.valid(at, min(at + 2048, end))) for at in range(begin, end, 2048)]

    def at(self, step: int):
        """The batch of a step; steps must be requested in order."""
        size = self.settings["batch"]
        while len(self.made) <= step:
            begin = (len(self.made) * self.world.size + self.world.rank) * size
            self.made.append(self.to_batch(self.data.train(begin, begin + size)))
        return self.made[step]


def learner_of(world, settings: dict, seed: int) -> tuple:
    """The samples of a seed, the task, and a function that makes the network. Collective."""
    import torch

    from hetmpi.run.build import make_model, make_task
    from hetmpi.tasks.ctr import ClickThroughRate

    if settings["workload"] in GRAPHS:
        config, data = graph_of(world, settings, seed)
        task = make_task(config, data, torch.device("cpu"))
        return data, task, lambda: make_model(config, task)
    data = source_of(world, settings, seed)
    return data, ClickThroughRate(data, torch.nn.BCEWithLogitsLoss()), lambda: model_of(settings, data)


def source_of(world, settings: dict, seed: int):
    """The samples of clicks of a seed. Collective."""
    from criteo import Resplit
    from hot import Hot

    from hetmpi.data.synthetic import Synthetic

    num_valid = settings["eval_samples"]
    if settings["workload"] == "hot":
        return Hot(seed, num_valid)
    if settings["workload"] == "criteo":
        return Resplit(world, settings["data"], seed, num_valid)
    return Synthetic(seed, scale=settings["scale"], zipf=settings["zipf"], num_valid=num_valid)


def model_of(settings: dict, data):
    """The network for clicks."""
    from hot import Deep

    from hetmpi.models.wdl import WDL

    if settings["workload"] == "hot":
        return Deep(data.num_fields, settings["dim"], bool(settings["norm"]))
    return WDL(data.num_fields, data.num_dense, settings["dim"], [256, 256, 256])


def train(world, hvd, settings: dict, variant: Variant, batches: Batches, target: float | None) -> Curve:
    """One run: `steps` steps, then until it reaches the target."""
    import torch

    from hetmpi.data.features import TABLE
    from hetmpi.dense import DenseOptimizer
    from hetmpi.schedule import Schedule
    from hetmpi.table.cache import CacheSettings
    from hetmpi.table.optim import RowOptimizer
    from hetmpi.table.staleness import Staleness
    from hetmpi.table.table import EmbeddingTable

    data = batches.data
    torch.manual_seed(batches.seed)
    model = batches.model()
    optimizer = RowOptimizer(settings["optimizer"], settings["rows_lr"])
    table = EmbeddingTable(
        world, data.num_rows, settings["dim"], optimizer, seed=batches.seed, init_std=settings["init_std"],
        partition="range" if settings["metis"] else "round_robin",
        staleness=Staleness(variant.staleness, variant.anticipate, variant.drift),
        cache=CacheSettings(capacity_fraction=settings["cache"] / 100 if variant.staleness != 0 else 0.0, admit="all"),
    )  # fmt: skip
    dense = DenseOptimizer(hvd, model, settings["dense"], settings["dense_lr"], 0.0, Schedule())
    task, curve, seconds, began = batches.task, Curve([], [], [], []), 0.0, time.perf_counter()
    last_step = settings["steps"] if target is None else int(settings["patience"] * settings["steps"])
    for step in range(last_step):
        batch = batches.at(step)
        rows = table.read(batch.keys[TABLE]).requires_grad_()
        task.loss(model, {TABLE: rows}, batch).backward()
        table.write(batch.keys[TABLE], rows.grad / world.size)
        dense.step(step)
        if (step + 1) % settings["eval_every"] == 0:
            seconds += time.perf_counter() - began
            curve.samples.append((step + 1) * world.size * settings["batch"])
            curve.scores.append(evaluate(world, table, model, batches))
            curve.bytes.append(world.comm.allreduce(table.counters.pulled_bytes + table.counters.push_bytes))
            curve.seconds.append(seconds)
            if target is not None and step + 1 >= settings["steps"] and max(curve.scores) >= target:
                break
            began = time.perf_counter()
    table.close()
    return curve


def evaluate(world, table, model, batches: Batches) -> float:
    """The task's first metric on the held-out samples with the owners' rows; the same on every rank. Collective."""
    import torch

    from hetmpi.data.features import TABLE

    table.flush()
    model.eval()
    with torch.no_grad():
        parts = [
            batches.task.predict(model, {TABLE: table.peek(batch.keys[TABLE])}, batch) for batch in batches.held_out
        ]
    model.train()
    gathered, score = world.comm.gather([np.concatenate(column) for column in zip(*parts)]), None
    if world.rank == 0:
        score = next(iter(batches.task.figures([np.concatenate(column) for column in zip(*gathered)]).values()))
    return world.comm.bcast(score)


def line(seed: int, variant: Variant, curve: Curve, target: float, samples: int) -> str:
    """The result of one run in a line."""
    reached = curve.samples_to(target)
    reached_text = f"{reached / 1e6:6.3f} M" if reached else "   none "
    return (
        f"seed {seed}  s = {variant.name:<9} score {curve.score_at(samples):.4f}  to target {reached_text}  "
        f"{curve.bytes_per_sample(samples):8,.0f} B/sample  {curve.seconds[-1]:5.1f} s"
    )


def report(world, settings: dict, variants: list[Variant], curves: dict):
    """The table over seeds, the picture, the JSON line."""
    samples, zeros = num_samples(world, settings), curves[variants[0].name]
    figures = {name: summary(runs, zeros, samples) for name, runs in curves.items()}
    zero = figures[variants[0].name]
    print(f"\n{'s':<10}{'score':>8}{'to s=0':>9}{'+-':>8}{'samples to target':>19}{'more':>8}{'B/sample':>10}{'s':>8}")
    for name, row in figures.items():
        reached = row["samples_to_target"]
        reached_text = f"{reached / 1e6:.3f} M" if reached else "not reached"
        more = f"{reached / zero['samples_to_target'] - 1:+.1%}" if reached else ""
        print(
            f"{name:<10}{row['score']:8.4f}{row['to_zero']:+9.4f}{row['error'] or 0:8.4f}{reached_text:>19}{more:>8}"
            f"{row['bytes_per_sample']:10,.0f}{row['seconds']:8.1f}"
        )
    draw(settings["picture"], variants, curves, figures)
    print(f"picture: {settings['picture']}")
    drawn = {name: course(runs, zeros) for name, runs in curves.items()}
    print(json.dumps({**grouped(variants, figures), "curves": drawn, "settings": settings}))


def error_of(values) -> float:
    """Standard error of the mean; None for a single value."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def summary(runs: list[Curve], zeros: list[Curve], samples: int) -> dict:
    """Means over seeds at `samples`; to_zero: difference of the score to s = 0, error: its standard error."""
    differences = [run.score_at(samples) - zero.score_at(samples) for run, zero in zip(runs, zeros)]
    reached = [run.samples_to(target_of(zero, samples)) for run, zero in zip(runs, zeros)]
    return {
        "score": float(np.mean([run.score_at(samples) for run in runs])),
        "to_zero": float(np.mean(differences)),
        "error": error_of(differences),
        "samples_to_target": float(np.mean(reached)) if None not in reached else None,
        "bytes_per_sample": float(np.mean([run.bytes_per_sample(samples) for run in runs])),
        "seconds": float(np.mean([np.interp(samples, run.samples, run.seconds) for run in runs])),
    }


def course(runs: list[Curve], zeros: list[Curve]) -> dict:
    """The mean curve over seeds, and its difference to s = 0, at the evaluations that all runs have."""
    num = min(len(run.samples) for run in [*runs, *zeros])
    scores = np.array([run.scores[:num] for run in runs])
    differences = scores - np.array([zero.scores[:num] for zero in zeros])
    return {
        "samples": runs[0].samples[:num],
        "score": [round(x, 5) for x in scores.mean(0)],
        "to_zero": [round(x, 5) for x in differences.mean(0)],
        "error": [None if len(runs) == 1 else round(error_of(column), 5) for column in differences.T],
    }


def grouped(variants: list[Variant], figures: dict) -> dict:
    """The figures by s: with anticipation at the top level, HET's rule under `plain`, limits of drift under `drift`."""
    fields = ("score", "samples_to_target", "to_zero", "error", "bytes_per_sample", "seconds")
    groups = {"": {f: {} for f in fields}, "plain": {f: {} for f in fields}}
    for variant in variants:
        is_plain = variant.anticipate == 1 or variant.staleness == 0
        places = ["plain"] if is_plain and variant.staleness != 0 else ["", "plain"] if is_plain else [""]
        if variant.drift:
            places = ["drift"]
        elif variant.anticipate not in (None, 1):
            places = [variant.name]
        for place in places:
            group = groups.setdefault(place, {f: {} for f in fields})
            for field in fields:
                name = variant.name if place == "drift" else variant.name.split("+")[0]
                group[field][name] = figures[variant.name][field]
    return {**groups.pop(""), **groups}


def family(variant: Variant) -> str:
    """The kind of limit on the age of a line."""
    if variant.drift:
        return "drift"
    return "count" if variant.anticipate is None else f"count, anticipating {variant.anticipate:g}"


def draw(path: str, variants: list[Variant], curves: dict, figures: dict):
    """Draws the score over samples, over bytes and over time, and the final one against the bytes of each variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9))
    courses = (("samples", 1e6, "samples (millions)"), ("bytes", 1e6, "MB between ranks"), ("seconds", 1, "seconds"))
    for axis, (field, unit, label) in zip(axes.flat, courses):
        for i, (name, runs) in enumerate(curves.items()):
            num = min(len(run.samples) for run in runs)
            x, y = (np.mean([getattr(run, of)[:num] for run in runs], axis=0) for of in (field, "scores"))
            axis.plot(x / unit, y, "--" if "+a1" in name else ":" if "+" in name else "-", color=f"C{i % 10}",
                      label=f"s = {name}")  # fmt: skip
        axis.set(xlabel=label, ylabel="held-out score")
    axes[0, 0].legend(fontsize=8)
    trade, zero = axes[1, 1], figures[variants[0].name]
    trade.axhline(0, color="grey", linewidth=0.8)
    families: dict[str, list[str]] = {}
    for variant in variants[1:]:
        families.setdefault(family(variant), []).append(variant.name)
    for i, (label, names) in enumerate(families.items()):
        names.sort(key=lambda name: figures[name]["bytes_per_sample"])
        share = [figures[name]["bytes_per_sample"] / zero["bytes_per_sample"] for name in names]
        costs, errors = ([figures[name][field] or 0 for name in names] for field in ("to_zero", "error"))
        trade.errorbar(share, costs, errors, marker="o", capsize=3, color=f"C{i}", label=label)
        for x, name in zip(share, names):
            trade.annotate(name, (x, figures[name]["to_zero"]), xytext=(5, 5), textcoords="offset points", fontsize=8)
    trade.set(xlabel="bytes, as a share of those of s = 0", ylabel="score less that of s = 0")
    trade.legend(fontsize=8, title="a line's age is limited by")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
