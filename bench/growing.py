"""Ids that arrive over a run: columns without a vocabulary against ids that are hashed into twice as many rows.

    ./run.sh bench growing [ranks=1] [steps=1500] [batch=4096] [fields=4] [pool=600000] [fresh=0.3] [rows=500000]
                           [dim=16] [min_count=2] [maintain=500] [zipf=1.05] [repeats=1] [settings=...]

Each field draws an id from a pool by Zipf's law, of which the occupants change over time, or with probability `fresh`
an id that comes once. Labels follow from a weight of each id. Contenders, one after the other: hashed, with 2 `rows`
rows per field, and open, with `rows` and `min_count`. Held-out samples are of the end of the stream.

Last, one JSON line: {"hashed": {"auc": x, "loss": [...], "step_ms": x}, "open": {..., "ids_admitted": n, "ids_waiting":
n, "ids_evicted": n}, "ids": distinct ids of the stream, "new_per_batch": share of a batch's distinct ids that
are new, "ratio": step time of open to hashed}. loss: of the batches of each tenth of the run, before they are trained
on. Times are medians over the second half of the steps.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from workload import parse

from hetmpi.data.batch import Samples
from hetmpi.data.features import FeatureRequest, arrange
from hetmpi.data.synthetic import Zipf, uniform, words
from hetmpi.open_rows import OpenRows

SETTINGS = {
    "ranks": 1, "steps": 1500, "batch": 4096, "fields": 4, "pool": 600_000, "fresh": 0.3, "rows": 500_000, "dim": 16,
    "min_count": 2, "maintain": 500, "zipf": 1.05, "repeats": 1,
    "settings": ["log.every_steps=5", "optim.rows_lr=0.1"],
}  # fmt: skip
OF_FIELDS, OF_IDS, FRESH, OF_WEIGHTS, OF_LABELS = range(11, 16)  # streams of random numbers
VALID = 100_000


class Arrivals:
    """Implements hetmpi/data/source.py, Source. Sample i depends on (seed, i) alone."""

    name, num_dense, seed = "arrivals", 1, 7

    def __init__(self, settings: dict, is_open: bool):
        self.settings, self.is_open = settings, is_open
        self.num_train, self.num_valid = settings["steps"] * settings["batch"] * settings["ranks"], VALID
        rows = OpenRows(settings["rows"], settings["min_count"])
        wanted = [
            FeatureRequest(f"field{i}", rows.num_rows, open=rows)
            if is_open
            else FeatureRequest(f"field{i}", 2 * settings["rows"])
            for i in range(settings["fields"])
        ]
        self.features, self.tables = arrange(wanted)
        self._law = Zipf(np.full(settings["fields"], settings["pool"]), settings["zipf"])

    def prepare(self, rank: int, size: int, barrier):
        """No effect: nothing needs preparation."""

    def train(self, start: int, stop: int) -> Samples:
        positions = np.arange(start, stop)
        return self._samples(positions, positions)

    def valid(self, start: int, stop: int) -> Samples:
        positions = np.arange(start, stop) + (1 << 40)
        return self._samples(positions, np.full(stop - start, self.num_train))

    def ids(self, positions: np.ndarray, times: np.ndarray) -> np.ndarray:
        """(B, F) int64. times: positions of the stream at which the pool is drawn from."""
        num = self.settings["fields"]
        drawn = uniform(words(self.seed, OF_FIELDS, positions, 2 * num))
        ranks = self._law.ranks(drawn[:, :num])
        # The occupant of rank r changes four times in a run, each at its own times.
        lives = (4 * times[:, None] / self.num_train + (ranks * 0.618) % 1).astype(np.int64)
        of_pool = (ranks * 8 + lives) * num + np.arange(num)
        once = words(self.seed, FRESH, positions, num).astype(np.int64) | (1 << 62)
        return np.where(drawn[:, num:] < self.settings["fresh"], once, mixed(of_pool, OF_IDS))

    def _samples(self, positions: np.ndarray, times: np.ndarray) -> Samples:
        ids = self.ids(positions, times)
        weights = 4 * uniform(mixed(ids, OF_WEIGHTS).astype(np.uint64)) - 1  # 63 bits: in [-1, 1)
        chance = 1 / (1 + np.exp(-2 * weights.sum(1)))
        label = (uniform(words(self.seed, OF_LABELS, positions, 1))[:, 0] < chance).astype(np.float32)
        if not self.is_open:
            firsts = np.array([feature.first for feature in self.features])
            ids = ids % (2 * self.settings["rows"]) + firsts
        return Samples(np.ascontiguousarray(ids), np.zeros((len(ids), 1), np.float32), label, chance.astype(np.float32))


def mixed(numbers: np.ndarray, stream: int) -> np.ndarray:
    """A hash of numbers, int64 of at least 0."""
    found = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
    return ((found ^ (found >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def main():
    settings = parse("growing", SETTINGS, sys.argv[1:])
    found = {name: [run(name, settings) for _ in range(settings["repeats"])] for name in ("hashed", "open")}
    merged = {name: {**runs[0], "step_ms": float(np.median([one["step_ms"] for one in runs]))}
              for name, runs in found.items()}  # fmt: skip
    num_ids, new = counted(settings)
    ratio = merged["open"]["step_ms"] / merged["hashed"]["step_ms"]
    for name, one in merged.items():
        losses = " ".join(f"{loss:.4f}" for loss in one["loss"])
        print(f"{name:8} AUC {one['auc']:.4f}, {one['step_ms']:.1f} ms per step, loss {losses}")
    print(json.dumps({**merged, "ids": num_ids, "new_per_batch": new, "ratio": round(ratio, 3)}))


def run(name: str, settings: dict) -> dict:
    """A training in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mpiexec", "-n", str(settings["ranks"]), sys.executable, __file__, "rank", name, folder]
        subprocess.run([*command, json.dumps(settings)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(folder, "found.json").read_text())


def train(name: str, folder: str, settings: dict):
    """A rank of run()."""
    import torch

    from hetmpi.log.run_files import read_lines
    from hetmpi.run.config import compose
    from hetmpi.spans import Spans
    from hetmpi.train import Training
    from hetmpi.world.world import World

    world = World()
    torch.set_num_threads(world.compute_threads())
    config = compose(world, [
        "data=synthetic", "model=wdl", f"batch_size={settings['batch']}", f"steps={settings['steps']}",
        f"run.dir={folder}", f"table.dim={settings['dim']}", "checkpoint.at_end=false",
        f"table.maintain_steps={settings['maintain']}", "optim.rows=adagrad", *settings["settings"],
    ])  # fmt: skip
    training = Training(world, config, torch.device("cpu"), Spans(), source=Arrivals(settings, name == "open"))
    training.run()
    if world.rank == 0:
        training.log.close()
        steps, evaluations = (read_lines(Path(folder, f"{kind}.jsonl")) for kind in ("metrics", "evaluation"))
        last = steps[-1]
        found = {
            "auc": round(next(line["auc"] for line in evaluations if "auc" in line), 5),
            "loss": [round(float(part.mean()), 5) for part in np.array_split([line["loss"] for line in steps], 10)],
            "step_ms": float(np.median([line["step_ms"] for line in steps[len(steps) // 2 :]])),
            **{key: last[key] for key in last if key.startswith("ids_") or key == "vocabulary_ms"},
        }
        Path(folder, "found.json").write_text(json.dumps(found))
    world.meet("for a benchmark")
    training.close()


def counted(settings: dict) -> tuple[int, float]:
    """Distinct ids of the stream, and the share of the last batch's that are new."""
    source, batch = Arrivals(settings, True), settings["batch"] * settings["ranks"]
    seen = np.empty(0, np.int64)
    for start in range(0, source.num_train, 100 * batch):
        positions = np.arange(start, min(start + 100 * batch, source.num_train - batch))
        seen = np.union1d(seen, source.ids(positions, positions))
    positions = np.arange(source.num_train - batch, source.num_train)
    last = np.unique(source.ids(positions, positions))
    return len(np.union1d(seen, last)), round(float(np.mean(~np.isin(last, seen))), 3)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        train(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
