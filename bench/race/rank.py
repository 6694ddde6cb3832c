"""One rank of a contender that uses hetmpi: hetmpi's own trainer, also profiled, the floor, or a table not shared.

    mpiexec -n RANKS python bench/race/rank.py hetmpi FOLDER [SETTING=VALUE ...]    settings of hetmpi.train
    mpiexec -n RANKS python bench/race/rank.py tables=3 FOLDER [SETTING=VALUE ...]  with the fields dealt to 3 tables
    mpiexec -n RANKS python bench/race/rank.py floor FOLDER [device=cuda] [optim.dense_exchange=horovod]
    mpiexec -n RANKS python bench/race/rank.py local FOLDER [device=cuda] [optim.dense_exchange=horovod]
    mpiexec -n RANKS python bench/race/rank.py local=3 FOLDER ...                   with the fields dealt to 3 tables
    mpiexec -n 1 python bench/race/rank.py profile FOLDER [SETTING=VALUE ...]       as hetmpi, by torch's profiler

The floor is the same dense network, its gradients summed as hetmpi sums them, with the rows of every sample in memory:
no table, loader or keys. Of a graph's nodes it has the sampled batches in memory too, and pools the rows of their ids.
Local is the floor with the least that a table costs, also where there is nothing to exchange: each rank has all rows in
its own memory, reads and updates them by torch, and has the distinct keys of all batches beforehand.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from hetmpi import _C
from hetmpi.data.batch import Samples
from hetmpi.data.features import TABLE, Feature, FeatureTable
from hetmpi.dense import DenseOptimizer
from hetmpi.layers import FeatureRows, look_up
from hetmpi.reductions import open_reductions
from hetmpi.run import build
from hetmpi.run.config import compose
from hetmpi.run.device import choose_device
from hetmpi.schedule import Schedule
from hetmpi.spans import PARTS, Spans
from hetmpi.train import Training
from hetmpi.world.launch import launch
from race import sampled
from race.problem import DENSE_LR, ROWS_LR, SAMPLED, Laps, Problem, chunk_steps, report

RUN = "run"  # run folder of the trainer, in the problem's folder


class Recorded:
    """The samples of a problem as a data set, of one table or more.

    firsts  table -> first key of each of its fields in the problem (n,), and in the table (n,)"""

    def __init__(self, problem: Problem, num_tables: int):
        self.problem, self.name = problem, "recorded"
        self.num_rows, self.num_fields, self.num_dense = problem.num_rows, problem.num_fields, problem.dense.shape[-1]
        self.field_rows, self.num_train, self.num_valid = problem.field_rows, None, problem.ranks
        self.ids = np.asarray(problem.ids).reshape(-1, self.num_fields)  # sliced faster than a memmap
        self.dense = np.asarray(problem.dense).reshape(-1, self.num_dense)
        self.label = np.asarray(problem.label).reshape(-1)
        self.shift, self.firsts = 0, {TABLE: (np.zeros(1, np.int64),) * 2}
        if num_tables > 1:
            self._deal([f"table-{number}" for number in range(num_tables)])

    def _deal(self, names: list[str]):
        """Deals the fields to the tables in turn."""
        of_field = (names * self.num_fields)[: self.num_fields]
        rows = {name: [r for r, table in zip(self.field_rows, of_field) if table == name] for name in names}
        self.tables = {name: FeatureTable(tuple(own)) for name, own in rows.items()}
        firsts = np.cumsum([0, *self.field_rows[:-1]])
        in_table = {name: iter(np.cumsum([0, *own[:-1]])) for name, own in rows.items()}
        placed = [int(next(in_table[table])) for table in of_field]
        self.features = [
            Feature(f"f{f}", table, first, self.field_rows[f]) for f, (table, first) in enumerate(zip(of_field, placed))
        ]
        self.shift = np.array(placed) - firsts
        for name in names:
            mine = [f for f, table in enumerate(of_field) if table == name]
            self.firsts[name] = firsts[mine], np.array(placed)[mine]

    def keys_in_problem(self, table: str, keys: np.ndarray) -> np.ndarray:
        """keys (n,) of a table -> the problem's."""
        firsts, in_table = self.firsts[table]
        field = np.searchsorted(in_table, keys, side="right") - 1
        return keys + (firsts - in_table)[field]

    def train(self, start: int, stop: int) -> Samples:
        start, stop = start % len(self.label), (stop - 1) % len(self.label) + 1  # a rank's batch never wraps around
        ids = self.ids[start:stop].astype(np.int64) + self.shift
        return Samples(ids, self.dense[start:stop].copy(), self.label[start:stop].copy())

    valid = train


