"""The settings of a run: composed by Hydra on rank 0, checked, and sent to all ranks.

Composing on every rank, as @hydra.main does, would create a time-stamped run folder per rank and print errors once per
rank.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from hydra import compose as hydra_compose
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hetmpi.dense import DENSE_RULES
from hetmpi.errors import UserError, check_choice, check_integer, check_number, check_path, one_line
from hetmpi.run.model_keys import check_model
from hetmpi.run.settings import GROUPS, PARTS, REMOVED, Declared, Settings, declared
from hetmpi.table.cache import CacheSettings
from hetmpi.table.optim import ROW_RULES
from hetmpi.table.staleness import Staleness
from hetmpi.wire.transport import current_name
from hetmpi.world.commands import command
from hetmpi.world.world import World

DEFAULT_CAPACITY_FRACTION = 0.1  # as in HET
CONF = Path(__file__).resolve().parents[1] / "conf"
NAMED = ("model", "data", "loss")  # groups whose choice is stored beside the settings, as model_name
MOST_LEVELS = 16  # of brackets in an override
LONGEST_ADVICE = 500
OF_ODD_OVERRIDES = (AssertionError, AttributeError, IndexError, KeyError, RecursionError, TypeError)  # Hydra's
WHERE = f"`{command('train --help')}` lists all settings, and the choices for model, data, task and loss"

PRIMARY = "hetmpi_settings"  # Hydra's name for Settings; not hetmpi, as users may have a file conf/hetmpi.yaml

ConfigStore.instance().store(PRIMARY, Settings)


def compose(world: World, overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """The resolved settings, the same on every rank, with `model_name`, `data_name` and `loss_name` added. config_dir:
    as in conf_folders. Collective.

    Raises UserError on every rank for an unknown key, group or value."""
    return OmegaConf.create(world.from_first(lambda: OmegaConf.to_container(resolved(overrides, config_dir))))


def resolved(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """The settings from the declarations, the files of the groups and `overrides`. Raises UserError, with Hydra's
    message if it is clear enough."""
    with advised(overrides, config_dir):
        config = composed(overrides, config_dir)
        del config["hydra"]
        OmegaConf.resolve(config)
    check(config)
    return config


@contextlib.contextmanager
def advised(overrides: list[str], config_dir: str | None):
    """A context that turns errors of Hydra and OmegaConf into a UserError."""
    for override in overrides:
        check_depth(override)
    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, *OF_ODD_OVERRIDES) as error:
        raise UserError(f"settings: {advice(error, overrides, config_dir)}") from error


def check_depth(override: str):
    """Raises UserError for an override that nests lists and groups deeper than Hydra's parser can follow."""
    depth = most = 0
    for character in override:
        depth += (character in "[{(") - (character in "]})")
        most = max(most, depth)
    if most > MOST_LEVELS:
        raise UserError(f"settings: {one_line(override, 80)} is nested in more than {MOST_LEVELS} levels")


