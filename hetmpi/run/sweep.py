"""Sweeps, as Hydra's multirun: points, each with its overrides and run folder, that all ranks train in turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hetmpi.comm.world import World
from hetmpi.errors import UserError
from hetmpi.run.config import advised, resolved

FOLDER_KEYS = ("run.dir", "hydra.sweep.dir")  # which of both names a sweep's folder is a matter of habit


class Point(NamedTuple):
    """One training of a sweep. is_done: whether its folder holds its summary."""

    overrides: list[str]
    folder: str
    is_done: bool


def points_of(world: World, overrides: list[str], config_dir: str | None) -> list[Point]:
    """The trainings that overrides with several values stand for, the same on every rank. Each has a folder in
    run.dir, or hydra.sweep.dir (default runs/TIME-sweep). Collective. Raises UserError on every rank for an override
    that cannot be read, and for a folder that holds a training with other settings."""
    points, error = None, None
    if world.rank == 0:
        try:
            points = planned(overrides, config_dir)
        except UserError as refused:
            error = refused
    world.agree(error)
    return world.comm.bcast(points)


def planned(overrides: list[str], config_dir: str | None) -> list[Point]:
    """As points_of."""
    with advised(overrides, config_dir):
        parsed = OverridesParser.create().parse_overrides(overrides)
        [combinations] = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    swept = {override.get_key_element() for override in parsed if override.is_sweep_override()}
    folder = time.strftime("runs/%Y%m%d-%H%M%S-sweep")
    for override in parsed:
        if override.get_key_element() in FOLDER_KEYS:
            folder = str(override.value())
    points = []
    for number, combination in enumerate(combinations):
        kept = [text for text in combination if text.partition("=")[0] not in FOLDER_KEYS]
        name = ",".join(text for text in kept if text.partition("=")[0] in swept)
        place = Path(folder, "-".join([str(number), *([name.replace("/", ":")] if name else [])]))
        points.append(point(kept, place, config_dir))
    return points


def point(overrides: list[str], folder: Path, config_dir: str | None) -> Point:
    """One training, which goes on from its newest checkpoint if there is one in its folder."""
    resume = ["resume=auto"] if (folder / "checkpoints").is_dir() else []
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    overrides = [*overrides, f"run.dir='{quoted}'", *resume]
    settings = OmegaConf.to_container(resolved(overrides, config_dir))
    if (folder / "config.yaml").exists():
        before = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        if before | {"resume": None} != settings | {"resume": None}:
            raise UserError(f"{folder} holds a training with other settings: choose another run.dir, or remove it")
    return Point(overrides, str(folder), (folder / "summary.json").exists())
