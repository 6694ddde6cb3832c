"""Pulls: requests for rows of other nodes ahead of the read that needs them, at s >= 1.

A request may serve several announced batches (Parts.round_steps): one message to each server then asks for the clocks
and rows of all their keys, and carries the gradients of as many writes.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from hetmpi import _C
from hetmpi.comm.requests import ANNOUNCED, UNANNOUNCED, Request, Requests
from hetmpi.table.client import Parts
from hetmpi.table.pushes import Pushes
from hetmpi.table.request import MOST_AHEAD, JointRequest, Keys, Phase, PullRequest


class Pulls:
    """The announced batches in the order of their reads, and their requests.

    last   the request of the last read"""

    def __init__(self, parts: Parts, pushes: Pushes, transport: Requests):
        self._parts, self._cache, self._pushes, self._transport = parts, parts.cache, pushes, transport
        self._ahead: deque[PullRequest] = deque()  # those of a joint request first
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
        computes. Without a line a row lacks the mean square that held gradients need."""
        return self._cache.capacity_rows > 0 and (self._cache.computes_beside or not self._parts.world.is_one_node)

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
        passed = (Phase.SERVED, Phase.READ) if is_second else (Phase.SERVED,)
        if self._ahead and self._ahead[0].pull.phase in passed:  # this write was not foreseen when lines were judged
            self.drop(self._ahead[0])
        return self.last if self.last is not None and self.last.is_of(keys) else self._parts.request(keys)

    def request_next(self, waits: bool = True) -> bool:
        """Requests the batch that is read next, if it is announced; with those after it that one request serves. waits:
        for the announcement of all of these. Returns whether it did."""
        num = self._parts.round_steps
        if not self._ahead or self._ahead[0].pull.phase is not Phase.NEW or (waits and len(self._ahead) < num):
            return False
        request, *others = list(self._ahead)[:num]
        self._pushes.send()
        if others:
            request = JointRequest.of([request, *others], self._parts.keys_of, self._cache.empty)
        self._cache.look_up(request.array, request.slots)
        self.request(request, self.last)
        return True

    def request(self, request: PullRequest, last: PullRequest | None):
        """Sends the request. last: the batch that is written in between, if any. REQUIRES: request.slots."""
        bound, route = self._parts.bound, request.remote_route
        if bound == _C.UNBOUNDED:
            route = request.route.where(request.is_remote & (request.slots < 0))
        self._parts.counters.clock_bytes += 4 * len(route.order)
        request.enter(Phase.REQUESTED, Phase.NEW)
        known = np.full(request.num, _C.NO_LINE, np.int32)
        if len(route.order):
            known = self._cache.clocks_within(request.slots, last is not None, bound)
        reason = UNANNOUNCED if last is None else ANNOUNCED
        pushes = self._pushes.take_held()
        asked = Request(reason, route, request.num, known=known, bound=bound, pushes=pushes)
        request.reply = self._transport.ask(asked, request.clocks)

    def request_rest(self) -> bool:
        """At a write: requests the batch that is read next although fewer are announced than one request serves.
        Returns whether it did."""
        is_first = self.last is not None and self.last.phase is Phase.READ  # write after a read
        return is_first and self.request_next(waits=False)

    def serve_next(self):
        """At a write: answers other ranks' requests in the round of the batch that is read next, if it is requested."""
        if self._ahead and self._ahead[0].pull.phase is Phase.REQUESTED:
            self.serve(self._ahead[0].pull)
        elif self._pushes.are_due():
            self.drop_all()  # the rows of a joint request would lack the gradients that leave now
            self._pushes.flush()

    def serve(self, request: PullRequest):
        """Answers other ranks' requests in the round of this one."""
        request.enter(Phase.SERVED, Phase.REQUESTED)
        request.reply.serve()

    def receive(self, request: PullRequest):
        """Waits for the clocks and the mask of fetched rows."""
        request.require("receive", Phase.SERVED)
        request.reply.receive()
        self._count(request)

    def _count(self, request: PullRequest):
        """Counts the bytes of the rows that the reply brings, once they are known."""
        if request.fetched is not None and not request.is_counted:
            request.is_counted = True
            self._parts.counters.row_bytes += self._transport.num_bytes * int(np.count_nonzero(request.fetched))

    def drop_all(self):
        """Drops the requests of all announced batches, which may still be read."""
        for request in self._ahead:
            self.drop(request)
        self.free_rows()

    def free_rows(self):
        """Frees the rows of the last read's joint request, unless they serve the next read too."""
        part = None if self.last is None else self.last.part
        if part is not None and not (self._ahead and self._ahead[0].pull is part.joint):
            part.joint.free()

    def drop(self, request: PullRequest):
        """Ends the transfers of a request and ignores their data; also for the other batches of its joint request."""
        pull = request.pull
        if pull.reply is not None:
            pull.reply.drop()
            self._count(pull)
        for other in self._ahead:
            if other.pull is pull:
                other.reset()
        request.reset()
