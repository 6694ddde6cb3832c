"""The data of a checkpoint's training run, from its manifest and the settings of data given beside it."""

from __future__ import annotations

import re

from omegaconf import DictConfig, OmegaConf

from hetmpi.checkpoint.manifest import brief
from hetmpi.data.source import Source
from hetmpi.data.tabular import Encoder
from hetmpi.errors import UserError
from hetmpi.run import build
from hetmpi.run.config import advised, composed
from hetmpi.world.world import World

PLACES = ("path", "cache")  # keys whose values come from the caller, never from a manifest
OURS = "hetmpi.data"
DEEPEST = 20


def source_of(
    world: World,
    manifest: dict,
    overrides: list[str],
    config_dir: str | None,
    before: Encoder | None = None,
    encoder: Encoder | None = None,
) -> Source:
    """The prepared data source of the checkpoint's training run, with `overrides`. The manifest is not trusted: the
    class comes from the settings, and only plain values of known keys are taken from the manifest, no paths. before: as
    of build.make_parts. encoder: the run's, whose kinds of columns it follows. Collective. Raises UserError."""
    wrong = [text for text in overrides if not re.match(r"[+~]*data\b", text)]
    if wrong:
        raise UserError(f"only settings of data can be given with a checkpoint, got {wrong[0]}")
    named = any(text.startswith("data=") for text in overrides)
    name, saved = manifest.get("data"), manifest.get("data_config")
    if not named:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]{0,99}", name) or not isinstance(saved, dict):
            raise UserError("the checkpoint does not name its data: give data=NAME")
        overrides = [f"data={name}", *overrides]
    with advised(overrides, config_dir):
        config = composed(overrides, config_dir)
        given = {text.lstrip("+~").split("=")[0] for text in overrides}
        if not named:
            take_saved(config.data, saved, given)
        if config.data.get("follow"):
            raise UserError(
                "the checkpoint is of a stream (data.follow=true), which holds out no samples: give data.path=FILES, "
                "without split"
            )
        del config["hydra"]
        missing = [key for key in OmegaConf.missing_keys(config) if key.startswith("data.")]
        if missing:
            raise UserError(f"give {', '.join(f'{key}=...' for key in sorted(missing))}")
        data: DictConfig = OmegaConf.create(OmegaConf.to_container(config.data, resolve=True))
    source = build.make(data)
    if before is not None and hasattr(source, "begin_with"):
        source.begin_with(before)
    if hasattr(source, "follows"):
        source.follows = encoder
    build.prepare_files(source, world)
    return source


def take_saved(data: DictConfig, saved: dict, given: set[str]):
    """Takes the values of known keys from a manifest's data_config, except those that are given. Raises UserError for
    values that are not plain, and for those that may be paths."""
    is_ours, now = str(data.get("_target_")).startswith(f"{OURS}."), OmegaConf.to_container(data)
    for key in sorted(set(data) & set(saved) - {"_target_", *PLACES}):
        value = saved[key]
        if f"data.{key}" in given:
            continue
        if not is_plain(value):
            raise UserError(f"manifest.json: data_config: {key} must be a plain value, got {brief(value)}")
        may_be_path = key == "valid" and isinstance(value, str) if is_ours else has_text(value)
        if may_be_path and value != now[key]:
            raise UserError(f"the checkpoint's data.{key} is {brief(value)}, which may be a path: give data.{key}=...")
        data[key] = value


def has_text(value) -> bool:
    """Whether a plain value is text, or a list or mapping with text among its values."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, str) or any(map(has_text, parts))


def is_plain(value, depth: int = 0) -> bool:
    """Whether a value of a manifest is a number, a boolean, null, text without interpolation, or lists and mappings of
    these without _target_, at most DEEPEST in each other."""
    if isinstance(value, list):
        return depth < DEEPEST and all(is_plain(part, depth + 1) for part in value)
    if isinstance(value, dict):
        return "_target_" not in value and is_plain([*value, *value.values()], depth)
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and "${" not in value)
