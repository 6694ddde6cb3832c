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
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from hetmpi import _C
from hetmpi.in_flight import InFlight, finish, in_span
from hetmpi.owner.mailbox import Mailbox, Message
from hetmpi.owner.route import Route
from hetmpi.owner.shards import ShardReader
from hetmpi.table.batch import Keys, check_room
from hetmpi.table.client import Client, TableContext, check_finite
from hetmpi.wire.requests import ANNOUNCED, UNANNOUNCED, Reply, Request, Requests
from hetmpi.wire.transport import choose, trial_ms

LEAST_AHEAD_MS = 3.0  # for 2,048 random rows; on faster networks it gains 3 % (docs/results.md, "Across hosts")


@dataclass
class Announced:
    """A batch that a later read will ask for, and the reply to its request once that has left."""

    keys: Keys
    reply: Reply | None = None


class BspClient(Client):
    """See hetmpi/table/client.py, Client. pays_ahead: whether a trial says that announcing a batch pays."""

    def __init__(self, context: TableContext, exchange: str):
        """exchange: messages, windows or auto. Collective."""
        self.context, self._world, self._cache, self._spans = context, context.world, context.cache, context.spans
        self._is_written = False  # a write is not yet settled
        self._near, self._reader = Mailbox(context.memory, context.record), ShardReader(context.memory)
        make = partial(Requests, context.memory, context.record, ["weight"], None)
        self.transport, self.why = choose(context.world, exchange, make, context.partition, context.num_rows)
        store = context.memory.local
        self._reducer = _C.StepReducer(
            store.rings, context.world.rank, *store.arrays, store.directory, store.applied, store.file
        )
        self._is_open = False  # the reducer waits for gradients of all ranks
        self.pays_ahead = False
        if self.transport.is_collective:
            [ms] = trial_ms(self._world, [self.transport], context.partition, context.num_rows)
            self.pays_ahead = bool(ms >= LEAST_AHEAD_MS)
        self._ahead: deque[Announced] = deque()
        self._world.receivers[self] = None

    def reading(self, keys: Keys) -> InFlight[torch.Tensor]:
        step = self.context.step + self._is_written  # that this rank has written
        with self._spans("fetch"):
            rows = self._cache.empty((len(keys.array), self.context.dim), np.float32)
            self.transport.rounds.check()
            reply = self._requested(keys, step)
            if reply is None:
                reply = self.transport.ask(Request(UNANNOUNCED, keys.remote_route, len(rows), step))
        yield from in_span(self._spans("drain"), self.settling(meets=False))
        with self._spans("fetch"):
            what = f"in step {step} for the ranks of its node to apply the gradients"
            self._world.wait(lambda: self.transport.has_applied(step), what)
            self.context.counters.row_bytes += self._reader.read("weight", keys.route, rows)
        yield  # the other tables of a group settle, whose requests are in the same round
        if reply is not None:
            with self._spans("fetch"):
                reply.serve()
            yield
        with self._spans("fetch"):
            if reply is not None:
                reply.receive()
                reply.place(rows)
            return self._cache.deliver(np.full(len(rows), -1), rows)  # no key has a line

    def _requested(self, keys: Keys, step: int) -> Reply | None:
        """The reply to the request of a batch that is read now, after `step` steps, if it has left. Drops batches
        announced earlier that were not read."""
        while self._ahead:
            batch = self._ahead.popleft()
            if batch.keys.are_those_of(keys):
                return batch.reply if batch.reply is not None and batch.reply.step == step else None
        return None

    def peek(self, keys: Keys) -> torch.Tensor:
        if self._is_written:
            raise RuntimeError("EmbeddingTable.peek: a write is not settled yet: call flush() on every rank first")
        return super().peek(keys)

    def announce(self, keys: Keys):
        if self._is_written:
            raise RuntimeError(
                "EmbeddingTable.prefetch: call it between a read and the write after it, not after write"
            )
        check_room(len(self._ahead))
        if self.transport.is_collective:
            self._ahead.append(Announced(keys))

    def check_write(self):
        self.transport.rounds.check()
        if self._is_written:
            raise RuntimeError(
                "EmbeddingTable.write: this step is written already: read or flush before the next write"
            )

    def writing(self, keys: Keys, grads: torch.Tensor) -> InFlight[None]:
        yield from in_span(self._spans("push"), self._sending(keys, grads.cpu().numpy()))
        if self._world.is_one_node or self.transport.rounds.awaits(self.transport):
            yield from in_span(self._spans("drain"), self._applying())
            yield  # the other tables of a group apply theirs, whose replies are in the same round
        if self._ahead and self._ahead[0].reply is not None:
            with self._spans("drain"):
                self._ahead[0].reply.serve()  # rows of the next batch leave, and arrive during the dense allreduce

    def _sending(self, keys: Keys, values: np.ndarray) -> InFlight[None]:
        """Sends each owner its rows of the step's gradients."""
        if self._cache.device.type != "cpu":
            check_finite(keys.array, values)
        own_keys, own_order = keys.route.of(self._world.rank)
        own_values = values
        if not self._world.is_one_node:  # applied after the call, when the caller may have changed the gradients
            own_values, own_order = values[own_order], np.arange(len(own_order))
        self._reducer.begin(self.step, own_keys, own_order, own_values)
        self._is_written = self._is_open = True
        message = Message(self.step, keys.route, values)
        if not self._world.is_one_node:
            self._post(message)
        yield  # the other tables of a group join the post
        self.transport.send_posts()
        self.context.counters.push_bytes += self._near.send(message, True)
        self.context.counters.pushed += len(values)

    def _post(self, message: Message):
        """Sends gradients to other nodes, and the request of the batch that is announced to be read next."""
        request = Request(_C.PUSHES, Route.empty(self._world.size), len(message.values), pushes=[message])
        if self._ahead and self._ahead[0].reply is None:
            batch = self._ahead[0]
            keys, step = batch.keys, self.step + 1
            request = replace(request, reason=ANNOUNCED, route=keys.remote_route, num=len(keys.array), step=step)
            batch.reply = self.transport.post(request)
        else:
            self.transport.post(request)

    def flush(self):
        self.transport.rounds.check()
        with self._spans("drain"):
            finish(self.settling())
            self.transport.rounds.finish(receives=True)
        for batch in self._ahead:
            batch.reply = None  # rows may be assigned before it is read

    def settling(self, meets: bool = True) -> InFlight[None]:
        """As in Client: applies the gradients of all ranks' last write. meets: whether to end with a barrier; not
        needed before a read, which waits for the owners of its rows."""
        if self._is_open:
            yield from self._applying()
        else:
            yield  # as often as a table that was written: then all tables of a group have settled
        if self._is_written:
            if meets:
                self.context.memory.fence(f"in step {self.step + 1} for all ranks to apply the gradients")
            self.context.step += 1
            self._is_written = False

    def _applying(self) -> InFlight[None]:
        """Waits for the gradients of all ranks in this step and applies them to this rank's rows."""
        self.transport.publish()
        yield
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
        finish(self.settling())

    def resume_at(self, step: int):
        self.context.step = self.context.memory.local.applied[0] = step

    def close(self):
        if self.transport.rounds.awaits(self.transport):
            finish(self.settling())  # others wait for this rank's replies
        self._world.meet("for all ranks to close the table")  # receives their gradients meanwhile
        self._world.receivers.pop(self, None)
        self.transport.close()
