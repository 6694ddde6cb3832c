"""hetmpi: a data-parallel PyTorch trainer whose embedding rows are partitioned over MPI ranks and served by RMA."""

import sys
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

PLACES = {  # public name -> the module that defines it
    "EmbeddingBag": "table.bag",
    "EmbeddingTable": "table.table",
    "RowOptimizer": "table.optim",
    "DenseOptimizer": "dense",
    "MpiReductions": "reductions",
    "Schedule": "schedule",
    "Staleness": "table.staleness",
    "CacheSettings": "table.cache",
    "FileStore": "owner.row_files",
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
