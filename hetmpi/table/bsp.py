"""BSP, s = 0: every read sees all writes of the step before, from all ranks, applied once.

read     fetches the rows from their owners; nothing is cached, as each step changes the rows that it reads. The request
         leaves before the last step is applied here; an owner replies when all of its node have applied it
announce lets the request of the next batch leave with the write before its read, so that rows come while the dense
         layers are summed. By windows it does nothing: rows would not travel before their reader gets them
         (docs/negative.md, "Wire")
write    each rank sends its gradients to their owners
settle   (in write on one node, and where replies are on their way; otherwise in the next read) each owner waits for the
         gradients of all ranks, sums them per key in an order of ranks (cpp/owner/rank_sums.h) and applies the row
         optimizer once; a read waits for the owners of its rows
So `write` and the following read (or flush) are collective: every rank makes these calls; a rank without keys passes
none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hetmpi import _C
from hetmpi._C import Keys
from hetmpi.owner.mailbox import Mailbox
from hetmpi.owner.node_memory import fence_all
from hetmpi.owner.shards import ShardReader
from hetmpi.table.batch import check_room
from hetmpi.table.client import Client, TableContext, check_finite
from hetmpi.wire.channel import ANNOUNCED, UNANNOUNCED, Channel
from hetmpi.wire.transport import choose, trial_ms

LEAST_AHEAD_MS = 3.0  # for 2,048 random rows; on faster networks it gains 3 % (docs/results.md, "Across hosts")


@dataclass
class Announced:
    """A batch that a later read will ask for, and its request once that has left."""

    keys: Keys
    request: _C.Request | None = None


class BspClient(Client):
    """See hetmpi/table/client.py, Client. pays_ahead: whether a trial says that announcing a batch pays."""

    def __init__(self, context: TableContext, exchange: str):
        """exchange: messages, windows or auto. Collective."""
        self.context, self._world, self._cache, self._spans = context, context.world, context.cache, context.spans
        self._is_written = False  # a write is not yet settled
        self._near, self._reader = Mailbox(context.memory, context.record), ShardReader(context.memory)
        make = partial(Channel, context.memory, context.record, ["weight"], None)
        self.channel, self.why = choose(context.world, exchange, make, context.partition, context.num_rows)
        store = context.memory.local
        self._reducer = _C.StepReducer(
            store.rings, context.world.rank, *store.arrays, store.directory, store.applied, store.file
        )
        self._is_open = False  # the reducer waits for gradients of all ranks
        self.pays_ahead = False
        if self.channel.is_collective:
            [ms] = trial_ms(self._world, [self.channel], context.partition, context.num_rows)
            self.pays_ahead = bool(ms >= LEAST_AHEAD_MS)
        self._ahead: deque[Announced] = deque()
        self._world.receivers[self] = None

    @staticmethod
    def read(clients: Sequence[BspClient], keys: Sequence[Keys]) -> list[torch.Tensor]:
        exchange, spans = clients[0].channel.exchange, clients[0]._spans
        exchange.check()
        steps = [client.context.step + client._is_written for client in clients]  # that this rank has written
        requests = [client._announced_request(*of_table) for client, *of_table in zip(clients, keys, steps)]
        with spans("fetch"):
            asked = []
            for i, (client, its_keys) in enumerate(zip(clients, keys)):
                if requests[i] is None and client.channel.must_ask(its_keys.remote_route):
                    requests[i] = _C.Request(client.channel, UNANNOUNCED, its_keys.remote_route, steps[i])
                    asked.append(requests[i])
            exchange.ask(asked)
        BspClient._settle(clients)
        with spans("fetch"):
            found = [client._read_node(*of_table) for client, *of_table in zip(clients, keys, steps)]
            for request, rows in zip(requests, found):
                if request is not None:
                    request.receive()
                    request.place([rows])
            # No key has a line.
            return [client._cache.deliver(np.full(len(rows), -1), rows) for client, rows in zip(clients, found)]

    def _announced_request(self, keys: Keys, step: int) -> _C.Request | None:
        """The request of a batch that is read now, after `step` steps, if it has left. Drops batches announced earlier
        that were not read."""
        while self._ahead:
            batch = self._ahead.popleft()
            if batch.keys.are_those_of(keys):
                return batch.request if batch.request is not None and batch.request.step == step else None
        return None

    def _read_node(self, keys: Keys, step: int) -> np.ndarray:
        """Rows (U, dim), in which those of this node are as they are after `step` steps."""
        rows = self._cache.empty((len(keys.array), self.context.dim), np.float32)
        what = f"in step {step} for the ranks of its node to apply the gradients"
        self._world.wait(lambda: self.channel.has_applied(step), what)
        self.context.counters.row_bytes += self._reader.read("weight", keys.route, rows)
        return rows

    def peek(self, keys: Keys) -> torch.Tensor:
        if self._is_written:
            raise RuntimeError("EmbeddingTable.peek: a write is not settled yet: call flush() on every rank first")
        return super().peek(keys)

    @staticmethod
    def announce(clients: Sequence[BspClient], keys: Sequence[Keys]):
        for client, its_keys in zip(clients, keys):
            if client._is_written:
                raise RuntimeError(
                    "EmbeddingTable.prefetch: call it between a read and the write after it, not after write"
                )
            check_room(len(client._ahead))
            if client.channel.is_collective:
                client._ahead.append(Announced(its_keys))

    def check_write(self):
        self.channel.exchange.check()
        if self._is_written:
            raise RuntimeError(
                "EmbeddingTable.write: this step is written already: read or flush before the next write"
            )

    @staticmethod
    def write(clients: Sequence[BspClient], keys: Sequence[Keys], grads: Sequence[torch.Tensor]):
        exchange, spans = clients[0].channel.exchange, clients[0]._spans
        is_one_node = clients[0]._world.is_one_node
        with spans("push"):
            messages = [
                client._begin_step(its_keys, its_grads.cpu().numpy())
                for client, its_keys, its_grads in zip(clients, keys, grads)
            ]
            if not is_one_node:
                exchange.post([client._posted(message) for client, message in zip(clients, messages)])
            for client, message in zip(clients, messages):
                client.context.counters.push_bytes += client._near.send(message)
                client.context.counters.pushed += len(message.values)
        BspClient._apply([client for client in clients if is_one_node or exchange.awaits(client.channel)])
        for client in clients:
            if client._ahead and client._ahead[0].request is not None:
                with spans("drain"):
                    client._ahead[0].request.serve()  # rows leave, and arrive during the dense allreduce

    def _begin_step(self, keys: Keys, values: np.ndarray) -> _C.Message:
        """Begins a step with this rank's gradients. Returns the message for the owners."""
        if self._cache.device.type != "cpu":
            check_finite(keys.array, values)
        message = _C.Message(self.step, keys.route, values)
        # Between nodes they are applied after the call, when the caller may have changed the gradients.
        self._reducer.begin(message, copies=not self._world.is_one_node)
        self._is_written = self._is_open = True
        return message

    def _posted(self, message: _C.Message) -> _C.Request:
        """Gradients for other nodes, with the request of the batch that is announced to be read next."""
        if not self._ahead or self._ahead[0].request is not None:
            return _C.Request(self.channel, _C.PUSHES, _C.Route(self._world.size), pushes=[message])
        batch = self._ahead[0]
        batch.request = _C.Request(self.channel, ANNOUNCED, batch.keys.remote_route, self.step + 1, pushes=[message])
        return batch.request

    def flush(self):
        self.channel.exchange.check()
        BspClient.settle([self])
        with self._spans("drain"):
            self.channel.exchange.receive_all()
        for batch in self._ahead:
            batch.request = None  # rows may be assigned before it is read

    @staticmethod
    def settle(clients: Sequence[BspClient]):
        """As in Client: applies the gradients of all ranks' last write."""
        memories = [client.context.memory for client in clients if client._is_written]
        BspClient._settle(clients)
        if memories:
            with clients[0]._spans("drain"):
                fence_all(memories, f"in step {clients[0].step} for all ranks to apply the gradients")

    @staticmethod
    def _settle(clients: Sequence[BspClient]):
        """As settle(), without a barrier: a read waits for the owners of its rows."""
        BspClient._apply(clients)
        for client in clients:
            client.context.step += client._is_written
            client._is_written = False

    @staticmethod
    def _apply(clients: Sequence[BspClient]):
        """Waits for the gradients of all ranks in this step and applies them to this rank's rows."""
        are_open = [client for client in clients if client._is_open]
        if are_open:
            with are_open[0]._spans("drain"):
                for client in are_open:
                    client._apply_step()

    def _apply_step(self):
        publish = self.channel.exchange.wire.publish
        self._world.wait(publish, "for other ranks to make room for its gradients")  # who may wait for them
        self._world.wait(self._reducer.poll, self._awaited)
        self.context.rule.set_step(self.context.optimizer.lr_at(self.step), self.step + 1)
        self._reducer.apply(self.context.rule)
        self._is_open = False

    def _awaited(self) -> str:
        return f"in step {self.step + 1} for the gradients of rank {self._reducer.awaited}"

    def receive_pending(self):
        """Takes the gradients that have arrived, while this rank waits for others (World.wait)."""
        if self._is_open:
            self._reducer.poll()

    def await_owners(self):
        BspClient.settle([self])

    def resume_at(self, step: int):
        self.context.step = self.context.memory.local.applied[0] = step

    def close(self):
        if self.channel.exchange.awaits(self.channel):
            BspClient.settle([self])  # others wait for this rank's replies
        self._world.meet("for all ranks to close the table")  # receives their gradients meanwhile
        self._world.receivers.pop(self, None)
        self.channel.close()
