"""The command line of `hetmpi train`: Hydra's overrides, and the Hydra options that work on several ranks."""

from __future__ import annotations

import argparse
import textwrap

from omegaconf import OmegaConf

from hetmpi.errors import UserError
from hetmpi.run.config import advised, composed, conf_folders
from hetmpi.run.settings import PARTS, Declared, by_group
from hetmpi.world.commands import command

USAGE = """\
usage: hetmpi train [OPTIONS] [KEY=VALUE ...]            one rank
       mpirun -np 4 hetmpi train [OPTIONS] [KEY=VALUE ...]
       ./run.sh train [OPTIONS] [KEY=VALUE ...]          in a checkout, on NP ranks

Trains a model whose embedding tables are partitioned over all ranks. KEY=VALUE is a Hydra override of a setting below,
or of a key of the chosen model, data, task or loss, as in model=deepfm model.hidden=[64,64] steps=1000.
Each setting has a line that says when to change it, with its values and default.

options:
  -m, --multirun      sweep: train each combination of the values in KEY=A,B in turn, on all ranks
  --config-dir DIR    search DIR for the files of model/, data/, task/, loss/ and experiment/, then conf/ in the current
                      folder, then the files that come with hetmpi
  --cfg job           print the composed settings and exit; --cfg hydra prints Hydra's own, --cfg all both
  --resolve           with --cfg: replace ${...} by values
  -h, --help          print this help and exit
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        help_line = command("train --help")
        raise UserError(f"settings: {message}: settings are given as KEY=VALUE; `{help_line}` lists them")


def parse(arguments: list[str]) -> argparse.Namespace:
    """-> overrides, multirun, config_dir, cfg, resolve, help. Raises UserError."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    asked = parser.parse_intermixed_args(arguments)
    if asked.cfg is not None and asked.multirun:
        raise UserError("--cfg prints the settings of one training: leave out -m, or --cfg")
    if asked.resolve and asked.cfg is None:
        raise UserError("--resolve requires --cfg")
    return asked


def answer(asked: argparse.Namespace) -> str:
    """The text for --help or --cfg. Raises UserError."""
    if asked.help:
        return help_text(asked.config_dir)
    return composed_text(asked.overrides, asked.config_dir, asked.cfg, asked.resolve)


def composed_text(overrides: list[str], config_dir: str | None, what: str, is_resolved: bool) -> str:
    """The composed settings as YAML. what: job (hetmpi's), hydra (Hydra's own) or all. Raises UserError."""
    with advised(overrides, config_dir):
        config = composed(overrides, config_dir)
        if what == "hydra":
            config = config.hydra
        elif what == "job":
            del config["hydra"]
        return OmegaConf.to_yaml(config, resolve=is_resolved)


def help_text(config_dir: str | None) -> str:
    """Usage, the choices of each group, and every setting with default, range and help."""
    lines = [USAGE, "choices:"]
    for group, names in choices(config_dir).items():
        lines.append(f"  {group:<18}  {' | '.join(names)}")
    for heading, settings in by_group():
        lines += ["", f"{heading or 'settings'}:", *map(help_line, settings)]
    return "\n".join(lines)


def help_line(setting: Declared) -> str:
    about = textwrap.wrap(
        f"{setting.help} [{setting.values}; default {setting.default_text}]", 86, break_long_words=False
    )
    return "\n".join(f"  {key:<32}{line}" for key, line in zip([setting.key] + [""] * len(about), about))


def choices(config_dir: str | None) -> dict[str, list[str]]:
    """Group -> names of the choices in all folders that are searched."""
    return {
        group: sorted({path.stem for folder in conf_folders(config_dir) for path in folder.glob(f"{group}/*.yaml")})
        for group in (*PARTS, "experiment")
    }
