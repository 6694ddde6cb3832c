"""Reading: one batch of keys on its way through prefetch, read and write, and what is known of it so far."""

from __future__ import annotations

import numpy as np
import torch

from hetmpi import _C
from hetmpi.inbox import NO_KEYS
from hetmpi.owners import FarRows, Owners
from hetmpi.partition import Route

MOST_AHEAD = 4  # batches announced and not read yet


class Reading:
    """A batch of keys, and after them the keys of lines that a read renews beside (`also`).

    keys            the tensor, which may be filled anew later
    is_far          which keys ranks of other nodes own: (n,) bool
    num             how many it has; the arrays below have n >= num entries, the first num for the batch
    array, route    all keys (n,) int64, and their owners; batch_route: the owners of the batch alone
    slots           line of each key, (n,) int64, -1 for none
    clocks          its owner's clock when it was read, (n,) int32
    is_found        whether slots and clocks are those of a read that no other read or write has followed
    asked, posted   keys whose clocks, and whose rows, other nodes were asked for early: (n,) bool, or None before
    is_ordered      s >= 1: whether order() of hetmpi/asking.py is done
    in_transit      keys whose sums were on their way to owners when clocks were asked for, (m,) int64
    """

    def __init__(self, keys: torch.Tensor, array: np.ndarray, partition: _C.Partition, far_ranks: np.ndarray, empty=np.empty):
        """far_ranks: ranks of other nodes, (size,) bool. empty(n, dtype): memory for what the cache reads and writes."""
        self.keys, self.num, self._partition, self._far_ranks, self._empty = keys, len(array), partition, far_ranks, empty
        self.batch_route = Route.of_keys(partition, array)
        self._over(array, self.batch_route)

    def _over(self, array: np.ndarray, route: Route):
        self.array, self.route, self.is_far = self._empty(len(array), np.int64), route, route.held_by(self._far_ranks)
        self.slots, self.clocks = self._empty(len(array), np.int64), self._empty(len(array), np.int32)
        self.array[:], self.slots[:], self.clocks[:] = array, -1, 0
        self.is_found = False
        self.asked = self.posted = None
        self.is_ordered = False
        self.in_transit = NO_KEYS
        self._clocks: FarRows | None = None
        self._rows: list[FarRows] = []

    def is_of(self, keys: torch.Tensor) -> bool:
        return self.keys is keys and np.array_equal(self.array[: self.num], keys.contiguous().numpy())

    def also(self, keys: np.ndarray):
        """Adds keys (m,) int64 that are not in the batch. REQUIRES: nothing asked."""
        if len(keys):
            array = np.concatenate([self.array[: self.num], keys])
            self._over(array, Route.of_keys(self._partition, array))

    def only_batch(self):
        """Forgets all but the batch. REQUIRES: window.flush() since anything was asked."""
        self._over(self.array[: self.num], self.batch_route)

    def ask_clocks(self, owners: Owners, asked: np.ndarray, use: str):
        """Starts fetching the clocks of the chosen keys (n,) bool, which other nodes own. use: see Owners.post."""
        self.asked = asked
        self._clocks = owners.post("clock", self.route.where(asked), use)

    def asked_clocks(self, out: np.ndarray):
        """Copies the clocks asked for to their places in out (n,) int32. REQUIRES: window.flush() since."""
        self._clocks.place(out)

    def post_rows(self, owners: Owners, posted: np.ndarray, arrays: tuple[str, ...], use: str):
        """Starts fetching the rows of the chosen keys (n,) bool, which other nodes own. arrays: weight, or weight and state.

        Where owners write meanwhile their clocks have to be here before: MPI does not order gets, and a row must not be
        older than its clock."""
        self.posted = posted
        route = self.route.where(posted)
        self._rows = [owners.post(array, route, use) for array in arrays]

    def place_rows(self, *outs: np.ndarray):
        """Copies the rows posted to their places, one out (n, width) per array. REQUIRES: window.flush() since."""
        for rows, out in zip(self._rows, outs):
            rows.place(out)
