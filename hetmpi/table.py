"""EmbeddingTable: one table of rows spread over all ranks, read and written by key.

Every read and write passes the rank's RowCache (cpp/row_cache.h), which may hold no line at all. How fresh a read is
depends on the staleness s.

s = 0, synchronous: every read sees all writes of the step before, from all ranks, applied once.
    read     lines whose owner's clock has not moved are as good as the owners' rows; the others are fetched
    write    each rank sends its gradients to their owners
    settle   (by write on one node, else by the next read) each owner waits for the gradients of all ranks, sums per key in
             rank order, applies the row optimizer once; before the next read all ranks meet
    So `write` and the read (or flush) after it are collective: every rank makes them, with no keys if it has none.

s >= 1, bounded: ranks go on without waiting for each other (HET's client rules, docs/design.md).
    prefetch asks the owners which lines of a batch are too old, while the one before is computed
    write    to the lines, with a preview of what the owner will do; what the next read needs is ordered; sums that are due,
             sums of lines that went, and gradients of keys without a line go to their owners, who apply them as they arrive
    read     lines within the bound are read as they are, the others and keys without a line have been fetched, or are now;
             new lines push out old ones
    Only `flush` and `close` are collective.

Where rows travel between nodes by alltoall (hetmpi/exchange.py), `read`, `peek`, `prefetch`, `write`, `flush` and
`await_owners` are collective at any s: all ranks make the same calls in the same order.
"""

from __future__ import annotations

import time
import weakref
from collections import deque

import numpy as np
import torch

from hetmpi import _C
from hetmpi.asking import NO_SLOTS, RmaAsking
from hetmpi.cache import CacheSettings, HostCache, Staleness, make_cache
from hetmpi.exchange import EXCHANGES, open_exchange
from hetmpi.gpu_cache import GpuCache
from hetmpi.inbox import Message
from hetmpi.metrics import Counters
from hetmpi.optim import RowOptimizer, check_choice
from hetmpi.partition import Route, make_partition
from hetmpi.reading import MOST_AHEAD, Reading
from hetmpi.rounds import RoundAsking
from hetmpi.spans import Spans
from hetmpi.window import Layout, RmaWindow, ring_bytes
from hetmpi.world import Patience, Refused, World

INIT_CHUNK_ROWS = 1 << 20
POLL_S = 0.001
NAP_S = 50e-6  # between two looks at what others are to do: short beside a step, long beside a look


