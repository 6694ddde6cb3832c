"""Imports point one way, and the core uses neither MPI nor torch (CONTRIBUTING.md, "The map")."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Modules that all others may import, and that import only the core and each other.
GROUND = {
    "_C",
    "bounded_file",
    "bounded_parquet",
    "errors",
    "memory",
    "spans",
    "counters",
    "metrics",
    "no_dynamo",
}
GROUND |= {"layers", "batch_norm", "gathered", "schedule", "open_rows", "gpu"}
ROOMS = {  # room -> rooms it may import from, besides itself and the ground
    "world": set(),
    "owner": {"world"},
    "wire": {"owner", "world"},
    "table": {"wire", "owner", "world"},
    "checkpoint": {"world", "owner", "table"},
    "data": set(),
    "tasks": {"world", "data", "table"},
    "log": {"world"},
    "run": {"world", "owner", "wire", "table", "checkpoint", "data", "tasks", "log"},
    "trained": {"world", "owner", "checkpoint", "data", "tasks", "run"},
}
# These may import all; nobody imports them.
COMMANDS = {"__main__", "train", "predict", "doctor", "export", "inspect", "report"}
ABOVE_TABLE = {"dense": {"table"}, "reductions": {"world"}}  # other modules outside the rooms


def test_the_package_has_all_folders():
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.findall('"(.*?)"', re.search(r"^packages = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)[1])
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "hetmpi").rglob("__init__.py")}
    found = {".".join(folder.parts) for folder in folders} | {"hetmpi.conf", "hetmpi.models"}
    assert sorted(listed) == sorted(found)


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
    """The names of hetmpi's modules among `names`, without the package's name."""
    modules = {path.relative_to(ROOT / "hetmpi").with_suffix("").as_posix().replace("/", ".")
               for path in (ROOT / "hetmpi").rglob("*.py")} | {"_C"}  # fmt: skip
    return {name.removeprefix("hetmpi.") for name in names if name.removeprefix("hetmpi.") in modules}


def room_of(module):
    return module.split(".")[0] if "." in module else None


def graph():
    """Module -> the modules of hetmpi it imports, of all modules but the packages' own files."""
    paths = [path for path in (ROOT / "hetmpi").rglob("*.py") if path.name != "__init__.py"]  # models/ is a link
    names = {path.relative_to(ROOT / "hetmpi").with_suffix("").as_posix().replace("/", "."): path for path in paths}
    return {
        name: known({found for found in imported(path) if found.startswith("hetmpi.")}) for name, path in names.items()
    }


def test_every_module_has_its_place():
    rooms = {room_of(module) for module in graph()} - {None}
    alone = {module for module in graph() if room_of(module) is None}
    assert rooms == set(ROOMS) and alone == (GROUND - {"_C"}) | COMMANDS | set(ABOVE_TABLE)


def test_modules_import_only_what_lies_below_them():
    for module, found in graph().items():
        room = room_of(module)
        if module in GROUND:
            assert found <= GROUND, f"hetmpi/{module}.py imports {sorted(found)}"
            continue
        below = set(ROOMS) if module in COMMANDS else ABOVE_TABLE[module] if room is None else ROOMS[room] | {room}
        above = set(ABOVE_TABLE) if module in COMMANDS or room == "run" else set()
        wrong = {name for name in found if name not in GROUND | above and room_of(name) not in below}
        assert not wrong, f"hetmpi.{module} imports {sorted(wrong)}"


def test_every_module_can_be_imported():
    for module in graph():
        import_module(f"hetmpi.{module}")


@pytest.mark.parametrize("folder", ["bench", "tools", "tests", "models"])
def test_what_other_code_imports_of_the_package_is_there(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hetmpi":
                module = import_module(node.module)
                for name in (alias.name for alias in node.names):
                    if not hasattr(module, name):
                        import_module(f"{node.module}.{name}")


def test_no_module_imports_itself_by_way_of_others():
    imports, seen = graph(), {}

    def visit(module, path):
        assert module not in path, " imports ".join([*path, module])
        if module not in seen:
            seen[module] = True
            for other in imports.get(module, ()):
                visit(other, [*path, module])

    for module in imports:
        visit(module, [])


def test_what_carries_rows_knows_nothing_of_staleness():
    for path in [*(ROOT / "hetmpi" / "owner").glob("*.py"), *(ROOT / "hetmpi" / "wire").glob("*.py")]:
        text = " ".join(path.read_text().split('"""', 2)[2].split())
        assert "taleness" not in text, path


def test_commands_are_imported_by_nobody():
    for path in [*(ROOT / "hetmpi").rglob("*.py"), *(ROOT / "models").glob("*.py")]:
        ours = {name for name in imported(path) if name.startswith("hetmpi.")}  # inspect is Python's too
        assert not known(ours) & COMMANDS, path


def test_models_know_torch_and_the_layers_of_hetmpi_alone():
    for path in (ROOT / "models").glob("*.py"):
        names = {
            name
            for name in imported(path)
            if not name.startswith(("hetmpi.layers", "hetmpi.batch_norm", "hetmpi.models"))
        }
        assert all(name.split(".")[0] in {"torch", "typing", "__future__"} for name in names), path


def test_the_core_knows_neither_mpi_nor_torch_and_its_bindings_alone_know_python():
    sources = [path for path in (ROOT / "cpp").rglob("*") if path.suffix in (".h", ".cu", ".cpp", ".c")]
    rooms = {"cpp", "cache", "client", "owner", "wire", "data", "graph", "cuda", "python"}
    assert {path.parent.name for path in sources} == rooms
    for path in sources:
        foreign = ("mpi", "torch", "ATen") + (("pybind11", "Python", "python/") if path.parent.name != "python" else ())
        included = re.findall(r'#include [<"](.*)[>"]', path.read_text())
        assert not any(name.startswith(foreign) for name in included), path


def test_the_map_in_contributing_names_the_modules_that_exist_each_in_its_folder():
    text = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1].split("\nhetmpi/\n")[1].split("\ncpp/")[0]
    named, folders = [], []
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        folders = folders[: max(0, depth // 2 - 1)] if depth <= 4 else folders
        if opened := re.match(r" +(\w+)/ ", line):
            folders.append(opened[1])
        named += ["/".join([*folders, name]) for name in re.findall(r"\b(\w+)\.py\b", line)]
    modules = [module.replace(".", "/") for module in graph() if room_of(module) != "models"]
    assert sorted(named) == sorted(modules)
