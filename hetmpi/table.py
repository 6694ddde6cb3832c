"""EmbeddingTable: one table of rows spread over all ranks, read and written by key.

Every read and write passes the rank's RowCache (cpp/row_cache.h), which may hold no line at all. How fresh a read is
depends on the staleness s.

s = 0, synchronous: every read sees all writes of the step before, from all ranks, applied once.
    read     lines whose owner's clock has not moved are as good as the owners' rows; the others are fetched
    write    each rank sends its gradients to their owners
    settle   at the next read: each owner waits for all ranks, sums per key in rank order, applies the row optimizer once;
             then all ranks meet, and the next read may begin
    So `write` and the read (or flush) after it are collective: every rank makes them, with no keys if it has none.

s >= 1, bounded: ranks go on without waiting for each other (HET's client rules, docs/design.md).
    read     waits until the owners have taken in what this rank sent; lines within the bound are read as they are, the
             others and keys without a line are fetched; new lines push out old ones
    write    to the lines, with a preview of what the owner will do; sums that are due, sums of lines that went, and
             gradients of keys without a line go to their owners, whose engines apply them as they arrive
    Only `flush` and `close` are collective.

Where rows travel between nodes by alltoall (hetmpi/exchange.py), `read`, `peek`, `prefetch`, `write`, `flush` and `await_owners`
are collective at any s: all ranks make the same calls in the same order.
"""

from __future__ import annotations

import sys
import time
import weakref

import numpy as np
import torch

from hetmpi import _C
from hetmpi.cache import CacheSettings, Staleness, make_cache
from hetmpi.early import EarlyRows
from hetmpi.exchange import EXCHANGES, far_ranks, open_exchange
from hetmpi.inbox import Message
from hetmpi.metrics import Counters
from hetmpi.optim import RowOptimizer, check_choice
from hetmpi.partition import Route, make_partition
from hetmpi.spans import Spans
from hetmpi.window import Layout, RmaWindow, ring_bytes
from hetmpi.world import Patience, Refused, World

INIT_CHUNK_ROWS = 1 << 20
POLL_S = 0.001
NAP_S = 50e-6  # between two looks at what others are to do: short beside a step, long beside a look


