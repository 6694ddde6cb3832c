"""Pulls: the batches to be read at s >= 1, and the requests for their rows of other nodes, ahead of the read.

A pull may serve several announced batches (TableContext.batches_per_pull): one message to each server then asks for
the clocks and rows of all their keys, and carries the gradients of as many writes.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from hetmpi import _C
from hetmpi._C import Keys
from hetmpi.table.batch import Batch, Phase, Pull, check_room
from hetmpi.table.client import TableContext
from hetmpi.table.pushes import Pushes
from hetmpi.wire.channel import ANNOUNCED, UNANNOUNCED, Channel


class Pulls:
    """The announced batches in the order of their reads, and their pulls.

    last   the batch of the last read"""

    def __init__(self, context: TableContext, pushes: Pushes, channel: Channel):
        self._context, self._cache, self._pushes, self._channel = context, context.cache, pushes, channel
        self._ahead: deque[Batch] = deque()  # those of one pull first
        self.last: Batch | None = None

    def announce(self, keys: Keys):
        """These keys are requested from other nodes once they are the next ones to be read."""
        check_room(len(self._ahead))
        if self._can_prepare:
            self._ahead.append(self.batch_of(keys))

    @property
    def _can_prepare(self) -> bool:
        """Whether announcing a batch has any use: rows can be fetched ahead, or lines looked up while a GPU
        computes. Without a line a row lacks the mean square that held gradients need."""
        return self._cache.capacity_rows > 0 and (self._cache.computes_beside or not self._context.world.is_one_node)

    def batch_of(self, keys: Keys) -> Batch:
        return Batch.of(keys, self._cache.empty)

    def take(self, keys: Keys) -> Batch:
        """The batch to be read now, with its pull. Drops batches announced earlier that were not read."""
        self.last = self._next(keys)
        if self.last.pull is None:
            Pull.of_one(self.last)
        return self.last

    def _next(self, keys: Keys) -> Batch:
        while self._ahead:
            batch = self._ahead.popleft()
            if batch.keys.are_those_of(keys):
                return batch
            self.drop(batch)
        return self.batch_of(keys)

    @property
    def _phase(self) -> Phase | None:
        """Of the pull of the batch that is read next; None if none is announced."""
        if not self._ahead:
            return None
        pull = self._ahead[0].pull
        return Phase.NEW if pull is None else pull.phase

    def of_write(self, keys: Keys) -> Batch:
        """The batch to be written now: that of the last read, if the keys are the same and it is not written yet.
        Otherwise a new one: a GPU may still read the slots of a batch that is written."""
        is_second = self.last is not None and self.last.phase is Phase.WRITTEN  # without a read in between
        passed = (Phase.SERVED, Phase.READ) if is_second else (Phase.SERVED,)
        if self._phase in passed:  # this write was not foreseen when lines were classified
            self.drop(self._ahead[0])
        is_last = self.last is not None and self.last.phase is Phase.READ and self.last.keys.are_those_of(keys)
        return self.last if is_last else self.batch_of(keys)

    def next_complete(self) -> Pull | None:
        """The next pull, to be requested, if all batches that it serves are announced."""
        is_complete = len(self._ahead) >= self._context.batches_per_pull and self._phase is Phase.NEW
        return self._next_pull() if is_complete else None

    def next_of_write(self) -> Pull | None:
        """At a write: the next pull, to be requested although fewer batches may be announced than it could serve."""
        is_first = self.last is not None and self.last.phase is Phase.READ  # write after a read
        return self._next_pull() if is_first and self._phase is Phase.NEW else None

    def _next_pull(self) -> Pull:
        """The pull of the batch that is read next, with those after it that one pull serves. REQUIRES: it is announced,
        and not requested."""
        self._pushes.send()
        batches = list(self._ahead)[: self._context.batches_per_pull]
        if len(batches) == 1:
            return Pull.of_one(batches[0])
        return Pull.of_several(batches, self._context.keys_of, self._cache.empty)

    def request(self, pull: Pull, is_written: bool) -> _C.Request:
        """Finds the lines of a pull and makes its request, to be sent. is_written: whether a batch is written before
        the read."""
        pull.enter(Phase.REQUESTED, Phase.NEW)
        self._cache.look_up(pull.keys.array, pull.slots)
        bound, route = self._context.bound, pull.keys.remote_route
        if bound == _C.UNBOUNDED and len(route):
            route = route.where(pull.slots < 0)
        self._context.counters.clock_bytes += 4 * len(route)
        is_asked = len(route) > 0  # else no clock is read
        known = self._cache.clocks_within(pull.slots, is_written, bound) if is_asked else np.empty(pull.num, np.int32)
        pull.request = _C.Request(
            self._channel, ANNOUNCED if is_written else UNANNOUNCED, route, known=known, bound=bound,
            pushes=self._pushes.take_held(), versions=pull.clocks,
        )  # fmt: skip
        return pull.request

    def serve_next(self):
        """At a write: answers other ranks' requests in the round of the batch that is read next, if it is requested."""
        if self._phase is Phase.REQUESTED:
            self.serve(self._ahead[0].pull)
        elif self._pushes.are_due():
            self.drop_all()  # the rows of a pull would lack the gradients that leave now
            self._pushes.flush()

    def serve(self, pull: Pull):
        """Answers other ranks' requests in the round of this one, if it is requested and they are not answered."""
        if pull.phase is Phase.REQUESTED:
            pull.enter(Phase.SERVED, Phase.REQUESTED)
            pull.request.serve()

    def drop_all(self):
        """Drops the pulls of all announced batches, which may still be read."""
        for batch in self._ahead:
            self.drop(batch)
        self.free_rows()

    def free_rows(self):
        """Frees the rows of the last read's pull, unless they serve the next read too."""
        pull = None if self.last is None else self.last.pull
        if pull is not None and not (self._ahead and self._ahead[0].pull is pull):
            pull.free()

    def drop(self, batch: Batch):
        """Ends the transfers of a batch and ignores their data; also for the other batches of its pull."""
        pull = batch.pull
        if pull is not None and pull.request is not None:
            pull.request.drop()
            self._context.counters.row_bytes += pull.request.num_bytes
        for other in self._ahead:
            if pull is not None and other.pull is pull:
                other.reset()
        batch.reset()
