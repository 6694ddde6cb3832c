"""Saving: decides when a run's checkpoints are saved and from which checkpoint it resumes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from hetmpi.checkpoint.checkpoints import Checkpoints, Position, position_of
from hetmpi.checkpoint.lock import FolderLock
from hetmpi.checkpoint.manifest import check_same, read_manifest
from hetmpi.data.source import Source
from hetmpi.errors import UserError, cure_of
from hetmpi.layers import FeatureRows
from hetmpi.world.world import World


class Saving:
    """The checkpoints of one run.

    checkpoints  those in checkpoint.dir
    resumed      the checkpoint that the run resumes, None for a new run
    origin       the checkpoint with which a new run begins (init_from), None for others
    start        first position of the run"""

    def __init__(self, world: World, config: DictConfig):
        """Finds the checkpoint to resume. Collective. Raises UserError if the named checkpoint is missing, damaged or
        of another run, or if later checkpoints of an earlier run are in the folder."""
        self.world, self.config = world, config
        self.checkpoints = Checkpoints(
            world, config.checkpoint.dir, config.checkpoint.keep, config.checkpoint.full_every
        )
        self.resumed = self._resumed()
        self.origin = self._origin() if self.resumed is None and config.init_from is not None else None
        self.start = Position() if self.resumed is None else position_of(self.resumed)
        # read now, as training may remove the resumed checkpoint
        self._began_with = self.origin if self.resumed is None else read_manifest(self.resumed).get("init_from")
        self._check_folder()
        self._every_steps, self._at_end = config.checkpoint.every_steps, config.checkpoint.at_end

    @property
    def is_regular(self) -> bool:
        """Whether checkpoints are saved during training."""
        return is_regular(self.config)

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether to save a checkpoint after `step` steps. is_last: whether training ends there."""
        return (is_last and self._at_end) or (self._every_steps > 0 and step % self._every_steps == 0)

    def about(self, model_arguments: dict[str, int], model: torch.nn.Module, source: Source) -> dict:
        """The manifest's entries about the run."""
        name, config = self.config.model_name, OmegaConf.to_container(self.config.model)
        about = {**self._kept(), "model": name, "model_config": config, "model_sizes": model_arguments}
        encoder = getattr(source, "encoder", None)
        if encoder is not None:
            about["encoder"] = type(encoder).__name__
        if isinstance(model, FeatureRows):
            about["joined"] = {"tables": list(model.table_dims), "pools": model.pools, "names": model.names}
        if self._began_with is not None:
            about["init_from"] = str(self._began_with)
        if hasattr(source, "digests"):
            about["graph"] = source.digests
        if hasattr(source, "order"):
            about["order"] = source.order
        if source.num_train is not None:
            about["train_samples"] = source.num_train
        return about

    def samples(self, step: int) -> int:
        """Samples of the stream that `step` steps have used."""
        return self.start.samples + (step - self.start.step) * self.config.batch_size * self.world.size

    def position(self, step: int) -> Position:
        """Position of the run after `step` steps."""
        return Position(step, self.samples(step))

    def path_of(self, step: int) -> Path | None:
        """The checkpoint after `step` steps in checkpoint.dir, or beside the checkpoint that the run resumed; None if
        there is none."""
        path = self.checkpoints.path(step)
        places = [path] if self.resumed is None else [path, self.resumed.parent / path.name]
        return next((place for place in places if place.is_dir()), None)

    def say_left(self, step: int, why: str):
        """Waits for the checkpoint, then prints how to continue. Collective."""
        self.checkpoints.wait()
        if self.world.rank == 0:
            path = self.checkpoints.path(step)
            again = f"run.dir={self.config.run.dir} resume=auto"
            print(f"hetmpi: stopped by {why}: saved {path}, continue with the same command and {again}", flush=True)

    def _resumed(self) -> Path | None:
        """The checkpoint to resume. Collective."""
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
                raise UserError(f"resume={path}: {wrong[0]}: name another checkpoint, or resume=auto")
        if path is not None:
            manifest = read_manifest(path)
            check_same(path, manifest, self._kept())
            check_columns(path, manifest, OmegaConf.to_container(self.config.model))
        return path

    def _origin(self) -> Path:
        """The checkpoint that init_from names. Collective."""
        path, config = Path(self.config.init_from), self.config
        if config.table.init_from is not None:
            raise UserError(
                f"table.init_from={config.table.init_from}: init_from={path} has all rows: give one of them"
            )
        wrong = self.checkpoints.damage(path)
        if wrong:
            raise UserError(f"init_from={path}: {wrong[0]}: name a checkpoint, as runs/day1/checkpoints/step-00001000")
        manifest, target = read_manifest(path), config.model.get("_target_")
        saved = manifest.get("model_config")
        if isinstance(saved, dict) and saved.get("_target_") != target:
            raise UserError(
                f"init_from={path} is of the model {saved.get('_target_')}, now it is {target}: give the same"
            )
        check_same(path, manifest, {"optim.dense": config.optim.dense})
        check_columns(path, manifest, OmegaConf.to_container(config.model))
        return path

    def _kept(self) -> dict:
        """Values that a resumed run must not change: samples would be skipped or repeated, or the state of the dense
        optimizer would be that of another rule."""
        config = self.config
        data = {
            key: value for key, value in OmegaConf.to_container(config.data).items() if key not in ("path", "cache")
        }
        return {"seed": config.seed, "data": config.data_name, "data_config": data, "optim.dense": config.optim.dense}

    def _check_folder(self):
        """Raises UserError if checkpoints of another run could be mistaken for those of this one. Collective."""
        steps = self.world.comm.bcast(self.checkpoints.steps() if self.world.rank == 0 else None)
        newer = [step for step in steps if step > self.start.step]
        if newer and (self.is_regular or self.config.checkpoint.at_end):
            raise UserError(
                f"checkpoint.dir={self.checkpoints.folder} holds {self.checkpoints.path(newer[0]).name} of an earlier "
                f"run, and this one begins at step {self.start.step}: set resume=auto to continue from it, remove it, "
                "or choose another checkpoint.dir"
            )


