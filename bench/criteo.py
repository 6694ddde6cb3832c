"""Raw Criteo text for `bench staleness`: small enough for memory, split anew for every seed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from hetmpi.data import criteo
from hetmpi.data.batch import Samples, concatenate
from hetmpi.errors import UserError


class Resplit:
    """Implements hetmpi/data/source.py, Source: all samples of a file, in an order drawn from the seed; the last
    `num_valid` are held out."""

    def __init__(self, world, path: str, seed: int, num_valid: int):
        """Collective."""
        cache = Path(tempfile.gettempdir()) / "hetmpi-bench-criteo"
        source = criteo.Criteo(path, seed, cache=str(cache))
        source.prepare(world.rank, world.size, world.comm.Barrier, lambda line: None)
        parts = [source.train(0, source.num_train), source.valid(0, source.num_valid)]
        self._samples = concatenate(parts)
        self._order = np.random.default_rng(seed).permutation(len(self._samples.label))
        self.num_train, self.num_valid = len(self._order) - num_valid, num_valid
        if self.num_train < 1:
            raise UserError(f"bench staleness: eval_samples must be below {len(self._order):,}, got {num_valid:,}")
        self.num_rows, self.num_fields, self.num_dense = source.num_rows, source.num_fields, source.num_dense
        self.field_rows = source.field_rows

    def train(self, start: int, stop: int) -> Samples:
        return self._samples[self._order[np.arange(start, stop) % self.num_train]]

    def valid(self, start: int, stop: int) -> Samples:
        return self._samples[self._order[self.num_train + np.arange(start, stop)]]
