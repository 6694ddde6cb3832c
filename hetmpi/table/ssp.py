"""SSP, s >= 1: opens and closes HET's client (cpp/client/bounded.h).

By windows, and on one node, only `flush` and `close` are collective. By messages all ranks make the same calls in the
same order.
"""

from __future__ import annotations

import weakref
from functools import partial

from hetmpi import _C
from hetmpi.table.client import Clients, OpenTable, TableContext
from hetmpi.table.gpu_cache import SharedClocks
from hetmpi.world.at_exit import at_exit, nothing

LEAD = 3  # steps by which another rank may be ahead


class SspClient(_C.BoundedClient):
    """See hetmpi/table/client.py, Client."""

    def __init__(self, context: TableContext, exchange: str):
        """exchange: messages, windows or auto. Collective."""
        self.context, world = context, context.world
        has_states = context.rule.preview_dim > 0 and context.cache.capacity_rows > 0
        # The owner's side: its thread applies pushes from the rings while this rank computes.
        self.applier = _C.PushApplier(context.memory.local.in_core, context.rule)
        lr, schedule = context.optimizer.lr, context.optimizer.schedule
        rates = [lr * schedule.factor(step) for step in range(LEAD + 1)]
        self.applier.set_step(rates, 1)  # others may push before the first write of this rank
        weakref.finalize(self, world.stop, self.applier)  # of a table that is dropped without close()
        self._stop = at_exit(world, nothing, partial(world.stop, self.applier))
        opened = OpenTable(context, exchange, has_states, self.applier)
        self.channel, self.why, self._opened = opened.channel, opened.why, opened
        if world.is_one_node:
            context.set_batches_per_pull(1)  # there is nothing to fetch ahead
        super().__init__(
            opened.core, self.applier, context.rule, lr, schedule, LEAD, context.bound, context.batches_per_pull,
            context.staleness.factor(world.size),
        )  # fmt: skip
        self._unpin = nothing
        compares = context.cache.capacity_rows > 0 and context.bound != _C.UNBOUNDED
        if compares and context.cache.computes_beside and world.is_one_node and not context.memory.is_sparse:
            clocks = [context.memory.on_node[rank].clock for rank in range(world.size)]
            self._unpin = at_exit(world, nothing, SharedClocks(context.cache, context.partition, clocks).close)
        origins = context.memory.layouts[world.rank].origins
        if rings := [ring for ring, origin in enumerate(origins) if origin % world.size != world.rank]:
            self.applier.watch(rings)
            world.start(self.applier)
            world.receivers[self] = None

    @staticmethod
    def settle(clients: Clients):
        """Other ranks do not depend on a write."""

    @property
    def num_histories(self) -> int:
        return self.applier.num_histories

    def flush(self):
        with self.context.spans("drain"):
            self.send_all()
            self.context.memory.fence(f"in step {self.step + 1} for all ranks to flush")
            self.set_rates()  # the schedule may have changed since the last write
            self.context.memory.fence(f"in step {self.step + 1} for all ranks to flush")

    def receive_pending(self):
        """Applies the gradients that have arrived, while this rank waits for others (World.wait). Raises an error in
        applying them once."""
        try:
            self.applier.drain()
        except Exception:
            self.context.world.receivers.pop(self, None)  # the next wait may be that of close()
            raise

    def close(self):
        self.drop_all()
        self.context.world.meet("for all ranks to close the table")  # the owner serves ranks that still read and write
        self.context.world.receivers.pop(self, None)
        self._stop()
        self._unpin()
        self.channel.close()
