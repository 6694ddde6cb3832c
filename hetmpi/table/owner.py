"""SspOwner: the owner's side at s >= 1. Applies pushes as they arrive."""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.store import ShardStore

LEAD = 3  # steps by which another rank may be ahead


class SspOwner:
    """A push applier (cpp/owner/push_applier.h), whose thread applies pushes from the rings while this rank
    computes."""

    def __init__(self, store: ShardStore, rule: _C.RowOptimizer):
        """rule: the row optimizer, of which it keeps a copy."""
        self.applier = _C.PushApplier(store.rings, *store.arrays, store.mean_square, store.directory, rule)
        self.drain, self.stop = self.applier.drain, self.applier.stop

    def start(self, rings: list[int]):
        """Starts to apply the pushes in these rings."""
        self.applier.start(rings)

    def set_step(self, optimizer: RowOptimizer, step: int):
        """The step of this rank, counted from 0. Other ranks may be ahead by LEAD steps."""
        self.applier.set_step([optimizer.lr_at(step + ahead) for ahead in range(LEAD + 1)], step + 1)

    def push(self, keys: np.ndarray, sums: np.ndarray, order: np.ndarray, clocks, counts, steps):
        """Applies this rank's own gradient sums of keys (m,): their sums, clocks, counts and steps are entries order
        (m,) of the arrays, which are as in Message."""
        self.applier.apply(keys, sums, order, clocks, counts, steps)
