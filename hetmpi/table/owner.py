"""SspOwner: the owner's side at s >= 1. Applies pushes as they arrive and selects the rows that a reply contains."""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.store import ShardStore

LEAD = 3  # steps by which another rank may be ahead


class SspOwner:
    """A push applier (cpp/owner/push_applier.h), whose thread applies pushes from the rings while this rank computes;
    implements hetmpi/comm/transport.py, Owner."""

    def __init__(self, store: ShardStore, rule: _C.RowOptimizer, arrays: tuple[str, ...]):
        """rule: the row optimizer, of which it keeps a copy. arrays: the arrays that a reply contains of each row,
        weight or weight and mean_square."""
        self._store, self._arrays = store, arrays
        self._applier = _C.PushApplier(store.rings, *store.arrays, store.mean_square, rule)
        self.drain, self.gather, self.stop = self._applier.drain, self._applier.gather, self._applier.stop
        self.apply = self._applier.apply_record

    def start(self, origins):
        """Starts to apply pushes of these ranks from their rings."""
        self._applier.start(list(origins))

    def set_step(self, optimizer: RowOptimizer, step: int):
        """The step of this rank, counted from 0. Other ranks may be ahead by LEAD steps."""
        self._applier.set_step([optimizer.lr_at(step + ahead) for ahead in range(LEAD + 1)], step + 1)

    def push(self, rows: np.ndarray, sums: np.ndarray, order: np.ndarray, clocks, counts, steps):
        """Applies this rank's own gradient sums: rows (m,); their sums, clocks, counts and steps are entries order (m,)
        of the arrays, which are as in Message."""
        self._applier.apply(rows, sums, order, clocks, counts, steps)

    def reply(self, rows: np.ndarray, known: np.ndarray, bound: int) -> tuple[np.ndarray, list[np.ndarray]]:
        clocks = np.empty(len(rows), np.int32)
        _C.gather_clocks(self._store.clock, rows, clocks, np.arange(len(rows)))  # first: rows must not be older
        wanted = rows[self.wants(known, clocks, bound)]
        arrays = [getattr(self._store, name) for name in self._arrays]
        values = [np.empty((len(wanted), array.shape[1]), np.float32) for array in arrays]
        for array, value in zip(arrays, values):
            self.gather(array, wanted, value, np.arange(len(wanted)))
        return clocks, values

    @staticmethod
    def wants(known: np.ndarray, clocks: np.ndarray, bound: int) -> np.ndarray:
        """HET's second condition, c_g <= c_c + s, evaluated at the owner: mask of the rows that a reply contains, (m,)
        bool. known (m,) int32: c_c of the requester's lines, NO_LINE for keys without one; clocks (m,) int32: c_g."""
        if bound == _C.UNBOUNDED:
            return known == _C.NO_LINE
        return (known == _C.NO_LINE) | (clocks > known.astype(np.int64) + bound)
