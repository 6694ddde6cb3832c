"""Source: where samples come from. Any class that keeps this protocol is one; Hydra builds the one that
conf/data/*.yaml names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Source(Protocol):
    """What the trainer asks of every source; a task asks for more (hetmpi/tasks/ctr.py, ClickSource).

    name       for messages
    num_train  samples of one epoch; None: the stream never repeats
    num_valid  held-out samples

    `prepare` comes first; the attributes are valid after it."""

    name: str
    num_train: int | None
    num_valid: int

    def prepare(self, rank: int, size: int, barrier: Callable[[], None]) -> None:
        """Makes the data ready, rank `rank` of `size` doing its share. Collective: `barrier` waits for all ranks."""

    def train(self, start: int, stop: int) -> Any:
        """The samples at positions [start, stop) of the endless training stream, of the type that the task takes: a
        function of these and the seed alone, never of the rank count. Thread-safe."""

    def valid(self, start: int, stop: int) -> Any:
        """Held-out samples [start, stop), stop <= num_valid. Thread-safe."""


def check_slice(start: int, stop: int, num_samples: int | None) -> None:
    """Raises IndexError unless 0 <= start <= stop <= num_samples; None admits any stop."""
    if not 0 <= start <= stop or (num_samples is not None and stop > num_samples):
        limit = "" if num_samples is None else f" <= {num_samples:,}"
        raise IndexError(f"sample positions must keep 0 <= start <= stop{limit}, got [{start}, {stop})")
