"""hetmpi: a data-parallel PyTorch trainer whose embedding rows are partitioned over MPI ranks and served by RMA."""

from importlib import import_module

__version__ = "0.1.0"

PLACES = {  # public name -> the module that defines it
    "EmbeddingBag": "table.bag",
    "EmbeddingTable": "table.table",
    "RowOptimizer": "table.optim",
    "DenseOptimizer": "dense",
    "Schedule": "table.optim",
    "Staleness": "table.cache",
    "CacheSettings": "table.cache",
    "look_up": "layers",
    "World": "comm.world",
    "launch": "comm.launch",
    "UserError": "errors",
    "NotFinite": "errors",
    "Checkpoints": "checkpoint.checkpoints",
    "Position": "checkpoint.checkpoints",
}
__all__ = list(PLACES)


def __getattr__(name: str):
    """A name in PLACES. Imports its module, which may import torch or MPI, on first use."""
    if name not in PLACES:
        raise AttributeError(f"module 'hetmpi' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"hetmpi.{PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *PLACES])