class OverRows(torch.nn.Module):
    """A problem's network behind the look-up of its rows."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.row_dim, self.network = problem.dim, problem.network()

    def forward(self, rows, batch):
        return self.network(look_up(rows, batch.index), batch.dense)


class Processor:
    """Processor time of this process by chunks of steps: of the calling thread, of that in polls while it waits, and of
    all other threads."""

    def __init__(self, world):
        self._notices = world.notices
        self.main_ms, self.polled_ms, self.other_ms = [], [], []
        self.restart()

    def restart(self):
        """Begins a chunk."""
        self.was = self.now()

    def now(self) -> np.ndarray:
        main = time.thread_time()
        return 1000 * np.array([main, self._notices.polled_s, time.process_time() - main])

    def lap(self):
        """Ends a chunk."""
        now = self.now()
        for values, ms in zip((self.main_ms, self.polled_ms, self.other_ms), (now - self.was) / chunk_steps()):
            values.append(float(ms))
        self.was = now

    def figures(self) -> dict:
        """ms per step of each chunk."""
        return {"main_cpu_ms": self.main_ms, "polled_cpu_ms": self.polled_ms, "other_cpu_ms": self.other_ms}


def config_of(world, problem: Problem, overrides: list[str]):
    """Settings of the trainer."""
    return compose(world, [
        f"table.dim={problem.dim}", f"batch_size={problem.batch}", f"steps={problem.steps}",
        f"run.dir={problem.folder / RUN}", "optim.rows=sgd", f"optim.rows_lr={ROWS_LR}", "optim.dense=sgd",
        f"optim.dense_lr={DENSE_LR}", f"log.every_steps={chunk_steps()}", f"eval.max_samples={world.size}",
        "device=cpu", "checkpoint.at_end=false", *(sampled.settings_of(problem) if problem.net in SAMPLED else []),
        *overrides,
    ])  # fmt: skip


def training_of(world, problem: Problem, config, num_tables: int, lap) -> Training:
    """The trainer, its rows the problem's first ones. lap: called after each chunk of steps."""
    torch.set_num_threads(1)
    source, model = None, None
    if problem.net not in SAMPLED:
        source, model = Recorded(problem, num_tables), OverRows(problem)
    if num_tables > 1:
        model = FeatureRows(model, dict.fromkeys(source.tables, problem.dim), [])
    training = Training(world, config, choose_device(world, config.device), Spans(), source, model, lap)
    for name, table in training.tables.items() if problem.net not in SAMPLED else ():
        table.shard.assign(slice(None), problem.first_rows(source.keys_in_problem(name, table.keys().numpy())))
        table.resume_at(0)
    return training


def hetmpi(world, problem: Problem, overrides: list[str], num_tables: int = 1):
    """Trains, and reports the trainer's log."""
    config, processor = config_of(world, problem, overrides), Processor(world)
    training = training_of(world, problem, config, num_tables, processor.lap)
    processor.restart()
    training.run()
    training.log and training.log.close()
    [table, *_] = training.tables.values()
    exact, exchange = table.staleness.is_exact, table.client.channel.name
    training.close()
    if world.rank == 0:
        lines = [json.loads(line) for line in Path(config.run.dir, "metrics.jsonl").read_text().splitlines()]
        kept = (
            "step_ms",
            "loss",
            "wait_ms",
            "pulled_bytes",
            "pushed_bytes",
            "hit_rate",
            *(f"{part}_ms" for part in PARTS),
        )
        figures = {name: [line[name] for line in lines] for name in kept}
        report({**figures, **processor.figures(), "is_exact": exact, "exchange": exchange})


