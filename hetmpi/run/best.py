"""Best values of metrics over the evaluations of a run: they decide when training ends early, and which checkpoint is
the best one. A checkpoint holds them, so that a resumed run decides as an uninterrupted one."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from hetmpi.checkpoint.manifest import Entries, read_manifest
from hetmpi.errors import UserError
from hetmpi.log.figures import value_text
from hetmpi.tasks.task import Task
from hetmpi.world.world import World

ENTRY = "evaluations"  # in a checkpoint's manifest
PLATEAU = "optim.schedule=plateau"
# Words in names of metrics of which a smaller value is better.
LOSSES = {"loss", "error", "entropy", "mae", "mse", "rmse"}


@dataclass
class Best:
    """The best value of a metric so far.

    best_at      the metric's best value, None if a larger value, or a smaller one, is always better
    value, step  the value and the step of its evaluation; None and 0 if there is none
    num_since    evaluations in a row since then that did not improve it"""

    metric: str
    lower_is_better: bool
    best_at: float | None = None
    value: float | None = None
    step: int = 0
    num_since: int = 0

    def add(self, step: int, value: float | None):
        """Adds the evaluation after `step` steps. None and values that are not finite are no improvement."""
        is_finite = value is not None and math.isfinite(value)
        if is_finite and (self.value is None or self.loss(value) < self.loss(self.value)):
            self.value, self.step, self.num_since = value, step, 0
        else:
            self.num_since += 1

    def loss(self, value: float) -> float:
        """A number that is smaller for a better value."""
        if self.best_at is not None:
            return abs(value - self.best_at)
        return value if self.lower_is_better else -value

    def words(self, toward: str, smaller: str, larger: str) -> str:
        """What a better value is: `toward` and the best value, or one of the others."""
        if self.best_at is not None:
            return f"{toward} {self.best_at:g}"
        return smaller if self.lower_is_better else larger

    def stagnation(self) -> str:
        """The evaluations without an improvement, in one sentence."""
        since = f"in {self.num_since} evaluation{'' if self.num_since == 1 else 's'}"
        if self.value is None:
            return f"{self.metric} was undefined {since}"
        shown = value_text(self.metric, self.value)
        moved = self.words(f"come nearer than {shown} to", f"fallen below {shown}", f"risen above {shown}")
        return f"{self.metric} has not {moved}, of step {self.step}, {since}"


class MetricHistory:
    """The metrics that eval.metric, for eval.patience and optim.schedule=plateau, and checkpoint.best name, with their
    best values, the same on every rank.

    step     of the last evaluation, 0 if there is none
    num_drops  times that the learning rates decayed, with optim.schedule=plateau
    watched  that of eval.patience and optim.schedule=plateau, None if neither is set
    kept     that of checkpoint.best, None if it is not set"""

    def __init__(self, world: World, config: DictConfig, task: Task, num_valid: int, resumed: Path | None):
        """resumed: the checkpoint to continue from. Collective. Raises UserError on every rank for a metric that the
        task lacks, and if there are no held-out samples."""
        self.world, self.patience = world, config.eval.patience
        names = world.from_first(lambda: followed(config, task, num_valid))
        self._bests = {name: best_of(task, name) for name in names.values()}
        self.watched, self.kept = (self._bests.get(names.get(key)) for key in ("eval.metric", "checkpoint.best"))
        self.step, self._has_earlier = 0, False
        self.num_drops = self._num_idle = 0
        self._measured = self._were_measured = getattr(task, "measured", "")  # now, and in the checkpoint
        self._most_idle = config.optim.plateau_evals if has_plateau(config) else None
        if resumed is not None:
            self._restore(resumed)

    def add(self, step: int, figures: dict):
        """Adds the evaluation after `step` steps, unless it was added before. figures: on rank 0. Collective. Raises
        UserError on every rank if a metric is missing."""
        if self._bests and step > self.step:
            values = self.world.from_first(lambda: {name: value_of(figures, name) for name in self._bests})
            self.step = step
            for name, best in self._bests.items():
                best.add(step, values[name])
            if self._most_idle is not None:
                self._num_idle = 0 if self.watched.step == step else self._num_idle + 1
                if self._num_idle >= self._most_idle:
                    self.num_drops, self._num_idle = self.num_drops + 1, 0

    @property
    def is_following(self) -> bool:
        """Whether a metric is followed."""
        return bool(self._bests)

    def is_best(self, step: int) -> bool:
        """Whether the evaluation after `step` steps is the best so far for checkpoint.best."""
        return self.kept is not None and self.kept.step == step

    def lacks(self, step: int) -> bool:
        """Whether the checkpoint after `step` steps, from which the run continues, has evaluations, but none of this
        step: if one was due there, a signal came before it."""
        return self._has_earlier and self.step < step

    @property
    def reason(self) -> str | None:
        """Reason to end training now; None to continue."""
        if self.patience is None or self.watched.num_since < self.patience:
            return None
        return f"{self.watched.stagnation()} (eval.patience={self.patience})"

    def notes(self) -> list[str]:
        """Descriptions of the two settings in effect, for the start of a run."""
        notes = []
        if self._were_measured != self._measured:
            notes.append(
                f"the best values of the checkpoint were measured {self._were_measured or 'among all'}, now they are "
                f"{self._measured or 'among all'}: they start anew"
            )
        if self.patience is not None:
            metric = self.watched.metric
            goal = self.watched.words(f"a {metric} nearer to", f"a smaller {metric}", f"a larger {metric}")
            notes.append(f"training ends after {self.patience} evaluation(s) in a row without {goal}")
        if self.kept is not None:
            metric = self.kept.metric
            goal = self.kept.words(f"{metric} nearest to", f"smallest {metric}", f"largest {metric}")
            notes.append(f"the checkpoint with the {goal} is kept")
        return notes

    # In files.

    def about(self) -> dict:
        """Entries for a checkpoint's manifest."""
        values = {
            name: {"value": best.value, "step": best.step, "num_since": best.num_since}
            for name, best in self._bests.items()
        }
        plateau = {} if self._most_idle is None else {"num_drops": self.num_drops, "num_idle": self._num_idle}
        measured = {"measured": self._measured} if self._measured else {}
        return {ENTRY: {"step": self.step, "best": values, **plateau, **measured}} if values else {}

    def _restore(self, path: Path):
        """Takes over the values in the manifest of a checkpoint. Raises UserError for invalid ones. Metrics that were
        not followed start without a value."""
        manifest = read_manifest(path)
        if not self._bests or ENTRY not in manifest:
            return
        said = Entries(f"{path}: manifest.json", manifest).part(ENTRY)
        self.step, self._has_earlier, saved = said.integer("step", 0, manifest["step"]), True, said.part("best")
        self._were_measured = str(said.values.get("measured", ""))
        if self._were_measured != self._measured:
            return
        if self._most_idle is not None and "num_drops" in said.values:
            self.num_drops, self._num_idle = said.integer("num_drops", 0), said.integer("num_idle", 0)
        for name in set(self._bests) & set(saved.values):
            entry, best = saved.part(name), self._bests[name]
            value = entry.get("value")
            if value is not None and (type(value) is not float or not math.isfinite(value)):
                raise entry.refusal("value", "a finite float or null")
            best.value, best.step = value, entry.integer("step", 0, self.step)
            best.num_since = entry.integer("num_since", 0)

    def summary(self, path_of) -> dict:
        """Entries for the summary. path_of(step): the checkpoint after `step` steps, None if it does not exist."""
        best = self.kept or self.watched
        if best is None:
            return {}
        step = None if best.value is None else best.step
        found = {f"best_{best.metric}": best.value, "best_metric": best.metric, "best_step": step}
        if self.kept is not None:
            path = None if step is None else path_of(step)
            found["best_checkpoint"] = None if path is None else str(path)
        return found | ({} if self.reason is None else {"ended_early": self.reason})


