"""EmbeddingTable: one table of rows spread over all ranks, read and written by key.

Synchronous (s = 0): every read sees all writes of the step before, from all ranks, applied once. The protocol of a step:

    read     the owners' rows, which nobody changes until every rank has written
    write    each rank sends its gradients to their owners
    settle   at the next read: each owner waits for all ranks, sums per key in rank order, applies the row optimizer once;
             then all ranks meet, and the next read may begin

So `write` and the read (or flush) after it are collective: every rank makes them, with no keys if it has none.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import torch

from hetmpi import _C
from hetmpi.inbox import Outbox
from hetmpi.optim import RowOptimizer
from hetmpi.partition import Route, make_partition
from hetmpi.window import Layout, RmaWindow, ring_bytes
from hetmpi.world import Refused, World

INIT_CHUNK_ROWS = 1 << 20
POLL_S = 0.001
WARN_AFTER_S = 60


class EmbeddingTable:
    """`num_rows` rows of `dim` float32, keys 0 <= key < num_rows, partitioned over the ranks of `world`.

    step            steps settled so far
    pulled_bytes    rows and clocks fetched from other ranks by read and prefetch since the start
    pushed_bytes    keys and gradients sent to other ranks since the start
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
    ):
        """Allocates the shards and gives every row its first value, normal with deviation `init_std`, which depends on
        (seed, name, key) alone. inbox_bytes: memory of each rank for gradients on their way in. Collective.

        Raises Refused if memory is short, ValueError for an unknown partition or an impossible shape."""
        if dim < 1:
            raise Refused(f"table.dim must be at least 1, got {dim}")
        self.world, self.num_rows, self.dim = world, num_rows, dim
        self.optimizer, self._rule = optimizer, optimizer.core(dim)
        self.partition = make_partition(partition, num_rows, world.size)
        rings = ring_bytes(inbox_bytes if world.size > 1 else 0, world.size, dim)
        self.window = RmaWindow(world, [self._layout(rank, rings) for rank in range(world.size)])
        self.shard = self.window.local
        self._initialise(table_seed(seed, name), init_std)
        self._outbox = Outbox(self.window)
        self._inbox = _C.Inbox(self.shard.rings, world.rank, self.shard.weight, self.shard.state, self.shard.clock)
        self.step = 0
        self.pulled_bytes = 0
        self.pushed_bytes = 0
        self._is_closed = False
        self._is_written = False  # a write waits to be settled
        self._last: RoutedKeys | None = None
        self._early: EarlyRows | None = None
        self.window.fence()

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

    def read(self, keys: torch.Tensor) -> torch.Tensor:
        """keys (U,) int64, unique -> rows (U, dim) float32, the owners' values after the last write.

        Collective after a write. Raises Refused for keys of another dtype or shape, or out of range."""
        self._settle()
        route = self._routed(keys, "read")
        early, self._early = self._early, None
        if early is not None:
            early.land()  # its buffers are MPI's until then
        if early is not None and early.route is route:
            rows, nbytes = early.finish()
        else:
            rows, nbytes = self._fetch(route)
        self.pulled_bytes += nbytes
        return torch.from_numpy(rows)

    def peek(self, keys: torch.Tensor) -> torch.Tensor:
        """As read, for evaluation: no other rank need take part, nothing is counted. REQUIRES: flush() since a write."""
        if self._is_written:
            raise RuntimeError("EmbeddingTable.peek: a write is not settled yet: call flush() on every rank first")
        return torch.from_numpy(self._fetch(Route(self.partition, self._checked(keys, "peek")))[0])

    def prefetch(self, keys: torch.Tensor):
        """Starts fetching rows that the next read will ask for by the same tensor `keys`; call it between read and write.

        What other ranks change meanwhile is fetched again by that read, so its result is the same. Raises Refused as
        read does, and RuntimeError between write and read, when rows change."""
        if self._is_written:
            raise RuntimeError("EmbeddingTable.prefetch: call it between a read and the write after it, not after write")
        if self._early is not None:
            self._early.land()
        self._early = EarlyRows(self, keys, Route(self.partition, self._checked(keys, "prefetch")))

    def write(self, keys: torch.Tensor, grads: torch.Tensor):
        """Sends the gradients of this step: keys (U,) int64, unique, grads (U, dim) float32. Collective.

        The owner sums over ranks: divide by world.size for the gradient of a loss averaged over the global batch.
        Raises Refused for a wrong dtype, shape or key, and RuntimeError if the step is already written."""
        if self._is_written:
            raise RuntimeError("EmbeddingTable.write: this step is written already: read or flush before the next write")
        route = self._routed(keys, "write")
        values = self._checked_grads(keys, grads)
        if self._early is not None:
            self._early.land()  # before any owner can change a row
        own_rows, own_order = route.of(self.world.rank)
        self._inbox.begin(self.step, own_rows, values[own_order])  # a copy: the caller's grads are its own again
        self._is_written = True
        self.pushed_bytes += self._outbox.send(self.step, route, values, while_waiting=self._drain)

    def flush(self):
        """Settles the last write everywhere: after it every rank sees every update. Collective."""
        self._settle()

    def close(self):
        """Frees the memory: arrays taken from `shard` are gone with it. Closing twice is fine. Collective."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._early is not None:
            self._early.land()
        self._inbox = self._outbox = self.shard = self._early = None
        self.window.free()

    def keys(self) -> torch.Tensor:
        """Keys of this rank's shard in the order of its rows: (n,) int64."""
        return torch.from_numpy(self.partition.keys_of(self.world.rank, 0, len(self.shard.weight)))

    def _drain(self):
        self._inbox.poll(0.0)
        self.world.progress()
        os.sched_yield()

    def _await_all(self):
        """Sums the messages of this step until every rank's are here; says so when one is long in coming."""
        warn_at = time.monotonic() + WARN_AFTER_S
        while not self._inbox.poll(POLL_S):
            self.world.progress()
            if time.monotonic() > warn_at:
                print(
                    f"hetmpi: rank {self.world.rank} on {self.world.host} has waited {WARN_AFTER_S} s in step "
                    f"{self.step + 1} for the gradients of rank {self._inbox.awaited}",
                    file=sys.stderr,
                    flush=True,
                )
                warn_at = float("inf")

    def _settle(self):
        if self._is_closed:
            raise RuntimeError("EmbeddingTable: the table is closed")
        if not self._is_written:
            return
        self._await_all()
        self._rule.set_step(self.optimizer.lr_at(self.step), self.step + 1)
        self._inbox.apply(self._rule)
        self.step += 1
        self._is_written = False
        self.window.fence()

    def _fetch(self, route: Route) -> tuple[np.ndarray, int]:
        """The owners' rows in the order of the batch, and the bytes that came from other ranks."""
        out = np.empty((len(route.rows), self.dim), np.float32)
        far = FarRows(self, self._far_parts(route), "rows")
        self._copy_near(route, out)
        self.window.flush()
        far.place(out)
        return out, route.num_elsewhere(self.world.rank) * self.dim * 4

    def _copy_near(self, route: Route, out: np.ndarray):
        for owner in route.owners():
            if owner in self.window.near:
                rows, order = route.of(owner)
                _C.gather(self.window.near[owner].weight, rows, out, order)

    def _far_parts(self, route: Route) -> list[tuple]:
        """(owner, rows (m,), order (m,)) for each owner on another node."""
        return [(owner, *route.of(owner)) for owner in route.owners() if owner not in self.window.near]

    def _routed(self, keys: torch.Tensor, verb: str) -> Route:
        """The route of `keys`, known already if the read before this write, or a prefetch, was given the same tensor."""
        for known in (self._early, self._last):
            if known is not None and known.keys is keys and known.version == keys._version:
                self._last = RoutedKeys(keys, known.route)
                return known.route
        self._last = RoutedKeys(keys, Route(self.partition, self._checked(keys, verb)))
        return self._last.route

    def _checked(self, keys: torch.Tensor, verb: str) -> np.ndarray:
        if self._is_closed:
            raise RuntimeError(f"EmbeddingTable.{verb}: the table is closed")
        if not torch.is_tensor(keys) or keys.dtype != torch.int64 or keys.dim() != 1:
            raise Refused(f"EmbeddingTable.{verb}: keys must be int64 of shape (U,), got {kind_of(keys)}")
        array = keys.numpy()
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