def profiled(world, problem: Problem, overrides: list[str]):
    """Trains, the last half of the steps under torch's profiler, and prints of a step: the times of wall clock and
    processor, the calls of CUDA, the operations by their own time."""
    config, laps = config_of(world, problem, overrides), []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    profiler, first = profile(activities=activities), problem.steps // chunk_steps() // 2

    def lap():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        laps.append((time.perf_counter(), time.thread_time(), time.process_time()))
        if len(laps) == first:
            profiler.start()
        if len(laps) == problem.steps // chunk_steps():
            profiler.stop()

    training = training_of(world, problem, config, 1, lap)
    training.run()
    training.close()
    if world.rank == 0:
        steps = (len(laps) - first) * chunk_steps()
        show_profile(profiler, steps, 1000 * (np.array(laps[-1]) - laps[first - 1]) / steps)


def show_profile(profiler, steps: int, ms: np.ndarray):
    """ms (3,): of a step's wall clock, main thread and all threads, slowed by the profiler."""
    print("ms a step: wall clock {:.2f}, main thread {:.2f}, all threads {:.2f}".format(*ms))
    calls = Counter(event.name for event in profiler.events() if event.name.startswith("cu"))
    print("calls a step: " + ", ".join(f"{name} {num / steps:.1f}" for name, num in calls.most_common(20)))
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=60))


class RowsInMemory:
    """The dense network on a rank's samples, with the rows of every sample in memory."""

    def __init__(self, world, problem: Problem, device: torch.device):
        self.model, self.criterion = problem.network(), torch.nn.BCEWithLogitsLoss()
        self.embeddings = 0.01 * torch.randn(problem.batch, problem.num_fields, problem.dim, device=device)
        self.batches = [
            [part.to(device) for part in problem.samples(step, world.rank)[1:]] for step in range(problem.steps)
        ]

    def loss(self, step: int) -> torch.Tensor:
        dense, label = self.batches[step]
        return self.criterion(self.model(self.embeddings.detach().requires_grad_(), dense), label)

    def write(self):
        """No effect: the rows stay as they are."""


class LocalTables(RowsInMemory):
    """The same with tables that are not shared, to which the fields are dealt in turn: this rank has all of their rows,
    and tells nobody of its updates."""

    num_tables = 1

    def __init__(self, world, problem: Problem, device: torch.device):
        super().__init__(world, problem, device)
        self.shape, self.lr = (problem.batch, problem.num_fields), ROWS_LR / world.size
        dealt, self.weights = Recorded(problem, self.num_tables), []
        tables = [np.arange(first, problem.num_fields, self.num_tables) for first in range(self.num_tables)]  # fields
        for name, fields in zip([*dealt.firsts][-self.num_tables :], tables):
            keys = dealt.keys_in_problem(name, np.arange(sum(problem.field_rows[f] for f in fields)))
            self.weights.append(torch.from_numpy(problem.first_rows(keys)).to(device))
        self.steps = []
        for step in range(min(problem.steps, len(problem.ids))):
            ids = problem.samples(step, world.rank)[0].numpy() + dealt.shift
            index, all_keys, num_keys = np.empty(self.shape, np.int64), [], 0
            for fields in tables:
                keys, of_ids = _C.unique(np.ascontiguousarray(ids[:, fields]).reshape(-1))
                index[:, fields] = of_ids.reshape(len(ids), -1) + num_keys
                num_keys += len(keys)
                all_keys.append(torch.from_numpy(keys).to(device))
            self.steps.append((all_keys, torch.from_numpy(index).to(device)))

    def loss(self, step: int) -> torch.Tensor:
        (self.keys, index), (dense, label) = self.steps[step % len(self.steps)], self.batches[step]
        self.rows = [
            weight.index_select(0, keys).requires_grad_() for weight, keys in zip(self.weights, self.keys)
        ]  # of each table: (U, dim)
        joined = torch.cat(self.rows) if len(self.rows) > 1 else self.rows[0]
        return self.criterion(self.model(look_up(joined, index), dense), label)

    def write(self):
        """Subtracts the gradients of the step's rows."""
        for weight, keys, rows in zip(self.weights, self.keys, self.rows):
            weight.scatter_add_(0, keys[:, None].expand_as(rows), rows.grad.mul_(-self.lr))  # faster than index_add_


