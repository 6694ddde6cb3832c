"""The data of a checkpoint's training run, from its manifest and the settings of data given beside it."""

from __future__ import annotations

import re

from omegaconf import DictConfig, OmegaConf

from hetmpi.checkpoint.manifest import brief
from hetmpi.comm.world import World
from hetmpi.data.source import Source
from hetmpi.errors import UserError
from hetmpi.run import build
from hetmpi.run.config import advised, composed


def source_of(world: World, manifest: dict, overrides: list[str], config_dir: str | None) -> Source:
    """The prepared data source of the checkpoint's training run, with `overrides`. The manifest is not trusted: the
    class comes from the settings, and only plain values of known keys are taken from the manifest. Collective. Raises
    UserError."""
    wrong = [text for text in overrides if not re.match(r"[+~]*data\b", text)]
    if wrong:
        raise UserError(f"only settings of data can be given with a checkpoint, got {wrong[0]}")
    named = any(text.startswith("data=") for text in overrides)
    name, saved = manifest.get("data"), manifest.get("data_config")
    if not named:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name) or not isinstance(saved, dict):
            raise UserError("the checkpoint does not name its data: give data=NAME")
        overrides = [f"data={name}", *overrides]
    with advised(overrides, config_dir):
        config = composed(overrides, config_dir)
        given = {text.lstrip("+~").split("=")[0] for text in overrides}
        for key in set(config.data) & set(saved or {}) - {"_target_"} if not named else ():
            if f"data.{key}" not in given:
                if not is_plain(saved[key]):
                    raise UserError(f"manifest.json: data_config: {key} must be a plain value, got {brief(saved[key])}")
                config.data[key] = saved[key]
        del config["hydra"]
        missing = [key for key in OmegaConf.missing_keys(config) if key.startswith("data.")]
        if missing:
            raise UserError(f"give {', '.join(f'{key}=...' for key in sorted(missing))}")
        data: DictConfig = OmegaConf.create(OmegaConf.to_container(config.data, resolve=True))
    source = build.make(data)
    source.prepare(world.rank, world.size, lambda: world.meet("for all ranks to prepare the data"))
    return source


def is_plain(value) -> bool:
    """Whether a value of a manifest is a number, a boolean, null, text without interpolation, or lists and mappings of
    these without _target_."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return "_target_" not in value and all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and "${" not in value)
