"""EarlyRows: rows of other nodes fetched while the step before their batch is computed."""

from __future__ import annotations

import numpy as np

from hetmpi.owners import FarRows, Owners
from hetmpi.partition import Route


class EarlyRows:
    """The rows of one batch that are not in the cache, posted by prefetch and taken by the next read.

    Their clocks come first. At the read the owners' clocks tell which rows have moved on by more than the bound; those, and
    rows to which this rank has pushed since, are fetched again.

    posted   which of its keys were asked for, (n,) bool
    """

    def __init__(self, owners: Owners, route: Route, posted: np.ndarray, arrays: tuple[str, ...]):
        """Posts the clocks. arrays: weight, and state where lines want it."""
        self.owners, self.posted, self.arrays = owners, posted, arrays
        self._part = route.where(posted)
        self._clock = owners.post("clock", self._part, "early")
        self._rows: list[FarRows] | None = None
        self._has_landed = False
        self._pushed: list[np.ndarray] = []  # keys

    def post_rows(self, clocks_first: bool):
        """Posts the rows, unless that is done. clocks_first: owners write meanwhile, and MPI does not order gets, so the
        clocks have to be here before: a row is then at least as new as its clock."""
        if self._rows is None:
            if clocks_first:
                self.owners.window.flush()
            self._rows = [self.owners.post(array, self._part, "early") for array in self.arrays]

    def land(self):
        """Waits for what was posted: its buffers are MPI's until then."""
        if not self._has_landed:
            self.post_rows(clocks_first=True)
            self.owners.window.flush()
            self._has_landed = True

    def drop(self):
        """Waits for what was posted, which nobody will use."""
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
