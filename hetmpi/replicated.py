"""ReplicatedTable: an EmbeddingTable of whose small fields every rank has all rows.

Most rows of a small field are in every batch: each of them travels from its owner and back in every step. Here every
rank keeps such rows, and their gradients go by one allreduce a step, as those of the dense layers do:
    write    starts the allreduce of the gradients and of how many ranks touched each row, beside that of the dense layers
    read     waits for it, then each rank applies the row optimizer once to the rows that any rank touched
All other keys go to the EmbeddingTable.

Invariants:
    all ranks have the same bits of every replicated row after the same number of writes: the same sums, the same code;
    replicated rows are exact at any staleness: all updates of the step before, from all ranks, applied once;
    their places in the owners' shards are up to date after flush().
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from hetmpi import _C
from hetmpi.optim import RowOptimizer
from hetmpi.reading import MOST_AHEAD
from hetmpi.table import EmbeddingTable
from hetmpi.window import Layout, Memory, refuse_if_short, size_text
from hetmpi.world import MPI, Refused, World

LARGEST_COUNT = (1 << 31) - 1  # numbers that one MPI call takes


class ReplicatedTable(EmbeddingTable):
    """An EmbeddingTable whose rows of `fields` are on every rank. Beyond its contract, every rank makes every write, at any
    staleness, with no keys if it has none.

    replica   rows of the fields' keys, in their order: weight (n, dim), state (n, state_dim), clock (n,)
    """

    def __init__(
        self, world: World, num_rows: int, dim: int, optimizer: RowOptimizer, fields: list[range], name: str = "table",
        **settings,
    ):  # fmt: skip
        """fields: keys to replicate, in ascending ranges (small_fields); the rest as for EmbeddingTable. Two tables that
        are written in turns need two names. Collective.

        Raises Refused if memory is short, for ranges that overlap or leave [0, num_rows), and if Horovod was started on
        other ranks than `world`."""
        bounds = [bound for keys in fields for bound in (keys.start, keys.stop)]
        if sorted(bounds) != bounds or not 0 <= min(bounds, default=0) <= max(bounds, default=0) <= num_rows:
            raise Refused(f"ReplicatedTable: fields must be ascending ranges within [0, {num_rows:,}), got {fields}")
        if torch.device(settings.get("device", "cpu")).type != "cpu":
            raise Refused("ReplicatedTable: device must be cpu: set table.replicate_below_rows=0 to train on a GPU")
        super().__init__(world, num_rows, dim, optimizer, name=name, **settings)
        self._bounds, self._allreduce = np.array(bounds, np.int64), f"{name}.replicated"
        self._splits: list[Split] = []
        self._sent: tuple[int | None, int] | None = None  # handle of the allreduce under way, its step
        try:
            self._hvd = world.start_horovod() if world.size > 1 else None
            self._open_replica(Layout(sum(map(len, fields)), dim, self._rule.state_dim, 0, 0))
        except Refused:
            self.close()
            raise
        keys = np.concatenate([np.arange(keys.start, keys.stop) for keys in fields] or [np.empty(0, np.int64)])
        owners, rows = self.partition.locate(keys)
        self._own = np.flatnonzero(owners == world.rank)  # rows of the replica, and
        self._own_rows = rows[self._own]  # their places in this rank's shard
        self.load()

    def _open_replica(self, layout: Layout):
        """Memory for the rows, and for the sums of a step."""
        check_memory(self.world, layout)
        num, dim = layout.num_rows, layout.dim
        self.replica = Memory(np.zeros(layout.nbytes, np.uint8), layout)
        self._sums = torch.zeros(num * (dim + 1))  # one tensor: one allreduce
        self._grads = self._sums[: num * dim].view(num, dim).numpy()
        self._touched = self._sums[num * dim :].numpy()  # (n,) float32: ranks that touched the row in the step

    # What a trainer calls.

    def read(self, keys: torch.Tensor) -> torch.Tensor:
        """As EmbeddingTable.read. After a write it waits until every rank has made that write."""
        with self.spans("find"):
            split = self._split(keys, "read")
        others = super().read(split.others)
        with self.spans("drain"):
            self._settle_replica()
        with self.spans("fetch"):
            return self._joined(split, others)

    def peek(self, keys: torch.Tensor) -> torch.Tensor:
        """As EmbeddingTable.peek."""
        split = Split(keys, self._checked(keys, "peek"), self._bounds)
        others = super().peek(split.others)
        if self._sent is not None:
            raise RuntimeError("ReplicatedTable.peek: a write is not settled yet: call flush() on every rank first")
        return self._joined(split, others)

    def prefetch(self, keys: torch.Tensor):
        """As EmbeddingTable.prefetch."""
        with self.spans("prefetch"):
            split = self._split(keys, "prefetch")
        super().prefetch(split.others)

    def write(self, keys: torch.Tensor, grads: torch.Tensor):
        """As EmbeddingTable.write; every rank makes it equally often."""
        with self.spans("push"):
            split = self._split(keys, "write", keeps=False)
            values = self._checked_grads(keys, grads).numpy()
            others = np.empty((len(split.at_others), self.dim), np.float32)
            _C.gather(values, split.at_others, others, np.arange(len(others)))
            if not self._is_written:  # else the write below refuses the step
                self._send_replica(split, values)
        super().write(split.others, torch.from_numpy(others))

    def flush(self):
        """As EmbeddingTable.flush; the owners' shards have the replicated rows then. Collective."""
        super().flush()
        with self.spans("drain"):
            self._settle_replica()
            for mine, shared in self._pairs():
                shared[self._own_rows] = mine[self._own]
            self.touched[self._own_rows] = 1

    def await_owners(self):
        """As EmbeddingTable.await_owners."""
        super().await_owners()
        if self.staleness.is_synchronous:
            self._settle_replica()

    def resume_at(self, step: int):
        """As EmbeddingTable.resume_at."""
        super().resume_at(step)
        self.load()

    def load(self):
        """Takes the replicated rows from the owners' shards, after these were filled by other means than write().
        Collective."""
        for mine, shared in self._pairs():
            mine[:] = 0
            mine[self._own] = shared[self._own_rows]
            self.world.comm.Allreduce(MPI.IN_PLACE, mine.view(np.uint32), op=MPI.BOR)  # the bits of one rank, else 0

    def close(self):
        """As EmbeddingTable.close."""
        if self._sent is not None:
            self._await_allreduce()  # the next table of this name may not meet it
        self._sent, self._splits = None, []
        super().close()

    # The replica.

    def _pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each array of the replica, and of this rank's shard."""
        return [(getattr(self.replica, name), getattr(self.shard, name)) for name in ("weight", "state", "clock")]

    def _send_replica(self, split: Split, values: np.ndarray):
        """Starts summing the gradients of replicated rows over all ranks.

        HOROVOD_DISABLE_GROUP_FUSION, which World sets, makes every call to Horovod a group that is fused with no other:
        the order of additions depends on nothing but the size."""
        self._settle_replica()  # at s >= 1 a write may follow a write
        self._sums.zero_()
        _C.gather(values, split.at_replicated, self._grads, split.rows)
        self._touched[split.rows] = 1
        handle = None
        if self._hvd is not None and len(self._sums):
            handle = self._hvd.allreduce_async_(self._sums, name=self._allreduce, op=self._hvd.Sum)
            self.counters.reduced_bytes += 2 * (self.world.size - 1) * self._sums.nbytes // self.world.size
        self._sent = handle, self.step

    def _settle_replica(self):
        """Applies the last write, once all ranks have made it."""
        self._check_open()
        if self._sent is None:
            return
        step = self._await_allreduce()
        self._rule.set_step(self.optimizer.lr_at(step), step + 1)
        mine = self.replica
        self._rule.apply_touched(mine.weight, mine.state, mine.clock, self._grads, self._touched)

    def _await_allreduce(self) -> int:
        """Waits for the sums of the last write; returns its step."""
        (handle, step), self._sent = self._sent, None
        if handle is not None:
            self._hvd.synchronize(handle)
        return step

    # Keys in two parts.

    def _split(self, keys: torch.Tensor, verb: str, keeps: bool = True) -> Split:
        """The parts of `keys`, the same ones for the same tensor: EmbeddingTable knows a batch by its tensor of keys.
        keeps: whether to remember them."""
        self._check_open()
        for known in self._splits:
            if known.is_of(keys):
                return known
        split = Split(keys, self._checked(keys, verb), self._bounds)
        if keeps:
            self._splits = [split, *self._splits[:MOST_AHEAD]]  # the batch in work and those announced
        return split

    def _joined(self, split: Split, others: torch.Tensor) -> torch.Tensor:
        """The rows (U, dim) of a batch: replicated ones and `others`."""
        rows = np.empty((len(split.array), self.dim), np.float32)
        _C.gather(self.replica.weight, split.rows, rows, split.at_replicated)
        _C.gather(others.numpy(), np.arange(len(others)), rows, split.at_others)
        return torch.from_numpy(rows)


