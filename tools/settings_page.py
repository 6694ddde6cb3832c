"""Writes docs/settings.md from the declarations of the settings and the files of conf/.

python tools/settings_page.py          tests/unit/test_config.py checks that the page is up to date
"""

from __future__ import annotations

from pathlib import Path

from hetmpi.run.config import CONF
from hetmpi.run.settings import PARTS, Declared, by_group

PAGE = Path(__file__).resolve().parent.parent / "docs/settings.md"
HEAD = """\
# Settings

<!-- written by tools/settings_page.py -->

Give a setting as `KEY=VALUE` on the command line, or in a file `conf/experiment/NAME.yaml` that `experiment=NAME`
selects. `hetmpi train --help` prints this list; `hetmpi train --cfg job KEY=VALUE ...` prints the values of a command
line and exits. The syntax is [Hydra's](https://hydra.cc/docs/advanced/override_grammar/basic/).
[Concepts](concepts.md) explains the words.
"""
TABLE_HEAD = ["| setting | default | values | meaning |", "|---|---|---|---|"]
PART_HEADS = {
    "model": "The keys below a choice are its own settings, as in `model=dcn model.num_cross_layers=2`.",
    "data": "As in `data=synthetic data.scale=0.1`.",
    "task": "",
    "loss": "",
    "experiment": "A file sets any of the settings above; the command line wins.",
}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for group, settings in by_group():
        heading = f"`{group}`" if group else "The run"
        parts.append("\n".join([f"## {heading}\n", *TABLE_HEAD, *map(row, settings), ""]))
    for group in (*PARTS, "experiment"):
        files = sorted((CONF / group).glob("*.yaml"))
        shown = "\n".join(f"`{group}={file.stem}`:\n\n```yaml\n{file.read_text()}```\n" for file in files)
        parts.append("\n\n".join(filter(None, [f"## `{group}`", PART_HEADS[group], shown])))
    return "\n".join(parts)


def row(setting: Declared) -> str:
    values = setting.values.replace(" | ", ", ")
    return f"| `{setting.key}` | `{setting.default_text}` | {values} | {setting.help} |"


if __name__ == "__main__":
    PAGE.write_text(page())
