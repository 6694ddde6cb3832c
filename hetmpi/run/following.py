"""Following: trains on the files of a stream as they come (data.follow=true), and evaluates on each one before.

Steps take the samples of the stream in order, also across the end of a file: a step is made when all its samples are
there. So steps and results do not depend on when files came. Before the first step that reaches into a file, the model
is evaluated on it (progressive validation: Blum, Kalai and Langford, 1999)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hetmpi.checkpoint.manifest import LARGEST, Entries, read_manifest
from hetmpi.data.tabular.stream import END, ENTRY, POLL_S, Stream
from hetmpi.errors import UserError, one_line, printable
from hetmpi.run import build
from hetmpi.spans import IDLE

MEANS, LAST = "progressive", "last"  # in a checkpoint's manifest: sums over all files, figures of the last one
MOST_NAMES = 100


class Following:
    """The files of a training's stream.

    resumed  names, for the log, of the files that the checkpoint's run had opened; none for a new run"""

    @staticmethod
    def of(training) -> Following | None:
        """None for a training without a stream."""
        stream = build.stream_of(training.source)
        return None if stream is None else Following(training, stream)

    def __init__(self, training, stream: Stream):
        """training: a hetmpi.train.Training."""
        self._training, self._stream, self._ranks = training, stream, build.ranks_of(training.world)
        self._sums: dict[str, tuple[float, int]] = {}  # metric -> sum over files of samples * value, and of samples
        self._last: dict[str, float | None] = {}  # figures of the last evaluation
        self._without: str | None = None
        self.resumed: list[str] = []
        if training.saving.resumed is not None:
            self.resumed = [printable(name) for name in stream.opened]
            self._restore(training.saving.resumed)

    def train(self, must_leave: Callable[[], bool]) -> bool:
        """Trains until the stream ends, or `steps` steps. Returns False if a signal ended it. Collective."""
        training = self._training
        if training.saving.resumed is None:
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
            training.spans.now("preparing a file")
            if self._stream.add(name, self._ranks):
                self._stream.forget(training.saving.samples(training.steps), self._ranks)
                self._evaluate()
            training.interval.go_on()

    def about(self) -> dict:
        """Entries for a checkpoint's manifest."""
        sums = {name: list(one) for name, one in self._sums.items()}
        return {ENTRY: {**self._stream.state(), MEANS: sums, LAST: self._last}}

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
        training, told = self._training, ""
        training.interval.pause()
        while (name := self._ranks.from_first(self._stream.look)) is None:
            if must_leave():
                break
            if training.log is not None and told != self._stream.waiting():
                told = self._stream.waiting()
                training.log.note(f"step {training.steps:,}: {told}")
            training.spans.now(IDLE)
            training.checkpoints.check()
            time.sleep(POLL_S)
        training.interval.go_on()
        return name

    def _evaluate(self):
        """Evaluates the model on the last file, unless the model is new. Collective."""
        training = self._training
        if training.steps == 0 and training.config.table.init_from is None and training.saving.origin is None:
            return
        training.evaluation = training.open_evaluation()
        if training.log is not None:
            num = training.evaluation.num_samples
            training.log.note(f"{one_line(self._stream.file)}: evaluation on {num:,} samples, not trained on yet")
        self._without = training.evaluate(training.steps).get("without")

    def figures(self, found: dict) -> dict:
        """The entries of an evaluation, for the log, of which the task found these figures. On the first rank."""
        num = self._training.evaluation.num_samples
        self._last = {key: value if is_finite(value) else None for key, value in found.items()}
        for key, value in self._last.items():
            if value is not None:
                total, count = self._sums.get(key, (0.0, 0))
                self._sums[key] = total + num * value, count + num
        return {"file": printable(self._stream.file), **found, **self._means()}

    def _means(self) -> dict[str, float]:
        """progressive_METRIC: mean over the samples of all files that were evaluated."""
        return {f"{MEANS}_{key}": total / count for key, (total, count) in self._sums.items()}

    def _say_rest(self):
        training = self._training
        samples = training.saving.samples(training.steps)
        rest = self._stream.num_samples - samples
        if rest and training.log is not None:
            files = one_line(", ".join(self._stream.begun(samples)), 500)
            training.log.note(
                f"the stream ends: its last {rest:,} samples, fewer than a step's, were not trained on: keep {files}, "
                "as a run that resumes this one, with further files, begins with them"
            )

    def _restore(self, resumed):
        """Takes over the figures in the manifest of a checkpoint. Raises UserError for invalid ones."""
        manifest = read_manifest(resumed)
        if ENTRY not in manifest:
            raise UserError(f"{resumed} was saved without data.follow=true: start anew")
        said = Entries(f"{resumed}: manifest.json", manifest).part(ENTRY)
        means, last = said.part(MEANS), said.part(LAST)
        for part in (means, last):
            if len(part.values) > MOST_NAMES:
                raise UserError(f"{part.place} must have at most {MOST_NAMES} figures, got {len(part.values):,}")
        for key, one in means.values.items():
            is_pair = isinstance(one, list) and len(one) == 2 and is_finite(one[0])
            if not (is_pair and type(one[1]) is int and 0 < one[1] <= LARGEST):
                raise means.refusal(key, "a sum and a number of samples")
            self._sums[key] = one[0], one[1]
        for key, value in last.values.items():
            if not (value is None or is_finite(value)):
                raise last.refusal(key, "a number or null")
        self._last = last.values


def is_finite(value) -> bool:
    return isinstance(value, float) and math.isfinite(value)
