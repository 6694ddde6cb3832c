"""Source: the protocol of data sets. Any class that implements it is a source; Hydra builds the class that
conf/data/*.yaml names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Source(Protocol):
    """Requirements of the trainer on every source; a task has further ones (hetmpi/tasks/ctr.py, ClickSource).

    name       for messages
    num_train  samples of one epoch; None: the stream never repeats
    num_valid  held-out samples

    The attributes are valid after `prepare`."""

    name: str
    num_train: int | None
    num_valid: int

    def prepare(self, rank: int, size: int, barrier: Callable[[], None]) -> None:
        """Prepares the data, rank `rank` of `size` its share. Collective: `barrier` waits for all ranks."""

    def train(self, start: int, stop: int) -> Any:
        """The samples at positions [start, stop) of the endless training stream, of the type that the task expects.
        Depends only on these positions and the seed, never on the number of ranks. Thread-safe."""

    def valid(self, start: int, stop: int) -> Any:
        """Held-out samples [start, stop), stop <= num_valid. Thread-safe."""


def check_slice(start: int, stop: int, num_samples: int | None) -> None:
    """Raises IndexError unless 0 <= start <= stop <= num_samples; None admits any stop."""
    if not 0 <= start <= stop or (num_samples is not None and stop > num_samples):
        limit = "" if num_samples is None else f" <= {num_samples:,}"
        raise IndexError(f"sample positions must satisfy 0 <= start <= stop{limit}, got [{start}, {stop})")
