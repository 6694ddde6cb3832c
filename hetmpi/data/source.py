"""Source: the protocol of data sets. Any class that implements it is a source; Hydra builds the class that
conf/data/*.yaml names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from hetmpi.data.batch import Samples, concatenate

SAMPLE_SEED = 2024  # fixed, so that all runs are evaluated on the same samples
READ_SAMPLES = 1 << 16  # at once


class Source(Protocol):
    """Requirements of the trainer on every source; a task has further ones (hetmpi/tasks/ctr.py, ClickSource).

    name       for messages
    num_train  samples of one epoch; None: the stream never repeats
    num_valid  held-out samples
    is_valid_random  whether the first held-out samples are a random sample of all (optional)
    files()    paths of the files that all ranks read, which must be the same (optional)
    contents   name -> hash of what was read, which must be the same on all ranks (optional)

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


def held_out(source: Source, num: int) -> Callable[[int, int], Any]:
    """A function as source.valid, of `num` held-out samples that are a random sample of all, the same in every run. Of
    samples of a type of one's own the first ones."""
    if num == source.num_valid or getattr(source, "is_valid_random", False):
        return source.valid
    if not isinstance(source.valid(0, 0), Samples):
        return source.valid
    places = np.sort(np.random.default_rng(SAMPLE_SEED).choice(source.num_valid, num, replace=False, shuffle=False))

    def valid(start: int, stop: int) -> Samples:
        parts = (source.valid(int(some[0]), int(some[-1]) + 1)[some - some[0]] for some in near(places[start:stop]))
        return concatenate([source.valid(0, 0), *parts])

    return valid


def near(places: np.ndarray) -> Iterator[np.ndarray]:
    """Ascending places (n,) in parts that lie within READ_SAMPLES."""
    if len(places):
        yield from np.split(places, np.flatnonzero(np.diff(places // READ_SAMPLES)) + 1)
