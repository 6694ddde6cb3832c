"""The settings of a run: Hydra's, composed once by rank 0 from conf/ and the command line, then given to all ranks.

Composing on every rank, as @hydra.main does, would make a time-stamped run folder per rank and print a wrong override
once per rank.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import fields, replace
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from hetmpi.comm.route import PARTITIONS
from hetmpi.comm.world import World
from hetmpi.dense import DENSE_RULES
from hetmpi.errors import LARGEST, UserError, check_integer, check_number
from hetmpi.run.device import DEVICES
from hetmpi.table.cache import ADMIT, POLICIES, CacheSettings, Staleness
from hetmpi.table.optim import ROW_RULES, SCHEDULES, check_choice
from hetmpi.table.request import MOST_AHEAD
from hetmpi.table.table import EXCHANGES

DEFAULT_CAPACITY_FRACTION = 0.1  # HET's
CONF = Path(__file__).resolve().parents[2] / "conf"
INTEGERS = {  # key -> the least it may be
    "steps": 0, "seed": 0, "batch_size": 1, "table.dim": 1, "optim.warmup_steps": 0, "eval.every_steps": 0,
    "eval.max_samples": 1, "eval.batch_size": 1, "loader.threads": 1, "loader.prefetch": 1, "log.every_steps": 1,
    "table.ranks_per_node": 1, "table.staleness": 0, "table.prefetch_batches": 0, "table.cache.capacity_rows": 0,
    "table.replicate_below_rows": 0, "checkpoint.every_steps": 0, "checkpoint.keep": 1, "checkpoint.full_every": 1,
}  # fmt: skip
NUMBERS = {
    "epochs": 0, "watchdog.seconds": 0, "table.init_std": 0, "table.inbox_mb": 0, "table.anticipate": 0,
    "table.staleness_growth": 0, "table.cache.capacity_fraction": 0, "optim.rows_lr": 0, "optim.dense_lr": 0,
    "optim.rows_weight_decay": 0, "optim.dense_weight_decay": 0,
}  # fmt: skip
OPTIONAL = {
    "steps",
    "epochs",
    "eval.max_samples",
    "table.ranks_per_node",
    "table.staleness",
    "table.prefetch_batches",
    "table.staleness_growth",
    "table.anticipate",
    "table.cache.capacity_rows",
    "table.cache.capacity_fraction",
    "optim.rows_lr",
    "optim.dense_lr",
    "resume",
}
MOST = {"table.dim": 1 << 20}
GROUPS = (
    "table",
    "table.cache",
    "optim",
    "eval",
    "loader",
    "checkpoint",
    "watchdog",
    "log",
    "train",
    "run",
    "model",
    "data",
    "task",
    "loss",
)
NAMED = ("model", "data", "loss")  # groups whose choice stands beside the settings, as model_name
PATHS = ("run.dir", "checkpoint.dir", "resume")
MOST_UNITS = 1 << 20  # of a layer
CHOICES = {
    "device": DEVICES, "table.cache.policy": POLICIES, "table.cache.admit": ADMIT, "table.exchange": EXCHANGES,
    "table.partition": PARTITIONS, "optim.rows": ROW_RULES, "optim.dense": DENSE_RULES, "optim.schedule": SCHEDULES,
}  # fmt: skip


def compose(world: World, overrides: list[str]) -> DictConfig:
    """The resolved settings, the same on every rank, with `model_name`, `data_name` and `loss_name` beside them.
    Collective.

    Raises UserError on every rank for an unknown key, group or value."""
    settings, error = None, None
    if world.rank == 0:
        try:
            settings = OmegaConf.to_container(resolved(overrides), resolve=True)
        except UserError as refused:
            error = refused
    world.agree(error)
    return OmegaConf.create(world.comm.bcast(settings))


def resolved(overrides: list[str]) -> DictConfig:
    """The settings that conf/ and `overrides` make. Raises UserError with Hydra's own words for what they cannot be."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = hydra_compose("config", overrides=overrides, return_hydra_config=True)
            HydraConfig.instance().set_config(config)
            choices = config.hydra.runtime.choices
            OmegaConf.set_struct(config, False)
            for group in NAMED:
                config[f"{group}_name"] = choices[group]
            del config["hydra"]
            OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"settings: {advice(error, overrides)}") from error
    check(config)
    return config


def advice(error: Exception, overrides: list[str]) -> str:
    """Hydra's message on one line, what was probably meant, and where the settings are listed."""
    text = " ".join(str(error).split("Config search path")[0].split())
    wrong = re.search(r"Could not override '([^']+)'", text)
    if wrong:
        text = wrong[0]
        near = difflib.get_close_matches(wrong[1], known_keys(), n=1)
        text += f", did you mean {near[0]}?" if near else "."
    elif any(override.startswith("-") for override in overrides):
        text = "settings are given as KEY=VALUE, --help lists them."
    elif "LexerNoViableAlt" in text or "mismatched input" in text:
        text += " Values with other than plain letters, digits and ./_- need quotes of their own: \"run.dir='/tmp/ü'\"."
    return f"{text} conf/config.yaml lists all settings, conf/*/ the models, losses and data"


