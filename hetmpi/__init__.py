"""hetmpi: a data-parallel PyTorch trainer whose embedding rows are partitioned over MPI ranks and served by RMA."""

__version__ = "0.1.0"


def __getattr__(name: str):
    """EmbeddingBag, which brings torch and MPI along, when it is asked for."""
    if name == "EmbeddingBag":
        from hetmpi.embedding_bag import EmbeddingBag

        return EmbeddingBag
    raise AttributeError(f"module 'hetmpi' has no attribute {name!r}")
