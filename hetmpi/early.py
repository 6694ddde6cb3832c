"""EarlyRows: rows of other nodes fetched while the step before their batch is computed."""

from __future__ import annotations

import numpy as np

from hetmpi.owners import Owners
from hetmpi.partition import Route


class EarlyRows:
    """The rows of one batch that are not in the cache, posted by prefetch and taken by the next read.

    Clocks are posted with them. At the read the owners' clocks tell which rows have moved on by more than the bound; those,
    and rows to which this rank has pushed since, are fetched again.

    route    of the whole batch
    posted   which of its keys were asked for, (n,) bool
    """

    def __init__(self, owners: Owners, route: Route, posted: np.ndarray, arrays: tuple[str, ...], in_order: bool):
        """arrays: weight, and state where lines want it. in_order: owners write meanwhile, so the clocks must be here
        before the rows are asked for, as MPI does not order gets: the rows are then at least as new as their clocks."""
        self.owners, self.route, self.posted = owners, route, posted
        part = route.where(posted)
        self._clock = owners.post("clock", part, "early")
        if in_order:
            owners.window.flush()
        self._rows = [owners.post(array, part, "early") for array in arrays]
        self._has_landed = False
        self._pushed: list[np.ndarray] = []  # keys

    def land(self):
        """Waits for what was posted: its buffers are MPI's until then."""
        if not self._has_landed:
            self.owners.window.flush()
            self._has_landed = True

    def clocks(self) -> np.ndarray:
        """The clocks of the rows when they were fetched, (n,) int32, 0 for keys not asked for. REQUIRES: land()."""
        out = np.zeros(len(self.posted), np.int32)
        self._clock.place(out)
        return out

    def note_pushed(self, keys: np.ndarray):
        """This rank pushed gradients of these keys (m,) int64 after the rows were posted."""
        self._pushed.append(keys)

    def untouched(self, keys: np.ndarray) -> np.ndarray:
        """Which keys (n,) of the batch this rank has not pushed since: (n,) bool."""
        if not self._pushed:
            return np.ones(len(keys), bool)
        return ~np.isin(keys, np.concatenate(self._pushed))

    def place(self, outs: list[np.ndarray]):
        """Copies what landed to its positions, one out per array posted. REQUIRES: land()."""
        for rows, out in zip(self._rows, outs):
            rows.place(out)
