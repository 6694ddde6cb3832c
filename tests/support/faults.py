"""Faults of the protocol that a simulation must find (sim.py, fault=NAME). Each is planted by put(owner, name, value),
which sets an attribute: at the seams of the core, which are the world's waits, the wire, the appliers and the clients'
verbs."""

import numpy as np
from sim import SimMessages, SimWorld

from hetmpi import _C
from hetmpi.owner.node_memory import NodeMemory
from hetmpi.table.client import TableContext
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.ssp import SspClient

PushApplier, BoundedClient = _C.PushApplier, _C.BoundedClient


def preview_by_another_rule(put):
    """Own gradients that are under way move rows from other nodes otherwise than their owners will."""
    init = BoundedClient.__init__

    def init_with_momentum(self, table, owner, rule, *arguments):
        init(self, table, owner, RowOptimizer("momentum").core(rule.sum_dim) if rule.is_plain else rule, *arguments)

    put(BoundedClient, "__init__", init_with_momentum)


class ChangingApplier(PushApplier):
    """Changes what it has drained for other threads and waits; the core's own drains stay as they are."""

    def __init__(self, shard, rule):
        super().__init__(shard, rule)
        self.weight = shard.weight

    def drain(self):
        before = self.weight.copy()
        num = super().drain()
        return num + self.change(self.weight - before)


def clock_before_row(put):
    """Clocks are written before the rows, which come later."""

    class LateRows(ChangingApplier):
        late = 0.0

        def change(self, moved):
            was_late, self.late = self.late, moved
            self.weight += was_late - moved
            return np.any(moved)

    put(_C, "PushApplier", LateRows)


def push_applied_twice(put):
    """Gradients of this node's ranks are applied twice."""

    class Twice(ChangingApplier):
        def change(self, moved):
            self.weight += moved
            return 0

    put(_C, "PushApplier", Twice)


def wait_left_out(put, text: str):
    """A rank does not wait where the reason has this text."""
    wait = SimWorld.wait

    def wait_for_others(self, look, what):
        return (text in (what() if callable(what) else what)) or wait(self, look, what)

    put(SimWorld, "wait", wait_for_others)


def tail_passed_early(put):
    """A rank believes that owners have applied what is in their rings."""
    wait_left_out(put, "to apply its gradients")


def reply_not_awaited(put):
    """A rank reads replies that are not here."""
    wait_left_out(put, "to read or write the table as often as it does")


def reply_before_the_step(put):
    """An owner says that it has applied a step when it begins to wait for it."""
    wait = SimWorld.wait

    def wait_early(self, look, what):
        if "for the gradients of" not in (what() if callable(what) else what):
            return wait(self, look, what)
        tables = [of_rank[self.rank] for of_rank in self.sim.tables.values()]
        exact = [table.memory.local.applied for table in tables if table.staleness.is_exact]
        for applied in exact:
            applied[0] += 1
        self.sim.hand_over(self.rank)
        wait(self, look, what)
        for applied in exact:
            applied[0] -= 1

    put(SimWorld, "wait", wait_early)


def eviction_drops_sums(put):
    """The sums of lines that a read evicts are lost."""

    def read_and_drop(clients, keys):
        rows = BoundedClient.read(clients, keys)
        for client in clients:
            client.context.cache.take()
        return rows

    put(SspClient, "read", staticmethod(read_and_drop))


def sum_added_twice(put):
    """The gradient of a key is added to its line twice."""

    def write_twice(clients, keys, grads):
        grads = [grad.clone() for grad in grads]
        for grad in grads:
            grad[:1] *= 2
        BoundedClient.write(clients, keys, grads)

    put(SspClient, "write", staticmethod(write_twice))


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


def request_not_answered(put):
    """A rank goes on before it has answered one of the others."""
    send = SimMessages.send

    def send_to_the_first(self, tag, messages):
        send(self, tag, dict(list(messages.items())[: 1 if tag == _C.REPLY_TAG else None]))

    put(SimMessages, "send", send_to_the_first)


def held_gradients_lost(put):
    """A record of gradients for another node does not leave with the request."""
    send = SimMessages.send

    def send_less(self, tag, messages):
        if tag == _C.REQUEST_TAG:
            on_node = self._sim.on_node, self._sim.node_of
            messages = {to: without_a_record(words, len(on_node[0][on_node[1][to]])) for to, words in messages.items()}
        send(self, tag, messages)

    put(SimMessages, "send", send_less)


def without_a_record(words: np.ndarray, num_owners: int) -> np.ndarray:
    """A request without the first record of its first section that has one (cpp/wire/sections.h, request.h)."""
    tables = next(num for num in range(1, len(words)) if num + words[:num].sum() == len(words))
    begins = tables + np.concatenate([[0], words[:tables].cumsum()])
    for table, begin in enumerate(begins[:-1]):
        at = begin + 3 + 2 * num_owners  # after the header and the counts
        if words[table] and words[begin + 3] > 0:
            size = words[at] // 8
            left = np.delete(words, slice(at, at + size))
            left[table] -= size
            left[begin + 3] -= 1
            return left
    return words


def fence_left_out(put):
    """A rank leaves a flush before others have flushed."""
    put(NodeMemory, "fence", lambda self, what="": None)


def bound_too_wide(put):
    """Clocks are compared at a staleness that is too large by 2."""
    set_batches = TableContext.set_batches_per_pull

    def set_wider(self, num):
        set_batches(self, num)
        self.bound += 2 * (self.bound > 0)

    put(TableContext, "set_batches_per_pull", set_wider)


def pushes_as_they_come(put):
    """By messages, pushes are applied in the order of their arrival."""
    server = _C.Server
    put(_C, "Server", lambda ranks, own, in_rounds: server(ranks, own, False))


FAULTS = {
    plant.__name__: plant
    for plant in (
        preview_by_another_rule, clock_before_row, push_applied_twice, tail_passed_early, reply_before_the_step,
        reply_not_awaited, eviction_drops_sums, sum_added_twice, poll_left_out, message_answered_twice,
        request_not_answered, held_gradients_lost, fence_left_out, bound_too_wide, pushes_as_they_come,
    )
}  # fmt: skip
