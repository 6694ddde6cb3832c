"""Writes docs/settings.md from the declarations of the settings and the files of conf/, with their comments.

python tools/settings_page.py          tests/unit/test_config.py checks that the page is up to date
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hetmpi.run.config import CONF
from hetmpi.run.settings import Declared, Settings, declared

PAGE = Path(__file__).resolve().parent.parent / "docs/settings.md"
HEAD = """\
# Settings

<!-- written by tools/settings_page.py -->

Give settings as `KEY=VALUE`, in [Hydra's syntax](https://hydra.cc/docs/advanced/override_grammar/basic/).
`hetmpi train --help` lists them with their ranges; `hetmpi train --cfg job KEY=VALUE ...` prints all values of a
command line. [Words](words.md) defines the terms.

{experiments}
"""
EXPERIMENTS = """\
`experiment=NAME` reads `conf/experiment/NAME.yaml`; further settings on the command line override it. Names: {names}, \
or your own."""
CHOICE = "`{group}=NAME` selects {noun}, by default `{default}`."
ROWS = ("setting and default (others)", "when to change it")
KEYS = "settings and defaults (...: required)"
SEVERAL = "several"
# Heading -> (its groups of files, with the noun of a choice; its settings: keys, or groups of keys).
SECTIONS = {
    "Data": ({"data": "the samples and their task"}, ()),
    "Task and loss": ({"task": "the task with its model and loss", "loss": "the loss"}, ()),
    "Model": ({"model": "a [model](models.md)"}, ()),
    "Train": ({}, ("steps", "epochs", "batch_size", "seed", "device", "train", "loader")),
    "Optim": ({}, ("optim",)),
    "Eval": ({}, ("eval",)),
    "Run": ({}, ("run", "resume", "init_from", "dry_run", "checkpoint", "log", "watchdog")),
    "Table": ({}, ("table",)),
}
FOR_EXPERTS = "Change these only if a measurement shows a gain."
FOLLOWING = "These keys follow other settings: {}."


class Key(NamedTuple):
    """A line of a file in conf/. value: as on the command line."""

    name: str
    value: str
    comment: str


def page() -> str:
    """The whole page."""
    names = ", ".join(f"`{path.stem}`" for path in sorted((CONF / "experiment").glob("*.yaml")))
    parts, following = [HEAD.format(experiments=filled(EXPERIMENTS.format(names=names)))], {}
    for heading, (groups, keys) in SECTIONS.items():
        parts.append(f"## {heading}\n")
        for group, noun in groups.items():
            files = {path.stem: keys_of(path) for path in sorted((CONF / group).glob("*.yaml"))}
            following |= {f"{group}.{key.name}": key.value for kind in files.values() for key in kind if follows(key)}
            kinds = {name: tuple(key for key in kind if not follows(key)) for name, kind in files.items()}
            parts.append(CHOICE.format(group=group, noun=noun, default=default_of(group)) + "\n")
            parts.append(table((f"`{group}=`", KEYS), rows_of_kinds(group, kinds)))
        if keys:
            settings = [one for key in keys for one in declared() if f"{one.key}.".startswith(f"{key}.")]
            parts.append(table(ROWS, (row(one) for one in settings if not one.for_experts)))
    parts.append(f"## For experts\n\n{FOR_EXPERTS}\n")
    parts.append(table(ROWS, (row(one) for one in declared() if one.for_experts)))
    names = ", ".join(f"`{key}={value}`" for key, value in sorted(following.items()))
    parts.append(filled(FOLLOWING.format(names)) + "\n")
    return "\n".join(parts)


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |\n" for cells in (heads, *rows)]
    return "".join([lines[0], f"|{'---|' * len(heads)}\n", *lines[1:]])


def filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def row(setting: Declared) -> tuple[str, str]:
    default = setting.default_text
    others = [choice for choice in setting.choices or () if choice != default]
    return f"`{setting.key}={default}`" + (f" ({', '.join(others)})" if others else ""), prose(setting.help)


def default_of(group: str) -> str:
    [name] = [choice[group] for choice in Settings().defaults if group in choice and isinstance(choice, dict)]
    return name


def keys_of(path: Path) -> tuple[Key, ...]:
    """The keys of a file of a kind, without its class and the choices that it makes."""
    lines = re.findall(r"^(\w+): *(.*?)(?:  # (.*))?$", path.read_text(), re.MULTILINE)
    return tuple(
        Key(name, re.sub(r"([,:]) ", r"\1", value).replace("???", "..."), comment)
        for name, value, comment in lines
        if name not in ("_target_", "defaults")
    )


def follows(key: Key) -> bool:
    """Whether a key has the value of a setting, and no meaning of its own."""
    return key.value.startswith("${") and not key.comment


def rows_of_kinds(group: str, kinds: dict[str, tuple[Key, ...]]) -> Iterable[tuple[str, str]]:
    """Kinds with equal keys share a row. Comments that several rows have are in a row of their own, which is first."""
    names_of: dict[tuple[Key, ...], list[str]] = {}
    for name, keys in kinds.items():
        names_of.setdefault(keys, []).append(name)
    counts = Counter((key.name, key.comment) for keys in names_of for key in keys)
    common = dict(pair for pair, number in reversed(counts.most_common()) if number > 1)
    if common:
        yield SEVERAL, "<br>".join(f"`{group}.{name}`: {prose(comment)}" for name, comment in sorted(common.items()))
    for keys, names in names_of.items():
        own = [f"{shown(group, key)}: {prose(key.comment)}" for key in keys if common.get(key.name) != key.comment]
        others = ", ".join(shown(group, key) for key in keys if common.get(key.name) == key.comment)
        yield ", ".join(f"`{name}`" for name in names), "<br>".join(filter(None, [*own, others])) or "none"


def shown(group: str, key: Key) -> str:
    return f"`{group}.{key.name}={key.value}`"


def prose(text: str) -> str:
    """A line of help or a comment in a cell of a table: names of pages are links."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page())