class Split:
    """One batch of keys in two parts.

    keys, array     the tensor, which may be filled anew later, and its numbers now (U,) int64
    others          keys that are not replicated, a tensor
    at_others, at_replicated  positions of the two parts in the batch; rows: of the replicated keys in the replica
    """

    def __init__(self, keys: torch.Tensor, array: np.ndarray, bounds: np.ndarray):
        """bounds: begin and end of each range of replicated keys, (2 * number of ranges,) int64, ascending."""
        self.keys, self.array = keys, array.copy()
        begins, ends = bounds[::2], bounds[1::2]
        first_rows = np.cumsum(ends - begins) - (ends - begins)  # of each range in the replica
        place = np.searchsorted(bounds, self.array, side="right")  # odd within a range
        is_replicated = place % 2 == 1
        self.at_replicated, self.at_others = np.flatnonzero(is_replicated), np.flatnonzero(~is_replicated)
        field = place[self.at_replicated] // 2
        self.rows = self.array[self.at_replicated] + (first_rows - begins)[field]
        self.others = torch.from_numpy(self.array[self.at_others])

    def is_of(self, keys: torch.Tensor) -> bool:
        return self.keys is keys and np.array_equal(self.array, keys.contiguous().numpy())


def small_fields(field_rows: list[int], below_rows: int) -> list[range]:
    """Keys of each field of fewer than `below_rows` rows; field f's begin at sum(field_rows[:f])."""
    return [range(end - rows, end) for rows, end in zip(field_rows, accumulate(field_rows)) if rows < below_rows]


def check_memory(world: World, layout: Layout):
    """Raises Refused on every rank if some node lacks memory for its ranks' replicas, or if they are too large for one
    allreduce. Collective."""
    num, cure = layout.num_rows, "lower table.replicate_below_rows"
    refuse_if_short(world, layout.nbytes + 4 * num * (layout.dim + 1), False, lambda need, place, free: (
        f"{num:,} rows of dim {layout.dim} on each rank need {size_text(need)} for the {world.node.size} rank(s) on "
        f"{world.host}, {size_text(free)} are free in {place}: {cure}"
    ))  # fmt: skip
    if num * (layout.dim + layout.state_dim + 1) > LARGEST_COUNT:  # the same on every rank
        raise Refused(f"{num:,} rows of dim {layout.dim} are more than one allreduce takes: {cure}")
