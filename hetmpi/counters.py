"""Counters: operations and traffic of one rank's table, and lags of its reads. cpp/counters.h counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np


@dataclass
class Counters:
    """Operations of one rank's table since its creation. Bytes are those sent between ranks.

    hits         keys read from the cache
    stale        keys found in the cache but fetched again, because they were older than the bound allows
    misses       keys that may be cached but were not; keys that may not be cached are not counted
    validated    clocks requested from owners to distinguish hits from stale lines
    evicted      evicted lines
    pushed       gradient sums sent to owners, including this rank
    clock_bytes, row_bytes, push_bytes  clocks and rows (with their mean squares) fetched, gradients sent
    pages_read, pages_written  of this rank's rows on disk (table.store=file); disk_steps: steps in which this rank's
                 main thread has waited for a disk
    """

    hits: int = 0
    stale: int = 0
    misses: int = 0
    validated: int = 0
    evicted: int = 0
    pushed: int = 0
    clock_bytes: int = 0
    row_bytes: int = 0
    push_bytes: int = 0
    pages_read: int = 0
    pages_written: int = 0
    disk_steps: int = 0

    @property
    def pulled_bytes(self) -> int:
        return self.clock_bytes + self.row_bytes

    @property
    def hit_rate(self) -> float | None:
        """Hits as a share of the keys that may be cached; None if there were none."""
        return self._share(self.hits)

    @property
    def stale_rate(self) -> float | None:
        """Stale lines as a share of the keys that may be cached; None if there were none."""
        return self._share(self.stale)

    def _share(self, part: float) -> float | None:
        whole = self.hits + self.stale + self.misses
        return part / whole if whole else None

    def as_array(self) -> np.ndarray:
        """All fields in order, (n,) int64."""
        return np.array([getattr(self, field.name) for field in fields(self)], np.int64)

    @classmethod
    def of_array(cls, values: np.ndarray) -> Counters:
        """The inverse of as_array."""
        return cls(*map(int, values))

    def since(self, before: Counters) -> Counters:
        """The counts since `before`."""
        return Counters.of_array(self.as_array() - before.as_array())

    def copy(self) -> Counters:
        return Counters(**asdict(self))


def lag_at(lags: np.ndarray, share: float, bound: int | None = None) -> int | None:
    """Quantile of lags: upper bound of the bin that contains the `share` quantile of the reads, at most `bound`; lags
    (32,) int64 as counted by EmbeddingTable. None if nothing was read."""
    if not lags.sum():
        return None
    bin_number = int(np.searchsorted(np.cumsum(lags), share * lags.sum()))
    largest = (1 << bin_number) - 1
    return largest if bound is None else min(largest, bound)


def trimmed(lags: np.ndarray) -> list[int] | None:
    """A histogram of lags without trailing empty bins; None if nothing was read."""
    filled = np.flatnonzero(lags)
    return lags[: filled[-1] + 1].tolist() if filled.size else None
