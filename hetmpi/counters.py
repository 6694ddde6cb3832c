"""Counters: what one rank's table did while it was used; and how late its reads were."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np


@dataclass
class Counters:
    """What one rank's table did since it was made. Bytes are those that cross between ranks.

    hits         keys read from the cache
    stale        keys found in the cache, but fetched again: older than the bound admits
    misses       keys the cache may keep but did not hold; keys it may not keep count nowhere
    validated    clocks asked of owners to tell hits from stale lines
    evicted      lines that made room for others
    pushed       sums of gradients sent to owners, this rank among them
    clock_bytes, row_bytes, push_bytes  clocks and rows (with optimizer state) fetched, gradients sent
    reduced_bytes  what an allreduce of the replicated rows' gradients sends at the least, 2 (P - 1) / P of them on P
                   ranks
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
    reduced_bytes: int = 0

    @property
    def pulled_bytes(self) -> int:
        return self.clock_bytes + self.row_bytes

    @property
    def hit_rate(self) -> float | None:
        """Share of the keys that the cache may keep; None if there were none."""
        return self._share(self.hits)

    @property
    def stale_rate(self) -> float | None:
        """As hit_rate, of keys found too old."""
        return self._share(self.stale)

    def _share(self, part: float) -> float | None:
        whole = self.hits + self.stale + self.misses
        return part / whole if whole else None

    def as_array(self) -> np.ndarray:
        """All fields in their order, (n,) int64."""
        return np.array([getattr(self, field.name) for field in fields(self)], np.int64)

    @classmethod
    def of_array(cls, values: np.ndarray) -> Counters:
        """The inverse of as_array."""
        return cls(*map(int, values))

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`."""
        return Counters.of_array(self.as_array() - before.as_array())

    def copy(self) -> Counters:
        return Counters(**asdict(self))


def lag_at(lags: np.ndarray, share: float, bound: int | None = None) -> int | None:
    """The largest lag of the bin below or in which `share` of the reads lie, at most `bound`; lags (32,) int64 as
    EmbeddingTable counts them. None if nothing was read."""
    if not lags.sum():
        return None
    bin_number = int(np.searchsorted(np.cumsum(lags), share * lags.sum()))
    largest = (1 << bin_number) - 1
    return largest if bound is None else min(largest, bound)


def trimmed(lags: np.ndarray) -> list[int] | None:
    """A histogram of lags without the empty bins at its end; None if nothing was read."""
    filled = np.flatnonzero(lags)
    return lags[: filled[-1] + 1].tolist() if filled.size else None
