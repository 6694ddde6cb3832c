"""Client: the protocol of a consistency model. bsp.py is s = 0, exact; ssp.py is s >= 1, HET's client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hetmpi import _C
from hetmpi._C import Keys
from hetmpi.counters import Counters
from hetmpi.errors import NotFinite
from hetmpi.owner.node_memory import NodeMemory
from hetmpi.owner.shards import ShardReader
from hetmpi.spans import Spans
from hetmpi.table.cache import RowCache
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.wire.channel import Channel
from hetmpi.world.world import World


class Client(Protocol):
    """One rank's side of a table. Keys are checked: int64, unique, in range.

    The static methods are for tables that are used together: clients of one class, whose channels share an exchange.
    Their messages have a section of each.

    context      the objects that EmbeddingTable passes
    channel      communication of rows and gradients between nodes
    why          reason in one sentence if a trial chose the wire
    num_histories  rows of this rank's shard of which it keeps pushes (cpp/owner/push_history.h)"""

    context: TableContext
    channel: Channel
    why: str | None
    _reader: ShardReader  # of this node's rows
    num_histories: int = 0

    @property
    def step(self) -> int:
        """Steps written so far (BSP: and settled)."""
        return self.context.step

    @staticmethod
    def read(clients: Clients, keys: Sequence[Keys]) -> list[torch.Tensor]:
        """keys (U,) -> rows (U, dim) float32 on each table's device, as recent as the consistency model requires."""

    @staticmethod
    def announce(clients: Clients, keys: Sequence[Keys]) -> None:
        """Announces the keys of a later read."""

    @staticmethod
    def write(clients: Clients, keys: Sequence[Keys], grads: Sequence[torch.Tensor]) -> None:
        """Pushes gradients (U, dim), or keeps them pending for a later push."""

    @staticmethod
    def settle(clients: Clients) -> None:
        """Completes the last write where other ranks depend on it, before this rank waits for them; by default they do
        not. Collective."""

    def peek(self, keys: Keys) -> torch.Tensor:
        """The owners' rows, for evaluation; neither the cache nor the counters are used."""
        rows = np.empty((len(keys.array), self.context.dim), np.float32)
        self._reader.read("weight", keys.route, rows)
        self.channel.fetch(keys.remote_route, rows, self.step)
        return torch.from_numpy(rows).to(self.context.cache.device)

    def check_write(self) -> None:
        """Raises RuntimeError unless write() may be called now; by default it may."""

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
    dim: int
    optimizer: RowOptimizer
    rule: _C.RowOptimizer  # of the optimizer, for rows of dim
    record: _C.RecordFormat  # of a push
    staleness: Staleness
    cache: RowCache
    admitted: np.ndarray  # (size,) bool: ranks whose rows are cached
    counters: Counters
    spans: Spans
    batches_per_pull: int = 1  # announced batches that one pull serves, at most s
    step: int = 0  # steps written so far; set by the client alone

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

    def keys_of(self, tensor: torch.Tensor, array: np.ndarray) -> Keys:
        """Keys whose values are array (U,) int64. Thread-safe."""
        kept = self.cache.empty(len(array), np.int64)
        kept[:] = array
        return Keys(tensor, kept, self.partition, self.world.is_remote, self.admitted)


def check_finite(keys, values: np.ndarray):
    """Raises NotFinite if gradients (n, width) float32 of keys (n,), or sums of gradients, are NaN or infinite."""
    if not _C.all_finite(values):
        wrong = np.flatnonzero(~np.isfinite(values).all(1))
        first = values[wrong[0]]
        raise NotFinite(
            f"EmbeddingTable.write: gradients must be finite, got {first[~np.isfinite(first)][0]} for key "
            f"{int(keys[wrong[0]])} ({len(wrong):,} of {len(values):,} keys)"
        )
