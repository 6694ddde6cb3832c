"""Pulls: rows of other nodes, asked for ahead of the read that needs them, at s >= 1."""

from __future__ import annotations

from collections import deque

import numpy as np

from hetmpi import _C
from hetmpi.comm.mailbox import NO_KEYS
from hetmpi.comm.transport import Pull, Transport
from hetmpi.comm.two_sided import ANNOUNCED, UNANNOUNCED
from hetmpi.table.client import Parts
from hetmpi.table.pushes import Pushes
from hetmpi.table.request import MOST_AHEAD, Keys, Phase, PullRequest

NO_SLOTS = np.empty(0, np.int64)


class Pulls:
    """The batches announced, in the order they will be read, and what other nodes were asked of them.

    last   the request read last"""

    def __init__(self, parts: Parts, pushes: Pushes, transport: Transport):
        self._parts, self._cache, self._pushes, self._transport = parts, parts.cache, pushes, transport
        self._ahead: deque[PullRequest] = deque()
        self.last: PullRequest | None = None

    def announce(self, keys: Keys):
        """Asks about these keys as soon as they are the next ones to be read."""
        if len(self._ahead) == MOST_AHEAD:
            raise RuntimeError(
                f"EmbeddingTable.prefetch: {MOST_AHEAD} batches are announced and not read yet, the most there may be"
            )
        if self._travels_ahead:
            self._ahead.append(self._parts.request(keys))
            self.ask_next()

    @property
    def _travels_ahead(self) -> bool:
        """Whether anything of an announced batch travels, or is decided while a GPU computes, before it is read."""
        if self._parts.world.is_one_node:
            return self._cache.computes_beside and self._cache.capacity_rows > 0
        return (
            not self._transport.carries_pushes or self._cache.capacity_rows > 0
        )  # without a line, a row lacks the state that sums take

    def take(self, keys: Keys) -> PullRequest:
        """The request of the keys to be read now. Those announced before it, which nobody read, are dropped."""
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
        """The request of the keys to be written now: that of the read before, if they are the same."""
        if self._ahead and self._ahead[0].phase is Phase.ORDERED:  # for a read that did not come before this write
            self.drop(self._ahead[0])
        return self.last if self.last is not None and self.last.is_of(keys) else self._parts.request(keys)

    def ask_next(self):
        """Asks other nodes about the batch that is read next, if it is announced."""
        if not self._ahead or self._ahead[0].phase is not Phase.NEW:
            return
        request = self._ahead[0]
        if self._transport.carries_pushes:
            self._pushes.send()
        elif self.last is not None:
            request.extend(self._lines_due(self.last, request))
        self._cache.look_up(request.array, request.slots)
        self.ask(request, self.last)

    def _lines_due(self, last: PullRequest, request: PullRequest) -> np.ndarray:
        """Keys (m,) int64 to renew beside a request: those of `last`, still to be written, whose sums that write may
        make due for push. Such a sum goes to its owner when its line has been renewed; else a line that is too old as
        well would have to wait until the owner has applied the sum."""
        if self._parts.bound == _C.UNBOUNDED:
            return NO_KEYS
        counts = self._cache.counts_from(last.slots[: last.num], self._parts.bound)
        keys = last.array[: last.num][last.is_remote[: last.num] & counts]
        return keys[~_C.contained(keys, request.array)]

    def ask(self, request: PullRequest, last: PullRequest | None):
        """Asks other nodes for clocks, and by those for rows. A clock may come from before sums that are on their way
        now were applied. last: the batch that is written in between, if any. REQUIRES: request.slots."""
        bound = self._parts.bound
        asked = request.is_remote & (request.slots < 0) if bound == _C.UNBOUNDED else request.is_remote
        if not self._transport.carries_pushes:
            request.in_transit = self._pushes.in_transit()
        self._parts.counters.clock_bytes += 4 * int(asked.sum())
        request.enter(Phase.ASKED, Phase.NEW)
        request.ticket = self._transport.begin(Pull(
            request.route.where(asked), request.clocks, bound=bound, reason=UNANNOUNCED if last is None else ANNOUNCED,
            known=lambda: self._cache.clocks_within(request.slots, last is not None, bound),
            wanted=lambda: self._wanted(request, asked),
        ))  # fmt: skip

    def _wanted(self, request: PullRequest, asked: np.ndarray) -> np.ndarray:
        """CheckValid, once the clocks of the keys asked (n,) bool are here: which rows are fetched ahead, (n,) bool.
        All that the read will need, but those to which sums of this rank are on their way."""
        num, bound, is_stale = request.num, self._parts.bound, np.zeros(len(request.array), bool)
        self._cache.validate(request.slots, request.clocks, bound, is_stale, counts_lags=False)
        needed = asked & ((request.slots < 0) | is_stale)
        if len(needed) > num:
            needed[num:] &= self._cache.counts_from(request.slots[num:], bound + 1)
        request.in_transit = np.concatenate([request.in_transit, self._cache.handed_out()])
        if len(request.in_transit):
            needed[needed] = ~_C.contained(request.array[needed], request.in_transit)
        return needed

    def order_next(self) -> np.ndarray:
        """Orders the rows of the batch that is read next, if other nodes were asked about it. Returns lines that will
        be renewed, (m,) int64."""
        if self._ahead and self._ahead[0].phase is Phase.ASKED:
            return self.order(self._ahead[0])
        self._transport.idle(self._parts.bound)
        return NO_SLOTS

    def order(self, request: PullRequest) -> np.ndarray:
        """Orders the rows that a batch needs. Returns lines that will be renewed, (m,) int64: their sums wait for
        that."""
        request.require("order", Phase.ASKED)
        request.ticket.advance()
        request.phase = Phase.ORDERED
        self._count(request)
        return NO_SLOTS if self._transport.carries_pushes else request.slots[request.fetched & (request.slots >= 0)]

    def receive(self, request: PullRequest):
        """Waits for the clocks, and until it is known which rows come."""
        request.require("receive", Phase.ORDERED)
        request.ticket.receive()
        self._count(request)

    def _count(self, request: PullRequest):
        """Counts the bytes of the rows that come by the ticket, once it is known which."""
        if request.fetched is not None and not request.is_counted:
            request.is_counted = True
            width = sum(self._transport.reader.shape(array)[0] for array in self._transport.arrays)
            self._parts.counters.row_bytes += 4 * width * int(request.fetched.sum())

    def drop_all(self):
        """Makes nothing of what was asked for the batches announced, which may still be read."""
        for request in self._ahead:
            self.drop(request)

    def drop(self, request: PullRequest):
        """Makes nothing of what was asked for a request."""
        self._parts.window.flush()
        if request.ticket is not None:
            request.ticket.drop()
            self._count(request)
            if (
                request.phase is Phase.ORDERED and not self._transport.carries_pushes
            ):  # sums that waited for their lines to be renewed
                self._cache.take_due(request.slots, self._parts.bound, held=NO_SLOTS)
        request.reset()