def is_regular(config: DictConfig) -> bool:
    """As Saving.is_regular."""
    return config.checkpoint.every_steps > 0 or config.checkpoint.best is not None


def check_columns(path: Path, manifest: dict, model: dict):
    """Raises UserError for a model that reads other columns, or the same in another order, than that of a checkpoint:
    its weights may fit nevertheless. model: its keys, of which lists of names are columns."""
    names = {key: value for key, value in model.items() if isinstance(value, list) and any(map(is_text, value))}
    saved = manifest.get("model_config")
    if isinstance(saved, dict):
        check_same(path, {"model_config": {key: saved.get(key) for key in names}}, {"model_config": names})


def is_text(value) -> bool:
    return isinstance(value, str)


@contextlib.contextmanager
def locked(world: World, config: DictConfig):
    """A context in which this job alone writes to run.dir and checkpoint.dir. Collective. Raises UserError on every
    rank if another job writes there, or if the folders cannot be written."""
    locks = locks_of(config)
    with contextlib.ExitStack() as stack:
        for lock in locks if world.rank == 0 else ():
            stack.callback(lock.release)
        world.from_first(lambda: take_all(locks))
        yield


def locks_of(config: DictConfig) -> list[FolderLock]:
    """The locks of the folders that a run writes to."""
    run, saved = Path(config.run.dir), Path(config.checkpoint.dir)
    locks = [FolderLock("run.dir", run)]
    if (is_regular(config) or config.checkpoint.at_end) and saved.resolve() != run.resolve():
        locks.append(FolderLock("checkpoint.dir", saved))
    return locks


def take_all(locks: list[FolderLock]):
    """Raises UserError if one of them cannot be taken. Locks of a killed job are watched at the same time."""
    for lock in locks:
        lock.watch()
    for lock in locks:
        try:
            lock.take()
        except OSError as problem:
            raise UserError(
                f"{lock.setting}: cannot write {problem.filename or lock.path}: {problem.strerror}: "
                f"{cure_of(problem, lock.setting)}"
            ) from problem
