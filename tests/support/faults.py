"""Faults of the protocol that a simulation must find (sim.py, fault=NAME). Each is planted by put(owner, name, value),
which sets an attribute."""

import numpy as np
from sim import SimMessages, SimWorld

from hetmpi import _C
from hetmpi.owner.mailbox import Mailbox
from hetmpi.owner.node_memory import NodeMemory
from hetmpi.owner.shards import ShardReader
from hetmpi.table.bsp import BspClient
from hetmpi.table.client import TableContext
from hetmpi.table.host_cache import HostCache
from hetmpi.table.pushes import Pushes
from hetmpi.table.ssp import SspClient


def preview_left_out(put):
    """Rows from other nodes lack own gradients that are under way."""

    def skip(self, pull, _):
        pull.num_previewed = len(self._pushes.held)

    put(SspClient, "_preview_held", skip)


def clock_before_row(put):
    """A row of this node is older than its clock."""
    check_valid, fetch, read = SspClient._check_valid, SspClient._fetch, ShardReader.read

    def check_late(self, pull):
        self._before = {rank: shard.weight.copy() for rank, shard in self.context.memory.on_node.items()}
        self.context.world.sim.hand_over(self.context.world.rank)
        return check_valid(self, pull)

    def fetch_early(self, *arguments):
        self._reader.before = self._before, self.context.partition
        fetch(self, *arguments)
        del self._reader.before

    def read_before(self, array, route, out):
        found = read(self, array, route, out)
        if array == "weight" and hasattr(self, "before"):
            shards, partition = self.before
            for owner, row, place in zip(*partition.locate(route.keys), route.order):
                if owner in shards:
                    out[place] = shards[owner][row]
        return found

    put(SspClient, "_check_valid", check_late)
    put(SspClient, "_fetch", fetch_early)
    put(ShardReader, "read", read_before)


def push_applied_twice(put):
    """Gradients reach the owners of this node twice."""
    send = Mailbox.send

    def send_twice(self, message):
        if message.clocks is not None:
            send(self, message)
        return send(self, message)

    put(Mailbox, "send", send_twice)


def tail_passed_early(put):
    """A rank believes that owners have applied what is in their rings."""
    put(Mailbox, "behind", lambda self: [])


def reply_before_the_step(put):
    """An owner says that it has applied a step when it begins to wait for it."""
    apply_step = BspClient._apply_step

    def early(self):
        applied = self.context.memory.local.applied
        applied[0] += 1
        self._world.sim.hand_over(self._world.rank)
        apply_step(self)
        applied[0] -= 1

    put(BspClient, "_apply_step", early)


def eviction_drops_sums(put):
    """The sums of evicted lines are lost."""
    insert = HostCache.insert_and_evict

    def drop(self, *arguments):
        before = self.num_pushes
        found = insert(self, *arguments)
        if self.num_pushes > before:
            self.take_pushes()
        return found

    put(HostCache, "insert_and_evict", drop)


def poll_left_out(put):
    """A rank that waits receives nothing."""
    put(SimWorld, "receive_pending", lambda self: None)


def message_answered_twice(put):
    """A reply is sent again."""
    send = SimMessages.send

    def send_again(self, tag, messages):
        send(self, tag, messages)
        if tag == _C.REPLY_TAG:
            send(self, tag, messages)

    put(SimMessages, "send", send_again)


def fence_left_out(put):
    """A rank leaves a flush before others have flushed."""
    put(NodeMemory, "fence", lambda self, what="": None)


def held_gradients_lost(put):
    """Gradients for other nodes do not leave with the request."""
    take = Pushes.take_held

    def lose(self):
        return take(self)[1:]

    put(Pushes, "take_held", lose)


def bound_too_wide(put):
    """Clocks are compared at a staleness that is too large by 2."""
    set_batches = TableContext.set_batches_per_pull

    def set_wider(self, num):
        set_batches(self, num)
        self.bound += 2 * (self.bound > 0)

    put(TableContext, "set_batches_per_pull", set_wider)


def request_not_answered(put):
    """A rank goes on before it has answered one of the others."""
    send = SimMessages.send

    def send_to_the_first(self, tag, messages):
        send(self, tag, dict(list(messages.items())[: 1 if tag == _C.REPLY_TAG else None]))

    put(SimMessages, "send", send_to_the_first)


def drop_without_receiving(put):
    """A rank forgets a request whose reply is under way."""
    put(_C.Request, "drop", lambda self: None)


def pushes_as_they_come(put):
    """By messages, pushes are applied in the order of their arrival."""
    server = _C.Server
    put(_C, "Server", lambda ranks, own, in_rounds: server(ranks, own, False))


def sum_added_twice(put):
    """A gradient is added to its line twice."""
    update = HostCache.update

    def update_twice(self, slots, grads, anticipate):
        update(self, slots, grads, anticipate)
        update(self, np.where(np.arange(len(slots)) == 0, slots, -1), grads, anticipate)

    put(HostCache, "update", update_twice)


FAULTS = {
    plant.__name__: plant
    for plant in (
        preview_left_out, clock_before_row, push_applied_twice, tail_passed_early, reply_before_the_step,
        eviction_drops_sums, poll_left_out, message_answered_twice, fence_left_out, held_gradients_lost,
        bound_too_wide, request_not_answered, drop_without_receiving, pushes_as_they_come,
        sum_added_twice,
    )
}  # fmt: skip
