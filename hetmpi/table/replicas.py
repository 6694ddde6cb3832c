"""ReplicatingClient: a client that keeps small fields whole on every rank.

Most rows of a small field occur in every batch, so each of them would travel from its owner and back in every step.
Here every rank holds such rows, and one allreduce per step sums their gradients, as for the dense layers:
    write    starts the allreduce of the gradients and of the number of ranks that touched each row, concurrent with
             that of the dense layers
    read     waits for it; then each rank applies the row optimizer once to the rows that any rank touched
All other keys are passed to the wrapped client.

Invariants:
    every replicated row is bitwise equal on all ranks after the same number of writes: same sums, same code;
    replicated rows are exact at any staleness: all updates of the step before, from all ranks, applied once;
    their copies in the owners' shards are up to date after flush().
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from hetmpi import _C
from hetmpi.comm.memory import refuse_if_short, size_text
from hetmpi.comm.mpi import MPI
from hetmpi.comm.waiting import wait_for
from hetmpi.comm.window import Layout, ShardMemory
from hetmpi.comm.world import World
from hetmpi.errors import UserError
from hetmpi.in_flight import InFlight
from hetmpi.table.client import Client, Parts
from hetmpi.table.request import MOST_AHEAD, Keys

LARGEST_COUNT = (1 << 31) - 1  # maximum count of an MPI call


class ReplicatingClient:
    """See hetmpi/table/client.py, Client. In addition, every rank makes every write, at any staleness; a rank without
    keys passes none.

    replica   rows of the fields' keys, in key order: weight (n, dim), state (n, state_dim), clock (n,)
    """

    def __init__(self, parts: Parts, inner: Client, fields: Sequence[range], name: str):
        """inner: the client of all other keys. fields: keys to replicate. name: of the table. Collective."""
        bounds = [bound for keys in fields for bound in (keys.start, keys.stop)]
        if sorted(bounds) != bounds or not 0 <= min(bounds) <= max(bounds) <= parts.num_rows:
            raise UserError(
                f"EmbeddingTable: replicated must be ascending ranges within [0, {parts.num_rows:,}), got {fields}"
            )
        if parts.cache.device.type != "cpu":
            raise UserError(
                "EmbeddingTable: device must be cpu with replicated rows: set table.replicate_below_rows=0 to train "
                "on a GPU"
            )
        self.parts, self.inner, self.transport, self.why = parts, inner, inner.transport, inner.why
        self._world, self._spans = parts.world, parts.spans
        self._bounds, self._allreduce = np.array(bounds, np.int64), f"{name}.replicated"
        self._splits: list[Split] = []
        self._sent: tuple[int | None, int] | None = None  # handle of the allreduce in progress, its step
        self._hvd = parts.world.start_horovod() if parts.world.size > 1 else None
        self._open_replica(Layout(sum(map(len, fields)), parts.dim, parts.rule.state_dim, 0, (), 0))
        owners, rows = parts.partition.locate(np.concatenate([np.arange(keys.start, keys.stop) for keys in fields]))
        self._own = np.flatnonzero(owners == parts.world.rank)  # rows of the replica that this rank owns,
        self._own_rows = rows[self._own]  # and their indices in its shard
        self._load()

    def _open_replica(self, layout: Layout):
        """Allocates the rows and the gradient sums of a step."""
        check_memory(self._world, layout)
        num, dim = layout.num_rows, layout.dim
        self.replica = ShardMemory(np.zeros(layout.nbytes, np.uint8), layout, None)
        self._sums = torch.zeros(num * (dim + 1))  # one tensor, so one allreduce
        self._grads = self._sums[: num * dim].view(num, dim).numpy()
        self._touched = self._sums[num * dim :].numpy()  # (n,) float32: ranks that touched the row in the step

    @property
    def step(self) -> int:
        return self.parts.step

    @property
    def num_windows(self) -> int:
        return self.inner.num_windows

    def reading(self, keys: Keys) -> InFlight[torch.Tensor]:
        """After a write it waits until every rank has made that write."""
        with self._spans("find"):
            split = self._split(keys)
        others = yield from self.inner.reading(split.others)
        with self._spans("drain"):
            self._settle_replica()
        with self._spans("fetch"):
            return self._joined(split, others)

    def peek(self, keys: Keys) -> torch.Tensor:
        split = Split(keys, self._bounds, self.parts)
        others = self.inner.peek(split.others)
        if self._sent is not None:
            raise RuntimeError("EmbeddingTable.peek: a write is not settled yet: call flush() on every rank first")
        return self._joined(split, others)

    def announce(self, keys: Keys):
        self.inner.announce(self._split(keys).others)

    def check_write(self):
        self.inner.check_write()

    def writing(self, keys: Keys, grads: torch.Tensor) -> InFlight[None]:
        """Every rank must make the same number of writes."""
        with self._spans("push"):
            split = self._split(keys, keeps=False)
            others = np.empty((len(split.at_others), self.parts.dim), np.float32)
            _C.gather(grads.numpy(), split.at_others, others, np.arange(len(others)))
            self._send_replica(split, grads.numpy())
        yield from self.inner.writing(split.others, torch.from_numpy(others))

    def settling(self) -> InFlight[None]:
        return self.inner.settling()

    def flush(self):
        """Also updates the replicated rows in the owners' shards."""
        self.inner.flush()
        with self._spans("drain"):
            self._settle_replica()
            weight, state, clock = (getattr(self.replica, name)[self._own] for name in ("weight", "state", "clock"))
            self.parts.store.assign(self._own_rows, weight, state, clock)

    def push_pending(self, timeout_s: float):
        self.inner.push_pending(timeout_s)

    def await_owners(self):
        self.inner.await_owners()

    def resume_at(self, step: int):
        self.inner.resume_at(step)
        self._load()

    def _load(self):
        """Copies the replicated rows from the owners' shards. Collective."""
        for name in ("weight", "state", "clock"):
            mine, shared = getattr(self.replica, name), getattr(self.parts.store, name)
            mine[:] = 0
            mine[self._own] = shared[self._own_rows]
            # The owner has the bits of each row, all other ranks zero.
            self._world.comm.Allreduce(MPI.IN_PLACE, mine.view(np.uint32), op=MPI.BOR)

    def close(self):
        if self._sent is not None:
            self._await_allreduce()  # its name may be used by the next table
        self.inner.close()

    # The replica.

    def _send_replica(self, split: Split, values: np.ndarray):
        """Starts summing the gradients of replicated rows over all ranks.

        HOROVOD_DISABLE_GROUP_FUSION, which World sets, keeps Horovod from fusing this group with others: the order of
        additions depends only on the size."""
        self._settle_replica()  # at s >= 1 a write may follow a write
        self._sums.zero_()
        _C.gather(values, split.at_replicated, self._grads, split.rows)
        self._touched[split.rows] = 1
        handle = None
        if self._hvd is not None and len(self._sums):
            handle = self._hvd.allreduce_async_(self._sums, name=self._allreduce, op=self._hvd.Sum)
            self.parts.counters.reduced_bytes += 2 * (self._world.size - 1) * self._sums.nbytes // self._world.size
        self._sent = handle, self.step

    def _settle_replica(self):
        """Applies the last write once all ranks have made it."""
        if self._sent is None:
            return
        step = self._await_allreduce()
        self.parts.rule.set_step(self.parts.optimizer.lr_at(step), step + 1)
        mine = self.replica
        self.parts.rule.apply_touched(mine.weight, mine.state, mine.clock, self._grads, self._touched)

    def _await_allreduce(self) -> int:
        """Waits for the sums of the last write and returns its step."""
        (handle, step), self._sent = self._sent, None
        if handle is not None:
            wait_for(
                self._world,
                lambda: self._hvd.poll(handle),
                f"in step {step + 1} for all ranks' gradients of the replicated rows",
            )
            self._hvd.synchronize(handle)
        return step

    # Split batches.

    def _split(self, keys: Keys, keeps: bool = True) -> Split:
        """The two parts of `keys`. The same tensor gives the same objects, by which a client identifies a batch. keeps:
        whether to remember them."""
        for known in self._splits:
            if known.is_of(keys):
                return known
        split = Split(keys, self._bounds, self.parts)
        if keeps:
            self._splits = [split, *self._splits[:MOST_AHEAD]]  # the current batch and the announced ones
        return split

    def _joined(self, split: Split, others: torch.Tensor) -> torch.Tensor:
        """The rows (U, dim) of a batch, merged from replicated ones and `others`."""
        rows = np.empty((len(split.array), self.parts.dim), np.float32)
        _C.gather(self.replica.weight, split.rows, rows, split.at_replicated)
        _C.gather(others.numpy(), np.arange(len(others)), rows, split.at_others)
        return torch.from_numpy(rows)


