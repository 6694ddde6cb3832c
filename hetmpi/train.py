"""Trains a model on a table partitioned over all ranks: mpirun -np 4 python -m hetmpi.train model=deepfm steps=1000

The only reader of the settings (conf/config.yaml).
"""

from __future__ import annotations

import math
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

from hetmpi.checkpoint import Checkpoints, Position, check_same, position_of, read_manifest
from hetmpi.config import CONF, cache_of, compose, staleness_of
from hetmpi.data.batch import Batch, to_batch
from hetmpi.data.gpu_batch import GpuBatches
from hetmpi.data.loader import Loader
from hetmpi.device import choose_device
from hetmpi.metrics import Counters, auc, lag_at, log_loss, trimmed
from hetmpi.optim import DenseOptimizer, RowOptimizer, Schedule
from hetmpi.preemption import Preemption
from hetmpi.replicated import ReplicatedTable, small_fields
from hetmpi.runlog import RunLog
from hetmpi.spans import Spans, by_part, chrome_trace, own_ms, wait_ms
from hetmpi.table import EmbeddingTable
from hetmpi.watchdog import Watchdog
from hetmpi.world import LEFT_EARLY, MPI, Refused, World, launch

MB = 1 << 20
LEAVE_S = 5  # for the owners to take in what a failing rank holds back


