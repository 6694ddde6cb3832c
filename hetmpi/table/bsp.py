"""BSP, s = 0: opens, settles and closes the client of the core (cpp/client/exact.h). `write` and the following read (or
flush) are collective: every rank makes these calls; a rank without keys passes none."""

from __future__ import annotations

from hetmpi import _C
from hetmpi.owner.node_memory import fence_all
from hetmpi.table.client import Clients, OpenTable, TableContext
from hetmpi.wire.transport import trial_ms

LEAST_AHEAD_MS = 3.0  # for 2,048 random rows; on faster networks it gains 3 % (docs/results.md, "Across hosts")


class BspClient(_C.ExactClient):
    """See hetmpi/table/client.py, Client. pays_ahead: whether a trial says that announcing a batch pays."""

    num_histories = 0

    def __init__(self, context: TableContext, exchange: str):
        """exchange: messages, windows or auto. Collective."""
        self.context, world = context, context.world
        opened = OpenTable(context, exchange, False, None)
        self.channel, self.why, self._opened = opened.channel, opened.why, opened
        self._shard = context.memory.local.in_core  # which the core borrows, for its StepReducer
        device_rows = context.memory.local.device_rows
        optimizer = context.optimizer
        super().__init__(opened.core, self._shard, context.rule, optimizer.lr, optimizer.schedule, device_rows)
        self.pays_ahead = False
        if self.channel.is_collective:
            [ms] = trial_ms(world, [self.channel], context.partition, context.num_rows)
            self.pays_ahead = bool(ms >= LEAST_AHEAD_MS)
        world.receivers[self] = None

    def flush(self):
        self.channel.exchange.check()
        BspClient.settle([self])
        self.receive_all()

    @staticmethod
    def settle(clients: Clients):
        """As in Client: applies the gradients of all ranks' last write, and waits until all ranks have."""
        memories = [client.context.memory for client in clients if client.is_written]
        _C.ExactClient.apply_written(clients)
        if memories:
            with clients[0].context.spans("drain"):
                fence_all(memories, f"in step {clients[0].step} for all ranks to apply the gradients")

    def await_owners(self):
        BspClient.settle([self])

    def resume_at(self, step: int):
        super().resume_at(step)
        self.context.memory.local.applied[0] = step

    def close(self):
        if self.channel.exchange.awaits(self.channel):
            BspClient.settle([self])  # others wait for this rank's replies
        world = self.context.world
        world.meet("for all ranks to close the table")  # receives their gradients meanwhile
        world.receivers.pop(self, None)
        self.channel.close()
