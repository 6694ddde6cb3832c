"""Pushes: gradients sent from one rank to their owners, at s >= 1: on its node by rings, to other nodes in front of the
next request (wire/channel.py)."""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.owner.mailbox import Mailbox
from hetmpi.table.client import TableContext, check_finite
from hetmpi.wire.channel import FLUSH, Channel
from hetmpi.world.waiting import ranks_text

MAX_IDLE_WRITES = 8  # successive writes without a request


class Pushes:
    """Sends the gradient sums that the cache releases, and tracks those that the owners have not applied yet.

    held   the messages that have gradients for other nodes, since the last request"""

    def __init__(self, context: TableContext, owner: _C.PushApplier, channel: Channel):
        self._context, self._cache, self._owner = context, context.cache, owner
        self._channel, self._mailbox = channel, Mailbox(context.memory, context.record)
        self._on_node = frozenset(context.world.node_ranks)
        self.held: list[_C.Message] = []
        self._num_idle = 0  # writes since the last request

    def send(self):
        """Sends the owners all gradient sums that the cache has released."""
        if self._cache.num_pushes == 0:
            return
        keys, clocks, counts, steps, sums = self._cache.take_pushes()
        if self._cache.device.type != "cpu":
            check_finite(keys, sums)
        context, route = self._context, self._context.partition.route(keys)
        message = _C.Message(context.step, route, sums, clocks, counts, steps if context.record.has_steps else None)
        self._owner.apply(message, context.world.rank)
        if not self._on_node.issuperset(route.owners):
            self.held.append(message)
        context.counters.push_bytes += self._mailbox.send(message)
        context.counters.pushed += len(keys)

    def progress(self):
        """Sends released gradients and applies received ones."""
        self.send()  # gradients of lines evicted in a read that no write followed
        self._owner.drain()

    def send_all(self):
        """Sends all pending gradients of this rank to their owners and waits until they are applied."""
        self._cache.take_all()
        self.deliver()

    def deliver(self):
        """Sends the gradients that the cache has released and waits until they are applied. Collective where the
        transport is."""
        self.send()
        self.flush()
        self.await_all()

    def take_held(self) -> list[_C.Message]:
        """Removes and returns the held messages, for a request."""
        held, self.held, self._num_idle = self.held, [], 0
        return held

    def are_due(self) -> bool:
        """Counts a write that no request preceded. Returns whether MAX_IDLE_WRITES were made so, which bounds the held
        messages: flush() must follow."""
        self._num_idle += 1
        return self._num_idle == MAX_IDLE_WRITES and not self._context.world.is_one_node

    def flush(self):
        """Sends the held messages to their owners, and waits until these have applied them. REQUIRES: no request of
        this table is under way."""
        if not self._context.world.is_one_node:
            none, route = np.empty(0, np.int32), _C.Route(self._context.world.size)
            request = _C.Request(
                self._channel, FLUSH, route, known=none, bound=self._context.bound, pushes=self.take_held(),
                versions=none,
            )  # fmt: skip
            self._channel.exchange.ask([request])
            request.drop()

    def await_all(self):
        """Waits until the owners have applied all gradients that this rank sent."""
        self._context.world.wait(lambda: not self._mailbox.behind(), self._awaited)

    def _awaited(self) -> str:
        behind = ranks_text(self._mailbox.behind())
        return f"in step {self._context.step + 1} for {behind} to apply its gradients"
