"""Client: the protocol of a consistency model. bsp.py is s = 0, exact; ssp.py is s >= 1, HET's client. Both are classes
of the core (cpp/client/), which these files open and close."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from hetmpi import _C
from hetmpi._C import Keys
from hetmpi.errors import NotFinite, UserError
from hetmpi.owner.node_memory import NodeMemory
from hetmpi.spans import Spans
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.wire.channel import Channel
from hetmpi.wire.transport import choose
from hetmpi.world.world import World

MOST_AHEAD = _C.MOST_AHEAD  # batches announced and not read yet


class Client(Protocol):
    """One rank's side of a table. Keys are checked.

    The static methods are for tables that are used together: clients of one class, whose channels share an exchange.
    Their messages have a section of each.

    channel      communication of rows and gradients between nodes
    why          reason in one sentence if a trial chose the wire
    step         steps written so far (BSP: and settled)
    num_histories  rows of this rank's shard of which it keeps pushes (cpp/owner/push_history.h)"""

    channel: Channel
    why: str | None
    step: int
    num_histories: int

    @staticmethod
    def read(clients: Clients, keys: Sequence[Keys]) -> list[torch.Tensor]:
        """keys (U,) -> rows (U, dim) float32 on each table's device, as recent as the consistency model requires."""

    @staticmethod
    def announce(clients: Clients, keys: Sequence[Keys]) -> None:
        """Announces the keys of a later read."""

    @staticmethod
    def write(clients: Clients, keys: Sequence[Keys], grads: Sequence[torch.Tensor]) -> None:
        """Pushes gradients (U, dim), or keeps them pending for a later push. Raises as EmbeddingTable.write."""

    @staticmethod
    def settle(clients: Clients) -> None:
        """Completes the last write where other ranks depend on it, before this rank waits for them. Collective."""

    def peek(self, keys: Keys) -> np.ndarray:
        """The owners' rows (U, dim), for evaluation; neither the cache nor the counters are used."""

    def flush(self) -> None:
        """Applies all updates at their owners. Collective."""

    def await_owners(self) -> None:
        """Waits until the owners have applied the gradients that this rank has pushed."""

    def resume_at(self, step: int) -> None:
        """Continues as after `step` steps."""

    def close(self) -> None:
        """Ends the transfers in progress. Collective."""


Clients = Sequence[Client]


@dataclass
class TableContext:
    """The parts that EmbeddingTable passes to a client."""

    world: World
    memory: NodeMemory
    partition: _C.Partition
    num_rows: int
    optimizer: RowOptimizer
    rule: _C.RowOptimizer  # of the optimizer, for rows of dim
    record: _C.RecordFormat  # of a push
    staleness: Staleness
    cache: _C.Lines
    space: _C.KeySpace
    counters: _C.Counters
    spans: Spans
    batches_per_pull: int = 1  # announced batches that one pull serves, at most s

    def __post_init__(self):
        self.set_batches_per_pull(self.batches_per_pull)

    def set_batches_per_pull(self, num: int):
        """Sets batches_per_pull, and bound, the staleness at which clocks are compared, as the C++ core writes it: s,
        less the steps between the first and the last batch of a pull, as the last one is read so much later
        (docs/design_consistency.md)."""
        self.batches_per_pull, self.bound = num, self.staleness.core_bound
        if self.bound != _C.UNBOUNDED:
            self.batches_per_pull = max(1, min(num, self.bound))
            self.bound -= self.batches_per_pull - 1


class OpenTable:
    """What a client of the core uses of its table, and keeps.

    channel, why  as of Client
    core          for the client's constructor"""

    def __init__(self, context: TableContext, exchange: str, has_states: bool, applier: _C.PushApplier | None):
        """exchange: messages, windows or auto. has_states: whether mean squares are read with the rows. applier: of
        gradients to this rank's shard; None at s = 0, where the step reducer applies them. Collective."""
        memory, world = context.memory, context.world
        shards = [memory.on_node[rank].in_core for rank in world.node_ranks]
        node = _C.NodeRows(shards, world.node_ranks, world.rank, has_states, applier)
        make = partial(Channel, memory, context.record, node, shards if applier is None else [])
        self.channel, self.why = choose(world, exchange, make, context.partition, context.num_rows)
        rings = [
            _C.RingProducer(memory.local_ring(owner, world.rank), context.record)
            if owner in memory.on_node and owner != world.rank
            else None
            for owner in range(world.size)
        ]
        self.core = _C.Table(
            context.space, node, self.channel, context.cache, context.spans, context.counters, rings
        )  # fmt: skip
        self._kept = context, node, rings


def checked_gradients(grads: torch.Tensor, shape: tuple[int, int], device: torch.device | str) -> torch.Tensor:
    """Gradients as the core takes them: contiguous, without a graph. Raises UserError unless they are float32 of this
    shape on this device."""
    is_right = isinstance(grads, torch.Tensor) and grads.dtype == torch.float32
    if not (is_right and grads.shape == shape and grads.device == torch.device(device)):
        raise UserError(
            f"EmbeddingTable.write: grads must be float32 of shape {shape} on {device}, got {kind_of(grads)}"
        )
    return grads.detach().contiguous()


def kind_of(value) -> str:
    """dtype, shape and device of a tensor, or the type of another object, for messages."""
    return f"{value.dtype} {tuple(value.shape)} on {value.device}" if torch.is_tensor(value) else type(value).__name__


def check_finite(keys, values: np.ndarray, which: str = "gradients"):
    """Raises NotFinite if gradients (n, width) float32 of keys (n,), or sums of gradients, are NaN or infinite. which:
    what they are, for the message."""
    if not _C.all_finite(values):
        wrong = np.flatnonzero(~np.isfinite(values).all(1))
        first = values[wrong[0]]
        raise NotFinite(
            f"EmbeddingTable.write: {which} must be finite, got {first[~np.isfinite(first)][0]} for key "
            f"{int(keys[wrong[0]])} ({len(wrong):,} of {len(values):,} keys)"
        )
