"""Staleness: HET's bound s."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetmpi import _C
from hetmpi.errors import UserError

LARGEST_BOUND = 1 << 31  # clocks have 32 bits
HARMLESS_BOUND, LARGEST_DRIFT = 10, 1.0  # beyond both up to .0632 of AUC is lost: docs/results.md


@dataclass(frozen=True)
class Staleness:
    """HET's bound s: 0 for synchronous training, n for at most n iterations, None for no bound. anticipate: factor by
    which a rank scales its own update of a cached row, to account for the updates of the other ranks that it has not
    seen yet; None is the number of ranks, 1 is HET's behaviour. drift: a cached row is fetched again, and its gradients
    are pushed, when the errors of its uses since the fetch, estimated from its own updates, add up to more than `drift`
    times the size of a row; 0 is no limit (docs/design_consistency.md, "Drift")."""

    bound: int | None = 0
    anticipate: float | None = None
    drift: float = 0.5

    def __post_init__(self):
        is_integer = isinstance(self.bound, int) and not isinstance(self.bound, bool)
        if self.bound is not None and not (is_integer and 0 <= self.bound < LARGEST_BOUND):
            raise UserError(f"table.staleness must be an integer in [0, 2**31), or null for no bound, got {self.bound}")
        if self.anticipate is not None and not 0 <= self.anticipate < float("inf"):
            raise UserError(f"table.anticipate must be at least 0, got {self.anticipate}")
        if not 0 <= self.drift < float("inf"):
            raise UserError(f"table.drift must be at least 0, got {self.drift}")

    @property
    def advice(self) -> str | None:
        """Advice for a bound that cost .002 of AUC and more in docs/results.md; None for others."""
        if self.bound is not None and self.bound <= HARMLESS_BOUND:
            return None
        if 0 < self.drift <= LARGEST_DRIFT:
            return None
        name = "null" if self.bound is None else self.bound
        return (
            f"table.staleness={name} with table.drift={self.drift:g} may cost more than .002 of AUC (docs/results.md): "
            f"table.drift={Staleness.drift:g} limits that"
        )

    def among(self, world_size: int) -> Staleness:
        """The same for tables of so many ranks: without drift for one, whose rows nobody else moves."""
        return self if world_size > 1 else replace(self, drift=0.0)

    @property
    def is_exact(self) -> bool:
        return self.bound == 0

    @property
    def core_bound(self) -> int:
        """The bound in the encoding of the C++ core."""
        if self.bound is not None:
            return self.bound
        return _C.UNBOUNDED if self.drift == 0 else LARGEST_BOUND - 1  # drift needs the owners' clocks

    def factor(self, world_size: int) -> float:
        """Factor by which a rank scales its own update of a cached row."""
        return float(world_size if self.anticipate is None else self.anticipate)
