"""hetmpi: a data-parallel PyTorch trainer whose embedding rows are partitioned over MPI ranks and served by RMA."""

from importlib import import_module

__version__ = "0.1.0"

PLACES = {  # what a program of one's own needs -> the module that has it
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
    """One of PLACES, whose module, which brings torch or MPI along, is imported when it is asked for."""
    if name not in PLACES:
        raise AttributeError(f"module 'hetmpi' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"hetmpi.{PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *PLACES])
