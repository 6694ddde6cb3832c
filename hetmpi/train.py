"""Trains a model on a table partitioned over all ranks: mpirun -np 4 python -m hetmpi.train model=deepfm steps=1000

The only reader of the settings (conf/config.yaml).
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from hetmpi.checkpoint.checkpoints import Checkpoints, Position, position_of
from hetmpi.checkpoint.manifest import check_same, read_manifest
from hetmpi.comm.launch import LEFT_EARLY, launch
from hetmpi.comm.memory import refuse_if_short, size_text
from hetmpi.comm.mpi import MPI
from hetmpi.comm.world import World
from hetmpi.counters import Counters, lag_at, trimmed
from hetmpi.data.batch import Batch, Samples, to_batch
from hetmpi.data.gpu_batch import GpuBatches
from hetmpi.data.loader import Loader
from hetmpi.dense import DenseOptimizer
from hetmpi.errors import NotFinite, Refused, doing
from hetmpi.metrics import auc, log_loss, without_auc
from hetmpi.run.config import CONF, cache_of, compose, staleness_of
from hetmpi.run.device import choose_device
from hetmpi.run.preemption import Preemption
from hetmpi.run.runlog import RunLog
from hetmpi.run.watchdog import Watchdog
from hetmpi.spans import Spans, by_part, chrome_trace, own_ms, wait_ms
from hetmpi.table.optim import RowOptimizer, Schedule
from hetmpi.table.replicas import small_fields
from hetmpi.table.table import EmbeddingTable

MB = 1 << 20
LEAVE_S = 5  # for the owners to take in what a failing rank holds back


def main(world: World, overrides: list[str] | None = None):
    """Composes the settings, builds the parts, trains, reports. overrides: default those on the command line."""
    overrides = sys.argv[1:] if overrides is None else overrides
    if {"-h", "--help"} & set(overrides):
        return print(usage()) if world.rank == 0 else None
    config = compose(world, overrides)
    spans = Spans(keeps_trace=config.train.profile)
    watchdog = Watchdog(world, spans, config.watchdog.seconds)
    torch.set_num_threads(world.compute_threads())
    no_gpu = config.device == "auto" and config.table.replicate_below_rows > 0  # which is for CPUs
    device = choose_device(world, "cpu" if no_gpu else config.device)
    if config.table.ranks_per_node is not None:
        world = World(world.comm, config.table.ranks_per_node)
    preemption = Preemption(world)
    training = Training(world, config, device, spans)
    try:
        is_done = training.run(preemption.is_agreed)
    except Exception:
        training.leave()
        raise
    finally:
        if training.log is not None:
            training.log.close()  # gives the terminal its cursor back
    preemption.close()
    training.close()
    watchdog.close()
    if not is_done:
        sys.exit(LEFT_EARLY)


def usage() -> str:
    """How to call the program, and every setting with its default."""
    return f"{__doc__}\nSettings, given as KEY=VALUE:\n\n{(CONF / 'config.yaml').read_text()}"


class Training:
    """The parts of one run and the loop over them."""

    def __init__(self, world: World, config: DictConfig, device: torch.device, spans: Spans):
        self.world, self.config, self.device, self.spans = world, config, device, spans
        self.hvd = world.start_horovod()
        self.data = self._data()
        self.checkpoints = Checkpoints(
            world, config.checkpoint.dir, config.checkpoint.keep, config.checkpoint.full_every
        )
        resumed = self._resumed()
        self.start = Position() if resumed is None else position_of(resumed)
        self._check_folder()
        self.total_steps = self._total_steps()
        self.model = self._model()
        self._check_batches()
        schedule = Schedule(config.optim.schedule, config.optim.warmup_steps, self.total_steps)
        self.replicated = self._replicated()
        self.table = self._table(schedule)
        self.dense = DenseOptimizer(
            self.hvd,
            self.model,
            config.optim.dense,
            config.optim.dense_lr,
            config.optim.dense_weight_decay,
            schedule,
            device,
        )
        if resumed is not None:
            self.checkpoints.load(resumed, self.table, self.model, self.dense)
        if config.checkpoint.every_steps > 0:
            self.checkpoints.reserve(self.table)
        self.criterion = torch.nn.BCEWithLogitsLoss()
        self.loader = Loader(
            partial(self._drawn, "train"), world.rank, world.size, config.batch_size, self.start.step, self.total_steps,
            config.loader.threads, config.loader.prefetch,
            to_batch if device.type == "cpu" else GpuBatches(device, self.data.num_rows), self.start.samples,
        )  # fmt: skip
        self.log = None
        if world.rank == 0:
            print(
                "\n".join(
                    [self._plan(), *self._choice(), *self._notes(), *([f"resumed from {resumed}"] if resumed else [])]
                ),
                flush=True,
            )
            settings = OmegaConf.merge(config, {"resume": resumed and str(resumed)})  # the one that `auto` found
            self.log = RunLog(config.run.dir, OmegaConf.to_yaml(settings), self.total_steps, self.start.step)
        self.watch = Stopwatch()

    def run(self, must_leave=lambda: False) -> bool:
        """The story: read rows, learn, write gradients, step the dense layers; look at held-out data now and then.
        must_leave(): asked after each step, on all ranks alike, whether to save and leave before the end. Returns
        whether the end was reached."""
        every, evaluates_every = self.config.log.every_steps, self.config.eval.every_steps
        interval = Interval(self.table, self.start.step, self.watch)
        self.watch.start()
        batches = Ahead(self.loader, self.config.table.prefetch_batches, self.spans)
        for step, batch in enumerate(batches, self.start.step):
            self.spans.step = step
            batch = batch.on(self.device)
            rows = self.table.read(batch.keys).requires_grad_()  # (U, row_dim)
            if self.device.type == "cpu":
                self._prefetch(batches)
            with self.spans("forward"):
                loss = self.criterion(self._logits(rows, batch), batch.label)
            if self.device.type == "cpu":
                self._check_loss(step, loss, batch, rows)
            with self._explained(step, batch, rows):
                with self.spans("backward"):
                    loss.backward()  # the allreduce of the dense gradients starts when the last of them is computed
                if self.device.type != "cpu":  # which computes meanwhile
                    self._prefetch(batches)
                with self.spans("backward"):
                    self.dense.begin()  # or here, on a rank where some parameter got no gradient
                if rows.grad is None:
                    raise Refused(f"model={self.config.model_name}: its output does not depend on the rows it is given")
                self.table.write(batch.keys, rows.grad.div_(self.world.size))
                with self.spans("allreduce"):
                    self.dense.step(step)
            if self.device.type != "cpu":  # the host waits for the loss here
                self._check_loss(step, loss, batch, rows)
            if (step + 1) % every == 0 or step + 1 == self.total_steps:
                self.table.settle()  # a rank that waits for the others below could not drain its inbox for them
                self._report(step + 1, loss.item(), interval)
            leaves = must_leave() and step + 1 < self.total_steps
            self._checkpoint(step + 1, leaves)
            if leaves:
                self._say_left(step + 1)
                return False
            if evaluates_every > 0 and (step + 1) % evaluates_every == 0 and step + 1 < self.total_steps:
                interval.pause()
                self.evaluate(step + 1)
                interval.go_on()
        self.table.flush()
        self.checkpoints.wait()
        self.watch.pause()
        self._finish(self.evaluate(self.total_steps))
        return True

    def _prefetch(self, batches: Ahead):
        """Announces the batches that come next."""
        for later in batches.announced():
            self.table.prefetch(later.keys)

    def evaluate(self, step: int) -> dict:
        """AUC and log loss on the held-out data, read from the owners: on rank 0 the figures, elsewhere {}.
        Collective."""
        self.table.flush()
        self.model.eval()
        with torch.no_grad():
            parts = [self._predict(batch) for batch in self._held_out()]
            for _ in range(len(parts), self._num_looks()):
                self.table.peek(torch.empty(0, dtype=torch.int64))  # others may need this rank's answers
        self.model.train()
        columns = [np.concatenate(column) if parts else np.empty(0, np.float32) for column in zip(*parts)]
        self.world.meet(f"after step {step} for all ranks to evaluate")
        gathered = self.world.comm.gather(columns)
        self.world.comm.Barrier()  # at s >= 1 a rank that trained on would change rows that others still evaluate
        if self.world.rank != 0:
            return {}
        parts = [part for part in gathered if part] or [[np.empty(0, np.float32)] * 2]
        label, logit, *teacher = [np.concatenate(part) for part in zip(*parts)]
        figures = {**self._progress(step), "auc": auc(label, logit), "log_loss": log_loss(label, logit)}
        figures["teacher_auc"] = auc(label, teacher[0]) if teacher else None
        figures = {name: None if value is None or math.isnan(value) else value for name, value in figures.items()}
        if len(label):
            self.log.evaluation(figures)
        return {**figures, "without_auc": without_auc(label, logit)}

    def _say_left(self, step: int):
        """Waits for the checkpoint, then says where the run can go on. Collective."""
        self.checkpoints.wait()
        if self.world.rank == 0:
            print(
                f"hetmpi: told to leave: saved {self.checkpoints.path(step)}, from which "
                f"resume={self.checkpoints.path(step)} goes on",
                flush=True,
            )

    def _checkpoint(self, step: int, must: bool):
        """Begins one after `step` steps, if it is time or must be. Collective."""
        every = self.config.checkpoint.every_steps
        self.checkpoints.check()
        if must or (every > 0 and (step % every == 0 or step == self.total_steps)):
            self.spans.now("checkpoint")
            sizes = {"num_fields": self.data.num_fields, "num_dense": self.data.num_dense, "dim": self.config.table.dim}
            about = {
                **self._what(),
                "model": self.config.model_name,
                "model_config": OmegaConf.to_container(self.config.model),
                "model_sizes": sizes,
            }
            self.checkpoints.save(Position(step, self._samples(step)), self.table, self.model, self.dense, about)

    def _resumed(self) -> Path | None:
        """The checkpoint to go on from. Collective. Raises Refused if the one named is none or damaged."""
        if self.config.resume is None:
            return None
        if self.config.resume == "auto":
            path = self.checkpoints.newest()
            if path is None and self.world.rank == 0:
                print(f"resume=auto: there is no checkpoint in {self.checkpoints.folder}", flush=True)
        else:
            path = Path(self.config.resume)
            wrong = self.checkpoints.damage(path)
            if wrong:
                raise Refused(f"resume={path}: {wrong[0]}: name another checkpoint, or resume=auto")
        if path is not None:
            check_same(path, read_manifest(path), self._what())
        return path

    def _what(self) -> dict:
        """What a run that goes on must not change: samples would be lost or taken twice, or the dense optimizer's state
        be another rule's."""
        data = {
            key: value
            for key, value in OmegaConf.to_container(self.config.data).items()
            if key not in ("path", "cache")
        }
        return {
            "seed": self.config.seed,
            "data": self.config.data_name,
            "data_config": data,
            "optim.dense": self.config.optim.dense,
        }

    def _check_folder(self):
        """Raises Refused if checkpoints of other steps would be taken for this run's. Collective."""
        steps = self.world.comm.bcast(self.checkpoints.steps() if self.world.rank == 0 else None)
        newer = [step for step in steps if step > self.start.step]
        if newer and self.config.checkpoint.every_steps > 0:
            raise Refused(
                f"checkpoint.dir={self.checkpoints.folder} holds {self.checkpoints.path(newer[0]).name} of an earlier "
                "run, and this one begins at step "
                f"{self.start.step}: set resume=auto to go on from it, or remove it, or choose another checkpoint.dir"
            )

    def _samples(self, step: int) -> int:
        """Samples of the stream that `step` steps have taken."""
        return self.start.samples + (step - self.start.step) * self.config.batch_size * self.world.size

    def leave(self):
        """On an error: gives the owners what this rank holds back, as far as they still answer."""
        try:
            self.table.push_pending(LEAVE_S)
        except Exception as error:
            print(f"hetmpi: rank {self.world.rank}: updates held back are lost: {error}", file=sys.stderr, flush=True)

    def close(self):
        """Frees what the ranks share. Collective."""
        self.loader.close()
        self.table.close()

    def _plan(self) -> str:
        """What is about to happen, in one line."""
        config = self.config
        replicated = (
            f"{self._num_replicated():,} of them ({len(self.replicated)} fields) on each, " if self.replicated else ""
        )
        return (
            f"{config.model_name} on {config.data_name}: {self.data.num_rows:,} rows of {self.model.row_dim} numbers "
            "over "
            f"{self.world.size} rank(s) on {self._place()}, {replicated}{self.total_steps:,} steps of "
            f"{config.batch_size * self.world.size:,} samples, "
            f"results in {config.run.dir}"
        )

    def _place(self) -> str:
        return "CPUs" if self.device.type == "cpu" else f"GPUs ({torch.cuda.get_device_name(self.device)})"

    def _choice(self) -> list[str]:
        """How rows travel between nodes and why, in one line, if table.exchange=auto had a choice."""
        client = self.table.client
        return [] if client.why is None else [f"table.exchange={client.transport.name}: {client.why}"]

    def _notes(self) -> list[str]:
        """Sentences about data that are too small for what is asked of them."""
        name, num_train, taken = self.config.data_name, self.data.num_train, self.config.batch_size * self.world.size
        notes = []
        if num_train is not None and num_train < taken and self.total_steps > self.start.step:
            notes.append(
                f"data={name} has {num_train:,} samples to train on, a step takes {taken:,}: samples repeat within a "
                "step"
            )
        if self.data.num_valid < 1:
            notes.append(f"data={name} holds out no samples: there will be no AUC and no log loss")
        return [f"hetmpi: {note}" for note in notes]

    def _data(self):
        data = build(self.config.data)
        try:
            with doing(f"prepare() of data={self.config.data_name}"):
                data.prepare(
                    self.world.rank, self.world.size, lambda: self.world.meet("for all ranks to prepare the data")
                )
        except OSError as error:
            if type(data).__module__.startswith("hetmpi."):
                raise Refused(f"data={self.config.data_name}: {error}") from error
            raise
        return data

    def _drawn(self, split: str, start: int, stop: int) -> Samples:
        """The data's samples [start, stop) of `train` or `valid`."""
        with doing(f"{split}({start}, {stop}) of data={self.config.data_name}"):
            return getattr(self.data, split)(start, stop)

    def _total_steps(self) -> int:
        num_train = self.data.num_train
        if num_train is not None and num_train < 1 and self.config.steps != 0:
            raise Refused(
                f"data={self.config.data_name} has {num_train} samples to train on: give it at least one, or steps=0 "
                "to evaluate"
            )
        if self.config.steps is not None:
            return max(self.config.steps, self.start.step)
        if num_train is None:
            raise Refused(f"data={self.config.data_name} never ends: give steps=N")
        left = max(0, self.config.epochs * num_train - self.start.samples)
        return self.start.step + math.ceil(left / (self.config.batch_size * self.world.size))

    def _model(self) -> torch.nn.Module:
        torch.manual_seed(self.config.seed)
        model = build(
            self.config.model,
            num_fields=self.data.num_fields,
            num_dense=self.data.num_dense,
            dim=self.config.table.dim,
        )
        if not isinstance(getattr(model, "row_dim", None), int):
            raise Refused(
                f"{self.config.model._target_}: set self.row_dim, the numbers per row that the model wants (int)"
            )
        if next(model.parameters(), None) is None:
            raise Refused(f"{self.config.model._target_}: it has no parameters, give it at least one dense layer")
        return model

    def _check_batches(self):
        """Raises Refused on every rank if a node lacks memory for the batches of its ranks that there are at a time, as
        ids, keys and rows alone. Collective."""
        size, data = self.config.batch_size, self.data
        num = min(self.config.loader.prefetch + 1, max(1, self.total_steps - self.start.step))
        sample = (
            16 * data.num_fields + 4 * data.num_dense + 4
        )  # ids, their places among the keys, dense features, label
        rows = 8 * self.model.row_dim * min(size * data.num_fields, data.num_rows)  # and their gradients
        refuse_if_short(self.world, num * size * sample + rows, False, lambda need, place, free: (
            f"batch_size={size:,}: the {num:,} batches that loader.prefetch={self.config.loader.prefetch} keeps need "
            "at "
            f"least {size_text(need)} for the {self.world.node.size} rank(s) on {self.world.host}, {size_text(free)} "
            "are "
            f"free in {place}: lower batch_size or loader.prefetch"
        ))  # fmt: skip

    def _logits(self, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The model's logits (B,). Raises Refused for another shape."""
        with doing(f"forward() of model={self.config.model_name}"):
            logits = self.model(rows, batch)
        if logits.shape != batch.label.shape:
            raise Refused(
                f"model={self.config.model_name}: forward must return logits of shape {tuple(batch.label.shape)}, "
                f"got {tuple(logits.shape)}"
            )
        return logits

    def _replicated(self) -> list[range]:
        """Keys of the fields that every rank has whole. Raises Refused if the data's fields are not those of its
        table."""
        below = self.config.table.replicate_below_rows
        if below == 0:
            return []
        if sum(self.data.field_rows) != self.data.num_rows:
            raise Refused(
                f"data={self.config.data_name}: field_rows must sum to num_rows, {self.data.num_rows:,}, for "
                f"table.replicate_below_rows={below}, got {sum(self.data.field_rows):,}"
            )
        return small_fields(self.data.field_rows, below)

    def _num_replicated(self) -> int:
        return sum(map(len, self.replicated))

    def _table(self, schedule: Schedule) -> EmbeddingTable:
        table, optim = self.config.table, self.config.optim
        return EmbeddingTable(
            self.world,
            self.data.num_rows,
            self.model.row_dim,
            RowOptimizer(optim.rows, optim.rows_lr, optim.rows_weight_decay, schedule=schedule),
            partition=table.partition,
            seed=self.config.seed,
            init_std=table.init_std,
            inbox_bytes=int(table.inbox_mb * MB),
            staleness=staleness_of(self.config),
            cache=cache_of(self.config),
            spans=self.spans,
            exchange=table.exchange,
            device=self.device,
            replicated=self.replicated,
        )

    def _shares(self) -> list[int]:
        """Where the ranks' shares of the held-out data begin, and where the last one ends: (size + 1,)."""
        num = self.data.num_valid
        if self.config.eval.max_samples is not None:
            num = min(num, self.config.eval.max_samples)
        return [num * r // self.world.size for r in range(self.world.size + 1)]

    def _num_looks(self) -> int:
        """Batches of the rank with the largest share."""
        return math.ceil(max(np.diff(self._shares())) / self.config.eval.batch_size)

    def _held_out(self):
        """This rank's share of the held-out data, in batches."""
        begin, end = self._shares()[self.world.rank : self.world.rank + 2]
        size = self.config.eval.batch_size
        for start in range(begin, end, size):
            yield to_batch(self._drawn("valid", start, min(start + size, end)))

    def _predict(self, batch: Batch) -> tuple[np.ndarray, ...]:
        """(label, logit) or (label, logit, teacher), each (B,) float32."""
        self.spans.now("evaluation")
        logit = self._logits(self.table.peek(batch.keys), batch.on(self.device)).cpu().numpy()
        known = (batch.label.numpy(), logit)
        return known if batch.teacher is None else (*known, batch.teacher.numpy())

    def _check_loss(self, step: int, loss: torch.Tensor, batch: Batch, rows: torch.Tensor):
        """Raises Refused, with the cause, for a loss that is not finite."""
        if not math.isfinite(loss.item()):
            raise Refused(f"loss is {loss.item()} at step {step + 1}: {self._cause(batch, rows)}")

    @contextlib.contextmanager
    def _explained(self, step: int, batch: Batch, rows: torch.Tensor):
        """Gives the refusal of a gradient that is not finite its step and cause."""
        try:
            yield
        except NotFinite as problem:
            raise Refused(f"{problem}, at step {step + 1}: {self._cause(batch, rows)}") from problem

    def _cause(self, batch: Batch, rows: torch.Tensor) -> str:
        """Why loss or gradients of a batch are not finite, and what to do."""
        optim = self.config.optim
        return not_finite(batch, rows, self.model) or (
            f"lower optim.rows_lr (now {optim.rows_lr}) or optim.dense_lr (now {optim.dense_lr}), or warm up over "
            "more steps (optim.warmup_steps)"
        )

    def _report(self, steps: int, loss: float, interval: Interval):
        """Sums over ranks what happened since the last report and logs it. Collective."""
        self.world.meet(f"after step {steps} for all ranks")
        loss = self.world.comm.allreduce(loss) / self.world.size
        counted, lags, milliseconds = interval.counted()
        sums, lags = self._summed(counted, lags)
        by_rank = self._by_rank(milliseconds)
        num_steps, seconds = interval.restart(steps)
        if self.log is not None:
            self.log.step({
                **self._progress(steps),
                "loss": loss,
                "step_ms": 1000 * seconds / num_steps,
                "samples_per_s": num_steps * self.config.batch_size * self.world.size / seconds,
                **self._table_figures(sums, lags, num_steps),
                **self._times(by_rank / num_steps),
                "lr": self.dense.lr * self.dense.schedule.factor(steps - 1),
            })  # fmt: skip

    def _progress(self, steps: int) -> dict:
        """How far the run is after `steps` steps, for rank 0's log."""
        return {"step": steps, "samples": self._samples(steps), "elapsed_s": self.log.earlier_s + self.watch.seconds}

    def _summed(self, counted: Counters, lags: np.ndarray):
        """Both summed over all ranks. Collective."""
        counts = np.concatenate([counted.as_array(), lags])
        self.world.comm.Allreduce(MPI.IN_PLACE, counts)
        return Counters.of_array(counts[: -len(lags)]), counts[-len(lags) :]

    def _by_rank(self, milliseconds: np.ndarray) -> np.ndarray | None:
        """All ranks' milliseconds by part: on rank 0 (ranks, parts), elsewhere None. Collective."""
        gathered = None if self.world.rank > 0 else np.empty((self.world.size, len(milliseconds)))
        self.world.comm.Gather(milliseconds, gathered)
        return gathered

    def _times(self, by_rank: np.ndarray) -> dict:
        """Of ms per step, (ranks, parts): the mean over ranks of what waiting for the table took and of each part, and
        how uneven the ranks' own work is."""
        mean, own = by_rank.mean(0), own_ms(by_rank)
        uneven = {
            "own_ms_min": own.min(),
            "own_ms": own.mean(),
            "own_ms_max": own.max(),
            "slowest_rank": int(own.argmax()),
        }
        return {"wait_ms": wait_ms(mean), **uneven, **in_ms(mean)}

    def _table_figures(self, sums: Counters, lags: np.ndarray, num_steps: int) -> dict:
        """What the table did, per step and over all ranks. Without a cache its figures are None."""
        has_cache = sums.hit_rate is not None
        per_step = {name: count / max(1, num_steps) for name, count in vars(sums).items()}
        cache = {
            name: per_step[name] if has_cache else None for name in ("hits", "stale", "misses", "validated", "evicted")
        }
        return {
            "hit_rate": sums.hit_rate,
            "stale_rate": sums.stale_rate,
            "pulled_bytes": sums.pulled_bytes / max(1, num_steps),
            "pushed_bytes": per_step["push_bytes"],
            "clock_bytes": per_step["clock_bytes"],
            "row_bytes": per_step["row_bytes"],
            "reduced_bytes": per_step["reduced_bytes"] if self.replicated else None,
            **cache,
            "pushed": per_step["pushed"],
            "lag_p50": lag_at(lags, 0.5, self.table.staleness.bound),
            "lag_p99": lag_at(lags, 0.99, self.table.staleness.bound),
            "lags": trimmed(lags),
        }

    def _finish(self, figures: dict):
        """Writes and shows the summary of the run. Collective."""
        sums, lags = self._summed(self.table.counters, self.table.lags)
        by_rank = self._by_rank(self.spans.as_array() / max(1, self.total_steps - self.start.step))
        hosts = self.world.comm.gather(self.world.host)
        traces = self.world.comm.gather(list(self.spans.trace)) if self.config.train.profile else None
        if self.log is None:
            return
        if traces:
            self.log.write("trace.json", chrome_trace(traces, hosts))
        samples, seconds = self._samples(self.total_steps) - self.start.samples, self.watch.seconds
        self.log.finish({
            "model": self.config.model_name,
            "data": self.config.data_name,
            "world_size": self.world.size,
            "device": self.device.type,
            "exchange": self.table.client.transport.name,
            "steps": self.total_steps,
            "first_step": self.start.step,  # the figures below are of the steps from there
            "samples_per_s": samples / seconds if seconds else None,
            "auc": figures["auc"],
            "log_loss": figures["log_loss"],
            "teacher_auc": figures["teacher_auc"],
            **self._table_figures(sums, lags, 1),
            **self._times(by_rank),
            "seconds": seconds,
            "num_rows": self.data.num_rows,
            "replicated_rows": self._num_replicated(),
            "row_dim": self.model.row_dim,
            "dense_parameters": sum(p.numel() for p in self.model.parameters()),
            "run_dir": self.config.run.dir,
            "by_rank": [{"host": host, "own_ms": own_ms(ms), **in_ms(ms)} for host, ms in zip(hosts, by_rank)],
        })  # fmt: skip
        if figures["without_auc"]:
            self.log.note(f"no AUC: {figures['without_auc']}")


def build(config: DictConfig, **arguments):
    """The object that config._target_ names. Raises Refused if there is none, if it does not take these arguments, or
    does not fit in memory; any other error of its class as it is."""
    target = config.get("_target_")
    if not isinstance(target, str) or not target:
        raise Refused(f"_target_ must name a class, as package.module.Class, got {target!r}")
    try:
        return instantiate(config, **arguments)
    except InstantiationException as error:
        cause = error.__cause__
        if cause is None:  # it names something else
            raise Refused(f"_target_={target} names no class: {' '.join(str(error).split())}") from error
    if "allocate memory" in str(cause):
        num_bytes = re.search(r"allocate (\d+) bytes", str(cause))
        size = size_text(int(num_bytes[1])) if num_bytes else "its size"
        raise Refused(
            f"{target}: memory lacks room for a tensor of {size}: lower table.dim or the widths of its layers"
        )
    if isinstance(cause, TypeError) and is_of_the_call(cause):
        raise Refused(f"{target}: {cause}: its keys must be the arguments of its constructor")
    if isinstance(cause, ImportError) and cause.__cause__ is not None:
        cause = cause.__cause__
        if isinstance(cause, AttributeError) or f"{target}.".startswith(f"{getattr(cause, 'name', None)}."):
            raise Refused(
                f"cannot import {target} ({cause}): start from the folder its file is in, or put that on PYTHONPATH"
            ) from cause
    with doing(f"making {target}"):
        raise cause


def is_of_the_call(error: BaseException) -> bool:
    """Whether Hydra's call itself failed, and not what it called."""
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    return "hydra" in Path(frame.tb_frame.f_code.co_filename).parts


def not_finite(batch: Batch, rows: torch.Tensor, model: torch.nn.Module) -> str | None:
    """What of a batch and the model is NaN or infinite, in one sentence; None if nothing is."""
    num = len(batch.label)
    if num == 0:
        return "the batch is empty: the data's train(start, stop) gave no samples"
    inputs = {"label": batch.label, **{f"dense feature {i}": column for i, column in enumerate(batch.dense.unbind(1))}}
    for name, values in inputs.items():
        wrong = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
        if wrong:
            return (
                f"the data give {name} = {values[wrong[0]].item()} in {len(wrong)} of the {num} samples of this "
                f"rank's batch, first in sample {wrong[0]}"
            )
    wrong = torch.nonzero(~torch.isfinite(rows.detach()).all(1)).flatten().tolist()
    if wrong:
        return (
            f"{len(wrong)} of {len(rows)} rows were not finite when they were read, the first of key "
            f"{int(batch.keys[wrong[0]])}"
        )
    parameters = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
    return f"the dense parameter {parameters[0]} is not finite" if parameters else None


def in_ms(milliseconds: np.ndarray) -> dict[str, float]:
    """Milliseconds of each part (parts,) under the names they have in the log."""
    return {f"{part}_ms": ms for part, ms in by_part(milliseconds).items()}


class Stopwatch:
    """Seconds of training; paused while held-out data are looked at."""

    def __init__(self):
        self._before, self._began = 0.0, None

    def start(self):
        self._began = time.perf_counter()

    def pause(self):
        self._before, self._began = self.seconds, None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._began is None else time.perf_counter() - self._began)


class Interval:
    """What happened since the last report: steps, seconds, and what the table counted. While it is paused only counts
    go on: what a flush pushes before an evaluation is training's, the time it takes is not."""

    def __init__(self, table: EmbeddingTable, first_step: int, watch: Stopwatch):
        self.table, self.first_step, self.watch = table, first_step, watch
        self.restart(first_step)

    def counted(self) -> tuple[Counters, np.ndarray, np.ndarray]:
        """This rank's counters, histogram of lags and milliseconds by part since the last restart."""
        table = self.table
        return table.counters.since(self.counters), table.lags - self.lags, table.spans.as_array() - self.milliseconds

    def restart(self, steps: int) -> tuple[int, float]:
        """(steps, seconds) since the last restart; begins anew at `steps`."""
        now, table = self.watch.seconds, self.table
        passed = (steps - self.steps, now - self.began) if steps > self.first_step else (0, 0.0)
        self.steps, self.began = steps, now
        self.counters, self.lags, self.milliseconds = table.counters.copy(), table.lags, table.spans.as_array()
        return passed

    def pause(self):
        self.watch.pause()
        self.paused = self.table.spans.as_array()

    def go_on(self):
        self.milliseconds += self.table.spans.as_array() - self.paused
        self.watch.start()


class Ahead:
    """Iterates batches, and has `depth` more at hand to announce."""

    def __init__(self, batches, depth: int, spans: Spans):
        self.batches, self.depth, self.spans = iter(batches), depth, spans
        self._later = deque()

    def __iter__(self):
        while True:
            batch = self._later.popleft() if self._later else self._load()
            if batch is None:
                return
            yield batch

    def announced(self):
        """Batches that have come within `depth` of the one in work since the last call."""
        while len(self._later) < self.depth:
            batch = self._load()
            if batch is None:
                return
            self._later.append(batch)
            yield batch

    def _load(self):
        with self.spans("load"):
            return next(self.batches, None)


if __name__ == "__main__":
    launch(main)
