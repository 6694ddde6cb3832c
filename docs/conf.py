"""Sphinx: README.md, CONTRIBUTING.md, CHANGELOG.md, docs/ and the docstrings as one site. In the repository's root:

sphinx-build -W -n -q -c docs . docs/_build
"""

import ast
import inspect
import re
import sys
from itertools import groupby
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import hetmpi  # noqa: E402

project, author, release = "hetmpi", "The hetmpi authors", hetmpi.__version__
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/api/*.rst"]
exclude_patterns = [".*", "docs/_build", "build", "prepared", "runs", "multirun", "outputs"]
myst_heading_anchors = 4

smartquotes = False
highlight_language = "none"

html_theme = "furo"
html_title = f"hetmpi {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_copyright = False

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
nitpick_ignore_regex = [
    ("py:.*", r"(?!hetmpi\.).*"),  # types of Python, numpy and torch
    (
        "py:class",
        r"hetmpi\.(spans\.Spans|_C\.(Spans|Keys|Lines)|counters\.Counters|table\.group\.TableGroup|owner\.store\.Layout"
        r"|data\.graph\.trained_inputs\.TrainedInputs)",
    ),  # arguments few need
]

INDEX_LINK = re.compile(r"^(?:- )?\[[^]]+\]\(([^)#]+)\.(?:md|rst)\)", re.MULTILINE)
COLUMNS = re.compile(r"\S {2,}\S")
MARKUP = re.compile(r"`([^`]+)`|([*|_\\])")  # code, and what reStructuredText would take for markup


def setup(app):
    app.connect("source-read", add_toctree)
    app.connect("autodoc-process-docstring", to_rst)
    app.connect("missing-reference", find_public_name)
    app.connect("build-finished", write_entrance)


def add_toctree(app, docname: str, source: list[str]):
    """The links of the index are the site's navigation."""
    if docname == root_doc:
        pages = "\n".join(INDEX_LINK.findall(source[0]))
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def to_rst(app, what: str, name: str, thing, options, lines: list[str]):
    """A docstring as reStructuredText: prose is prose, lines that are indented or in columns stand as they are."""
    text = "\n".join(lines)
    if what == "class" and (fields := fields_of(thing)):
        text += f"\n\nFields:\n\n{fields}\n"
    lines[:] = []
    for is_set, group in groupby(text.splitlines(), is_set_by_hand):
        block = "\n".join(group)
        if is_set:
            block = "\n::\n\n" + "\n".join(f"   {line}" for line in dedent(block).splitlines()) + "\n"
        else:
            block = MARKUP.sub(lambda found: f"``{found[1]}``" if found[1] else f"\\{found[2]}", block)
        lines += block.split("\n")


def is_set_by_hand(line: str) -> bool:
    return bool(line.startswith("  ") or COLUMNS.search(line))


def fields_of(cls: type) -> str:
    """The lines that declare a class's fields, whose comments give shapes."""
    lines = inspect.getsource(cls).splitlines()
    fields = [node for node in ast.parse(dedent("\n".join(lines))).body[0].body if isinstance(node, ast.AnnAssign)]
    return "\n".join(lines[node.lineno - 1] for node in fields)


def find_public_name(app, env, node, content):
    """Names of the package, where an annotation names the module behind them."""
    name = node["reftarget"].rpartition(".")[2]
    if node.get("refdomain") == "py" and hetmpi.PLACES.get(name):
        domain = env.get_domain("py")
        return domain.resolve_xref(env, node["refdoc"], app.builder, "class", f"hetmpi.{name}", node, content)


def write_entrance(app, error):
    """Opens the site at its root."""
    if app.builder.format == "html" and not error:
        (Path(app.outdir) / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">\n')
