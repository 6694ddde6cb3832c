"""EmbeddingTable: one table of rows spread over all ranks, read and written by key.

It checks what it is given and hands it to its client: bsp.py for s = 0, where every read sees all writes of the step
before; ssp.py for s >= 1, HET's client, where reads may be s iterations behind. Rows of replicated fields are whole on
every rank (replicas.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from hetmpi import _C
from hetmpi.comm.route import make_partition
from hetmpi.comm.window import Layout, RmaWindow, ring_bytes
from hetmpi.comm.world import World
from hetmpi.counters import Counters
from hetmpi.errors import UserError
from hetmpi.in_flight import finish
from hetmpi.spans import Spans
from hetmpi.table.bsp import BspClient
from hetmpi.table.cache import CacheSettings, RowCache, Staleness
from hetmpi.table.client import Client, Parts, check_finite
from hetmpi.table.optim import RowOptimizer, check_choice
from hetmpi.table.replicas import ReplicatingClient
from hetmpi.table.request import MOST_AHEAD, Keys
from hetmpi.table.ssp import SspClient
from hetmpi.table.store import ShardStore

EXCHANGES = ("auto", "rma", "alltoall")
REMOTE_WINDOW = {"rma": "needed", "auto": "wanted", "alltoall": "unused"}


class EmbeddingTable:
    """`num_rows` rows of `dim` float32, keys 0 <= key < num_rows, partitioned over the ranks of `world`.

    device     where rows are read to and gradients come from, and where the cache is
    counters   what this rank's reads and writes did (hetmpi.counters.Counters)
    spans      what their time went to (hetmpi.spans.Spans)
    shard      this rank's rows (hetmpi.table.store.RowStore)
    cache      this rank's lines, to look at
    client     the consistency model at work (hetmpi.table.client.Client)
    touched_since  says for whoever set shard.touched to 0 that nobody else has done so since
    """

    def __init__(
        self,
        world: World,
        num_rows: int,
        dim: int,
        optimizer: RowOptimizer,
        partition: str = "round_robin",
        seed: int = 0,
        name: str = "table",
        init_std: float = 0.01,
        inbox_bytes: int = 8 << 20,
        staleness: Staleness = Staleness(0),
        cache: CacheSettings = CacheSettings(capacity_rows=0),
        spans: Spans | None = None,
        exchange: str = "rma",
        device: torch.device | str = "cpu",
        replicated: Sequence[range] = (),
    ):
        """Allocates the shards and gives every row its first value, normal with deviation `init_std`, which depends on
        (seed, name, key) alone. inbox_bytes: memory of each rank for gradients on their way in. spans: where times are
        added, None for the table's own. exchange: how rows and gradients travel between nodes: rma, one-sided;
        alltoall, by calls that all ranks make; auto, whichever fetches rows faster here; or the path of a class,
        "package.module.Class", that is a hetmpi.comm.transport.Transport. device: cpu, or this rank's GPU: the cache is
        there, rows are read to it and gradients taken from it, while keys stay on the CPU. replicated: keys whose rows
        every rank has whole, in ascending ranges (small_fields); every rank then makes every write, and two tables
        written in turns need two names. Collective.

        Raises UserError if memory is short, for ranges that overlap or leave [0, num_rows), and if Horovod, which
        replicated rows take, runs on other ranks; ValueError for an unknown partition or exchange or an impossible
        shape."""
        if dim < 1:
            raise UserError(f"table.dim must be at least 1, got {dim}")
        if "." not in exchange:
            check_choice("table.exchange", exchange, EXCHANGES)
        if staleness.is_synchronous and cache.dtype != "float32":
            raise UserError(
                f"table.cache.dtype must be float32 at staleness 0, where reads are exact, got {cache.dtype}"
            )
        self.world, self.name, self.num_rows, self.dim = world, name, num_rows, dim
        self.staleness, self.optimizer = staleness, optimizer
        self.partition, self.partition_kind = make_partition(partition, num_rows, world.size), partition
        self.counters, self.spans, self.touched_since = Counters(), spans or Spans(), None
        self._known = deque(maxlen=MOST_AHEAD + 1)  # keys checked lately: a batch is announced, read and written
        rule = optimizer.core(dim)
        make_client, record = BspClient, _C.RecordFormat(dim, False)
        if not staleness.is_synchronous:
            make_client, record = SspClient, _C.RecordFormat(rule.sum_dim, True)
        rings = ring_bytes(inbox_bytes if world.size > 1 else 0, world.size, record)
        layouts = [
            Layout(self.partition.num_local_rows(rank), dim, rule.state_dim, world.size, rings)
            for rank in range(world.size)
        ]
        self.window = RmaWindow(world, layouts, REMOTE_WINDOW.get(exchange, "wanted"))
        self.shard = ShardStore(self.window.local, lambda begin, end: self.partition.keys_of(world.rank, begin, end))
        self.shard.initialise(table_seed(seed, name), init_std)
        try:  # after the shards took their memory
            self.cache: RowCache = cache.open(world, num_rows, dim, optimizer, torch.device(device))
        except UserError:
            self.window.free()
            raise
        self.device = self.cache.device
        admitted = cache.admitted(world, self.device) & (self.cache.capacity_rows > 0)
        self.window.fence()
        parts = Parts(
            world, self.window, self.shard, self.partition, num_rows, dim, optimizer, rule, record, staleness,
            self.cache, admitted, self.counters, self.spans,
        )  # fmt: skip
        self.client: Client = make_client(parts, exchange)
        if replicated:
            self._replicate(parts, replicated, name)

    def _replicate(self, parts: Parts, fields: Sequence[range], name: str):
        try:
            self.client = ReplicatingClient(parts, self.client, fields, name)
        except UserError:
            self.close()
            raise

    # What a trainer calls.

    def read(self, keys: torch.Tensor) -> torch.Tensor:
        """keys (U,) int64 on the CPU, unique -> rows (U, dim) float32 on `device`: at s = 0 the owners' values after
        the last write, else at most `staleness` iterations behind them, with all of this rank's own updates.

        At s = 0 collective after a write. Raises UserError for keys of another dtype or shape, out of range, or given
        twice."""
        checked = self.to_read(keys)
        return finish(self.client.reading(checked))

    def peek(self, keys: torch.Tensor) -> torch.Tensor:
        """The owners' rows, for evaluation: no line is used, nothing is counted, keys may repeat, and no other rank
        need take part but in an exchange by alltoall. REQUIRES: flush() since a write, on every rank."""
        checked = self._checked(keys, "peek", are_unique=False)
        return self.client.peek(checked)

    def prefetch(self, keys: torch.Tensor):
        """Announces a batch that a later read will ask for by the same tensor `keys`, so that what other nodes own of
        it travels meanwhile; call it between a read and the write after it. Batches are read in the order announced.

        At s >= 1 the bound holds for the owners' clocks as they are when the batch before is read; at s = 0 nothing
        travels ahead. Raises UserError as read does, and at s = 0 RuntimeError between write and read."""
        with self.spans("prefetch"):
            checked = self._checked(keys, "prefetch")
            self.client.announce(checked)

    def write(self, keys: torch.Tensor, grads: torch.Tensor):
        """Takes the gradients of this step: keys (U,) int64, unique, grads (U, dim) float32 on `device`. At s = 0
        collective.

        The owner sums over ranks: divide by world.size for the gradient of a loss averaged over the global batch.
        Raises UserError for a wrong dtype, shape or key, NotFinite for a gradient that is NaN or infinite (of a GPU's
        at s >= 1 when its sum is sent), and at s = 0 RuntimeError if the step is already written."""
        checked = self.to_write(keys, grads)
        finish(self.client.writing(*checked))

    def settle(self):
        """Ends what the last write left to do before this rank waits for others in another way, as in an allreduce: at
        s = 0 the owners have applied it then. Collective."""
        self._check_open()
        finish(self.client.settling())

    def flush(self):
        """Brings every update to its owner: after it every rank's reads of the owners see all of them. Collective."""
        self._check_open()
        self.client.flush()

    def push_pending(self, timeout_s: float = float("inf")):
        """Sends the owners every update this rank holds back, and waits until they have applied them. Not collective:
        for a rank that leaves. At s = 0 nothing is held back. Raises TimeoutError if owners do not reply in time; what
        had no room in their inboxes is lost then. Raises RuntimeError if there is something to send and the exchange is
        by alltoall, where no rank can send alone."""
        self._check_open()
        self.client.push_pending(timeout_s)

    def await_owners(self):
        """Waits until the owners have applied what this rank has pushed: at s >= 1 not collective but in an exchange
        by alltoall, at s = 0 as flush()."""
        self._check_open()
        self.client.await_owners()

    def close(self):
        """Frees the memory: arrays taken from `shard` are gone with it, and updates not flushed. Closing twice is fine.
        Collective."""
        if self.client is None:
            return
        client, self.client = self.client, None
        client.close()
        self.shard = None
        self.window.free()

    def resume_at(self, step: int):
        """Goes on as after `step` steps, whose rows were assigned to each rank's `shard`. REQUIRES: nothing read or
        written yet. Collective."""
        self.touched_since = None
        self.client.resume_at(step)
        self.window.fence()

    def keys(self) -> torch.Tensor:
        """Keys of this rank's shard in the order of its rows: (n,) int64."""
        return torch.from_numpy(self.partition.keys_of(self.world.rank, 0, len(self.shard)))

    @property
    def step(self) -> int:
        """Steps written so far (s = 0: and settled)."""
        return self.client.step

    @property
    def lags(self) -> np.ndarray:
        """How far behind the owners' clocks, as this rank knew them, the lines read were: (32,) int64, bin 0 no lag,
        bin i lags of [2^(i-1), 2^i)."""
        return self.cache.lags

    # Keys and gradients as they come in.

    def to_read(self, keys: torch.Tensor) -> Keys:
        """The keys as the client takes them. Raises as read()."""
        with self.spans("find"):
            return self._checked(keys, "read")

    def to_write(self, keys: torch.Tensor, grads: torch.Tensor) -> tuple[Keys, torch.Tensor]:
        """Keys and gradients as the client takes them. Raises as write()."""
        self._check_open()
        self.client.check_write()
        with self.spans("push"):
            checked, values = self._checked(keys, "write"), self._checked_grads(keys, grads)
            if values.is_cpu:  # those of a GPU are looked at on their way to the owners
                check_finite(checked.array, values.numpy())
            return checked, values

    def _checked(self, keys: torch.Tensor, verb: str, are_unique: bool = True) -> Keys:
        self._check_open()
        if not torch.is_tensor(keys) or keys.dtype != torch.int64 or keys.dim() != 1 or not keys.is_cpu:
            raise UserError(f"EmbeddingTable.{verb}: keys must be int64 of shape (U,) on the CPU, got {kind_of(keys)}")
        array = keys.contiguous().numpy()
        if any(known is keys and np.array_equal(checked, array) for known, checked in self._known):
            return Keys(keys, array)
        again = _C.first_repeated(array) if are_unique else -1
        if again >= 0:
            raise UserError(
                f"EmbeddingTable.{verb}: keys must be unique, got {array[again]} twice: take torch.unique(ids, "
                "return_inverse=True) and look rows up by the inverse (hetmpi.look_up)"
            )
        if array.size and not 0 <= array.min() <= array.max() < self.num_rows:
            wrong = array[(array < 0) | (array >= self.num_rows)]
            raise UserError(
                f"EmbeddingTable.{verb}: keys must lie in [0, {self.num_rows:,}), got {wrong[0]} "
                f"({wrong.size:,} of {array.size:,} are out of range)"
            )
        if are_unique:
            self._known.append((keys, array.copy()))  # a copy: the tensor may be filled anew
        return Keys(keys, array)

    def _checked_grads(self, keys: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
        shape = len(keys), self.dim
        if (
            not torch.is_tensor(grads)
            or grads.dtype != torch.float32
            or tuple(grads.shape) != shape
            or grads.device != self.device
        ):
            raise UserError(
                f"EmbeddingTable.write: grads must be float32 of shape {shape} on {self.device}, got {kind_of(grads)}"
            )
        return grads.detach().contiguous()

    def _check_open(self):
        if self.client is None:
            raise RuntimeError("EmbeddingTable: the table is closed")


def kind_of(value) -> str:
    """dtype, shape and place of a tensor, the type of anything else, for messages."""
    return f"{value.dtype} {tuple(value.shape)} on {value.device}" if torch.is_tensor(value) else type(value).__name__


def table_seed(seed: int, name: str) -> int:
    """Seed of the table called `name`: tables of one training start from different rows."""
    text = f"{seed}/{name}".encode()
    return int.from_bytes(text, "little") % 0xFFFFFFFFFFFFFFC5  # the largest prime below 2^64