class EmbeddingTable:
    """`num_rows` rows of `dim` float32, keys 0 <= key < num_rows, partitioned over the ranks of `world`.

    step       steps written so far (s = 0: and settled)
    counters   what this rank's reads and writes did (hetmpi.metrics.Counters)
    spans      what their time went to (hetmpi.spans.Spans)
    lags       how far behind the owners the lines read were: (32,) int64, bin 0 no lag, bin i lags of [2^(i-1), 2^i)
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
    ):
        """Allocates the shards and gives every row its first value, normal with deviation `init_std`, which depends on
        (seed, name, key) alone. inbox_bytes: memory of each rank for gradients on their way in. spans: where times are
        added, None for the table's own. exchange: how rows and gradients travel between nodes: rma, one-sided; alltoall, by
        calls that all ranks make; auto, whichever fetches rows faster here. Collective.

        Raises Refused if memory is short, ValueError for an unknown partition or exchange or an impossible shape."""
        if dim < 1:
            raise Refused(f"table.dim must be at least 1, got {dim}")
        check_choice("table.exchange", exchange, EXCHANGES)
        self.world, self.num_rows, self.dim, self.staleness = world, num_rows, dim, staleness
        self.optimizer, self._rule = optimizer, optimizer.core(dim)
        self.partition = make_partition(partition, num_rows, world.size)
        self.step, self.counters, self.spans = 0, Counters(), spans or Spans()
        self._anticipate = staleness.factor(world.size)
        self._is_far = far_ranks(world)
        self._open(inbox_bytes, {"rma": "needed", "auto": "wanted", "alltoall": "unused"}[exchange])
        self._initialise(table_seed(seed, name), init_std)
        try:
            self._cache = make_cache(world, cache, num_rows, dim, optimizer)  # now that the shards have taken their memory
        except Refused:
            self.window.free()
            raise
        self._admitted = cache.admitted(world) & (self._cache.capacity_rows > 0)  # (size,) bool: ranks whose rows it keeps
        self.window.fence()
        self._start(exchange)

    def _open(self, inbox_bytes: int, far: str):
        """Memory that others can use, and this rank theirs. far: as for RmaWindow."""
        world, is_synchronous = self.world, self.staleness.is_synchronous
        self._record = _C.RecordFormat(self.dim if is_synchronous else self._rule.sum_dim, not is_synchronous)
        rings = ring_bytes(inbox_bytes if world.size > 1 else 0, world.size, self._record)
        self.window = RmaWindow(world, [self._layout(rank, rings) for rank in range(world.size)], far)
        self.shard = self.window.local

    def _start(self, exchange: str):
        """The owner's side: an inbox that waits for every rank's step, or an engine that applies what comes. And this
        rank's ways to other owners."""
        shard = self.shard.weight, self.shard.state, self.shard.clock
        self._inbox = self._engine = None
        if self.staleness.is_synchronous:
            self._inbox = _C.Inbox(self.shard.rings, self.world.rank, *shard)
        else:
            self._rule.set_step(self.optimizer.lr_at(0), 1)  # others may push before this rank writes
            self._engine = _C.Engine(self.shard.rings, *shard, self._rule)
            weakref.finalize(self, self._engine.stop)  # also at exit, before MPI takes the memory away
        self.exchange = open_exchange(
            exchange, self.window, self._engine, self._record, self.partition, self.num_rows
        )
        self._owners, self._outbox = self.exchange.owners, self.exchange.outbox
        self._is_closed = False
        self._has_read = False  # s >= 1: since sums were last sent
        self._is_written = False  # s = 0: a write waits to be settled
        self._last: Reading | None = None
        self._early: tuple[Reading, EarlyRows] | None = None

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
        """keys (U,) int64, unique -> rows (U, dim) float32: at s = 0 the owners' values after the last write, else at most
        `staleness` iterations behind them, with all of this rank's own updates.

        At s = 0 collective after a write. Raises Refused for keys of another dtype or shape, or out of range."""
        with self.spans("drain"):
            self._await_writes()
        self._has_read = True
        with self.spans("find"):
            reading = self._last = self._routed(keys, "read")
            admitted = reading.route.held_by(self._admitted)
            self._find(reading, admitted)
        (prefetched, early), self._early = self._early or (None, None), None
        if early is not None and prefetched is not reading:
            early.drop()
            early = None
        return torch.from_numpy(self._read(reading, admitted, early))

    def peek(self, keys: torch.Tensor) -> torch.Tensor:
        """The owners' rows, for evaluation: no line is used, nothing is counted, and no other rank need take part but in an
        exchange by alltoall. REQUIRES: flush() since a write, on every rank."""
        if self._is_written:
            raise RuntimeError("EmbeddingTable.peek: a write is not settled yet: call flush() on every rank first")
        route = Route.of_keys(self.partition, self._checked(keys, "peek"))
        rows = np.empty((len(keys), self.dim), np.float32)
        self._owners.read("weight", route, rows)
        return torch.from_numpy(rows)

    def prefetch(self, keys: torch.Tensor):
        """Starts fetching rows that the next read will ask for by the same tensor `keys`; call it between read and write.

        What changes meanwhile is fetched again by that read, so it is as fresh as without. Raises Refused as read does,
        and at s = 0 RuntimeError between write and read, when rows change."""
        if self._is_written:
            raise RuntimeError("EmbeddingTable.prefetch: call it between a read and the write after it, not after write")
        with self.spans("prefetch"):
            if self._owners.is_collective:
                self._checked(keys, "prefetch")  # nothing travels ahead
            else:
                self._prefetch(keys)

    def _prefetch(self, keys: torch.Tensor):
        if self._early is not None:
            self._early[1].drop()
        reading = Reading(keys, self._checked(keys, "prefetch"), self.partition)
        if not self.staleness.is_synchronous:
            self._await_drained(float("inf"))  # after a write: the rows must have it
        posted = reading.route.held_by(self._is_far)
        if self._cache.capacity_rows and posted.any():
            self._cache.find(reading.array, reading.slots, counts_as_use=False)
            posted &= reading.slots < 0
        arrays = ("weight", "state") if self._wants_state else ("weight",)
        self._early = reading, EarlyRows(self._owners, reading.route, posted, arrays)
        if self.staleness.is_synchronous:
            self._early[1].post_rows(clocks_first=False)  # nobody writes rows now; else they wait for write()
        num_posted = int(posted.sum())  # all of them far
        self.counters.clock_bytes += 4 * num_posted
        self.counters.row_bytes += 4 * num_posted * (self.dim + (self._rule.state_dim if self._wants_state else 0))

    def write(self, keys: torch.Tensor, grads: torch.Tensor):
        """Takes the gradients of this step: keys (U,) int64, unique, grads (U, dim) float32. At s = 0 collective.

        The owner sums over ranks: divide by world.size for the gradient of a loss averaged over the global batch.
        Raises Refused for a wrong dtype, shape or key, and at s = 0 RuntimeError if the step is already written."""
        if self._is_written:
            raise RuntimeError("EmbeddingTable.write: this step is written already: read or flush before the next write")
        with self.spans("push"):
            reading = self._routed(keys, "write")
            values = self._checked_grads(keys, grads)
            if self.staleness.is_synchronous:
                self._send_step(reading.route, values)
            else:
                self._update(reading, values)

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
        if self._owners.is_collective:
            self._cache.take_all()
            if self._cache.num_pushes:
                raise RuntimeError(f"{self._cache.num_pushes:,} sums of gradients: with exchange=alltoall no rank sends alone")
            return
        self._push_all(time.monotonic() + timeout_s)

    def _push_all(self, deadline: float):
        """Sends the owners every update this rank holds back, and waits until they have taken them in."""
        self._cache.take_all()
        self._push(deadline)
        self._await_drained(deadline)

    def await_owners(self):
        """Waits until the owners have taken in what this rank sent: at s >= 1 not collective, at s = 0 as flush(). In an
        exchange by alltoall collective, and at s >= 1 this rank has then taken in what it was sent."""
        if self.staleness.is_synchronous:
            self._settle()
        else:
            self._await_writes()

    def close(self):
        """Frees the memory: arrays taken from `shard` are gone with it, and updates not flushed. Closing twice is fine.
        Collective."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._early is not None:
            self._early[1].drop()
        if self._engine is not None:
            self.world.comm.Barrier()  # the engine serves ranks that still read and write
            self._engine.stop()
        self._outbox.close()
        self._inbox = self._engine = self._owners = self._outbox = self.exchange = self.shard = None
        self._early = None
        self.window.free()

    def keys(self) -> torch.Tensor:
        """Keys of this rank's shard in the order of its rows: (n,) int64."""
        return torch.from_numpy(self.partition.keys_of(self.world.rank, 0, len(self.shard.weight)))

    @property
    def lags(self) -> np.ndarray:
        return self._cache.lags

    @property
    def cache(self) -> _C.RowCache:
        """This rank's lines, to look at."""
        return self._cache

    # Reading, at any staleness.

    def _read(self, reading: Reading, admitted: np.ndarray, early: EarlyRows | None) -> np.ndarray:
        """The rows (U, dim) of a batch: lines that are fresh enough, the owners' rows for all others."""
        bound, is_stale = self.staleness.at(self.step), np.zeros(len(reading.array), bool)
        with self.spans("validate"):
            self._ask_clocks(reading, admitted, early, bound)
            if early is not None:
                early.land()  # with the clocks, where there are any
            num_stale = self._cache.validate(reading.slots, reading.clocks, bound, is_stale)
        with self.spans("fetch"):
            return self._collect(reading, admitted, early, is_stale, num_stale, bound)

    def _collect(
        self, reading: Reading, admitted: np.ndarray, early: EarlyRows | None, is_stale: np.ndarray, num_stale: int,
        bound: int,
    ) -> np.ndarray:  # fmt: skip
        """The rows (U, dim), lines renewed and new ones made."""
        slots, num = reading.slots, len(reading.array)
        is_missing = slots < 0
        num_found, num_missing = num - int(is_missing.sum()), int((is_missing & admitted).sum())
        rows = np.empty((num, self.dim), np.float32)
        states = np.empty((num, self._rule.state_dim), np.float32)
        self._fetch(reading, is_missing | is_stale, admitted, early, bound, rows, states)
        if num_found:
            self._cache.refresh(slots, is_stale, rows, states, reading.clocks, self._anticipate)
            self._cache.gather(slots, rows)
        if num_missing:
            evicted = self._cache.insert_and_evict(
                reading.array, admitted, rows, states, reading.clocks, slots
            )
            self.counters.evicted += evicted
        self.counters.hits += num_found - num_stale
        self.counters.stale += num_stale
        self.counters.misses += num_missing
        reading.is_found = True
        return rows

    def _find(self, reading: Reading, admitted: np.ndarray):
        """Looks the keys up that the cache may keep; they count as used."""
        if self._cache.capacity_rows == 0:
            reading.slots[:] = -1
        elif admitted.all():
            self._cache.find(reading.array, reading.slots, counts_as_use=True)
        else:
            slots = np.empty(int(admitted.sum()), np.int64)
            self._cache.find(reading.array[admitted], slots, counts_as_use=True)
            reading.slots[:] = -1
            reading.slots[admitted] = slots

    def _ask_clocks(self, reading: Reading, admitted: np.ndarray, early: EarlyRows | None, bound: int):
        """Fetches the owners' clocks that this read needs: to tell fresh lines from stale ones, for new lines, and at
        s >= 1 for gradients that will be passed on."""
        found = reading.slots >= 0
        if self.staleness.is_synchronous and self._cache.capacity_rows == 0 and early is None:
            return
        if bound == _C.UNBOUNDED:
            wanted = ~found
        elif self.staleness.is_synchronous:
            wanted = admitted if early is None else admitted | early.posted
        else:
            wanted = np.ones(len(found), bool)
        if bound != _C.UNBOUNDED:
            self.counters.validated += int(found.sum())
        if not self._owners.asks(wanted):
            return
        route = reading.route.where(wanted)
        self._owners.read("clock", route, reading.clocks)
        self.counters.clock_bytes += 4 * route.num_elsewhere(self.world.rank)

    def _fetch(
        self, reading: Reading, needed: np.ndarray, admitted: np.ndarray, early: EarlyRows | None, bound: int,
        rows: np.ndarray, states: np.ndarray,
    ):  # fmt: skip
        """Brings the needed rows (U, dim), and the states (U, state_dim) of those the cache may keep, from their owners
        to their positions, and the clocks they came with."""
        if early is not None:
            fresh = self._early_ones(reading, needed, early, bound)
            early.place([rows, states] if self._wants_state else [rows])
            needed = needed & ~fresh
        if not self._owners.asks(needed):
            return
        route = reading.route.where(needed)
        self._owners.read("weight", route, rows)
        self.counters.row_bytes += 4 * self.dim * route.num_elsewhere(self.world.rank)
        if self._wants_state and self._owners.asks(needed & admitted):
            state_route = reading.route.where(needed & admitted)
            self._owners.read("state", state_route, states)
            self.counters.row_bytes += 4 * self._rule.state_dim * state_route.num_elsewhere(self.world.rank)

    def _early_ones(self, reading: Reading, needed: np.ndarray, early: EarlyRows, bound: int) -> np.ndarray:
        """Which needed rows a prefetch has brought and are as fresh as if fetched now; their clocks are set to those
        they came with."""
        clocks = early.clocks()
        fresh = needed & early.posted & early.untouched(reading.array)
        if bound != _C.UNBOUNDED:
            fresh &= reading.clocks - clocks <= bound
        reading.clocks[fresh] = clocks[fresh]
        return fresh

    @property
    def _wants_state(self) -> bool:
        """Whether lines preview updates by a rule that has state."""
        return self._rule.state_dim > 0 and self._cache.capacity_rows > 0 and not self.staleness.is_synchronous

    def _await_writes(self):
        """Waits until what this rank wrote is with the owners, so that what is fetched now has it; at s = 0 what all
        ranks wrote."""
        self._check_open()
        if self.staleness.is_synchronous:
            return self._settle(meets=not self._owners.is_collective)
        if self._cache.num_pushes or (self._owners.is_collective and self._has_read):
            self._push()  # sums of lines that went in a read after which nothing was written
        self._engine.drain()
        self._await_drained(float("inf"))

    # Writing at s >= 1.

    def _update(self, reading: Reading, grads: np.ndarray):
        """HET's Write: to the lines, and to the owners what is due."""
        if self._early is not None:
            self._early[1].post_rows(clocks_first=True)
        lr, keys, slots = self.optimizer.lr_at(self.step), reading.array, reading.slots
        self._cache.set_step(lr, self.step + 1)
        self._engine.set_step(lr, self.step + 1)
        if self._owners.any(not reading.is_found):
            self._find_unread(reading)
        self._cache.update(slots, grads, self._anticipate)
        self._cache.pass_on(keys, slots, reading.clocks, grads)
        self._cache.take_due(slots, self.staleness.at(self.step))
        for known in {reading, self._last} - {None}:
            known.is_found = False  # its clocks are those before this write
        self._push()
        self.step += 1

    def _find_unread(self, reading: Reading):
        """Brings what a read would have told of keys that were not read."""
        is_unread = np.full(len(reading.array), not reading.is_found)
        if not reading.is_found:
            self._cache.find(reading.array, reading.slots, counts_as_use=False)
        route = reading.route.where(is_unread)
        self._owners.read("clock", route, reading.clocks)
        self.counters.clock_bytes += 4 * route.num_elsewhere(self.world.rank)

    def _push(self, deadline: float = float("inf")):
        """Sends the owners all sums that the cache has handed out."""
        keys, clocks, counts, sums = self._cache.take_pushes()
        self._has_read = False
        if not len(keys) and not self._owners.is_collective:
            return
        if self._early is not None:
            self._early[1].note_pushed(keys)
        route = Route.of_keys(self.partition, keys)
        rows, order = route.of(self.world.rank)
        self._engine.apply(rows, sums, order, clocks, counts)
        message = Message(self.step, route, sums, clocks, counts)
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
        if self._early is not None:
            self._early[1].land()  # before any owner can change a row
        own_rows, own_order = route.of(self.world.rank)
        self._inbox.begin(self.step, own_rows, values[own_order])  # a copy: the caller's grads are its own again
        self._is_written = True
        message = Message(self.step, route, values)
        self.counters.push_bytes += self._outbox.send(message, True, self._drain_inbox)
        self.counters.pushed += len(values)

    def _settle(self, meets: bool = True):
        """Applies the gradients of the last step. meets: then waits for all ranks, unless what follows does so."""
        self._check_open()
        if not self._is_written:
            return
        self._outbox.publish()
        self._await_all()
        self._rule.set_step(self.optimizer.lr_at(self.step), self.step + 1)
        self._inbox.apply(self._rule)
        self.step += 1
        self._is_written = False
        if meets:
            self.window.fence()

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

    def _routed(self, keys: torch.Tensor, verb: str) -> Reading:
        """What is known of `keys`: of the read before this write, or of a prefetch, if given the same tensor."""
        self._check_open()
        known_ones = [self._early[0] if self._early else None, self._last]
        for known in known_ones if verb == "read" else reversed(known_ones):
            if known is not None and known.is_of(keys):
                return known
        return Reading(keys, self._checked(keys, verb), self.partition)

    def _checked(self, keys: torch.Tensor, verb: str) -> np.ndarray:
        self._check_open()
        if not torch.is_tensor(keys) or keys.dtype != torch.int64 or keys.dim() != 1:
            raise Refused(f"EmbeddingTable.{verb}: keys must be int64 of shape (U,), got {kind_of(keys)}")
        array = keys.contiguous().numpy()
        if array.size and not 0 <= array.min() <= array.max() < self.num_rows:
            wrong = array[(array < 0) | (array >= self.num_rows)]
            raise Refused(
                f"EmbeddingTable.{verb}: keys must lie in [0, {self.num_rows:,}), got {wrong[0]} "
                f"({wrong.size:,} of {array.size:,} are out of range)"
            )
        return array

    def _checked_grads(self, keys: torch.Tensor, grads: torch.Tensor) -> np.ndarray:
        shape = len(keys), self.dim
        if not torch.is_tensor(grads) or grads.dtype != torch.float32 or tuple(grads.shape) != shape:
            raise Refused(f"EmbeddingTable.write: grads must be float32 of shape {shape}, got {kind_of(grads)}")
        return grads.detach().contiguous().numpy()

    def _check_open(self):
        if self._is_closed:
            raise RuntimeError("EmbeddingTable: the table is closed")


