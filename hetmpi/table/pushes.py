"""Pushes: gradients sent from one rank to their owners, at s >= 1."""

from __future__ import annotations

import time

import numpy as np

from hetmpi import _C
from hetmpi.comm.mailbox import Message
from hetmpi.comm.requests import Requests
from hetmpi.comm.route import Route
from hetmpi.comm.waiting import Patience, ranks_text
from hetmpi.table.client import Parts, check_finite
from hetmpi.table.owner import SspOwner

NAP_S = 50e-6  # polling interval: short compared with a step, long compared with a poll
FOREVER = float("inf")


class Pushes:
    """Sends the gradient sums that the cache releases, and tracks those that the owners have not applied yet."""

    def __init__(self, parts: Parts, owner: SspOwner, transport: Requests):
        self._parts, self._cache, self._owner = parts, parts.cache, owner
        self._transport, self._mailbox = transport, transport.mailbox

    def send(self, deadline: float = FOREVER):
        """Sends the owners all gradient sums that the cache has released. deadline, here and below: a
        time.monotonic()."""
        if self._cache.num_pushes == 0:
            return
        keys, clocks, counts, steps, sums = self._cache.take_pushes()
        if self._cache.device.type != "cpu":
            check_finite(keys, sums)
        route = Route.of_keys(self._parts.partition, keys)
        own_keys, order = route.of(self._parts.world.rank)
        times = clocks, counts, steps if self._parts.record.has_steps else None
        if len(own_keys):
            self._owner.push(own_keys, sums, order, *times)
        message = Message(self._parts.step, route, sums, *times, keys)
        self._parts.counters.push_bytes += self._mailbox.send(message, False, lambda: self._drain(deadline))
        self._parts.counters.pushed += len(keys)

    def progress(self):
        """Sends released gradients and applies received ones."""
        self.send()  # gradients of lines evicted in a read that no write followed
        self._owner.drain()

    def send_all(self, deadline: float = FOREVER):
        """Sends all pending gradients of this rank to their owners and waits until they are applied."""
        self._cache.take_all()
        self.deliver(deadline)

    def deliver(self, deadline: float = FOREVER):
        """Sends the gradients that the cache has released and waits until they are applied. Collective where the
        transport is."""
        self.send(deadline)
        self._transport.flush(self._parts.bound)
        self.await_all(deadline)

    @property
    def num_held(self) -> int:
        """Upper bound of the number of gradient sums that have not left this rank."""
        return self._cache.num_pending + self._cache.num_pushes + self._mailbox.num_held

    def await_keys(self, keys: np.ndarray, chosen: np.ndarray):
        """Waits until the owners have applied the gradients that this rank sent of the chosen (n,) bool keys (n,)."""
        sent = self._mailbox.in_transit()
        if len(sent) and np.count_nonzero(_C.contained(keys, sent, chosen)):
            self.await_all()

    def await_all(self, deadline: float = FOREVER):
        """Waits until the owners have applied all gradients that this rank sent."""
        with Patience(self._parts.world, self._awaited) as patience:
            while not self._mailbox.is_drained():
                self._drain(deadline)
                patience.check()

    def _awaited(self) -> str:
        return f"in step {self._parts.step + 1} for {self._behind()} to apply its gradients"

    def _behind(self) -> str:
        return ranks_text(self._mailbox.behind())

    def _drain(self, deadline: float):
        """Applies received gradients while this rank waits. Raises TimeoutError after the deadline."""
        if time.monotonic() > deadline:
            raise TimeoutError(f"{self._behind()} did not apply the gradients sent to them in time")
        if not self._owner.drain():
            self._mailbox.progress()
            time.sleep(NAP_S)
