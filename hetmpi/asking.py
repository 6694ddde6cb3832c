"""What is asked of other nodes ahead of a read at staleness s >= 1, so that it travels while the rank computes.

Two ways, of the same calls. A Reading passes them in this order:
    ask      when the batch is announced, or at the read: which of its lines are too old, which rows are missing?
    order    in the write before the read, or at the read: what can be done for it by then
    answer   at the read: clocks of the keys of other nodes, and which rows come (`posted`)
    place    at the read: those rows
or it is forgotten after any of them. `bound` is the staleness in force.
"""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.inbox import NO_KEYS, Outbox
from hetmpi.metrics import Counters
from hetmpi.owners import Owners
from hetmpi.reading import Reading

NO_SLOTS = np.empty(0, np.int64)


class RmaAsking:
    """One-sided: clocks are fetched when asked for; they are here by the write, which says what rows are needed and starts
    fetching them. Owners have no part in it.

    takes_sums   whether questions take along the sums handed out before"""

    takes_sums = False

    def __init__(self, cache, owners: Owners, outbox: Outbox, counters: Counters, arrays: tuple[str, ...]):
        """cache: the table's (hetmpi/cache.py). arrays: what a line is made of, weight or weight and state."""
        self._cache, self._owners, self._outbox, self._counters = cache, owners, outbox, counters
        self._window, self._arrays = owners.window, arrays

    def beside(self, reading: Reading, last: Reading, bound: int) -> np.ndarray:
        """Keys (m,) int64 to ask for along with `reading`: those of `last`, still to be written, whose sums that write may
        make due. Such a sum goes to its owner when its line has been renewed; else a line that is too old as well would have
        to wait until the owner has taken the sum in."""
        if bound == _C.UNBOUNDED:
            return NO_KEYS
        is_far = last.is_far[: last.num]
        keys = last.array[: last.num][is_far & self._cache.counts_from(last.slots[: last.num], bound)]
        return keys[~_C.contained(keys, reading.array)]

    def ask(self, reading: Reading, last: Reading | None, bound: int):
        """Starts fetching clocks, and how much the owners have taken in. A clock may come from before sums that are on their
        way now were taken in. last: the batch that is written in between, if any. REQUIRES: reading.slots."""
        reading.in_transit = np.concatenate([self._outbox.in_transit(), self._cache.handed_out()])
        far = reading.is_far
        if bound == _C.UNBOUNDED:
            far = far & (reading.slots < 0)
        reading.ask_clocks(self._owners, far, "early")
        self._counters.clock_bytes += 4 * int(far.sum())
        self._outbox.ask_tails()

    def idle(self, bound: int):
        """Nothing is left to do: sums go with the write."""

    def order(self, reading: Reading, bound: int) -> np.ndarray:
        """Takes the clocks and starts fetching the rows that the read will need, but those to which sums of this rank are on
        their way. Returns lines that will be renewed, (m,) int64: their sums wait for that."""
        self._window.flush()
        self._outbox.hear_tails()
        self._outbox.publish()
        reading.asked_clocks(reading.clocks)
        num, is_stale = reading.num, np.zeros(len(reading.array), bool)
        self._cache.validate(reading.slots, reading.clocks, bound, is_stale, counts_lags=False)
        needed = reading.asked & ((reading.slots < 0) | is_stale)
        if len(needed) > num:
            needed[num:] &= self._cache.counts_from(reading.slots[num:], bound + 1)
        reading.in_transit = np.concatenate([reading.in_transit, self._cache.handed_out()])
        if len(reading.in_transit):
            needed[needed] = ~_C.contained(reading.array[needed], reading.in_transit)
        reading.post_rows(self._owners, needed, self._arrays, "early")
        self._counters.row_bytes += self._owners.row_bytes(self._arrays) * int(needed.sum())
        return reading.slots[needed & (reading.slots >= 0)]

    def answer(self, reading: Reading):
        """Nothing is left to do: the clocks came before the rows were ordered."""

    def judge(self, reading: Reading, is_stale: np.ndarray):
        """What the cache says of lines (n,) bool holds; those whose rows were ordered are renewed."""
        is_stale |= reading.posted & (reading.slots >= 0)

    def place(self, reading: Reading, rows: np.ndarray, states: np.ndarray):
        """Puts the rows posted into rows (n, dim), their states into states (n, state_dim)."""
        if reading.posted.any():
            self._window.flush()
            reading.place_rows(rows, states)

    def forget(self, reading: Reading, bound: int):
        """Makes nothing of what was asked."""
        self._window.flush()
        if reading.is_ordered:  # sums that waited for their lines to be renewed
            self._cache.take_due(reading.slots, bound, held=NO_SLOTS)
        reading.only_batch()

    def flush(self, bound: int):
        """Nothing is left to do: what was handed out is sent."""

    def close(self):
        """Nothing is left to do: the table flushes the window."""