class Reading:
    """One batch of keys, and what a read found of it.

    keys            the tensor, which may be filled anew later
    array, route    its numbers now (U,) int64, and their owners
    slots           line of each key, (U,) int64, -1 for none; clocks: its owner's when it was read, (U,) int32
    is_found        whether slots and clocks are those of a read that no other read or write has followed
    """

    def __init__(self, keys: torch.Tensor, array: np.ndarray, partition):
        self.keys, self.array = keys, array.copy()
        self.route = Route.of_keys(partition, array)
        self.slots = np.full(len(array), -1, np.int64)
        self.clocks = np.zeros(len(array), np.int32)
        self.is_found = False

    def is_of(self, keys: torch.Tensor) -> bool:
        return self.keys is keys and np.array_equal(self.array, keys.contiguous().numpy())


def kind_of(value) -> str:
    """dtype and shape of a tensor, the type of anything else, for messages."""
    return f"{value.dtype} {tuple(value.shape)}" if torch.is_tensor(value) else type(value).__name__


def table_seed(seed: int, name: str) -> int:
    """Seed of the table called `name`: tables of one training start from different rows."""
    text = f"{seed}/{name}".encode()
    return int.from_bytes(text, "little") % 0xFFFFFFFFFFFFFFC5  # the largest prime below 2^64