class EmbeddingTable:
    """`num_rows` rows of `dim` float32, keys 0 <= key < num_rows, partitioned over the ranks of `world`.

    device     where rows are read to and gradients come from, and where the cache is
    step       steps written so far (s = 0: and settled)
    counters   what this rank's reads and writes did (hetmpi.metrics.Counters)
    spans      what their time went to (hetmpi.spans.Spans)
    shard      this rank's rows: weight (n, dim) float32, state (n, state_dim) float32, clock (n,) int32
    touched    (n,) uint8: 1 for each row of the shard that was updated since somebody set it to 0, which touched_since tells apart.
               Who changes rows of the shard otherwise sets it to 1
    lags       how far behind the owners' clocks, as this rank was told them, the lines read were: (32,) int64, bin 0 no
               lag, bin i lags of [2^(i-1), 2^i)
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
    ):
        """Allocates the shards and gives every row its first value, normal with deviation `init_std`, which depends on
        (seed, name, key) alone. inbox_bytes: memory of each rank for gradients on their way in. spans: where times are
        added, None for the table's own. exchange: how rows and gradients travel between nodes: rma, one-sided; alltoall, by
        calls that all ranks make; auto, whichever fetches rows faster here. device: cpu, or this rank's GPU: the cache is there, rows are
        read to it and gradients taken from it, while keys stay on the CPU. Collective.

        Raises Refused if memory is short, ValueError for an unknown partition or exchange or an impossible shape."""
        if dim < 1:
            raise Refused(f"table.dim must be at least 1, got {dim}")
        check_choice("table.exchange", exchange, EXCHANGES)
        if staleness.is_synchronous and cache.dtype != "float32":
            raise Refused(f"table.cache.dtype must be float32 at staleness 0, where reads are exact, got {cache.dtype}")
        self.world, self.num_rows, self.dim, self.staleness = world, num_rows, dim, staleness
        self.optimizer, self._rule = optimizer, optimizer.core(dim)
        self.partition, self.partition_kind = make_partition(partition, num_rows, world.size), partition
        self.step, self.counters, self.spans = 0, Counters(), spans or Spans()
        self._anticipate = staleness.factor(world.size)
        self._open(inbox_bytes, {"rma": "needed", "auto": "wanted", "alltoall": "unused"}[exchange])
        self._initialise(table_seed(seed, name), init_std)
        try:
            self._cache = make_cache(world, cache, num_rows, dim, optimizer, torch.device(device))  # after the shards took their memory
        except Refused:
            self.window.free()
            raise
        self.device = self._cache.device
        self._admitted = cache.admitted(world, self.device) & (self._cache.capacity_rows > 0)  # (size,) bool: ranks whose rows it keeps
        self.window.fence()
        self._start(exchange)

    def _open(self, inbox_bytes: int, far: str):
        """Memory that others can use, and this rank theirs. far: as for RmaWindow."""
        world, is_synchronous = self.world, self.staleness.is_synchronous
        self._record = _C.RecordFormat(self.dim if is_synchronous else self._rule.sum_dim, not is_synchronous)
        rings = ring_bytes(inbox_bytes if world.size > 1 else 0, world.size, self._record)
        self.window = RmaWindow(world, [self._layout(rank, rings) for rank in range(world.size)], far)
        self.shard = self.window.local
        self.touched, self.touched_since = np.zeros(len(self.shard.weight), np.uint8), None

    def _start(self, exchange: str):
        """The owner's side: an inbox that waits for every rank's step, or an engine that applies what comes. And this
        rank's ways to other owners."""
        shard = self.shard.weight, self.shard.state, self.shard.clock, self.touched
        self._inbox = self._engine = None
        if self.staleness.is_synchronous:
            self._inbox = _C.Inbox(self.shard.rings, self.world.rank, *shard)
        else:
            self._rule.set_step(self.optimizer.lr_at(0), 1)  # others may push before this rank writes
            self._engine = _C.Engine(self.shard.rings, *shard, self._rule)
            weakref.finalize(self, self._engine.stop)  # also at exit, before MPI takes the memory away
        self.exchange = open_exchange(exchange, self.window, self._engine, self._record, self.partition, self.num_rows)
        self._owners, self._outbox = self.exchange.owners, self.exchange.outbox
        if self._engine is not None:
            self._engine.start(list(self._outbox.rings))  # who has a ring here is whom this rank has one at
        self._asking = None if self.staleness.is_synchronous else self._make_asking()
        self._is_closed = False
        self._is_written = False  # s = 0: a write waits to be settled
        self._last: Reading | None = None
        self._ahead: deque[Reading] = deque()  # announced, in the order they will be read
        self._num_early = 0  # s = 0: batches posted early

    def _make_asking(self) -> RmaAsking | RoundAsking:
        """s >= 1: how other nodes are asked for what reads need."""
        arrays = ("weight", "state") if self._wants_state else ("weight",)
        ways = self._cache, self._owners, self._outbox, self.counters, arrays
        if self.exchange.name == "alltoall":
            return RoundAsking(*ways, self._engine, self._rule, self._anticipate)
        return RmaAsking(*ways)

    @property
    def _travels_ahead(self) -> bool:
        """Whether anything of a batch that is announced travels, or is decided while a GPU computes, before it is read."""
        if self.world.is_one_node:
            return self._cache.computes_beside and self._cache.capacity_rows > 0 and not self.staleness.is_synchronous
        return self.exchange.name == "rma" or (not self.staleness.is_synchronous and self._cache.capacity_rows > 0)

    def _layout(self, rank: int, ring: int) -> Layout:
        num_rows = self.partition.num_local_rows(rank)
        return Layout(num_rows, self.dim, self._rule.state_dim, self.world.size, ring)

    def _initialise(self, seed: int, std: float):
        self.shard.state[:] = 0
        self.shard.clock[:] = 0
        self.shard.rings[:, : _C.RING_HEADER_BYTES] = 0
        for begin in range(0, len(self.shard.weight), INIT_CHUNK_ROWS):
            weight = self.shard.weight[begin : begin + INIT_CHUNK_ROWS]
            _C.init_rows(weight, self.partition.keys_of(self.world.rank, begin, begin + len(weight)), seed, std)

    # What a trainer calls.

    def read(self, keys: torch.Tensor) -> torch.Tensor:
        """keys (U,) int64 on the CPU, unique -> rows (U, dim) float32 on `device`: at s = 0 the owners' values after the last write, else at most
        `staleness` iterations behind them, with all of this rank's own updates.

        At s = 0 collective after a write. Raises Refused for keys of another dtype or shape, or out of range."""
        with self.spans("find"):
            self._check_open()
            reading = self._last = self._next(keys)  # first: what it forgets may hand out sums
        with self.spans("drain"):
            self._take_turn()
        with self.spans("find"):
            admitted = self._admitted_of(reading)
            self._find(reading, admitted)
        with self.spans("validate"):
            is_stale = self._validated(reading, admitted)
        with self.spans("fetch"):
            rows = self._collect(reading, admitted, is_stale)
        with self.spans("prefetch"):
            self._ask_next()
        return rows

    def peek(self, keys: torch.Tensor) -> torch.Tensor:
        """The owners' rows, for evaluation: no line is used, nothing is counted, and no other rank need take part but in an
        exchange by alltoall. REQUIRES: flush() since a write, on every rank."""
        if self._is_written:
            raise RuntimeError("EmbeddingTable.peek: a write is not settled yet: call flush() on every rank first")
        route = Route.of_keys(self.partition, self._checked(keys, "peek"))
        rows = np.empty((len(keys), self.dim), np.float32)
        self.exchange.looks.read("weight", route, rows)
        return self._cache.on_device(rows)

    def prefetch(self, keys: torch.Tensor):
        """Announces a batch that a later read will ask for by the same tensor `keys`, so that what other nodes own of it
        travels meanwhile; call it between a read and the write after it. Batches are read in the order announced.

        At s = 0 rows that change meanwhile are fetched again by that read: it is as fresh as without. At s >= 1 the bound
        holds for the owners' clocks as they are when the batch before is read. Raises Refused as read does, and at s = 0
        RuntimeError between write and read, when rows change."""
        if self._is_written:
            raise RuntimeError("EmbeddingTable.prefetch: call it between a read and the write after it, not after write")
        if len(self._ahead) == MOST_AHEAD:
            raise RuntimeError(f"EmbeddingTable.prefetch: {MOST_AHEAD} batches are announced and not read yet, the most there may be")
        with self.spans("prefetch"):
            array = self._checked(keys, "prefetch")
            if not self._travels_ahead:
                return
            reading = self._reading(keys, array)
            self._ahead.append(reading)
            if self.staleness.is_synchronous:
                self._post_early(reading)
            self._ask_next()

    def write(self, keys: torch.Tensor, grads: torch.Tensor):
        """Takes the gradients of this step: keys (U,) int64, unique, grads (U, dim) float32 on `device`. At s = 0 collective.

        The owner sums over ranks: divide by world.size for the gradient of a loss averaged over the global batch.
        Raises Refused for a wrong dtype, shape or key, and at s = 0 RuntimeError if the step is already written."""
        if self._is_written:
            raise RuntimeError("EmbeddingTable.write: this step is written already: read or flush before the next write")
        with self.spans("push"):
            reading = self._written(keys)
            values = self._checked_grads(keys, grads)
            if self.staleness.is_synchronous:
                self._send_step(reading.batch_route, self._cache.on_host(values))
            else:
                self._update(reading, self._cache.local(values))
        if self.staleness.is_synchronous:
            if self.world.is_one_node:  # across nodes the gradients travel while the caller waits for the dense ones
                with self.spans("drain"):
                    self._take_in()
            return
        with self.spans("validate"):
            held = self._order_next()
        with self.spans("push"):
            self._push_due(reading, held)

    def flush(self):
        """Brings every update to its owner: after it every rank's reads of the owners see all of them. Collective."""
        with self.spans("drain"):
            if self.staleness.is_synchronous:
                self._settle()
            else:
                self._check_open()
                self._push_all(float("inf"))
                self.window.fence()

    def push_pending(self, timeout_s: float = float("inf")):
        """Sends the owners every update this rank holds back, and waits until they have taken them in. Not collective:
        for a rank that leaves. At s = 0 nothing is held back. Raises TimeoutError if owners do not answer in time; what
        had no room in their inboxes is lost then. Raises RuntimeError if there is something to send and the exchange is
        by alltoall, where no rank can send alone."""
        self._check_open()
        if self.staleness.is_synchronous:
            return
        if self.exchange.name == "alltoall":
            num_held = self._cache.num_pending + self._cache.num_pushes + self._outbox.num_held
            if num_held:
                raise RuntimeError(f"{num_held:,} sums of gradients: with exchange=alltoall no rank sends alone")
            return
        self._push_all(time.monotonic() + timeout_s)

    def _push_all(self, deadline: float):
        """Sends the owners every update this rank holds back, and waits until they have taken them in."""
        self._forget(self._ahead)
        self._cache.take_all()
        self._bring(deadline)

    def _bring(self, deadline: float):
        """s >= 1: brings the owners what the cache has handed out. In an exchange by alltoall collective."""
        self._push(deadline)
        self._asking.flush(self.staleness.at(self.step))
        self._await_drained(deadline)

    def await_owners(self):
        """Waits until the owners have taken in what this rank has handed out: at s >= 1 not collective but in an exchange
        by alltoall, at s = 0 as flush()."""
        if self.staleness.is_synchronous:
            self._settle()
        else:
            if self.exchange.name == "alltoall":
                self._forget(self._ahead)
            self._take_turn()
            self._bring(float("inf"))

    def close(self):
        """Frees the memory: arrays taken from `shard` are gone with it, and updates not flushed. Closing twice is fine.
        Collective."""
        if self._is_closed:
            return
        self._forget(self._ahead)
        self.window.flush()  # buffers of what was sent are MPI's until then
        self._is_closed = True
        if self._engine is not None:
            self.world.comm.Barrier()  # the engine serves ranks that still read and write
            self._engine.stop()
            self._asking.close()
        self._outbox.close()
        self._inbox = self._engine = self._owners = self._outbox = self._asking = self.exchange = self.shard = self._last = None
        self._ahead.clear()
        self.window.free()

    def resume_at(self, step: int):
        """Goes on as after `step` steps, whose rows were put into `shard` of each rank. REQUIRES: nothing written yet. Collective."""
        self.step, self.touched_since = step, None
        if self._engine is not None:
            self._engine.set_step(self.optimizer.lr_at(step), step + 1)
        self.window.fence()

    def keys(self) -> torch.Tensor:
        """Keys of this rank's shard in the order of its rows: (n,) int64."""
        return torch.from_numpy(self.partition.keys_of(self.world.rank, 0, len(self.shard.weight)))

    @property
    def lags(self) -> np.ndarray:
        return self._cache.lags

    @property
    def cache(self) -> HostCache | GpuCache:
        """This rank's lines, to look at."""
        return self._cache

    # Reading, at any staleness.

    def _take_turn(self):
        """Brings this rank to where it may read: at s = 0 all ranks' writes are with their owners; at s >= 1 what was handed
        out is sent, and owners elsewhere see what was sent."""
        self._check_open()
        if self.staleness.is_synchronous:
            return self._settle(meets=not self._owners.is_collective)
        self._push()  # sums of lines that went in a read after which nothing was written
        self._engine.drain()
        self._outbox.publish()

    def _next(self, keys: torch.Tensor) -> Reading:
        """What is known of `keys`. Batches announced before it, which nobody read, are forgotten."""
        while self._ahead:
            reading = self._ahead.popleft()
            if reading.is_of(keys):
                return reading
            self._forget([reading])
        if self._last is not None and self._last.is_of(keys):
            self._last.only_batch()
            return self._last
        return self._reading(keys, self._checked(keys, "read"))

    def _reading(self, keys: torch.Tensor, array: np.ndarray) -> Reading:
        return Reading(keys, array, self.partition, self.world.is_far, self._cache.empty)

    def _admitted_of(self, reading: Reading) -> np.ndarray:
        """Which keys the cache may keep: (n,) bool."""
        if self._admitted.all():
            return np.ones(len(reading.array), bool)
        return reading.route.held_by(self._admitted)

    def _find(self, reading: Reading, admitted: np.ndarray):
        """Looks the keys up, unless that was done when they were asked for; those of the batch count as used."""
        if self._cache.capacity_rows == 0:
            reading.slots[:] = -1
            return
        if self.staleness.is_synchronous or reading.asked is None:
            self._cache.look_up(reading.array, reading.slots)
        self._cache.use(reading.slots[: reading.num], int(admitted[: reading.num].sum()))

    def _validated(self, reading: Reading, admitted: np.ndarray) -> np.ndarray:
        """Which lines are too old to be read, or are to be renewed beside: (n,) bool. Gets the clocks it takes."""
        num, bound = reading.num, self.staleness.at(self.step)
        if self.staleness.is_synchronous:
            if self._cache.capacity_rows > 0 or reading.posted is not None:
                self._read_clocks(reading, admitted if reading.posted is None else admitted | reading.posted)
        else:
            if reading.asked is None:
                self._await_taken_in(reading.array)
                self._asking.ask(reading, None, bound)
            if not reading.is_ordered:
                self._order(reading)
            self._asking.answer(reading)
            reading.in_transit = np.concatenate([reading.in_transit, self._outbox.in_transit()])
            near = ~reading.is_far
            self._read_clocks(reading, near & (reading.slots < 0) if bound == _C.UNBOUNDED else near)
        is_stale, judged = np.zeros(len(reading.array), bool), reading.slots[:num]
        if not self.staleness.is_synchronous:
            judged = np.where(reading.posted[:num], -1, judged)  # such lines are renewed
        self._cache.validate(judged, reading.clocks[:num], bound, is_stale[:num], counts_lags=True)
        if not self.staleness.is_synchronous:
            self._asking.judge(reading, is_stale)
        num_found, num_stale = int((reading.slots[:num] >= 0).sum()), int(is_stale[:num].sum())
        self.counters.validated += num_found if bound != _C.UNBOUNDED else 0
        self.counters.hits += num_found - num_stale
        self.counters.stale += num_stale
        return is_stale

    def _read_clocks(self, reading: Reading, wanted: np.ndarray):
        """Gets the owners' clocks of the wanted keys (n,) bool, as they are now."""
        if self._owners.asks(wanted):
            route = reading.route.where(wanted)
            self._owners.read("clock", route, reading.clocks)
            self.counters.clock_bytes += 4 * route.num_elsewhere(self.world.rank)

    def _collect(self, reading: Reading, admitted: np.ndarray, is_stale: np.ndarray) -> torch.Tensor:
        """The rows (U, dim) of the batch, lines renewed and new ones made."""
        num, slots, clocks = reading.num, reading.slots, reading.clocks
        is_missing = slots < 0
        rows = self._cache.empty((len(slots), self.dim), np.float32)  # of those, what is fetched
        states = self._cache.empty((len(slots), self._rule.state_dim), np.float32)
        needed = is_missing | is_stale
        self._fetch(reading, needed & ~self._place_early(reading, rows, states), admitted, rows, states)
        if not is_missing.all():
            self._cache.refresh(slots, is_stale, rows, states, clocks, self._anticipate)
            if not self.staleness.is_synchronous:  # sums that waited for their lines to be renewed
                self._cache.take_due(slots, self.staleness.at(self.step), held=NO_SLOTS)
        delivered = self._cache.deliver(slots[:num], rows[:num])
        num_missing = int((is_missing & admitted)[:num].sum())
        if num_missing:
            self.counters.evicted += self._cache.insert_and_evict(
                reading.array[:num], admitted[:num], self._cache.local(delivered), states[:num], clocks[:num], slots[:num]
            )
        self.counters.misses += num_missing
        reading.is_found = True
        return delivered

    def _place_early(self, reading: Reading, rows: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Puts rows that came early in their places; which of them are as good as if fetched now: (n,) bool."""
        if not self.staleness.is_synchronous:
            self._asking.place(reading, rows, states)
            return reading.posted
        if reading.posted is None or not reading.posted.any():
            return np.zeros(len(rows), bool)
        self.window.flush()
        reading.place_rows(rows, states)
        clocks = reading.clocks.copy()
        reading.asked_clocks(clocks)
        return reading.posted & (clocks == reading.clocks)

    def _fetch(
        self, reading: Reading, needed: np.ndarray, admitted: np.ndarray, rows: np.ndarray, states: np.ndarray
    ):  # fmt: skip
        """Brings the needed rows (n, dim), and the states (n, state_dim) of those the cache may keep, from their owners
        to their positions."""
        if not self._owners.asks(needed):
            return
        if not self.staleness.is_synchronous:
            late = needed.copy()  # this rank's sums were on their way when their clocks were asked for
            late[needed] = _C.contained(reading.array[needed], reading.in_transit)
            if late.any():
                self._await_taken_in(reading.array[late])
                self._read_clocks(reading, late)
        route = reading.route.where(needed)
        self._owners.read("weight", route, rows)
        self.counters.row_bytes += 4 * self.dim * route.num_elsewhere(self.world.rank)
        if self._wants_state and self._owners.asks(needed & admitted):
            state_route = reading.route.where(needed & admitted)
            self._owners.read("state", state_route, states)
            self.counters.row_bytes += 4 * self._rule.state_dim * state_route.num_elsewhere(self.world.rank)

    @property
    def _wants_state(self) -> bool:
        """Whether lines preview updates by a rule that has state."""
        return self._rule.state_dim > 0 and self._cache.capacity_rows > 0 and not self.staleness.is_synchronous

    # Reading ahead.

    def _post_early(self, reading: Reading):
        """s = 0: starts fetching what other nodes own, rows and clocks as they are now."""
        self._cache.look_up(reading.array, reading.slots)
        far = reading.is_far & (reading.slots < 0)
        self._num_early += 1
        use = f"early {self._num_early % MOST_AHEAD}"  # as many as are announced at a time
        reading.ask_clocks(self._owners, far, use)
        reading.post_rows(self._owners, far, ("weight",), use)
        self.counters.clock_bytes += 4 * int(far.sum())
        self.counters.row_bytes += self._owners.row_bytes(["weight"]) * int(far.sum())

    def _ask_next(self):
        """s >= 1: starts asking other nodes about the batch that is read next."""
        if self.staleness.is_synchronous or not self._ahead or self._ahead[0].asked is not None:
            return
        reading, last, bound = self._ahead[0], self._last, self.staleness.at(self.step)
        if self._asking.takes_sums:
            self._push()
        if last is not None:
            reading.also(self._asking.beside(reading, last, bound))
        self._cache.look_up(reading.array, reading.slots)
        self._asking.ask(reading, last, bound)

    def _order(self, reading: Reading) -> np.ndarray:
        """s >= 1: orders what a batch needs that was asked for; lines that will be renewed, (m,) int64."""
        held = self._asking.order(reading, self.staleness.at(self.step))
        reading.is_ordered = True
        return held

    def _order_next(self) -> np.ndarray:
        """Orders the rows of the batch that is read next, if it is announced; lines that will be renewed, (m,) int64."""
        reading = self._ahead[0] if self._ahead else None
        if reading is None or reading.asked is None:
            self._asking.idle(self.staleness.at(self.step))
            return NO_SLOTS
        return self._order(reading)

    def _forget(self, readings):
        """Makes nothing of what was fetched early."""
        for reading in readings:
            if self.staleness.is_synchronous:
                self.window.flush()
                reading.only_batch()
            else:
                self._asking.forget(reading, self.staleness.at(self.step))

    def _await_taken_in(self, keys: np.ndarray):
        """s >= 1: waits until the owners have taken in what this rank sent of these keys (m,) int64."""
        sent = self._outbox.in_transit()
        if len(sent) and _C.contained(keys, sent).any():
            self._await_drained(float("inf"))

    # Writing at s >= 1.

    def _update(self, reading: Reading, grads):
        """HET's Write, to the lines; gradients of keys without one are handed out. grads: as the cache takes them."""
        if self._ahead and self._ahead[0].is_ordered:  # for a read that did not come before this write
            self._forget([self._ahead[0]])
        num, lr = reading.num, self.optimizer.lr_at(self.step)
        self._cache.set_step(lr, self.step + 1)
        self._engine.set_step(lr, self.step + 1)
        if not reading.is_found:
            self._find_unread(reading)
        keys, slots, clocks = reading.array[:num], reading.slots[:num], reading.clocks[:num]
        self._cache.update(slots, grads, self._anticipate)
        self._cache.pass_on(keys, slots, clocks, grads)

    def _find_unread(self, reading: Reading):
        """Brings what a read would have told of keys that were not read, as far as no other rank need answer."""
        reading.only_batch()
        self._cache.look_up(reading.array, reading.slots)
        reading.clocks[:] = _C.UNKNOWN_CLOCK
        self._read_clocks(reading, np.full(len(reading.array), self.exchange.name != "alltoall") | ~reading.is_far)

    def _push_due(self, reading: Reading, held: np.ndarray):
        """Sends what the write handed out, and sums that are due, but for lines held (m,) int64: they are renewed first."""
        self._cache.take_due(reading.slots[: reading.num], self.staleness.at(self.step), held)
        for known in {reading, self._last} - {None}:
            known.is_found = False  # its clocks are those before this write
        self._push()
        self.step += 1

    def _push(self, deadline: float = float("inf")):
        """Sends the owners all sums that the cache has handed out."""
        if self._cache.num_pushes == 0:
            return
        keys, clocks, counts, sums = self._cache.take_pushes()
        route = Route.of_keys(self.partition, keys)
        rows, order = route.of(self.world.rank)
        self._engine.apply(rows, sums, order, clocks, counts)
        message = Message(self.step, route, sums, clocks, counts, keys)
        self.counters.push_bytes += self._outbox.send(message, False, lambda: self._drain_engine(deadline))
        self.counters.pushed += len(keys)

    def _drain_engine(self, deadline: float):
        """Takes in what others sent while this rank waits for them. Raises TimeoutError after the deadline."""
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank(s) {self._outbox.behind()} have not taken in the gradients sent to them in time")
        if not self._engine.drain():
            self._outbox.progress()
            time.sleep(NAP_S)

    def _await_drained(self, deadline: float):
        """Waits until the owners have taken in everything this rank sent."""
        patience = Patience(self.world)
        self._outbox.publish()
        while not self._outbox.is_drained():
            self._drain_engine(deadline)
            patience.check(lambda: f"in step {self.step + 1} for rank(s) {self._outbox.behind()} to take in its gradients")

    # Writing at s = 0.

    def _send_step(self, route: Route, values: np.ndarray):
        """Sends each owner its part of the step's gradients."""
        self.window.flush()  # rows fetched early are here before any owner can change one
        own_rows, own_order = route.of(self.world.rank)
        self._inbox.begin(self.step, own_rows, values[own_order])  # a copy: the caller's grads are its own again
        self._is_written = True
        message = Message(self.step, route, values)
        self.counters.push_bytes += self._outbox.send(message, True, self._drain_inbox)
        self.counters.pushed += len(values)

    def _settle(self, meets: bool = True):
        """Waits until all ranks' gradients of the last write are in the rows. meets: not where what follows makes ranks meet."""
        self._check_open()
        if self._is_written:
            if not self.world.is_one_node:
                self._take_in()
            if meets:
                self.window.fence()
            self.step += 1
            self._is_written = False

    def _take_in(self):
        """Waits for all ranks' gradients of this step and applies them to this rank's rows."""
        self._outbox.publish()
        self._await_all()
        self._rule.set_step(self.optimizer.lr_at(self.step), self.step + 1)
        self._inbox.apply(self._rule)

    def _drain_inbox(self):
        self._inbox.poll(NAP_S)
        self._outbox.progress()

    def _await_all(self):
        """Sums the messages of this step until every rank's are here."""
        patience = Patience(self.world)
        while not self._inbox.poll(POLL_S):
            self._outbox.progress()
            patience.check(lambda: f"in step {self.step + 1} for the gradients of rank {self._inbox.awaited}")

    # Keys and gradients as they come in.

    def _written(self, keys: torch.Tensor) -> Reading:
        """What is known of a batch that is written: of the read before, if it was given the same tensor."""
        self._check_open()
        if self._last is not None and self._last.is_of(keys):
            return self._last
        return self._reading(keys, self._checked(keys, "write"))

    def _checked(self, keys: torch.Tensor, verb: str) -> np.ndarray:
        self._check_open()
        if not torch.is_tensor(keys) or keys.dtype != torch.int64 or keys.dim() != 1 or not keys.is_cpu:
            raise Refused(f"EmbeddingTable.{verb}: keys must be int64 of shape (U,) on the CPU, got {kind_of(keys)}")
        array = keys.contiguous().numpy()
        if array.size and not 0 <= array.min() <= array.max() < self.num_rows:
            wrong = array[(array < 0) | (array >= self.num_rows)]
            raise Refused(
                f"EmbeddingTable.{verb}: keys must lie in [0, {self.num_rows:,}), got {wrong[0]} "
                f"({wrong.size:,} of {array.size:,} are out of range)"
            )
        return array

    def _checked_grads(self, keys: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
        shape = len(keys), self.dim
        if not torch.is_tensor(grads) or grads.dtype != torch.float32 or tuple(grads.shape) != shape or grads.device != self.device:
            raise Refused(f"EmbeddingTable.write: grads must be float32 of shape {shape} on {self.device}, got {kind_of(grads)}")
        return grads.detach().contiguous()

    def _check_open(self):
        if self._is_closed:
            raise RuntimeError("EmbeddingTable: the table is closed")


def kind_of(value) -> str:
    """dtype, shape and place of a tensor, the type of anything else, for messages."""
    return f"{value.dtype} {tuple(value.shape)} on {value.device}" if torch.is_tensor(value) else type(value).__name__


def table_seed(seed: int, name: str) -> int:
    """Seed of the table called `name`: tables of one training start from different rows."""
    text = f"{seed}/{name}".encode()
    return int.from_bytes(text, "little") % 0xFFFFFFFFFFFFFFC5  # the largest prime below 2^64
