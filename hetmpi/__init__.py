"""hetmpi: a data-parallel PyTorch trainer whose embedding rows are partitioned over MPI ranks and served by RMA."""

import os
import sys


def put_current_folder_last():
    """So that a file random.py or horovod.py in the current folder, which `python -m hetmpi.train` puts first on the
    path, does not take the place of a module that hetmpi imports."""
    is_module = sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv and not sys.flags.safe_path
    if is_module and sys.orig_argv[sys.orig_argv.index("-m") + 1].split(".")[0] == "hetmpi":
        sys.path.append(sys.path.pop(0))


def put_current_folder_before_packages():
    """Called when hetmpi's imports are done: models of one's own are found before packages of their name, and Python's
    own modules before both."""
    if sys.path[-1] == os.getcwd():
        library = os.path.dirname(os.__file__)
        first = [path for path in sys.path if path in (library, os.path.join(library, "lib-dynload"))]
        sys.path[:] = [*first, sys.path[-1], *(path for path in sys.path[:-1] if path not in first)]


put_current_folder_last()  # before any other import

from importlib import import_module  # noqa: E402
from pathlib import Path  # noqa: E402

__version__ = "0.1.0"

PLACES = {  # public name -> the module that defines it
    "EmbeddingBag": "table.bag",
    "EmbeddingTable": "table.table",
    "RowOptimizer": "table.optim",
    "DenseOptimizer": "dense",
    "MpiReductions": "reductions",
    "TorchReductions": "reductions",
    "Schedule": "schedule",
    "Staleness": "table.staleness",
    "CacheSettings": "table.cache",
    "FileStore": "owner.row_files",
    "GpuStore": "owner.gpu_rows",
    "look_up": "layers",
    "World": "world.world",
    "launch": "world.launch",
    "UserError": "errors",
    "NotFinite": "errors",
    "Checkpoints": "checkpoint.checkpoints",
    "Position": "checkpoint.checkpoints",
}
__all__ = list(PLACES)


def __getattr__(name: str):
    """A name in PLACES. Imports its module, which may import torch or MPI, on first use."""
    if name == "_C":  # `from hetmpi import _C` asks here before it imports the core
        return import_core()
    if name not in PLACES:
        raise AttributeError(f"module 'hetmpi' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"hetmpi.{PLACES[name]}"), name)
    return value


def import_core():
    """The C++ core. Raises MissingLibrary where it is not compiled for this Python, as one line."""
    try:
        return import_module("hetmpi._C")
    except ModuleNotFoundError as error:
        from hetmpi.errors import MissingLibrary, show_in_one_line

        sys.excepthook = show_in_one_line
        raise MissingLibrary(
            f"{sys.executable} has no compiled core of hetmpi ({Path(__file__).parent}): activate the environment of "
            "./run.sh setup (. .venv/bin/activate), which compiles it, or pip install the checkout"
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *PLACES])
