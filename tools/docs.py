"""Writes the API documentation as HTML: what a program of one's own imports, from its docstrings, and the trainer's
settings.

./run.sh docs [OUT_DIR]          default: docs/api
"""

from __future__ import annotations

import ast
import html
import inspect
import re
import sys
from importlib import import_module
from itertools import groupby
from pathlib import Path
from textwrap import dedent

import pdoc
from jinja2 import ChoiceLoader, DictLoader

import hetmpi
from hetmpi.run.command_line import help_text

ROOT = Path(__file__).resolve().parent.parent
BESIDES = {
    "data.source": ["Source"],
    "data.batch": ["Samples", "Batch"],
    "tasks.task": ["Task"],
    "tasks.ctr": ["ClickSource", "ClickThroughRate"],
    "export": [],
    "run.config": [],
}  # module -> names shown that hetmpi.PLACES has not
STYLE = """
.pdoc pre, .pdoc .param { white-space: pre-wrap; }
@media (min-width: 770px) { main, header { width: calc(70rem + var(--sidebar-width)); } }
"""
COLUMNS = re.compile(r"\S {2,}\S")


def main(out: Path):
    """Writes the pages."""
    shown: dict[str, list[str]] = {}
    for name, module in hetmpi.PLACES.items():
        shown.setdefault(module, []).append(name)
    shown |= BESIDES
    for module, names in shown.items():
        page = import_module(f"hetmpi.{module}")
        page.__all__ = names  # pdoc shows these
        for name in names:
            tell_fields(getattr(page, name))
    for room in {module.split(".")[0] for module in shown if "." in module}:
        import_module(f"hetmpi.{room}").__all__ = [
            module.split(".")[1] for module in shown if module.startswith(f"{room}.")
        ]
    hetmpi.__all__ = list(dict.fromkeys(module.split(".")[0] for module in shown))
    hetmpi.__doc__ += "\n\nFor a program of your own:\n\n" + "\n".join(map(entry, hetmpi.PLACES))
    import_module("hetmpi.run.config").__doc__ += "\n\n" + "\n".join(
        f"  {line}" for line in help_text(None).splitlines()
    )
    pdoc.render.configure(docformat="markdown", include_undocumented=False, footer_text=f"hetmpi {hetmpi.__version__}")
    pdoc.render.env.loader = ChoiceLoader([DictLoader({"custom.css": STYLE}), pdoc.render.env.loader])
    pdoc.render.env.filters["to_markdown"] = as_markdown
    pdoc.pdoc("hetmpi", output_directory=out)


def tell_fields(shown):
    """Puts the fields of a class, whose shapes stand in comments, into its docstring."""
    lines = inspect.getsource(shown).splitlines()
    body = ast.parse("\n".join(lines)).body[0].body if inspect.isclass(shown) else []
    fields = [lines[node.lineno - 1] for node in body if isinstance(node, ast.AnnAssign)]
    if fields:
        shown.__doc__ = "\n\n".join([inspect.getdoc(shown), "Fields:", "\n".join(fields)])


def entry(name: str) -> str:
    """A line of the list of names: where it leads, and the first sentence there."""
    sentence = re.split(r"(?<=\.)\s|\n\n", inspect.getdoc(getattr(hetmpi, name)))[0].replace("\n", " ")
    return f"- [hetmpi.{name}](hetmpi/{hetmpi.PLACES[name].replace('.', '/')}.html#{name}): {sentence}"


def as_markdown(docstring: str) -> str:
    """A docstring as Markdown: prose is prose, lines that are indented or in columns are shown as they stand."""
    parts = []
    for is_set, lines in groupby(docstring.splitlines(), is_set_by_hand):
        text = "\n".join(lines)
        parts.append(
            f"\n```text\n{dedent(text)}\n```\n" if is_set else html.escape(text, quote=False).replace("*", r"\*")
        )
    return "\n".join(parts)


def is_set_by_hand(line: str) -> bool:
    return bool(line.startswith("  ") or COLUMNS.search(line))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
