"""Loader: makes a rank's batches in advance in threads; Lookahead: keeps some of them to announce. Threads, not
processes: a fork after MPI has started is unsafe, and numpy and hetmpi._C release the interpreter lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from hetmpi.data.batch import to_batch
from hetmpi.spans import Spans


class Loader:
    """Iterates over the batches of steps [first_step, last_step), once, in order.

    The global batch of the first step is stream positions [first_sample, first_sample + size * batch_size), and each
    further step continues there: with the default first_sample, step t is [t * size * batch_size, (t + 1) * size *
    batch_size). Rank r takes the r-th slice of batch_size samples. So the samples of a step do not depend on the number
    of ranks that share them.

    An exception in making a batch is raised at its step. Leaving the loop early, `close` and the end of a `with` block
    stop the threads, after the batches in the making are done.
    """

    def __init__(
        self,
        train: Callable,
        rank: int,
        size: int,
        batch_size: int,
        first_step: int,
        last_step: int,
        threads: int = 1,
        prefetch: int = 2,
        make: Callable = to_batch,
        first_sample: int | None = None,
    ):
        """train: the `train` method of a data set. threads: number of batches made concurrently. prefetch: number of
        batches made, or in the making, in addition to the current one. make: thread-safe function from samples to a
        batch. Raises ValueError for an invalid count."""
        for name, value in (("batch_size", batch_size), ("threads", threads), ("prefetch", prefetch)):
            if value < 1:
                raise ValueError(f"Loader: {name} must be at least 1, got {value}")
        if not 0 <= rank < size:
            raise ValueError(f"Loader: rank must lie in [0, {size}), got {rank}")
        self.train, self.rank, self.size, self.batch_size, self.prefetch = train, rank, size, batch_size, prefetch
        self.make, self.first_sample = make, first_step * size * batch_size if first_sample is None else first_sample
        self.steps = range(first_step, last_step)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hetmpi-loader")

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator:
        ahead = deque()
        try:
            for step in self.steps:
                ahead.append(self._pool.submit(self._make, step))
                if len(ahead) > self.prefetch:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            self.close()

    def close(self) -> None:
        """Stops the threads and drops batches that are not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _make(self, step: int):
        start = self.first_sample + ((step - self.steps.start) * self.size + self.rank) * self.batch_size
        return self.make(self.train(start, start + self.batch_size))


class Lookahead:
    """Iterates over batches, with the next `depth` ones ready to be announced. The batch of a step for which
    is_barrier(step) is announced to nobody, and none after it before that step."""

    def __init__(
        self, batches: Iterable, depth: int, spans: Spans, first_step: int = 0, is_barrier=lambda step: False,
        complete=lambda batch, step: batch,
    ):  # fmt: skip
        """complete(batch, step): called for each batch when it is taken from `batches`; returns the batch."""
        self.batches, self.depth, self.spans, self.is_barrier = iter(batches), depth, spans, is_barrier
        self._later, self._next_step, self._complete = deque(), first_step, complete

    def __iter__(self):
        while True:
            batch = self._later.popleft() if self._later else self._load()
            if batch is None:
                return
            yield batch

    def announced(self):
        """Batches that have come within `depth` of the current one since the last call."""
        while len(self._later) < self.depth and not self.is_barrier(self._next_step):
            batch = self._load()
            if batch is None:
                return
            self._later.append(batch)
            yield batch

    def _load(self):
        step, self._next_step = self._next_step, self._next_step + 1
        with self.spans("load"):
            batch = next(self.batches, None)
        return None if batch is None else self._complete(batch, step)
