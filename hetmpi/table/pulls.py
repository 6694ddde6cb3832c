"""Pulls: requests for rows of other nodes ahead of the read that needs them, at s >= 1.

Two-sided, a pull may serve several announced batches (Parts.round_steps): one message to each server then requests the
clocks and rows of all their keys, and carries the gradients of as many writes.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from hetmpi import _C
from hetmpi.comm.mailbox import NO_KEYS, joined
from hetmpi.comm.transport import Pull, Transport
from hetmpi.comm.two_sided import ANNOUNCED, UNANNOUNCED
from hetmpi.table.client import Parts
from hetmpi.table.pushes import Pushes
from hetmpi.table.request import MOST_AHEAD, JointRequest, Keys, Phase, PullRequest

NO_SLOTS = np.empty(0, np.int64)


class Pulls:
    """The announced batches in the order of their reads, and their pull requests.

    last   the request of the last read"""

    def __init__(self, parts: Parts, pushes: Pushes, transport: Transport):
        self._parts, self._cache, self._pushes, self._transport = parts, parts.cache, pushes, transport
        self._row_bytes = 4 * sum(transport.reader.shape(array)[0] for array in transport.arrays)
        self._ahead: deque[PullRequest] = deque()  # those of a joint pull first
        self.last: PullRequest | None = None

    def announce(self, keys: Keys):
        """Requests these keys from other nodes as soon as they are the next ones to be read."""
        if len(self._ahead) == MOST_AHEAD:
            raise RuntimeError(
                f"EmbeddingTable.prefetch: {MOST_AHEAD} batches, the maximum, are announced and not read yet: read one "
                "before the next call"
            )
        if self._can_prepare:
            self._ahead.append(self._parts.request(keys))
            self.request_next()

    @property
    def _can_prepare(self) -> bool:
        """Whether announcing a batch has any use: rows can be fetched ahead, or lines looked up while a GPU
        computes."""
        if self._parts.world.is_one_node:
            return self._cache.computes_beside and self._cache.capacity_rows > 0
        # Without a line a row lacks the mean square that held gradients need.
        return not self._transport.carries_pushes or self._cache.capacity_rows > 0

    def take(self, keys: Keys) -> PullRequest:
        """The request of the keys to be read now. Drops batches announced earlier that were not read."""
        self.last = self._next(keys)
        return self.last

    def _next(self, keys: Keys) -> PullRequest:
        while self._ahead:
            request = self._ahead.popleft()
            if request.is_of(keys):
                return request
            self.drop(request)
        if self.last is not None and self.last.is_of(keys):
            self.last.reset()
            return self.last
        return self._parts.request(keys)

    def of_write(self, keys: Keys) -> PullRequest:
        """The request of the keys to be written now: that of the last read, if they are the same."""
        is_second = self.last is not None and self.last.phase is Phase.WRITTEN  # without a read in between
        passed = (Phase.ROWS_REQUESTED, Phase.READ) if is_second else (Phase.ROWS_REQUESTED,)
        if self._ahead and self._ahead[0].pull.phase in passed:  # this write was not foreseen when lines were judged
            self.drop(self._ahead[0])
        return self.last if self.last is not None and self.last.is_of(keys) else self._parts.request(keys)

    def request_next(self, waits: bool = True) -> bool:
        """Requests the batch that is read next, if it is announced; with those after it that one pull serves. waits:
        for the announcement of all of these. Returns whether it did."""
        num = self._parts.round_steps
        if not self._ahead or self._ahead[0].pull.phase is not Phase.NEW or (waits and len(self._ahead) < num):
            return False
        request, *others = list(self._ahead)[:num]
        if self._transport.carries_pushes:
            self._pushes.send()
            if others:
                request = JointRequest.of([request, *others], self._parts.keys_of, self._cache.empty)
        elif self.last is not None and len(keys := self._lines_to_refresh(self.last, request)):
            request.extend(self._parts.keys_of(request.keys, np.concatenate([request.array, keys])))
        self._cache.look_up(request.array, request.slots)
        self.request_clocks(request, self.last)
        return True

    def _lines_to_refresh(self, last: PullRequest, request: PullRequest) -> np.ndarray:
        """Keys (m,) int64 whose lines are refreshed with a request: those of `last`, not written yet, whose gradients
        the write may make due for push. A gradient sum is pushed after its line is refreshed. Refreshing it in advance
        avoids that the next read of a stale line waits until the owner has applied the push."""
        if self._parts.bound == _C.UNBOUNDED:
            return NO_KEYS
        num = last.num
        chosen = last.is_remote[:num] & self._cache.counts_from(last.slots[:num], self._parts.bound)
        if not np.count_nonzero(chosen):
            return NO_KEYS
        keys = last.array[:num]
        return keys[chosen & ~_C.contained(keys, request.array, chosen)]

    def request_clocks(self, request: PullRequest, last: PullRequest | None):
        """Requests clocks from other nodes, and by these rows. A clock may be older than the application of pushes that
        are in transit now. last: the batch that is written in between, if any. REQUIRES: request.slots."""
        bound, requested, route = self._parts.bound, request.is_remote, request.remote_route
        if bound == _C.UNBOUNDED:
            requested = requested & (request.slots < 0)
            route = request.route.where(requested)
        if not self._transport.carries_pushes:
            request.in_transit = self._pushes.in_transit()
        self._parts.counters.clock_bytes += 4 * len(route.order)
        request.enter(Phase.CLOCKS_REQUESTED, Phase.NEW)
        pull = Pull(
            route,
            request.clocks,
            known=lambda: self._cache.clocks_within(request.slots, last is not None, bound),
            wanted=lambda: self._wanted(request, requested),
            bound=bound,
            reason=UNANNOUNCED if last is None else ANNOUNCED,
        )
        request.ticket = self._transport.begin(pull)

    def _wanted(self, request: PullRequest, requested: np.ndarray) -> np.ndarray:
        """CheckValid after the clocks of the requested keys (n,) bool have arrived: mask of the rows to fetch ahead,
        (n,) bool. These are all rows that the read will need, except those with gradients of this rank in transit."""
        num, bound, is_stale = request.num, self._parts.bound, np.zeros(len(request.array), bool)
        self._cache.validate(request.slots, request.clocks, bound, is_stale, counts_lags=False)
        needed = requested & ((request.slots < 0) | is_stale)
        if len(needed) > num:
            needed[num:] &= self._cache.counts_from(request.slots[num:], bound + 1)
        request.in_transit = joined([request.in_transit, self._cache.handed_out()])
        if len(request.in_transit):
            needed &= ~_C.contained(request.array, request.in_transit, needed)
        return needed

    def request_rest(self) -> bool:
        """At a write: requests the batch that is read next although fewer are announced than one pull serves. Returns
        whether it did."""
        is_first = self.last is not None and self.last.phase is Phase.READ  # write after a read
        return is_first and self.request_next(waits=False)

    def request_next_rows(self) -> np.ndarray:
        """Requests the rows of the batch that is read next, if its clocks are requested. Returns the lines that will be
        refreshed, (m,) int64."""
        if self._ahead and self._ahead[0].pull.phase is Phase.CLOCKS_REQUESTED:
            return self.request_rows(self._ahead[0].pull)
        if self._transport.idle():
            self.drop_all()  # the rows of a joint pull would lack the gradients that leave now
            self._transport.flush(self._parts.bound)
        return NO_SLOTS

    def request_rows(self, request: PullRequest) -> np.ndarray:
        """Requests the rows that a batch needs. Returns the lines that will be refreshed, (m,) int64; their gradients
        are pushed afterwards."""
        request.require("request_rows", Phase.CLOCKS_REQUESTED)
        request.ticket.advance()
        request.phase = Phase.ROWS_REQUESTED
        self._count(request)
        return NO_SLOTS if self._transport.carries_pushes else request.slots[request.fetched & (request.slots >= 0)]

    def receive(self, request: PullRequest):
        """Waits for the clocks and the mask of fetched rows."""
        request.require("receive", Phase.ROWS_REQUESTED)
        request.ticket.receive()
        self._count(request)

    def _count(self, request: PullRequest):
        """Counts the bytes of the rows fetched by the ticket, once they are known."""
        if request.fetched is not None and not request.is_counted:
            request.is_counted = True
            self._parts.counters.row_bytes += self._row_bytes * int(np.count_nonzero(request.fetched))

    def drop_all(self):
        """Drops the requests of all announced batches, which may still be read."""
        for request in self._ahead:
            self.drop(request)
        self.free_rows()

    def free_rows(self):
        """Frees the rows of the last read's joint pull, unless they serve the next read too."""
        part = None if self.last is None else self.last.part
        if part is not None and not (self._ahead and self._ahead[0].pull is part.joint):
            part.joint.free()

    def drop(self, request: PullRequest):
        """Ends the transfers of a request and ignores their data; also for the other batches of its pull."""
        self._parts.window.flush()
        pull = request.pull
        if pull.ticket is not None:
            pull.ticket.drop()
            self._count(pull)
            # Push the gradients that waited for their lines to be refreshed.
            if pull.phase is Phase.ROWS_REQUESTED and not self._transport.carries_pushes:
                self._cache.take_due(pull.slots, self._parts.bound, held=NO_SLOTS)
        for other in self._ahead:
            if other.pull is pull:
                other.reset()
        request.reset()
