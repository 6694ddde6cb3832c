"""Plans sweeps, like Hydra's multirun: points, each with its overrides and run folder, that all ranks train in turn."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from omegaconf import OmegaConf

from hetmpi.errors import UserError
from hetmpi.log.files import flat
from hetmpi.log.run_files import read_settings
from hetmpi.run.config import advised, resolved
from hetmpi.run.settings import REMOVED, declared
from hetmpi.wire.transport import current_name
from hetmpi.world.world import World

FOLDER_KEYS = ("run.dir", "hydra.sweep.dir")  # either one names the folder of a sweep


class Point(NamedTuple):
    """One run of a sweep. is_done: whether its folder holds a summary."""

    overrides: list[str]
    folder: str
    is_done: bool


def points_of(world: World, overrides: list[str], config_dir: str | None) -> list[Point]:
    """The points for all combinations of overrides with several values, the same on every rank. Each has a folder in
    run.dir, or hydra.sweep.dir (default runs/TIME-sweep). Collective. Raises UserError on every rank for an override
    that cannot be parsed, and for a folder that holds a run with other settings."""
    return world.from_first(lambda: planned(overrides, config_dir))


def planned(overrides: list[str], config_dir: str | None) -> list[Point]:
    """As points_of, on one rank."""
    with advised(overrides, config_dir):
        parsed = OverridesParser.create().parse_overrides(overrides)
        [combinations] = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        base = folder_of(parsed)
    swept = {override.get_key_element() for override in parsed if override.is_sweep_override()}
    points, checkpoint_dirs = [], set()
    for number, combination in enumerate(combinations):
        kept = [text for text in combination if text.lstrip("+").partition("=")[0] not in FOLDER_KEYS]
        name = ",".join(text for text in kept if text.partition("=")[0] in swept).replace("/", ":")
        point, checkpoint_dir = planned_point(kept, f"{base}/{number}{f'-{name}' if name else ''}", config_dir)
        if checkpoint_dir in checkpoint_dirs:
            raise UserError(f"checkpoint.dir={checkpoint_dir} would be shared by several runs: leave it out")
        checkpoint_dirs.add(checkpoint_dir)
        points.append(point)
    return points


def folder_of(parsed: list[Override]) -> str:
    """The sweep's folder. Raises UserError if it is not a single path."""
    folder = datetime.now().strftime("runs/%Y%m%d-%H%M%S-%f-sweep")
    for override in parsed:
        if override.key_or_group in FOLDER_KEYS:
            if override.is_sweep_override() or not isinstance(override.value(), (str, QuotedString)):
                raise UserError(f"{override.input_line}: the folder of a sweep must be one path")
            folder = str(override.value())
    return folder


def planned_point(overrides: list[str], folder: str, config_dir: str | None) -> tuple[Point, str]:
    """A point, which resumes from its newest checkpoint if there is one, and its checkpoint.dir."""
    overrides = [*overrides, f"run.dir={quoted(folder)}"]
    settings = OmegaConf.to_container(resolved(overrides, config_dir))
    place, checkpoint_dir = Path(settings["run"]["dir"]), settings["checkpoint"]["dir"]
    if (place / "config.yaml").exists():
        defaults = {setting.key: setting.default for setting in declared()}  # for settings newer than the run
        before, now = defaults | as_now(read_settings(place / "config.yaml")), flat(settings)
        if before | {"resume": None} != now | {"resume": None}:
            raise UserError(f"{place} holds a run with other settings: choose another run.dir, or remove it")
    resume = ["resume=auto"] if Path(checkpoint_dir).is_dir() else []
    return Point([*overrides, *resume], str(place), (place / "summary.json").exists()), checkpoint_dir


def as_now(settings: dict) -> dict:
    """Settings of a run folder as this version writes them: without removed ones that had no effect."""
    now = {key: value for key, value in settings.items() if key not in REMOVED or value != REMOVED[key].default}
    if "table.exchange" in now:
        now["table.exchange"] = current_name(now["table.exchange"], warns=False)
    return now


def quoted(text: str) -> str:
    """Quotes a text for use in an override. Hydra treats a backslash as an escape only before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text) + "'"