class Split:
    """One batch of keys, split in two parts.

    keys, array     the tensor, which may be overwritten later, and its current values (U,) int64
    others          keys that are not replicated
    at_others, at_replicated  positions of the two parts in the batch; rows: indices of the replicated keys in the
                              replica
    """

    def __init__(self, keys: Keys, bounds: np.ndarray, parts: Parts):
        """bounds: begin and end of each range of replicated keys, (2 * number of ranges,) int64, ascending."""
        self.keys, self.array = keys.tensor, keys.array
        begins, ends = bounds[::2], bounds[1::2]
        first_rows = np.cumsum(ends - begins) - (ends - begins)  # of each range in the replica
        place = np.searchsorted(bounds, self.array, side="right")  # odd within a range
        is_replicated = place % 2 == 1
        self.at_replicated, self.at_others = np.flatnonzero(is_replicated), np.flatnonzero(~is_replicated)
        field = place[self.at_replicated] // 2
        self.rows = self.array[self.at_replicated] + (first_rows - begins)[field]
        others = self.array[self.at_others]
        self.others = parts.keys_of(torch.from_numpy(others), others)

    def is_of(self, keys: Keys) -> bool:
        return self.keys is keys.tensor and np.array_equal(self.array, keys.array)


def small_fields(field_rows: list[int], below_rows: int) -> list[range]:
    """Key range of each field with fewer than `below_rows` rows; keys of field f begin at sum(field_rows[:f])."""
    return [range(end - rows, end) for rows, end in zip(field_rows, accumulate(field_rows)) if rows < below_rows]


def check_memory(world: World, layout: Layout):
    """Raises UserError on every rank if some node lacks memory for its ranks' replicas, or if they are too large for
    one allreduce. Collective."""
    num, cure = layout.num_rows, "lower table.replicate_below_rows"

    def message(need, place, free):
        return (
            f"{num:,} rows of dim {layout.dim} on each rank need {size_text(need)} for the {world.node.size} rank(s) "
            f"on {world.host}, {size_text(free)} are free in {place}: {cure}"
        )

    refuse_if_short(world, layout.nbytes + 4 * num * (layout.dim + 1), False, message)
    if num * (layout.dim + layout.state_dim + 1) > LARGEST_COUNT:  # the same on every rank
        raise UserError(f"{num:,} rows of dim {layout.dim} are more than one allreduce takes: {cure}")