def followed(config: DictConfig, task: Task, num_valid: int) -> dict[str, str]:
    """Setting -> metric: eval.metric, for eval.patience and optim.schedule=plateau, and checkpoint.best, if they are
    used. Raises UserError as MetricHistory."""
    follows_metric = {"eval.patience": config.eval.patience is not None, PLATEAU: has_plateau(config)}
    users = [name for name, follows in follows_metric.items() if follows]
    asked = {"eval.metric": config.eval.metric} if users or config.eval.metric is not None else {}
    asked |= {} if config.checkpoint.best is None else {"checkpoint.best": config.checkpoint.best}
    if not asked:
        return {}
    if num_valid < 1 and (users or config.checkpoint.best is not None):
        names = " and ".join([*users, *(key for key in asked if key != "eval.metric")])
        raise UserError(f"data={config.data_name} has no held-out samples: {names} cannot be used with it")
    known = list(task.figures([]))
    for key, name in asked.items():
        if name is None and not known:
            raise UserError(f"{key} must name a metric: this task does not list its metrics without samples")
        asked[key] = known[0] if name is None else name
        if known and asked[key] not in known:
            raise UserError(f"{key}={name} must be a metric of the task: {', '.join(known)}")
    return {key: name for key, name in asked.items() if users or key != "eval.metric"}


def has_plateau(config: DictConfig) -> bool:
    return config.optim.schedule == "plateau"


def best_of(task: Task, metric: str) -> Best:
    """Without a value yet."""
    return Best(metric, is_lower_better(task, metric), getattr(task, "best_at", {}).get(metric))


def is_lower_better(task: Task, metric: str) -> bool:
    """Whether a smaller value of a metric is better, as documented at Task."""
    named = getattr(task, "lower_is_better", None)
    if named is None:
        return not LOSSES.isdisjoint(metric.lower().split("_"))
    return metric in ([named] if isinstance(named, str) else named)


def value_of(figures: dict, name: str) -> float | None:
    """The value of a metric. Raises UserError if there is none of this name, or if it is no number."""
    if name not in figures:
        raise UserError(f"the task's figures() must have {name}, got {', '.join(figures) or 'none'}")
    value = figures[name]
    if value is not None and not isinstance(value, numbers.Real):
        raise UserError(f"the task's figures(): {name} must be a number or None, got {type(value).__name__}")
    return None if value is None else float(value)