class RoutedKeys:
    """A tensor of keys and the route found for what it held: torch counts in-place changes as versions."""

    def __init__(self, keys: torch.Tensor, route: Route):
        self.keys, self.version, self.route = keys, keys._version, route


class FarRows:
    """Rows asked of owners on other nodes, on their way into a buffer of their own."""

    def __init__(self, table: EmbeddingTable, parts: list[tuple], use: str):
        """parts: (owner, rows (m,), order (m,)) each. Posts one get for each; the rows are here after window.flush().
        `use` names the buffers they come to."""
        self.parts = []  # (order (m,), rows (m, dim)) per owner
        for owner, rows, order in parts:
            buffer = table.window.buffer(use, owner, len(rows), table.dim, np.float32)
            table.window.get_rows(owner, rows, buffer)
            self.parts.append((order, buffer))

    def place(self, out: np.ndarray):
        """Copies the rows to their places in the batch. REQUIRES: window.flush()."""
        for order, buffer in self.parts:
            _C.gather(buffer, np.arange(len(order)), out, order)


class EarlyRows(RoutedKeys):
    """A prefetch: rows of other nodes fetched before the step's writes, and what the writes made of them.

    Between a read and the write after it no owner changes a row, so rows and clocks fetched there belong together.
    At the next read the owners' clocks tell which rows have changed since; those alone are fetched again."""

    def __init__(self, table: EmbeddingTable, keys: torch.Tensor, route: Route):
        super().__init__(keys, route)
        self.table = table
        self.has_landed = False
        self.parts = table._far_parts(route)
        self.rows = FarRows(table, self.parts, "early rows")
        self.clocks = self._post_clocks("early clocks")

    def land(self):
        """Waits for what was posted."""
        if not self.has_landed:
            self.table.window.flush()
            self.has_landed = True

    def finish(self) -> tuple[np.ndarray, int]:
        """The rows (U, dim) as the owners have them now, and the bytes fetched from other ranks. REQUIRES: settled."""
        self.land()
        now = self._post_clocks("clocks")
        out = np.empty((len(self.route.rows), self.table.dim), np.float32)
        self.table._copy_near(self.route, out)
        self.table.window.flush()
        self.rows.place(out)
        refetched = self._refetch(now, out)
        clock_bytes = 16 * sum(len(clock) for clock in now.values())
        fetched = self.route.num_elsewhere(self.table.world.rank) + refetched
        return out, fetched * self.table.dim * 4 + clock_bytes

    def _refetch(self, now: dict, out: np.ndarray) -> int:
        """Fetches again the rows whose clock has moved, into their places in out; returns how many."""
        changed = []
        for owner, rows, order in self.parts:
            moved = np.flatnonzero(now[owner][:, 0] != self.clocks[owner][:, 0])
            if len(moved):
                changed.append((owner, rows[moved], order[moved]))
        again = FarRows(self.table, changed, "rows")
        self.table.window.flush()
        again.place(out)
        return sum(len(rows) for _, rows, _ in changed)

    def _post_clocks(self, use: str) -> dict:
        clocks = {}  # owner -> (m, 1) int64
        for owner, rows, _ in self.parts:
            clocks[owner] = self.table.window.buffer(use, owner, len(rows), 1, np.int64)
            self.table.window.get_clocks(owner, rows, clocks[owner])
        return clocks


def kind_of(value) -> str:
    """dtype and shape of a tensor, the type of anything else, for messages."""
    return f"{value.dtype} {tuple(value.shape)}" if torch.is_tensor(value) else type(value).__name__


def table_seed(seed: int, name: str) -> int:
    """Seed of the table called `name`: tables of one training start from different rows."""
    text = f"{seed}/{name}".encode()
    return int.from_bytes(text, "little") % 0xFFFFFFFFFFFFFFC5  # the largest prime below 2^64
