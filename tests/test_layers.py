"""Imports point one way, and the core knows neither MPI nor torch (docs/design.md, rooms)."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {  # module -> modules of hetmpi it may import
    "world": set(),
    "layers": {"_C"},
    "partition": {"_C"},
    "metrics": set(),
    "spans": set(),
    "runlog": {"world"},
    "optim": {"_C"},
    "window": {"_C", "world"},
    "inbox": {"_C", "partition", "window"},
    "owners": {"_C", "partition", "window"},
    "reading": {"_C", "inbox", "owners", "partition"},
    "asking": {"_C", "inbox", "metrics", "owners", "reading"},
    "rounds": {"_C", "asking", "inbox", "metrics", "owners", "partition", "reading", "window", "world"},
    "exchange": {"_C", "inbox", "owners", "partition", "rounds", "window", "world"},
    "gpu_cache": {"_C", "world"},
    "cache": {"_C", "gpu_cache", "optim", "window", "world"},
    "table": {
        "_C", "asking", "cache", "exchange", "gpu_cache", "inbox", "metrics", "optim", "partition", "reading", "rounds", "spans", "window", "world",
    },
    "replicated": {"_C", "optim", "reading", "table", "window", "world"},
    "device": {"_C", "world"},
    "preemption": {"world"},
    "embedding_bag": {"_C", "optim", "table", "world"},
    "export": {"checkpoint", "data.batch", "partition", "world"},
    "checkpoint": {"partition", "table", "window", "world"},
    "config": {"cache", "device", "exchange", "optim", "partition", "reading", "world"},
    "data.batch": {"_C"},
    "data.gpu_batch": {"_C", "data.batch"},
    "data.loader": {"data.batch"},
    "data.synthetic": {"data.batch"},
    "data.raw": {"data.distinct"},
    "data.distinct": set(),
    "data.prepare": {"data.distinct", "data.raw"},
    "data.criteo": {"data.batch", "data.prepare", "data.raw"},
}


def imported(path):
    """Every module that a file imports, by dotted name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def known(names):
    """The modules of hetmpi among `names`, without the package's name."""
    modules = {path.relative_to(ROOT / "hetmpi").with_suffix("").as_posix().replace("/", ".")
               for path in (ROOT / "hetmpi").rglob("*.py")} | {"_C"}  # fmt: skip
    return {name.removeprefix("hetmpi.") for name in names if name.removeprefix("hetmpi.") in modules}


def test_modules_import_only_what_lies_below_them():
    for module, allowed in ALLOWED.items():
        path = ROOT / "hetmpi" / (module.replace(".", "/") + ".py")
        found = known({name for name in imported(path) if name.startswith("hetmpi.")})
        assert found <= allowed, f"hetmpi/{path.name} imports {sorted(found - allowed)}"


def test_train_is_imported_by_nobody():
    for path in [*(ROOT / "hetmpi").rglob("*.py"), *(ROOT / "models").glob("*.py")]:
        assert not any(name.startswith("hetmpi.train") for name in imported(path)), path


def test_models_know_torch_and_the_look_up_of_rows_alone():
    for path in (ROOT / "models").glob("*.py"):
        names = {name for name in imported(path) if not name.startswith("hetmpi.layers")}
        assert all(name.split(".")[0] in {"torch", "models", "typing", "__future__"} for name in names), path


def test_the_core_knows_neither_mpi_nor_torch_nor_python():
    for path in (ROOT / "cpp").glob("*.h"):
        text = path.read_text()
        assert not any(f"#include <{name}" in text for name in ("mpi", "torch", "ATen", "pybind11", "Python")), path
