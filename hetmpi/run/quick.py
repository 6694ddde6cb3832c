"""Quick evaluations: about ten in a run that is evaluated seldom, on a sample of the held-out samples, for the curves
of its report. They decide nothing, and leave every bit of the training as it is."""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import DictConfig

from hetmpi.checkpoint.checkpoints import Position
from hetmpi.data.source import Source
from hetmpi.run.progress import Stopwatch
from hetmpi.tasks.task import Task
from hetmpi.world.world import World

NUM = 10  # in a run
LEAST_STEPS = 100  # of a run
LEAST_SAMPLES, MOST_SAMPLES = 2048, 1 << 18  # of the sample, which the ranks keep in memory
TRAINED_PER_SAMPLE = 80  # an evaluated sample takes less than half of a trained one: ten take a sixteenth of the time
MOST_SHARE = 1 / 20  # of the time of training; further ones are left out


class QuickEvaluations:
    """The schedule of quick evaluations, and their time.

    num_samples  in the sample"""

    def __init__(self, world: World, num_samples: int, total_steps: int):
        self.world, self.num_samples, self._total_steps = world, num_samples, total_steps
        self._watch = Stopwatch()

    @staticmethod
    def of(
        world: World, config: DictConfig, source: Source, task: Task, total_steps: int | None, start: Position
    ) -> QuickEvaluations | None:
        """None for a run with evaluations enough, or a setting that says how often; for one that follows a metric; at
        s >= 1, where an evaluation pushes pending gradients; and for tasks that evaluate in their own way."""
        steps = 0 if total_steps is None else total_steps - start.step
        has_rule = (
            config.eval.every_steps is not None or config.eval.patience is not None
            or config.checkpoint.best is not None or config.optim.schedule == "plateau"
        )  # fmt: skip
        has_epochs = config.steps is None and (config.epochs or 0) >= NUM
        is_own = type(task).evaluate is not Task.evaluate
        if has_rule or has_epochs or is_own or steps < LEAST_STEPS or config.table.staleness != 0:
            return None
        most = source.num_valid if config.eval.max_samples is None else min(source.num_valid, config.eval.max_samples)
        num = max(LEAST_SAMPLES, steps * config.batch_size * world.size // TRAINED_PER_SAMPLE)
        return QuickEvaluations(world, min(num, most, MOST_SAMPLES), total_steps) if most > 0 else None

    def is_tenth(self, step: int) -> bool:
        """Whether a tenth of the run ends with this step, but for the last."""
        total = self._total_steps
        return step != total and step * NUM // total > (step - 1) * NUM // total

    def has_time(self, trained_s: float) -> bool:
        """Whether the evaluations so far took little of the time of training so far, on rank 0. Collective."""
        return self.world.comm.bcast(self._watch.seconds <= MOST_SHARE * trained_s)

    def timed(self, evaluate: Callable):
        """evaluate(), whose time counts."""
        self._watch.start()
        try:
            return evaluate()
        finally:
            self._watch.pause()
