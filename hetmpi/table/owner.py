"""SspOwner: the owner's side at s >= 1. Applies pushes as they come, and says which rows a pull of another node
needs."""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.table.store import ShardStore


class SspOwner:
    """A push applier (cpp/owner/push_applier.h), whose thread applies the rings' pushes while this rank computes; and
    hetmpi/comm/transport.py, Owner."""

    def __init__(self, store: ShardStore, rule: _C.RowOptimizer, arrays: tuple[str, ...]):
        """rule: the row optimizer, a copy of which it keeps. arrays: which a reply has of each row, weight or weight
        and state."""
        self._store, self._arrays = store, arrays
        self._applier = _C.PushApplier(store.rings, *store.arrays, rule)
        self.set_step, self.drain = self._applier.set_step, self._applier.drain
        self.gather, self.stop = self._applier.gather, self._applier.stop

    def start(self, origins):
        """Begins to apply what these ranks put into their rings here."""
        self._applier.start(list(origins))

    def push(self, rows: np.ndarray, sums: np.ndarray, order: np.ndarray, clocks: np.ndarray, counts: np.ndarray):
        """Applies this rank's own sums: rows (m,), whose sums, clocks and counts are entries order (m,) of the
        arrays."""
        self._applier.apply(rows, sums, order, clocks, counts)

    def apply(self, rows: np.ndarray, sums: np.ndarray, clocks: np.ndarray, counts: np.ndarray):
        self.push(rows, sums, np.arange(len(rows)), clocks, counts)

    def reply(self, rows: np.ndarray, known: np.ndarray, bound: int) -> tuple[np.ndarray, list[np.ndarray]]:
        clocks = np.empty(len(rows), np.int32)
        _C.gather_clocks(self._store.clock, rows, clocks, np.arange(len(rows)))  # before the rows, which may be newer
        wanted = rows[self.wants(known, clocks, bound)]
        arrays = [getattr(self._store, name) for name in self._arrays]
        values = [np.empty((len(wanted), array.shape[1]), np.float32) for array in arrays]
        for array, value in zip(arrays, values):
            self.gather(array, wanted, value, np.arange(len(wanted)))
        return clocks, values

    @staticmethod
    def wants(known: np.ndarray, clocks: np.ndarray, bound: int) -> np.ndarray:
        """HET's second condition, c_g <= c_c + s, at the owner: which rows a reply holds, (m,) bool. known (m,) int32:
        c_c of the asker's lines, NO_LINE for none; clocks (m,) int32: c_g."""
        if bound == _C.UNBOUNDED:
            return known == _C.NO_LINE
        return (known == _C.NO_LINE) | (clocks > known.astype(np.int64) + bound)