def main(world: World, overrides: list[str] | None = None):
    """Composes the settings, builds the parts, trains, reports. overrides: default those on the command line."""
    overrides = sys.argv[1:] if overrides is None else overrides
    if {"-h", "--help"} & set(overrides):
        return print(usage()) if world.rank == 0 else None
    config = compose(world, overrides)
    torch.set_num_threads(world.compute_threads())
    no_gpu = config.device == "auto" and config.table.replicate_below_rows > 0  # which is for CPUs
    device = choose_device(world, "cpu" if no_gpu else config.device)
    if config.table.ranks_per_node is not None:
        world = World(world.comm, config.table.ranks_per_node)
    preemption = Preemption(world)
    spans = Spans(keeps_trace=config.train.profile)
    watchdog = Watchdog(world, spans, config.watchdog.seconds)
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
        self.checkpoints = Checkpoints(world, config.checkpoint.dir, config.checkpoint.keep, config.checkpoint.full_every)
        resumed = self._resumed()
        self.start = Position() if resumed is None else position_of(resumed)
        self._check_folder()
        self.total_steps = self._total_steps()
        self.model = self._model()
        schedule = Schedule(config.optim.schedule, config.optim.warmup_steps, self.total_steps)
        self.replicated = self._replicated()
        self.table = self._table(schedule)
        self.dense = DenseOptimizer(
            self.hvd, self.model, config.optim.dense, config.optim.dense_lr, config.optim.dense_weight_decay, schedule, device,
        )  # fmt: skip
        if resumed is not None:
            self.checkpoints.load(resumed, self.table, self.model, self.dense)
        if config.checkpoint.every_steps > 0:
            self.checkpoints.reserve(self.table)
        self.criterion = torch.nn.BCEWithLogitsLoss()
        self.loader = Loader(
            self.data.train, world.rank, world.size, config.batch_size, self.start.step, self.total_steps,
            config.loader.threads, config.loader.prefetch,
            to_batch if device.type == "cpu" else GpuBatches(device, self.data.num_rows), self.start.samples,
        )  # fmt: skip
        self.log = None
        if world.rank == 0:
            print("\n".join([self._plan(), *self._choice(), *([f"resumed from {resumed}"] if resumed else [])]), flush=True)
            settings = OmegaConf.merge(config, {"resume": resumed and str(resumed)})  # the one that `auto` found
            self.log = RunLog(config.run.dir, OmegaConf.to_yaml(settings), self.total_steps, self.start.step)
        self.watch = Stopwatch()

    def run(self, must_leave=lambda: False) -> bool:
        """The story: read rows, learn, write gradients, step the dense layers; look at held-out data now and then. must_leave():
        asked after each step, on all ranks alike, whether to save and leave before the end. Returns whether the end was reached."""
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
            with self.spans("backward"):
                loss.backward()  # Horovod's hooks start the dense allreduce here
            if self.device.type != "cpu":  # which computes meanwhile
                self._prefetch(batches)
            with self.spans("backward"):
                self.dense.begin()  # or this starts it
            if rows.grad is None:
                raise Refused(f"model={self.config.model_name}: its output does not depend on the rows it is given")
            self.table.write(batch.keys, rows.grad.div_(self.world.size))
            with self.spans("allreduce"):
                self.dense.step(step)
            self._check_finite(step, loss.item())
            if (step + 1) % every == 0 or step + 1 == self.total_steps:
                if self.table.staleness.is_synchronous:
                    self.table.flush()  # a rank that waits for the others below could not drain its inbox for them
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
        """AUC and log loss on the held-out data, read from the owners: on rank 0 the figures, elsewhere {}. Collective."""
        self.table.flush()
        self.model.eval()
        with torch.no_grad():
            parts = [self._predict(batch) for batch in self._held_out()]
            for _ in range(len(parts), self._num_looks()):
                self.table.peek(torch.empty(0, dtype=torch.int64))  # others may need this rank's answers
        self.model.train()
        columns = [np.concatenate(column) if parts else np.empty(0, np.float32) for column in zip(*parts)]
        gathered = self.world.comm.gather(columns)
        self.world.comm.Barrier()  # at s >= 1 a rank that trained on would change rows that others still evaluate
        if self.world.rank != 0:
            return {}
        label, logit, *teacher = [np.concatenate(part) for part in zip(*[g for g in gathered if g])]
        figures = {**self._progress(step), "auc": auc(label, logit), "log_loss": log_loss(label, logit)}
        figures["teacher_auc"] = auc(label, teacher[0]) if teacher else None
        self.log.evaluation(figures)
        return figures

    def _say_left(self, step: int):
        """Waits for the checkpoint, then says where the run can go on. Collective."""
        self.checkpoints.wait()
        if self.world.rank == 0:
            print(f"hetmpi: told to leave: saved {self.checkpoints.path(step)}, from which resume={self.checkpoints.path(step)} goes on", flush=True)

    def _checkpoint(self, step: int, must: bool):
        """Begins one after `step` steps, if it is time or must be. Collective."""
        every = self.config.checkpoint.every_steps
        self.checkpoints.check()
        if must or (every > 0 and (step % every == 0 or step == self.total_steps)):
            self.spans.now("checkpoint")
            sizes = {"num_fields": self.data.num_fields, "num_dense": self.data.num_dense, "dim": self.config.table.dim}
            about = {
                **self._what(), "model": self.config.model_name, "model_config": OmegaConf.to_container(self.config.model),
                "model_sizes": sizes,
            }  # fmt: skip
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
        """What a run that goes on must not change: samples would be lost or taken twice, or the dense optimizer's state be another rule's."""
        data = {key: value for key, value in OmegaConf.to_container(self.config.data).items() if key not in ("path", "cache")}
        return {"seed": self.config.seed, "data": self.config.data_name, "data_config": data, "optim.dense": self.config.optim.dense}

    def _check_folder(self):
        """Raises Refused if checkpoints of other steps would be taken for this run's. Collective."""
        steps = self.world.comm.bcast(self.checkpoints.steps() if self.world.rank == 0 else None)
        newer = [step for step in steps if step > self.start.step]
        if newer and self.config.checkpoint.every_steps > 0:
            raise Refused(
                f"checkpoint.dir={self.checkpoints.folder} holds {self.checkpoints.path(newer[0]).name} of an earlier run, and this one begins at step "
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
        replicated = f"{self._num_replicated():,} of them ({len(self.replicated)} fields) on each, " if self.replicated else ""
        return (
            f"{config.model_name} on {config.data_name}: {self.data.num_rows:,} rows of {self.model.row_dim} numbers over "
            f"{self.world.size} rank(s) on {self._place()}, {replicated}{self.total_steps:,} steps of {config.batch_size * self.world.size:,} samples, "
            f"results in {config.run.dir}"
        )

    def _place(self) -> str:
        return "CPUs" if self.device.type == "cpu" else f"GPUs ({torch.cuda.get_device_name(self.device)})"

    def _choice(self) -> list[str]:
        """How rows travel between nodes and why, in one line, if table.exchange=auto had a choice."""
        exchange = self.table.exchange
        return [] if exchange.why is None else [f"table.exchange={exchange.name}: {exchange.why}"]

    def _data(self):
        data = build(self.config.data)
        try:
            data.prepare(self.world.rank, self.world.size, self.world.comm.Barrier)
        except (ValueError, OSError) as error:
            raise Refused(str(error)) from error
        return data

    def _total_steps(self) -> int:
        if self.config.steps is not None:
            return max(self.config.steps, self.start.step)
        if self.data.num_train is None:
            raise Refused(f"data={self.config.data_name} never ends: give steps=N")
        left = max(0, self.config.epochs * self.data.num_train - self.start.samples)
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
            raise Refused(f"{self.config.model._target_}: set self.row_dim, the numbers per row that the model wants (int)")
        return model

    def _logits(self, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The model's logits (B,). Raises Refused for another shape."""
        logits = self.model(rows, batch)
        if logits.shape != batch.label.shape:
            raise Refused(
                f"model={self.config.model_name}: forward must return logits of shape {tuple(batch.label.shape)}, "
                f"got {tuple(logits.shape)}"
            )
        return logits

    def _replicated(self) -> list[range]:
        """Keys of the fields that every rank has whole. Raises Refused if the data's fields are not those of its table."""
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
        kind = partial(ReplicatedTable, fields=self.replicated) if self.replicated else EmbeddingTable
        return kind(
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
            yield to_batch(self.data.valid(start, min(start + size, end)))

    def _predict(self, batch: Batch) -> tuple[np.ndarray, ...]:
        """(label, logit) or (label, logit, teacher), each (B,) float32."""
        self.spans.now("evaluation")
        logit = self._logits(self.table.peek(batch.keys), batch.on(self.device)).cpu().numpy()
        known = (batch.label.numpy(), logit)
        return known if batch.teacher is None else (*known, batch.teacher.numpy())

    def _check_finite(self, step: int, loss: float):
        if not math.isfinite(loss):
            raise Refused(
                f"loss is {loss} at step {step + 1}: lower optim.rows_lr (now {self.config.optim.rows_lr}) or "
                f"optim.dense_lr (now {self.config.optim.dense_lr}), or warm up over more steps (optim.warmup_steps)"
            )

    def _report(self, steps: int, loss: float, interval: Interval):
        """Sums over ranks what happened since the last report and logs it. Collective."""
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
        """Of ms per step, (ranks, parts): the mean over ranks of what waiting for the table took and of each part, and how
        uneven the ranks' own work is."""
        mean, own = by_rank.mean(0), own_ms(by_rank)
        uneven = {"own_ms_min": own.min(), "own_ms": own.mean(), "own_ms_max": own.max(), "slowest_rank": int(own.argmax())}
        return {"wait_ms": wait_ms(mean), **uneven, **in_ms(mean)}

    def _table_figures(self, sums: Counters, lags: np.ndarray, num_steps: int) -> dict:
        """What the table did, per step and over all ranks. Without a cache its figures are None."""
        has_cache = sums.hit_rate is not None
        per_step = {name: count / max(1, num_steps) for name, count in vars(sums).items()}
        cache = {name: per_step[name] if has_cache else None for name in ("hits", "stale", "misses", "validated", "evicted")}
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
            "exchange": self.table.exchange.name,
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


def build(config: DictConfig, **arguments):
    """The object that config._target_ names. Raises Refused if it cannot be found or refuses its arguments."""
    try:
        return instantiate(config, **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, (ValueError, TypeError, OSError)):
            raise Refused(f"{config._target_}: {error.__cause__}") from error
        if "Error locating target" in str(error):
            raise Refused(
                f"cannot import {config._target_} ({error.__cause__ or error}): start from the folder its file is in, or "
                "put that on PYTHONPATH"
            ) from error
        raise


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
    """What happened since the last report: steps, seconds, and what the table counted. While it is paused only counts go on: what
    a flush pushes before an evaluation is training's, the time it takes is not."""

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