def known_keys() -> list[str]:
    """Dotted names of the settings in conf/config.yaml and the data groups."""
    keys = set()
    for path in [CONF / "config.yaml", *(path for group in GROUPS for path in CONF.glob(f"{group}/*.yaml"))]:
        group = "" if path.parent == CONF else f"{path.parent.name}."
        keys |= {group + name for name in dotted(OmegaConf.to_container(OmegaConf.load(path)))}
    return sorted(keys)


def dotted(settings: dict) -> list[str]:
    """The names of settings and of groups of them, as on the command line."""
    names = []
    for key, value in settings.items():
        names += [key, *(f"{key}.{name}" for name in dotted(value))] if isinstance(value, dict) else [key]
    return names


def check(config: DictConfig):
    """Raises UserError for values that no run can have; fills in the learning rates left open."""
    missing = OmegaConf.missing_keys(config)
    if missing:
        raise UserError(f"settings: give {', '.join(f'{key}=...' for key in sorted(missing))}")
    for key in GROUPS:
        if not isinstance(OmegaConf.select(config, key), DictConfig):
            raise UserError(
                f"settings: {key} must be a group of settings, got {OmegaConf.select(config, key)}: set {key}.NAME"
            )
    for key, least in {**INTEGERS, **NUMBERS}.items():
        if (value := OmegaConf.select(config, key)) is not None or key not in OPTIONAL:
            check_kind = check_integer if key in INTEGERS else check_number
            check_kind(f"settings: {key}", value, least, MOST.get(key, LARGEST))
    for key in PATHS:
        check_path(config, key)
    check_model(config.model)
    for key, choices in CHOICES.items():
        if key == "table.exchange" and "." in str(config.table.exchange):  # the path of a transport's class
            continue
        try:
            check_choice(key, OmegaConf.select(config, key), choices)
        except ValueError as error:
            raise UserError(f"settings: {error}") from error
    if not isinstance(config.train.profile, bool):
        raise UserError(f"settings: train.profile must be true or false, got {config.train.profile}")
    if config.table.staleness == 0 and config.table.prefetch_batches:
        raise UserError(
            f"settings: table.prefetch_batches={config.table.prefetch_batches} takes a staleness of 1 or more: at 0 "
            "most rows fetched ahead would change before they are read"
        )
    if config.table.prefetch_batches is None:
        config.table.prefetch_batches = 0 if config.table.staleness == 0 else 1
    if config.table.prefetch_batches > MOST_AHEAD:
        raise UserError(
            f"settings: table.prefetch_batches must be at most {MOST_AHEAD}, got {config.table.prefetch_batches}"
        )
    try:
        staleness_of(config), cache_of(config)
    except ValueError as error:
        raise UserError(f"settings: {error}") from error
    if config.steps is None and config.epochs is None:
        raise UserError("settings: give steps or epochs, both are null")
    if config.optim.rows_lr is None:
        config.optim.rows_lr = ROW_RULES[config.optim.rows]
    if config.optim.dense_lr is None:
        config.optim.dense_lr = DENSE_RULES[config.optim.dense]


def staleness_of(config: DictConfig) -> Staleness:
    """The bound that table.staleness and its neighbours say. Raises UserError."""
    return Staleness(config.table.staleness, config.table.staleness_growth, config.table.anticipate)


def cache_of(config: DictConfig) -> CacheSettings:
    """The cache that table.cache says; without a capacity, a tenth of the rows where it can pay. At s = 0 it cannot:
    what a step reads it writes, so the lines are out of date when they are read again. Raises UserError."""
    unknown = set(config.table.cache) - {field.name for field in fields(CacheSettings)}
    if unknown:
        raise UserError(f"table.cache has no setting {', '.join(sorted(unknown))}")
    settings = CacheSettings(**config.table.cache)
    if settings.capacity_rows is None and settings.capacity_fraction is None:
        fraction = 0.0 if config.table.staleness == 0 else DEFAULT_CAPACITY_FRACTION
        return replace(settings, capacity_fraction=fraction)
    return settings


def check_path(config: DictConfig, key: str):
    """Raises UserError unless the value of `key` is text, or null where it may be."""
    value = OmegaConf.select(config, key)
    if not (value is None and key in OPTIONAL) and not (isinstance(value, str) and value):
        raise UserError(f"settings: {key} must be a path, got {str(value)[:100]!r}: write a number as ./NUMBER")


def check_model(model: DictConfig):
    """Raises UserError for sizes that no layer of the models here can have. What others take is theirs to check."""
    for key, value in model.items() if str(model._target_).startswith("models.") else ():
        if isinstance(value, ListConfig):
            for size in value:
                check_integer(f"settings: each of model.{key}", size, 1, MOST_UNITS)
        elif key != "_target_":
            check_integer(f"settings: model.{key}", value, 0, MOST_UNITS)
