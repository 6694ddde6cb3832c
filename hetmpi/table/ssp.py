"""SSP, s >= 1: HET's client (Miao et al., PVLDB 15(2), 2022, section 3.2; docs/design_consistency.md, "The bound").

    read      Find, CheckValid, Fetch: uses lines within the bound; stale lines and keys without a line are fetched,
              ahead of the read if announced; new lines evict old ones
    announce  requests clocks and rows from other nodes while the batch before is computed (pulls.py)
    write     Update: each line accumulates the gradient and applies it to its copy, a preview of the owner's update.
              Pushed are gradients summed over more than s iterations, those of evicted lines, and those of keys without
              a line (pushes.py)

By windows, and on one node, only `flush` and `close` are collective. By messages all ranks make the same calls in the
same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from hetmpi import _C
from hetmpi._C import Keys
from hetmpi.owner.shards import ShardReader
from hetmpi.table.batch import Batch, CacheLines, Phase, Pull
from hetmpi.table.client import Client, TableContext
from hetmpi.table.pulls import Pulls
from hetmpi.table.pushes import Pushes
from hetmpi.wire.channel import Channel
from hetmpi.wire.transport import choose
from hetmpi.world.at_exit import at_exit, nothing

LEAD = 3  # steps by which another rank may be ahead


class SspClient(Client):
    """See hetmpi/table/client.py, Client."""

    def __init__(self, context: TableContext, exchange: str):
        """exchange: messages, windows or auto. Collective."""
        self.context, self._cache, self._spans = context, context.cache, context.spans
        self._anticipate = context.staleness.factor(context.world.size)
        has_states = context.rule.preview_dim > 0 and context.cache.capacity_rows > 0
        self._arrays = ("weight", "mean_square") if has_states else ("weight",)  # of a line
        store = context.memory.local
        # The owner's side: its thread applies pushes from the rings while this rank computes.
        self._owner = _C.PushApplier(
            store.rings, *store.arrays, store.mean_square, store.directory, context.rule, store.file
        )
        self._set_rates(0)  # others may push before the first write of this rank
        weakref.finalize(self, context.world.stop, self._owner)  # of a table that is dropped without close()
        self._stop = at_exit(context.world, nothing, partial(context.world.stop, self._owner))
        world, origins = context.world, context.memory.layouts[context.world.rank].origins
        make = partial(Channel, context.memory, context.record, self._arrays, self._owner)
        self.channel, self.why = choose(world, exchange, make, context.partition, context.num_rows)
        if rings := [ring for ring, origin in enumerate(origins) if origin % world.size != world.rank]:
            self._owner.watch(rings)
            world.start(self._owner)
            world.receivers[self] = None
        self._reader = ShardReader(context.memory, self._owner)
        if world.is_one_node:
            context.set_batches_per_pull(1)  # there is nothing to fetch ahead
        self._pushes = Pushes(context, self._owner, self.channel)
        self._pulls = Pulls(context, self._pushes, self.channel)

    # Read.

    @staticmethod
    def read(clients: Sequence[SspClient], keys: Sequence[Keys]) -> list[torch.Tensor]:
        spans = clients[0]._spans
        with spans("find"):  # first: a dropped pull may release gradients
            batches = [client._pulls.take(its_keys) for client, its_keys in zip(clients, keys)]
        with spans("drain"):
            for client in clients:
                client._pushes.progress()
        with spans("find"):
            request(clients, [batch.pull if batch.pull.phase is Phase.NEW else None for batch in batches], False)
        with spans("validate"):
            for client, batch in zip(clients, batches):
                client._pulls.serve(batch.pull)
            judged = [client._check_valid(batch.pull) for client, batch in zip(clients, batches)]
        with spans("fetch"):
            delivered = []
            for client, batch, found in zip(clients, batches, judged):
                if found is not None:
                    client._fetch(batch.pull, *found)
                delivered.append(client._deliver(batch))
                client._pulls.free_rows()
        with spans("prefetch"):
            request(clients, [client._pulls.next_complete() for client in clients], True)
        return delivered

    def _check_valid(self, pull: Pull) -> tuple[np.ndarray | None, np.ndarray | None] | None:
        """Receives the replies, and reads the clocks of this node. Returns masks (n,) bool of the lines that are stale
        or refreshed anyway, and of the rows needed of this node, None for one without any; or None if an earlier batch
        of the pull has."""
        if pull.phase is not Phase.SERVED:
            return None
        bound, near, counters = self.context.bound, pull.near, self.context.counters
        if self._cache.capacity_rows > 0:
            self._cache.use(pull.slots, np.count_nonzero(pull.keys.is_admitted))
        pull.request.receive()
        counters.row_bytes += pull.request.num_bytes
        self._pushes.await_all()  # rows of this node must have this rank's gradients
        is_bounded = bound != _C.UNBOUNDED
        if not is_bounded:
            near = near.where(pull.slots < 0)
        counters.clock_bytes += self._reader.read("clock", near, pull.clocks)
        is_stale, is_missing, num_found, num_stale, num_missing = self._cache.classify(
            pull.slots, pull.request.fetched, pull.is_decided, pull.clocks, bound
        )
        counters.validated += num_found if is_bounded else 0
        counters.hits += num_found - num_stale
        counters.stale += num_stale
        return is_stale if num_stale else None, is_missing if num_missing else None

    def _fetch(self, pull: Pull, is_stale: np.ndarray | None, is_missing: np.ndarray | None):
        """Sets the rows and states of a pull, and refreshes the lines. Masks: of _check_valid()."""
        empty, context = self._cache.empty, self.context
        pull.rows = rows = empty((pull.num, context.dim), np.float32)
        pull.states = states = empty((pull.num, context.rule.preview_dim), np.float32)
        pull.request.place([rows, states])
        self._preview_held(pull, pull.request.fetched)
        if is_missing is not None:
            route = pull.keys.route.where(is_missing)
            self.context.counters.row_bytes += self._reader.read("weight", route, rows)
            if "mean_square" in self._arrays:
                near = route.where(pull.keys.is_admitted)
                self.context.counters.row_bytes += self._reader.read("mean_square", near, states)
        if is_stale is not None:
            self._cache.refresh(pull.slots, is_stale, rows, states, pull.clocks, self._anticipate)
        pull.enter(Phase.READ, Phase.SERVED)
        pull.request = None  # its memory is not needed any more

    def _deliver(self, batch: Batch) -> torch.Tensor:
        """The rows (U, dim) of a batch: from lines, or fetched; the latter get a line if they may be cached."""
        if batch.places is not None:
            return self._deliver_part(batch)
        delivered = self._cache.deliver(batch.slots, batch.pull.rows)
        self._insert(batch, self._cache.delivered(delivered), batch.pull.states)
        batch.enter(Phase.READ, Phase.NEW)
        return delivered

    def _deliver_part(self, batch: Batch) -> torch.Tensor:
        """The rows (U, dim) of one of the batches of a pull. Lines include this rank's later updates; rows of other
        nodes without a line get them as previews of held messages, those of this node are read again."""
        pull, keys, counters = batch.pull, batch.keys, self.context.counters
        if pull.is_uncached is None:
            fetched = torch.from_numpy(pull.rows).to(self._cache.device)
            self._insert(pull, self._cache.as_input(fetched), pull.states)
            pull.is_uncached = (pull.slots < 0) & pull.keys.is_remote
        self._preview_held(pull, pull.is_uncached)
        rows, left = self._cache.empty((batch.num, self.context.dim), np.float32), np.empty(batch.num, bool)
        num_left, num_repeated, num_hits = _C.part_of_pull(
            batch.places, pull.slots, pull.clocks, pull.is_uncached, pull.rows, keys.is_admitted, batch.first_new,
            batch.slots, batch.clocks, rows, left,
        )  # fmt: skip
        counters.hits += num_hits
        counters.misses += num_repeated - num_hits
        if num_left > 0:
            self._pushes.await_all()
            route = keys.local_route.where(left)
            counters.clock_bytes += self._reader.read("clock", route, batch.clocks)
            counters.row_bytes += self._reader.read("weight", route, rows)
        batch.enter(Phase.READ, Phase.NEW)
        return self._cache.deliver(batch.slots, rows)

    def _insert(self, lines: CacheLines, weights, states: np.ndarray):
        """Gives the keys that have no line and may be cached a line with their rows (num, dim). weights: from the
        cache's as_input() or delivered()."""
        missing, evicted = self._cache.insert_and_evict(
            lines.keys.array, lines.keys.is_admitted, weights, states, lines.clocks, lines.slots
        )
        self.context.counters.misses += missing
        self.context.counters.evicted += evicted

    def _preview_held(self, pull: Pull, chosen: np.ndarray):
        """Previews on the chosen (n,) bool rows the messages that are held since the last call."""
        held = self._pushes.held  # empty without a cache, where no state is fetched
        for message in held[pull.num_previewed :]:
            places = _C.places_of(message.route, pull.keys.array, chosen)
            self._cache.preview(
                places, pull.rows, pull.states, pull.clocks, message.values, message.counts, message.clocks,
                self._anticipate,
            )  # fmt: skip
        pull.num_previewed = len(held)

    @staticmethod
    def announce(clients: Sequence[SspClient], keys: Sequence[Keys]):
        for client, its_keys in zip(clients, keys):
            client._pulls.announce(its_keys)
        request(clients, [client._pulls.next_complete() for client in clients], True)

    # Write.

    @staticmethod
    def write(clients: Sequence[SspClient], keys: Sequence[Keys], grads: Sequence[torch.Tensor]):
        spans = clients[0]._spans
        with spans("push"):
            batches = [client._update(*of_table) for client, *of_table in zip(clients, keys, grads)]
        with spans("validate"):
            request(clients, [client._pulls.next_of_write() for client in clients], True)
            for client in clients:
                client._pulls.serve_next()
        with spans("push"):
            for client, batch in zip(clients, batches):
                client._end_step(batch)

    def _end_step(self, batch: Batch):
        self._cache.take_due(batch.slots, self.context.bound)
        self._pushes.send()
        for known in (batch, self._pulls.last):
            if known is not None and known.phase in (Phase.READ, Phase.NEW):
                known.phase = Phase.WRITTEN  # its clocks are older than this write
        self.context.step += 1

    def _update(self, keys: Keys, grads: torch.Tensor) -> Batch:
        """HET's Update of the lines; releases gradients of keys without a line."""
        batch = self._pulls.of_write(keys)
        lr = self._set_rates(self.step)
        self._cache.set_step(lr, self.step + 1)
        if batch.phase is not Phase.READ:  # takes the clocks that need no reply of another rank
            self._cache.look_up(keys.array, batch.slots)
            batch.clocks[:] = _C.UNKNOWN_CLOCK
            self.context.counters.clock_bytes += self._reader.read("clock", keys.local_route, batch.clocks)
        values = self._cache.as_input(grads)
        self._cache.update(batch.slots, values, self._anticipate)
        self._cache.push_directly(keys.array, batch.slots, batch.clocks, values)
        return batch

    def _set_rates(self, step: int) -> float:
        """Tells the owner's side this rank's step, counted from 0, and returns its learning rate. Other ranks may be
        ahead by LEAD steps."""
        lrs = [self.context.optimizer.lr_at(step + ahead) for ahead in range(LEAD + 1)]
        self._owner.set_step(lrs, step + 1)
        return lrs[0]

    # Flush.

    @property
    def num_histories(self) -> int:
        return self._owner.num_histories

    def flush(self):
        with self._spans("drain"):
            self._pulls.drop_all()
            self._pushes.send_all()
            self.context.memory.fence(f"in step {self.step + 1} for all ranks to flush")
            self._set_rates(self.step)  # the schedule may have changed since the last write
            self.context.memory.fence(f"in step {self.step + 1} for all ranks to flush")

    def await_owners(self):
        self._pulls.drop_all()
        self._pushes.progress()
        self._pushes.deliver()

    def receive_pending(self):
        """Applies the gradients that have arrived, while this rank waits for others (World.wait). Raises an error in
        applying them once."""
        try:
            self._owner.drain()
        except Exception:
            self.context.world.receivers.pop(self, None)  # the next wait may be that of close()
            raise

    def resume_at(self, step: int):
        self.context.step = step
        self._set_rates(step)

    def close(self):
        self._pulls.drop_all()
        self.context.world.meet("for all ranks to close the table")  # the owner serves ranks that still read and write
        self.context.world.receivers.pop(self, None)
        self._stop()
        self.channel.close()


def request(clients: Sequence[SspClient], pulls: Sequence[Pull | None], is_written: bool):
    """Sends the requests of the clients' pulls, None where there is none to send, in one message to each server.
    is_written: whether a batch is written before they are read."""
    asked = [
        client._pulls.request(pull, is_written and client._pulls.last is not None)
        for client, pull in zip(clients, pulls)
        if pull is not None
    ]
    if asked:
        clients[0].channel.exchange.ask(asked)
