"""Following: trains on the files of a stream as they come (data.follow=true), and evaluates on each one before.

Steps take the samples of the stream in order, also across the end of a file: a step is made when all its samples are
there. So steps and results do not depend on when files came. Before the first step that reaches into a file, the model
is evaluated on it (progressive validation: Blum, Kalai and Langford, 1999)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hetmpi.checkpoint.manifest import Entries, read_manifest
from hetmpi.data.tabular.stream import END, ENTRY, POLL_S, Stream
from hetmpi.errors import UserError
from hetmpi.run import build
from hetmpi.spans import IDLE

MEANS = "progressive"
MOST_NAMES = 100


class Following:
    """The files of a training's stream.

    evaluated  name of the last file on which the model was evaluated"""

    @staticmethod
    def of(training) -> Following | None:
        """None for a training without a stream."""
        stream = build.stream_of(training.source)
        return None if stream is None else Following(training, stream)

    def __init__(self, training, stream: Stream):
        """training: a hetmpi.train.Training."""
        self._training, self._stream, self._ranks = training, stream, build.ranks_of(training.world)
        self.evaluated = stream.evaluated
        self._sums: dict[str, tuple[float, int]] = {}  # metric -> sum over files of samples * value, and of samples
        self._last: dict = {}  # the last evaluation
        self._without: str | None = None
        if training.saving.resumed is not None:
            self._restore(training.saving.resumed)

    def train(self, must_leave: Callable[[], bool]) -> bool:
        """Trains until the stream ends, or `steps` steps. Returns False if a signal ended it. Collective."""
        training = self._training
        self._evaluate()
        while True:
            last_step = self._last_step()
            if training.steps < last_step and not training.train_to(last_step, must_leave):
                return False
            if training.steps == training.total_steps:
                return True
            name = self._next(must_leave)
            if name is None:
                if training.saved_step != training.steps:
                    training.checkpoint(must=True, is_last=False)
                training.say_left()
                return False
            if name == END:
                self._say_rest()
                return True
            training.interval.pause()
            if self._stream.add(name, self._ranks):
                self._stream.forget(training.saving.samples(training.steps), self._ranks)
                self._evaluate()
            training.interval.go_on()

    def about(self) -> dict:
        """Entries for a checkpoint's manifest."""
        training = self._training
        state = self._stream.state(training.saving.samples(training.steps), self.evaluated)
        return {ENTRY: {**state, MEANS: {name: list(one) for name, one in self._sums.items()}}}

    def summary(self) -> dict:
        """As Training.evaluate: the last evaluation, and the means over all files."""
        return {"figures": {**self._last, **self._means()}, "without": self._without}

    def _last_step(self) -> int:
        """The last step of which all samples are there."""
        training = self._training
        taken = training.config.batch_size * training.world.size
        last = training.start.step + (self._stream.num_samples - training.start.samples) // taken
        return last if training.total_steps is None else min(last, training.total_steps)

    def _next(self, must_leave: Callable[[], bool]) -> str | None:
        """Waits for the next file and returns its name, END after the last one, None if a signal came. Collective."""
        training, told = self._training, False
        training.interval.pause()
        while (name := self._ranks.from_first(self._stream.look)) is None:
            if must_leave():
                break
            if not told and training.log is not None:
                training.log.note(f"step {training.steps:,}: waiting for the next file; a file {END} ends the run")
            told = True
            training.spans.now(IDLE)
            training.checkpoints.check()
            time.sleep(POLL_S)
        training.interval.go_on()
        return name

    def _evaluate(self):
        """Evaluates the model on the last file, unless it was before, or the model is new. Collective."""
        training, name = self._training, self._stream.file
        if name <= self.evaluated or training.source.num_valid == 0:
            return
        self.evaluated = name
        if training.steps == 0 and training.config.table.init_from is None:
            return
        training.evaluation = training.open_evaluation()
        if training.log is not None:
            training.log.note(f"{name}: evaluation on {training.evaluation.num_samples:,} samples, not trained on yet")
        self._without = training.evaluate(training.steps).get("without")

    def figures(self, found: dict) -> dict:
        """The entries of an evaluation, for the log, of which the task found these figures. On the first rank."""
        num = self._training.evaluation.num_samples
        self._last = found
        for key, value in found.items():
            if isinstance(value, float) and math.isfinite(value):
                total, count = self._sums.get(key, (0.0, 0))
                self._sums[key] = total + num * value, count + num
        return {"file": self.evaluated, **found, **self._means()}

    def _means(self) -> dict[str, float]:
        """progressive_METRIC: mean over the samples of all files that were evaluated."""
        return {f"{MEANS}_{key}": total / count for key, (total, count) in self._sums.items()}

    def _say_rest(self):
        training = self._training
        rest = self._stream.num_samples - training.saving.samples(training.steps)
        if rest and training.log is not None:
            training.log.note(
                f"the stream ends: its last {rest:,} samples, fewer than a step's, were not trained on; a run that "
                "resumes this one, with further files, begins with them"
            )

    def _restore(self, resumed):
        """Takes over the means in the manifest of a checkpoint. Raises UserError for invalid ones."""
        manifest = read_manifest(resumed)
        if ENTRY not in manifest:
            raise UserError(f"{resumed} was saved without data.follow=true: start anew")
        means = Entries(f"{resumed}: manifest.json", manifest).part(ENTRY).part(MEANS)
        for key, one in means.values.items():
            is_right = isinstance(one, list) and len(one) == 2 and isinstance(one[0], (int, float))
            if len(self._sums) >= MOST_NAMES or not (is_right and type(one[1]) is int and one[1] > 0):
                raise means.refusal(key, "a sum and a number of samples")
            self._sums[key] = float(one[0]), one[1]