def composed(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Hydra's composition, not yet resolved, with its own settings under `hydra`. Raises Hydra's errors."""
    GlobalHydra.instance().clear()
    path = create_config_search_path(None)
    for folder in conf_folders(config_dir):
        path.prepend("hetmpi", f"file://{folder.resolve()}", "schema")
    Hydra.create_main_hydra2("hetmpi", path)
    config = hydra_compose(PRIMARY, overrides=overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(config)  # for ${hydra:...}
    OmegaConf.set_struct(config, False)
    for group in NAMED:
        config[f"{group}_name"] = config.hydra.runtime.choices[group]
    return config


def conf_folders(config_dir: str | None) -> list[Path]:
    """Folders that are searched for files of groups, in this order: config_dir, conf/ in the current folder, hetmpi's
    own. Raises UserError if config_dir does not exist."""
    if config_dir is None:
        return [Path("conf"), CONF]
    if not Path(config_dir).is_dir():
        raise UserError(f"--config-dir={config_dir}: there is no such folder")
    return [Path(config_dir), Path("conf"), CONF]


def advice(error: Exception, overrides: list[str], config_dir: str | None) -> str:
    """The error in one line, with a suggestion."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    wrong_value = re.search(r"(?:Value |value: )'?(.*?)'?( of type '(\w+)'|\s+full_key)", str(cause), re.DOTALL)
    setting = next((s for s in declared() if s.key == getattr(cause, "full_key", None)), None)
    if setting is not None and wrong_value is not None:
        return refusal_of(setting, wrong_value[1], wrong_value[3])
    if getattr(cause, "full_key", None) in GROUPS:
        return not_a_group(cause.full_key, wrong_value and wrong_value[1])
    text = " ".join((str(error) or type(error).__name__).split("Config search path")[0].split())
    if removal(text):
        return f"{removal(text)}. {WHERE}"
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        near, group = difflib.get_close_matches(unknown[1], known_keys(config_dir), n=1), unknown[1].split(".")[0]
        if near == [unknown[1]]:
            text = f"{unknown[0]}: the chosen {group} does not have it, choose one that does with {group}=NAME"
        else:
            text = unknown[0] + (f", did you mean {near[0]}?" if near else "")
    elif "LexerNoViableAlt" in text or "mismatched input" in text:
        text = one_line(text, LONGEST_ADVICE - 100)
        text += " Quote values that contain other characters than letters, digits and ./_-: \"run.dir='/tmp/ü'\"."
    text = one_line(text, LONGEST_ADVICE)
    return f"{text if text.endswith('?') else text.rstrip('.') + '.'} {WHERE}"


def removal(text: str) -> str | None:
    """Why the setting that the text names was removed; None if it names none of them."""
    for key, removed in REMOVED.items():
        if re.search(rf"\b{re.escape(key)}\b", text):
            return f"{key} was removed, as {removed.why}: leave it out"
    return None


def not_a_group(name: str, value) -> str:
    return f"{name} must be a group of settings, got {one_line(value, 100)}: set {name}.NAME"


def refusal_of(setting: Declared, text: str, kind: str | None) -> str:
    """The message for a value that OmegaConf could not convert."""
    try:
        check_value(setting, float(text) if kind == "float" else text == "True" if kind == "bool" else text)
    except UserError as refusal:
        return str(refusal)
    return f"{setting.key} must be {setting.values}, got {one_line(text, 100)}"


def known_keys(config_dir: str | None) -> list[str]:
    """Dotted names of the settings and of the keys in the files of the groups."""
    keys = {setting.key for setting in declared()} | set(GROUPS)
    for group in PARTS:
        for path in (path for folder in conf_folders(config_dir) for path in folder.glob(f"{group}/*.yaml")):
            with contextlib.suppress(YAMLError, OSError, ValueError):  # a file that is not selected may be invalid
                keys |= {group, *(f"{group}.{key}" for key in OmegaConf.load(path) if key != "defaults")}
    return sorted(keys)


def check(config: DictConfig):
    """Raises UserError for invalid values; fills in learning rates where they are null, and the new name of a
    transport, with a warning."""
    missing = OmegaConf.missing_keys(config)
    if missing:
        raise UserError(f"settings: give {', '.join(f'{key}=...' for key in sorted(missing))}")
    for group in PARTS:
        if not isinstance(config[group], DictConfig):
            raise UserError(f"settings: {not_a_group(group, config[group])}")
    config.table.exchange = current_name(config.table.exchange, warns=True)
    known = {setting.key for setting in declared()} | set(GROUPS)
    for group in GROUPS:
        unknown = sorted({f"{group}.{one_line(key, 100)}" for key in OmegaConf.select(config, group)} - known)
        if unknown:
            names = ", ".join(unknown)
            raise UserError(f"settings: {removal(names) or f'there is no {names}'}. {WHERE}")
    try:
        check_path("run.dir", str(config.run.dir))  # before that of checkpoint.dir, which lies in it
        for setting in declared():
            value = OmegaConf.select(config, setting.key)
            if value is not None or not setting.is_optional:
                check_value(setting, value)
        staleness_of(config), cache_of(config), check_store(config.table)
    except ValueError as error:
        raise UserError(f"settings: {error}") from error
    check_model(config.model)
    optim = config.optim
    for key in ("eval.patience", "checkpoint.best", "optim.schedule"):
        value = OmegaConf.select(config, key)
        follows = value == "plateau" if key == "optim.schedule" else value is not None
        if follows and is_evaluated_at_end_only(config):
            every = "null" if config.eval.every_steps is None else 0
            raise UserError(
                f"settings: {key}={value} needs evaluations during training: set eval.every_steps, now {every}"
            )
    if config.steps is None and config.epochs is None:
        raise UserError("settings: give steps or epochs, both are null")
    if optim.rows_lr is None:
        optim.rows_lr = ROW_RULES[optim.rows]
    if optim.dense_lr is None:
        optim.dense_lr = DENSE_RULES[optim.dense]


def check_value(setting: Declared, value):
    """Raises ValueError if the setting does not allow this value. REQUIRES: not null if the setting may be null."""
    if setting.kind is int:
        check_integer(setting.key, value, setting.least, setting.most)
    elif setting.kind is float:
        check_number(setting.key, value, setting.least, setting.most)
    elif setting.kind is bool:
        if not isinstance(value, bool):
            raise UserError(f"{setting.key} must be true or false, got {one_line(value, 100)}")
    elif setting.choices is None:
        if not isinstance(value, str) or not value:
            cure = ": write a number as ./NUMBER" if setting.noun == "path" else ""
            raise UserError(f"{setting.key} must be a {setting.noun}, got '{one_line(value, 100)}'{cure}")
        if setting.noun == "path":
            check_path(setting.key, value)
    elif not (setting.takes_class and "." in str(value)):
        check_choice(setting.key, value, setting.choices)


def is_evaluated_at_end_only(config: DictConfig) -> bool:
    """Whether a run makes no evaluation but that at its end (build.evaluations_due)."""
    if config.eval.every_steps is not None:
        return config.eval.every_steps == 0
    return config.steps is not None or (config.epochs or 0) <= 1


def check_store(table: DictConfig):
    """Raises UserError for settings of a store that do not go together."""
    if table.store == "file" and table.store_dir is None:
        raise UserError("table.store=file needs table.store_dir=FOLDER, a folder on a local disk of each node")
    if table.store in ("gpu", "pinned") and table.staleness != 0:
        raise UserError(
            f"table.store={table.store} needs table.staleness=0, where no rows are cached, got {table.staleness}: set "
            "that, or table.store=memory"
        )
    for name in ("store_dir", "store_memory_gb"):
        if table.store != "file" and table[name] is not None:
            raise UserError(f"table.{name}={table[name]} is for table.store=file: set that, or remove it")


def staleness_of(config: DictConfig) -> Staleness:
    """The bound from table.staleness and related settings. Raises UserError."""
    return Staleness(config.table.staleness, config.table.anticipate, config.table.drift)


def cache_of(config: DictConfig, owner: str = "", own: Mapping = MappingProxyType({})) -> CacheSettings:
    """The cache of a table from table.cache, with settings of its `own` in their place; owner: for messages. The
    default capacity is a tenth of the rows at s >= 1. Raises UserError, also for a capacity at s = 0."""
    values = own_settings(config, "table.cache", own, tuple(config.table.cache), owner)
    if {"capacity_rows", "capacity_fraction"} & set(own):
        values |= {"capacity_rows": None, "capacity_fraction": None, **own}
    settings = CacheSettings(**values)
    try:
        settings.check_at(staleness_of(config))
    except UserError as error:
        raise UserError(f"{owner}: {error}" if owner else str(error)) from error
    if settings.capacity_rows is None and settings.capacity_fraction is None:
        fraction = 0.0 if config.table.staleness == 0 else DEFAULT_CAPACITY_FRACTION
        return replace(settings, capacity_fraction=fraction)
    return settings


def own_settings(config: DictConfig, group: str, own: Mapping, names: Sequence[str], owner: str) -> dict:
    """The settings of a group with those that `owner`, a table or a column, has of its `own`. Raises UserError for
    other names than `names` and values that the settings do not allow."""
    unknown = sorted(set(own) - set(names))
    if unknown:
        raise UserError(f"{owner}: there is no {group}.{unknown[0]} of its own, only {', '.join(names)}")
    of_key = {setting.key: setting for setting in declared()}
    for key, value in own.items():
        setting = of_key[f"{group}.{key}"]
        if value is not None or not setting.is_optional:
            try:
                check_value(setting, value)
            except ValueError as error:
                raise UserError(f"{owner}: {error}") from error
    return {**OmegaConf.select(config, group), **{key: value for key, value in own.items() if value is not None}}
