"""Runs on generated samples whose users and tags have no fixed vocabulary."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training
from hetmpi.world.world import World

GLOBAL, STEPS, NUM = 48, 40, 2400
SETTINGS = [
    "data=tabular", "data.label=click", "table.dim=4", "seed=3", f"steps={STEPS}", "log.every_steps=10", "device=cpu",
    "optim.rows=adagrad", "optim.rows_lr=0.1", "optim.dense=sgd", "optim.dense_lr=0.05", "table.maintain_steps=10",
]  # fmt: skip


def written(path):
    """Samples of Zipf users, of which later ones are new, and of one to three tags; some of both are missing."""
    random = np.random.default_rng(5)
    users = np.minimum(random.zipf(1.3, NUM), 300) + np.arange(NUM) // 600 * 20
    worth, of_tags = random.normal(size=400), random.normal(size=12)
    tags = [random.integers(0, 12, random.integers(0, 4)) for _ in range(NUM)]
    scores = worth[users] + np.array([of_tags[found].sum() for found in tags])
    clicks = (random.random(NUM) < 1 / (1 + np.exp(-scores))).astype(np.float32)
    names = [None if user % 29 == 0 else f"user {user}" for user in users]
    table = {"user": names, "tags": [[f"t{tag}" for tag in found] for found in tags], "click": clicks}
    pq.write_table(pa.table(table | {"hour": np.arange(NUM) % 24, "price": random.random(NUM)}), path)


def columns(user, tags="{name: tags, rows: open, max_rows: 50}"):
    return f"data.columns=[{{name: user, {user}}}, {tags}, {{name: hour, kind: id}}]"


def made(folder, *overrides):
    """A training into a folder that all ranks share, with the same global batch at 1, 2 and 3 ranks."""
    world, path = World(), folder / "samples.parquet"
    if world.rank == 0 and not path.exists():
        folder.mkdir(exist_ok=True)
        written(path)
    world.comm.Barrier()
    own = [f"data.path={path}", f"data.cache={folder}/prepared", f"run.dir={folder}"]
    config = compose(world, [*SETTINGS, f"batch_size={GLOBAL // world.size}", *own, *overrides])
    return Training(world, config, torch.device("cpu"), Spans())


def rows_of(training):
    """Table -> its rows in use."""
    return {name: table.peek(torch.arange(table.num_used)).clone() for name, table in training.tables.items()}


def closed(training):
    """Ends a training; returns its rows and, on rank 0, the entries of its vocabularies."""
    rows = rows_of(training)
    entries = {name: one.state() for name, one in training.vocabularies.of_tables.items()}
    if training.log is not None:
        training.log.close()
    training.close()
    return rows, entries


def last_evaluation(folder):
    lines = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if "auc" in line)
