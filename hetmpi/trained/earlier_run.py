"""The run before, with which a new run begins on new data (init_from): its columns, rows, dense layers and optimizer
state."""

from __future__ import annotations

from pathlib import Path

import torch

from hetmpi.checkpoint.checkpoints import Checkpoints
from hetmpi.checkpoint.manifest import read_manifest
from hetmpi.data.source import Source
from hetmpi.data.tabular import Encoder
from hetmpi.data.tabular.grown import earlier_keys
from hetmpi.trained.saved_model import check_data, dense_state, encoder_of

ENTRY = "init_from"  # in a manifest: the path of the checkpoint with which its run has begun


def encoder_before(resumed: Path | None, init_from: Path | None) -> Encoder | None:
    """The encoder with which the data of a run begin: that of the checkpoint that it resumes, if its run began with
    another, or of `init_from`; None for a run on its own, and for data that are no tables."""
    path = init_from if resumed is None else resumed
    if path is None or (resumed is not None and ENTRY not in read_manifest(resumed)):
        return None
    manifest = read_manifest(path)
    found = encoder_of(path, manifest, dense_state(path, manifest), has_ids=False)
    return found if isinstance(found, Encoder) else None


def begin(
    path: Path, checkpoints: Checkpoints, tables, source: Source, model: torch.nn.Module,
    dense,
) -> int:  # fmt: skip
    """Fills tables, dense layers and their optimizer `dense` from the checkpoint `path`. tables: as they are saved.
    Returns the number of rows that are new. Collective. Raises UserError for a checkpoint of other tables, another
    model, or of other data that are no tables of columns."""
    before, moved = encoder_before(None, path), {}
    if before is None:
        check_data(path, source)
    else:
        found = earlier_keys(before, source.encoder)
        moved = {"" if len(source.encoder.tables) == 1 else name: keys for name, keys in found.items()}
    checkpoints.load(path, tables, model, dense, moved)
    return 0 if before is None else source.encoder.num_rows - before.num_rows
