"""Trains a model on tables partitioned over all ranks: mpirun -np 4 python -m hetmpi.train model=deepfm steps=1000

Only this program reads the settings (hetmpi/run/settings.py); hetmpi/run/build.py builds the parts of a run from them.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from hetmpi.world.early_signals import exit_on_signals
    from hetmpi.world.oversubscription import restart_with_naps

    exit_on_signals()
    restart_with_naps()

import contextlib
import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from hetmpi.data.loader import Loader, Lookahead
from hetmpi.data.source import Source, held_out
from hetmpi.errors import LARGEST, NotFinite, UserError, doing
from hetmpi.gpu import Gpu, gpu_of
from hetmpi.log.display import tell
from hetmpi.log.environment import environment
from hetmpi.log.headline import comparison
from hetmpi.log.runlog import CURVES, OF_SAMPLES, RunLog
from hetmpi.log.status import write_failed
from hetmpi.reductions import open_reductions
from hetmpi.run import build, command_line
from hetmpi.run.best import Best, MetricHistory, best_of
from hetmpi.run.config import compose, staleness_of
from hetmpi.run.device import choose_device, has_bf16
from hetmpi.run.following import Following
from hetmpi.run.plan import dry_run
from hetmpi.run.preemption import Preemption
from hetmpi.run.progress import Interval, Stopwatch, gathered_by_rank, in_ms, summed, table_figures, times
from hetmpi.run.quick import QuickEvaluations
from hetmpi.run.saving import Saving, locked
from hetmpi.run.sweep import points_of
from hetmpi.run.watchdog import Watchdog
from hetmpi.schedule import Schedule
from hetmpi.spans import Spans, chrome_trace, own_ms
from hetmpi.tasks.evaluation import Evaluation
from hetmpi.trained.earlier_run import begin, encoder_before
from hetmpi.trained.id_rows import export_changes
from hetmpi.trained.saved_model import check_data, check_samples, resumed_stream, tensors_of
from hetmpi.world.launch import LEFT_EARLY, launch, on_failure
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World


def main(world: World, arguments: list[str] | None = None):
    """Parses `arguments` (default: those of this process), then trains, runs a sweep, or prints help or settings.
    Collective."""
    asked = command_line.parse(sys.argv[1:] if arguments is None else arguments)
    if asked.help or asked.cfg is not None:
        show(world, asked)
    elif asked.multirun:
        sweep(world, asked.overrides, asked.config_dir)
    else:
        config = compose(world, asked.overrides, asked.config_dir)
        preemption = Preemption(world)
        is_done = train(world, config, preemption)
        preemption.close()
        if not is_done:
            sys.exit(LEFT_EARLY)


def show(world: World, asked: Namespace):
    """Prints the text for --help or --cfg on rank 0. Collective."""
    text = world.from_first(lambda: command_line.answer(asked))
    if world.rank == 0:
        print(text, flush=True)


def sweep(world: World, overrides: list[str], config_dir: str | None):
    """Trains the points of a sweep in turn, except those that are done, then prints a comparison. Collective."""
    points, preemption = points_of(world, overrides, config_dir), Preemption(world)
    for number, point in enumerate(points, 1):
        if world.rank == 0:
            done = " is done" if point.is_done else ""
            print(f"hetmpi: {number} of {len(points)}: {point.folder}{done}", flush=True)
        if point.is_done:
            continue
        preemption.is_training = False
        is_done = train(world, compose(world, point.overrides, config_dir), preemption)
        if not is_done or (number < len(points) and preemption.is_agreed_now()):
            preemption.close()
            if world.rank == 0:
                folder = Path(point.folder).parent
                print(
                    f"hetmpi: sweep stopped by a signal: continue with the same command and run.dir={folder}",
                    flush=True,
                )
            sys.exit(LEFT_EARLY)
    preemption.close()
    if world.rank == 0 and not any(text.startswith("dry_run=") for text in overrides):
        print(comparison([Path(point.folder) for point in points]), flush=True)


def train(world: World, config: DictConfig, preemption: Preemption) -> bool:
    """Builds the parts of a run and trains. Returns whether the run is done; otherwise a signal ended it.
    Collective."""
    spans = Spans(keeps_trace=config.train.profile)
    watchdog = Watchdog(world, spans, config.watchdog.seconds)
    torch.set_num_threads(world.compute_threads())
    device = choose_device(world, config.device)
    whole = world
    if config.table.ranks_per_node is not None:
        world = whole.split(config.table.ranks_per_node)
    is_done = True
    if config.dry_run:
        dry_run(world, config, device, encoder_before(None, config.init_from and Path(config.init_from)))
    else:
        is_done = run_training(world, config, device, spans, preemption)
    if world is not whole:
        world.node.Free()
    watchdog.close()
    return is_done


def run_training(world: World, config: DictConfig, device: torch.device, spans: Spans, preemption: Preemption) -> bool:
    """Trains. Returns as train(). Collective."""
    with locked(world, config):
        training = Training(world, config, device, spans)
        try:
            is_done = training.run(partial(training.must_leave, preemption))
            if not is_done:
                training.check_disk()
        finally:
            if training.log is not None:
                training.log.close()  # gives the terminal its cursor back
    training.close()
    return is_done


class Training:
    """One training run: a source of samples, a task, a model and a group of tables."""

    def __init__(
        self,
        world: World,
        config: DictConfig,
        device: torch.device,
        spans: Spans,
        source: Source | None = None,
        model: torch.nn.Module | None = None,
        after_report: Callable[[], None] = lambda: None,
    ):
        """source (prepared), model: replace those that the settings name. after_report(): called on every rank after
        each log line. Collective."""
        self.world, self.config, self.device, self.spans, self.after_report = world, config, device, spans, after_report
        self.hvd = open_reductions(world, config.optim.dense_exchange, device)
        self.saving = Saving(world, config)
        self.checkpoints, self.start = self.saving.checkpoints, self.saving.start
        self.source, self.task, self.model, self.specs = build.make_parts(
            world,
            config,
            device,
            source,
            model,
            resumed_stream(self.saving.resumed, self.start.samples),
            encoder_before(self.saving.resumed, self.saving.origin),
        )
        self.following = Following.of(self)
        self.total_steps, self.steps = build.total_steps(config, self.source, world.size, self.start), self.start.step
        self.precision = build.precision_of(config, device)
        build.check_accumulate(config, self.task)
        self.is_due = build.evaluations_due(config, self.source, world.size, self.start)
        self.generator = build.generator_of_dropout(self.model, device)
        self.bests = MetricHistory(world, config, self.task, self.source.num_valid, self.saving.resumed)
        num_steps = LARGEST if self.total_steps is None else self.total_steps - self.start.step
        num_batches = build.num_batches(config, world, self.task, self.specs, num_steps, device)
        build.check_batches(config, world, self.task, self.specs, num_batches)
        build.check_final(config, world, self.task, self.model)
        self.schedule = schedule = Schedule(
            config.optim.schedule, config.optim.warmup_steps, self.total_steps or 0, decay=config.optim.plateau_decay,
            drops=self.bests.num_drops,
        )  # fmt: skip
        most_keys = build.most_keys_of(config, self.task, self.specs)
        self.tables = build.make_tables(config, world, self.specs, most_keys, schedule, device, spans)
        for table in self.tables.values():
            table.remember(config.loader.prefetch)
        self.vocabularies = build.make_vocabularies(config, world, self.source, self.specs, self.tables)
        if config.checkpoint.export_deltas:
            if not self.vocabularies:
                raise UserError("checkpoint.export_deltas=true needs columns with rows: open in data.columns")
            self.checkpoints.after = partial(export_changes, Path(config.run.dir, "deltas"))
        self.task.opened(self.tables)
        self.dense = build.make_dense(config, self.hvd, self.model, schedule, device)
        if self.saving.resumed is not None:
            check_data(self.saving.resumed, self.source)
            if config.steps != 0:  # else it is evaluated, on whatever data
                check_samples(self.saving.resumed, self.source)
            self.checkpoints.load(self.saving.resumed, self.tables.to_save, self.model, self.dense)
        elif self.saving.origin is not None:
            self.num_new = begin(
                self.saving.origin, self.checkpoints, self.tables.to_save, self.source, self.model, self.dense
            )
        self.num_filled = self._filled()
        if self.saving.is_regular:
            self.checkpoints.reserve(self.tables.to_save)
        self.loader: Loader | None = None
        self._unchecked: list[LossOnGpu] = []
        self.of_data = f" of data={config.data_name}"
        self.evaluation = self.open_evaluation()
        self.quick = QuickEvaluations.of(world, config, self.source, self.task, self.total_steps, self.start)
        if self.quick is not None:
            num = self.quick.num_samples
            self.quick_evaluation = replace(self.evaluation, draw=cache(self._held_out(num)), num_samples=num)
        self.log_steps = build.log_steps(config, self.total_steps)
        self.log = self._opened_log()
        self._best_curves: Best | None = None  # the evaluation whose curves are written
        self.watch = Stopwatch()
        # Of the settings, what each step needs: a look at OmegaConf's takes 20 us.
        self.accumulate, self.in_forward = config.train.accumulate, f"forward() of model={config.model_name}"
        self.is_disk_full = False  # that of this rank's rows, if they are on disk
        self.saved_step = self.start.step if self.saving.resumed is not None else None

    def run(self, must_leave=lambda: False) -> bool:
        """Trains to the end, or until a signal. must_leave(): called on all ranks after each step; returns, the same on
        each, whether to save and leave. Returns whether the run is done. Collective."""
        self.evaluated = self._overdue_evaluation()
        self.interval = Interval(self.tables, self.spans, self.start.step, self.watch)
        self.watch.start()
        if self.following is not None:
            is_done = self.following.train(must_leave)
        else:
            is_done = self.bests.reason is not None or self.train_to(self.total_steps, must_leave)
        if not is_done:
            return False
        self.tables.flush()
        self.watch.pause()
        if self.following is not None:
            self.evaluated = self.following.summary()
        elif self.evaluated is None:
            self.evaluated = self.evaluate(self.steps)
        self.model.eval()
        final = self.task.final_figures(self.evaluation)
        self.model.train()
        self.checkpoints.wait()
        self._finish(self.evaluated, final)
        return True

    def train_to(self, last_step: int, must_leave: Callable[[], bool]) -> bool:
        """The training loop up to `last_step`: read rows, compute the loss and gradients, write the gradients of the
        rows, step the dense layers; log, evaluate and save at intervals. Returns False if a signal ended it.
        Collective."""
        every = self.log_steps
        self.loader = self._loader(last_step)
        batches = Lookahead(
            self.loader, build.batches_ahead(self.config, self.tables), self.spans, self.steps,
            self.vocabularies.is_due, self._translated,
        )  # fmt: skip
        for step, batch in enumerate(batches, self.steps):
            self.spans.step, self.steps, self.evaluated = step, step + 1, None
            loss = self._step(step, batch.on(self.device), batches)
            is_last = step + 1 == last_step
            if (step + 1) % every == 0 or is_last:
                self.tables.settle()  # a rank does not drain its inbox while it waits in the collectives below
                self._report(step + 1, loss.item())
            if self.vocabularies.is_due(step + 1):
                self.check_losses()
                self.tables.flush()
                self.vocabularies.maintain(step + 1)
            leaves = must_leave() and step + 1 != self.total_steps
            if not leaves and self._is_evaluated(step + 1):
                self.interval.pause()
                self.evaluated = self.evaluate(step + 1)
                self.interval.go_on()
            elif not leaves and self.quick is not None and self._is_quick_due(step + 1):
                self.interval.pause()
                self.quick.timed(partial(self.evaluate_quickly, step + 1))
                self.interval.go_on()
            ends_early = self.bests.reason is not None
            self.checkpoint(leaves, is_last or ends_early)
            if leaves:
                self.say_left()
                return False
            if ends_early:
                if (step + 1) % every != 0 and not is_last:
                    self._report(step + 1, loss.item())
                break
        return True

    def must_leave(self, preemption: Preemption) -> bool:
        """Whether a signal or a full disk ends the run after this step, the same on every rank. Collective."""
        if not self.is_disk_full and any(table.shard.is_full for table in self.tables.values()):
            self.is_disk_full = True
        if self.is_disk_full:
            preemption.ask()
        return preemption.is_agreed()

    def check_disk(self):
        """Raises UserError on every rank if the disk of some rank's rows is full. Collective."""
        folder, error = self.config.table.store_dir, None
        if self.is_disk_full:
            error = UserError(
                f"table.store_dir={folder}: the disk of rank {self.world.rank} is full: the run is saved after step "
                f"{self.steps}; free space there, or name another folder, and continue by resume=auto"
            )
        self.world.agree(error)

    def say_left(self):
        """Says, and records, that the run was left after its last step, which is saved. Collective."""
        is_full = self.world.comm.allreduce(self.is_disk_full, MPI.LOR)
        self.saving.say_left(self.steps, "a full disk" if is_full else "a signal")
        if self.log is not None:
            self.log.stop(self.steps, self.checkpoints.path(self.steps))

    def _step(self, step: int, batch, batches: Lookahead) -> Tensor:
        """Makes one step with a batch and returns the loss (). Raises UserError, with the cause, for a loss or gradient
        that is not finite."""
        on_gpu, keys, rows = gpu_of(self.device) is not None, self.task.keys(batch), {}
        try:
            for name, found in self.tables.read(keys).items():
                rows[name] = found.requires_grad_()  # (U, row_dim)
            if not on_gpu:
                self._prefetch(batches)
            if self.generator is not None:
                self.generator.manual_seed(build.seed_of(self.config.seed, step, self.world.rank))
            loss = self._passes(step, batch, keys, rows)
            if on_gpu:  # the GPU computes meanwhile
                self._prefetch(batches)
            with self.spans("backward"):
                self.dense.begin()  # starts the allreduce if a parameter got no gradient
            self.tables.write(keys, self._gradients(rows))
            with self.spans("allreduce"):
                self.dense.step(step)
        except NotFinite as problem:
            self.check_losses()  # a loss that is not finite came before its gradients
            is_late = any(table.checks_late for table in self.tables.values())
            if is_late:
                raise UserError(f"{problem}, told at step {step + 1}, of one before: {self._advice()}") from problem
            raise UserError(f"{problem}, at step {step + 1}: {self._cause(batch, keys, rows)}") from problem
        return loss

    def _passes(self, step: int, batch, keys: dict[str, Tensor], rows: dict[str, Tensor]) -> Tensor:
        """Computes the loss () and the gradients of rows and parameters, of a part of the batch after the other."""
        num, losses = self.accumulate, []
        parts = [(batch, 1.0)] if num == 1 else self.task.split(batch, num)
        for number, (part, share) in enumerate(parts, 1):
            with self.spans("forward"):
                loss = self.task.loss(self._forward, rows, part) * share
                if gpu_of(self.device) is None:
                    self._check_loss(step, loss.item(), batch, keys, rows)
                else:
                    if number == 1:
                        self.check_losses()  # of the step before, which have arrived by now
                    values = {name: found.detach() for name, found in rows.items()}
                    self._unchecked.append(
                        LossOnGpu(step, gpu_of(self.device).Later(loss.detach()), batch, keys, values)
                    )
            follows = self.dense.held() if number < len(parts) else contextlib.nullcontext()
            with self.spans("backward"), follows:
                loss.backward()  # the last starts the allreduce of the dense gradients once all of them are computed
            losses.append(loss.detach())
        return sum(losses)

    def _translated(self, batch, step: int):
        """A batch of the loader, with keys in place of the ids of tables without a fixed vocabulary. Collective."""
        with self.spans("vocabulary"):
            return self.vocabularies.of_batch(batch, step)

    def _forward(self, rows, batch):
        with doing(self.in_forward), self.precision():
            return in_float32(self.model(rows, batch))

    def _gradients(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients (U, dim) of the mean loss over all ranks with respect to the rows of each table."""
        grads = {name: found.grad for name, found in rows.items()}
        for name in [name for name, grad in grads.items() if grad is None]:
            if len(rows[name]) > 0:
                which = f" of the table {name}" if len(self.tables) > 1 else ""
                raise UserError(
                    f"model={self.config.model_name}: its output does not depend on the rows{which} it is given"
                )
            grads[name] = torch.zeros_like(rows[name])
        if self.world.size > 1:
            torch._foreach_div_(list(grads.values()), self.world.size)
        return grads

    def _prefetch(self, batches: Lookahead):
        """Prefetches the rows of the next batches."""
        for later in batches.announced():
            self.tables.prefetch(self.task.keys(later))

    # Held-out data.

    def evaluate(self, step: int) -> dict:
        """Evaluates the model on held-out data. Returns on rank 0 the task's metrics under `figures` and the reason for
        missing ones under `without`, on other ranks {}. Collective."""
        columns = self._columns(self.evaluation, step)
        figures = {} if columns is None else self.task.figures(columns)
        if columns:
            entries = figures if self.following is None else self.following.figures(figures)
            self.log.evaluation({**self._progress(step), **entries})
            self._log_curves(step, figures, columns)
        self.bests.add(step, figures)
        if self.schedule.drops != self.bests.num_drops:
            self.schedule.drops = self.bests.num_drops
            self.tables.flush()  # from here on all ranks apply gradients with the lower rates
        return {} if columns is None else {"figures": figures, "without": self.task.without_figures(columns)}

    def _log_curves(self, step: int, figures: dict, columns: list[np.ndarray]):
        """Writes the curves of the best evaluation so far, on rank 0."""
        metric = next(iter(figures), None)
        if metric is None or self.following is not None:
            return
        self._best_curves = self._best_curves or best_of(self.task, metric)
        self._best_curves.add(step, figures[metric])
        if self._best_curves.step == step:
            unseen = getattr(self.source, "unseen_values", dict)()
            self.log.write(CURVES, json.dumps({"step": step, "unseen": unseen, **self.task.curves(columns)}) + "\n")

    def evaluate_quickly(self, step: int):
        """Logs the metrics of a sample of the held-out data, which decide nothing. Collective."""
        columns = self._columns(self.quick_evaluation, step)
        if columns:
            num = self.quick.num_samples
            sample = {} if num == self.evaluation.num_samples else {OF_SAMPLES: num}
            self.log.evaluation({**self._progress(step), **self.task.figures(columns), **sample})

    def _columns(self, evaluation: Evaluation, step: int) -> list[np.ndarray] | None:
        """The columns of held-out samples after `step` steps, as Task.evaluate. Collective."""
        self.check_losses()
        self.model.eval()
        columns = self.task.evaluate(evaluation, step)
        self.model.train()
        return columns

    def _is_quick_due(self, step: int) -> bool:
        """Whether a quick evaluation is due after `step` steps. Collective."""
        if not self.quick.is_tenth(step):
            return False
        self.tables.settle()  # as before a report
        return self.quick.has_time(self.watch.seconds)

    def _is_evaluated(self, step: int) -> bool:
        """Whether to evaluate before a checkpoint is saved after `step` steps. The last evaluation comes after the
        checkpoint, unless its result is saved with it."""
        return self.bests.is_following if step == self.total_steps else self.is_due(step)

    def _overdue_evaluation(self) -> dict | None:
        """Makes the evaluation due at the checkpoint that the run resumes, if a signal prevented it; None otherwise.
        Then restores the link to the best checkpoint, which a kill may have left behind. Collective."""
        is_overdue = self.bests.lacks(self.start.step) and self.is_due(self.start.step)
        evaluated = self.evaluate(self.start.step) if is_overdue else None
        if self.bests.kept is not None:
            self.checkpoints.mark_best(self.bests.kept.step)
        return evaluated

    # The log.

    def _opened_log(self) -> RunLog | None:
        """Prints the plan of the run and opens the log, on rank 0; None on other ranks."""
        on_failure(partial(write_failed, Path(self.config.run.dir)))
        if self.world.rank != 0:
            return None
        resumed = self.saving.resumed
        told = [self._plan(), *self._choice(), *self._notes(), *self._origin()]
        tell(told)
        settings = OmegaConf.merge(self.config, {"resume": resumed and str(resumed)})  # the path that `auto` found
        return RunLog(
            self.config.run.dir, OmegaConf.to_yaml(settings), self.total_steps, self.start.step, spans=self.spans,
            step_samples=self.config.batch_size * self.world.size,
            environment=environment(self.world.notices.hosts, self.device),
            files=None if self.following is None else self.following.resumed,
        )  # fmt: skip

    def _plan(self) -> str:
        """Model, data, ranks, steps and run folder in one line."""
        config, specs = self.config, self.specs.values()
        place = "CPUs" if self.device.type == "cpu" else f"GPUs ({torch.cuda.get_device_name(self.device)})"
        rows = " and ".join(f"{spec.num_rows:,} rows of {spec.dim} numbers" for spec in specs)
        steps = "steps" if self.total_steps is None else f"{self.total_steps:,} steps"
        return (
            f"{config.model_name} on {config.data_name}: {rows} over {self.world.size} rank(s) on {place}, "
            f"{steps} of {config.batch_size * self.world.size:,} samples, results in {config.run.dir}"
        )

    def _choice(self) -> list[str]:
        """The transport between nodes, the batches that are announced and the reason, one line per table, if
        table.exchange=auto had a choice."""
        ahead = "true" if build.batches_ahead(self.config, self.tables) else "false"
        return [
            f"table.exchange={table.client.channel.name} table.look_ahead={ahead} "
            f"table.batches_per_pull={table.client.context.batches_per_pull}: {table.client.why}"
            for table in self.tables.values()
            if table.client.why is not None
        ]

    def _origin(self) -> list[str]:
        """Where the run continues, and where its first rows come from if not from the seed."""
        resumed, place, origin = self.saving.resumed, self.config.table.init_from, self.config.init_from
        if self.saving.origin is not None:
            return [
                f"init_from={origin}: its columns, rows, dense layers and optimizer state; {self.num_new:,} new rows"
            ]
        if resumed is not None and origin is not None:
            return [f"resumed from {resumed}; init_from={origin} is not read"]
        if place is None:
            return [] if resumed is None else [f"resumed from {resumed}"]
        if resumed is not None:
            return [f"resumed from {resumed}, with its rows; table.init_from={place} is not read"]
        num_rows = sum(spec.num_rows for spec in self.specs.values())
        return [f"table.init_from={place}: {self.num_filled:,} of {num_rows:,} rows"]

    def _notes(self) -> list[str]:
        """Metrics that are followed; warnings about data sets that are too small, and settings known to cost
        accuracy."""
        name, num_train, taken = self.config.data_name, self.source.num_train, self.config.batch_size * self.world.size
        notes = self.bests.notes()
        if num_train is not None and num_train < taken and self.total_steps > self.start.step:
            notes.append(
                f"data={name} has {num_train:,} training samples, fewer than the {taken:,} of a step: samples repeat "
                "within a step"
            )
        if self.source.num_valid < 1 and self.following is None:
            notes.append(f"data={name} has no held-out samples: their metrics are not computed")
        if self.config.train.precision == "bf16" and self.device.type == "cpu" and not has_bf16():
            notes.append("train.precision=bf16: this processor has no instructions for 16 bits, a step may take longer")
        if self.world.size > 1 and any(self.tables[name].cache.capacity_rows > 0 for name in self.specs):
            notes += filter(None, [staleness_of(self.config).advice])
        return [f"hetmpi: {note}" for note in notes]

    def _report(self, steps: int, loss: float):
        """Sums the metrics since the last report over all ranks and logs them. Collective."""
        self.check_losses()
        self.world.meet(f"after step {steps} for all ranks")
        loss = self.world.comm.allreduce(loss) / self.world.size
        counted, lags, milliseconds = self.interval.counted()
        sums, lags = summed(self.world, counted, lags)
        by_rank = gathered_by_rank(self.world, milliseconds)
        ids = self.vocabularies.figures
        num_steps, seconds = self.interval.restart(steps)
        if self.log is not None:
            self.log.step({
                **self._progress(steps),
                "loss": loss,
                "step_ms": 1000 * seconds / num_steps,
                "samples_per_s": num_steps * self.config.batch_size * self.world.size / seconds,
                **self._table_figures(sums, lags, num_steps),
                **self._disk_figures(sums, num_steps),
                **times(by_rank / num_steps),
                **ids,
                "lr": self.dense.lr * self.dense.schedule.factor(steps - 1),
            })  # fmt: skip
        self.after_report()

    def _progress(self, steps: int) -> dict:
        """The metrics of progress after `steps` steps, for rank 0's log."""
        elapsed_s = self.log.earlier_s + self.watch.seconds
        return {"step": steps, "samples": self.saving.samples(steps), "elapsed_s": elapsed_s}

    def _table_figures(self, sums, lags: np.ndarray, num_steps: int) -> dict:
        staleness = next(iter(self.tables.values())).staleness  # the same for all tables
        return table_figures(sums, lags, num_steps, staleness)

    def _disk_figures(self, sums, num_steps: int) -> dict:
        """Of rows on disk, per step and rank; {} for rows in memory."""
        if self.config.table.store != "file" or num_steps == 0:
            return {}
        return {
            "disk_wait_rate": sums.disk_steps / (num_steps * self.world.size),
            "pages_read": sums.pages_read / num_steps,
            "pages_written": sums.pages_written / num_steps,
        }

    def _finish(self, evaluated: dict, final: dict):
        """Writes and displays the summary of the run. Collective."""
        sums, lags = summed(self.world, self.tables.counters, self.tables.lags)
        by_rank = gathered_by_rank(self.world, self.spans.as_array() / max(1, self.steps - self.start.step))
        hosts, ids = self.world.comm.gather(self.world.host), self.vocabularies.figures
        traces = self.world.comm.gather(list(self.spans.trace)) if self.config.train.profile else None
        if self.log is None:
            return
        if traces:
            self.log.write("trace.json", chrome_trace(traces, hosts))
        samples, seconds = self.saving.samples(self.steps) - self.start.samples, self.watch.seconds
        last = self.checkpoints.path(self.steps)
        self.log.finish({
            "model": self.config.model_name,
            "data": self.config.data_name,
            "world_size": self.world.size,
            "is_one_node": self.world.is_one_node,
            "device": self.device.type,
            "exchange": next(iter(self.tables.values())).client.channel.name,
            "look_ahead": build.batches_ahead(self.config, self.tables) > 0,
            "batches_per_pull": next(iter(self.tables.values())).client.context.batches_per_pull,
            "dense_exchange": getattr(self.hvd, "kind", "horovod"),
            "steps": self.steps,
            "first_step": self.start.step,  # the figures below are of the steps after it
            "samples_per_s": samples / seconds if seconds else None,
            **evaluated["figures"],
            **final,
            **(self.bests.summary(self.saving.path_of) or self._best_logged(evaluated["figures"])),
            **self._table_figures(sums, lags, 1),
            **self._disk_figures(sums, self.steps - self.start.step),
            **times(by_rank),
            **ids,
            "seconds": seconds,
            "num_rows": sum(spec.num_rows for spec in self.specs.values()),
            "row_dim": max(spec.dim for spec in self.specs.values()),
            "dense_parameters": sum(p.numel() for p in self.model.parameters()),
            "run_dir": self.config.run.dir,
            "checkpoint": str(last) if last.is_dir() else None,
            "by_rank": [{"host": host, "own_ms": own_ms(ms), **in_ms(ms)} for host, ms in zip(hosts, by_rank)],
        }, self.task.predict_settings(getattr(self.source, "encoder", None) is not None))  # fmt: skip
        if evaluated["without"]:
            self.log.note(evaluated["without"])

    def _best_logged(self, figures: dict) -> dict:
        """For the summary, of a run that follows no metric: the best evaluation by the task's first metric, if it was
        not the last."""
        metric = next(iter(figures), None)
        if metric is None or self.following is not None:
            return {}
        best = best_of(self.task, metric)
        for step, value in self.log.evaluations(metric):
            best.add(step, value)
        if best.value is None or figures[metric] is None or best.loss(best.value) >= best.loss(figures[metric]):
            return {}
        return {f"best_{metric}": best.value, "best_metric": metric, "best_step": best.step}

    # Samples, steps, checkpoints.

    def _loader(self, last_step: int) -> Loader:
        """The batches from the next step to `last_step`."""
        config, world = self.config, self.world
        return Loader(
            self._drawn, world.rank, world.size, config.batch_size, self.steps, last_step,
            config.loader.threads, config.loader.prefetch, self._making(), self.saving.samples(self.steps),
        )  # fmt: skip

    def open_evaluation(self) -> Evaluation:
        """Of the held-out samples that are there now."""
        settings, num = self.config.eval, self.source.num_valid
        num = num if settings.max_samples is None else min(num, settings.max_samples)
        return Evaluation(
            self.world, self.tables, self.model, self._forward, self._held_out(num), num, settings.batch_size,
            self.device, self.spans, self.vocabularies.of_held_out,
        )  # fmt: skip

    def _held_out(self, num: int) -> Callable:
        """A random sample of `num` held-out samples, by their numbers (start, stop)."""
        with doing(f"valid(0, 0){self.of_data}"):
            valid = held_out(self.source, num)

        def drawn(start: int, stop: int):
            with doing(f"valid({start}, {stop}){self.of_data}"):
                return valid(start, stop)

        return drawn

    def _making(self) -> Callable:
        """The function from samples to a batch with checked keys, for the loader's threads."""
        make = self.task.batches(self.device)

        def made(samples):
            batch = make(samples)
            keys = self.task.keys(batch)
            have_keys = [name for name in keys if name not in self.vocabularies.of_tables]  # ids have none yet
            self.tables.check({name: keys[name] for name in have_keys}, are_fixed=True)
            return batch

        return made

    def _drawn(self, start: int, stop: int):
        """The source's training samples [start, stop)."""
        with doing(f"train({start}, {stop}){self.of_data}"):
            return self.source.train(start, stop)

    def _filled(self) -> int:
        """Fills the rows that table.init_from has, in a new run, and returns their number. Collective."""
        if self.config.table.init_from is None or self.saving.resumed is not None:
            return 0
        return build.fill_tables(self.config, self.tables, self.source)

    def checkpoint(self, must: bool, is_last: bool):
        """Starts to save a checkpoint after the last step if one is due, `must` is true, or the evaluation there is the
        best. is_last: no further sample is there. Collective."""
        step = self.steps
        self.checkpoints.check()
        is_best = self.bests.is_best(step)
        if must or is_best or self.saving.is_due(step, is_last):
            self.check_losses()
            self.spans.now("checkpoint")
            about = self.saving.about(self.task.model_arguments(self.config.table.dim), self.model, self.source)
            if self.following is not None:
                about |= self.following.about()
            self.saved_step = step
            self.checkpoints.save(
                self.saving.position(step), self.tables.to_save, self.model, self.dense, about | self.bests.about(),
                self._encoder, is_best,
            )  # fmt: skip

    @cached_property
    def _encoder(self) -> dict[str, Tensor] | None:
        """On rank 0: what predict needs for files that were not prepared; None for data that are no files."""
        found = getattr(self.source, "encoder", None) or getattr(self.source, "trained_inputs", None)
        encoder = found if self.world.rank == 0 else None
        return None if encoder is None else tensors_of(encoder.to_arrays())

    # Errors and cleanup.

    def _check_loss(self, step: int, loss: float, batch, keys: dict[str, Tensor], rows: dict[str, Tensor]):
        """Raises UserError with the cause if the loss is not finite."""
        if not math.isfinite(loss):
            raise UserError(f"loss is {loss} at step {step + 1}: {self._cause(batch, keys, rows)}")

    def check_losses(self):
        """Waits for the losses on a GPU that are not checked yet. Raises as _check_loss."""
        unchecked, self._unchecked = self._unchecked, []
        for one in unchecked:
            self._check_loss(one.step, one.loss.value(), one.batch, one.keys, one.rows)

    def _cause(self, batch, keys: dict[str, Tensor], rows: dict[str, Tensor]) -> str:
        """The cause of a loss or gradient that is not finite, and how to avoid it."""
        # A GPU has updated the parameters, by the gradients of this loss, before the host learns of it.
        model = self.model if self.device.type == "cpu" else None
        return self.task.not_finite(batch) or what_is_not_finite(keys, rows, model) or self._advice()

    def _advice(self) -> str:
        optim = self.config.optim
        return (
            f"lower optim.rows_lr (now {optim.rows_lr}) or optim.dense_lr (now {optim.dense_lr}), or warm up over more "
            "steps (optim.warmup_steps)"
        )

    def close(self):
        """Closes the loader and frees the tables. Collective."""
        if self.loader is not None:
            self.loader.close()
        self.tables.close()


@dataclass
class LossOnGpu:
    """The loss () of a step, or of a part of its batch, on its way to the host, and what it is of: so that the host
    need not wait for it."""

    step: int
    loss: Gpu.Later
    batch: object
    keys: dict[str, Tensor]
    rows: dict[str, Tensor]


def in_float32(found):
    """A model's output, a tensor or a tuple of tensors, in 32 bits."""
    if isinstance(found, tuple):
        return tuple(map(in_float32, found))
    return found.float() if torch.is_tensor(found) and found.dtype == torch.bfloat16 else found


def what_is_not_finite(keys: dict[str, Tensor], rows: dict[str, Tensor], model: torch.nn.Module | None) -> str | None:
    """One sentence that names the rows or the parameter with NaN or infinity; None if all are finite. model: None to
    look at the rows alone."""
    for name, found in rows.items():
        wrong = torch.nonzero(~torch.isfinite(found.detach()).all(1)).flatten().tolist()
        if wrong:
            first = int(keys[name][wrong[0]])
            return f"{len(wrong)} of {len(found)} rows were not finite when they were read, the first of key {first}"
    if model is None:
        return None
    parameters = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
    return f"the dense parameter {parameters[0]} is not finite" if parameters else None


if __name__ == "__main__":
    launch(main)