class BatchesInMemory:
    """The network on a rank's batches, sampled beforehand, with the rows of each batch in memory."""

    def __init__(self, world, problem: Problem, device: torch.device):
        config = config_of(world, problem, [])
        source = build.make(config.data)
        build.prepare(source, world, config)
        self.task = build.make_task(config, source, device)
        self.model, make = build.make_model(config, self.task), self.task.batches(device)
        starts = ((step * world.size + world.rank) * problem.batch for step in range(problem.steps))
        self.batches = [make(source.train(start, start + problem.batch)).on(device) for start in starts]
        self.rows = {}
        for name, spec in self.task.tables(self.model).items():
            most = max(len(batch.keys[name]) for batch in self.batches)
            self.rows[name] = 0.01 * torch.randn(most, spec.dim, device=device)

    def loss(self, step: int) -> torch.Tensor:
        batch = self.batches[step]
        rows = {name: self.rows[name][: len(keys)].detach().requires_grad_() for name, keys in batch.keys.items()}
        return self.task.loss(self.model, rows, batch)

    def write(self):
        """As RowsInMemory."""


def floor(world, problem: Problem, kind: type, device: torch.device, dense_exchange: str):
    """Trains the dense network only, or with it the table of `kind`."""
    hvd, spans = open_reductions(world, dense_exchange, device), Spans()
    torch.set_num_threads(1)
    work = kind(world, problem, device)
    dense = DenseOptimizer(hvd, work.model, "sgd", DENSE_LR, 0.0, Schedule(), device)
    parts, spent, laps = {f"{part}_ms": [] for part in PARTS}, spans.as_array(), Laps()
    processor = Processor(world)
    for step in range(problem.steps):
        with spans("forward"):
            loss = work.loss(step)
        with spans("backward"):
            loss.backward()
            dense.begin()
            work.write()
        with spans("allreduce"):
            dense.step(step)
        if laps.step(loss):
            for values, ms in zip(parts.values(), (spans.as_array() - spent) / laps.chunk):
                values.append(float(ms))
            spent = spans.as_array()
            processor.lap()
    # A single rank needs no others' updates: its losses are those of a table that is shared.
    losses = {"loss": [float(loss) for loss in laps.losses]} if kind is LocalTables and world.size == 1 else {}
    if world.rank == 0:
        report({"step_ms": laps.step_ms, **losses, **parts, **processor.figures()})


def main(world):
    name, folder, *overrides = sys.argv[1:]
    problem = Problem(folder)
    if world.size != problem.ranks:
        raise ValueError(f"{folder} is a problem for {problem.ranks} ranks, not {world.size}")
    if name == "profile":
        return profiled(world, problem, overrides)
    if name == "hetmpi" or name.startswith("tables="):
        return hetmpi(world, problem, overrides, int(name.partition("=")[2] or 1))
    given = {"device": "cpu", "optim.dense_exchange": "auto", **dict(one.split("=") for one in overrides)}
    in_memory = BatchesInMemory if problem.net in SAMPLED else RowsInMemory
    kind, device = in_memory, choose_device(world, given["device"])
    if name.startswith("local"):
        if problem.net in SAMPLED:
            raise ValueError(f"local takes net=mlp or het, got net={problem.net}")
        kind, LocalTables.num_tables = LocalTables, int(name.partition("=")[2] or 1)
    floor(world, problem, kind, device, given["optim.dense_exchange"])


launch(main)
