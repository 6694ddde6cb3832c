"""SSP, s >= 1: HET's client (Miao et al., PVLDB 15(2), 2022, section 3.2; docs/design.md, "The bound").

    read      Find, CheckValid, Fetch: uses lines within the bound; stale lines and keys without a line are fetched,
              ahead of the read if announced; new lines evict old ones
    announce  requests clocks and rows from other nodes while the batch before is computed (pulls.py)
    write     Update: each line accumulates the gradient and applies it to its copy, a preview of the owner's update.
              Pushed are gradients summed over more than s iterations, those of evicted lines, and those of keys without
              a line (pushes.py)

By windows, and on one node, only `flush` and `close` are collective. By messages all ranks make the same calls in the
same order.
"""

from __future__ import annotations

import time
import weakref

import numpy as np
import torch

from hetmpi import _C
from hetmpi.comm.requests import Endpoint
from hetmpi.comm.route import Route
from hetmpi.comm.shards import ShardReader
from hetmpi.comm.transport import choose
from hetmpi.in_flight import InFlight, timed
from hetmpi.table.client import Parts
from hetmpi.table.owner import SspOwner
from hetmpi.table.pulls import Pulls
from hetmpi.table.pushes import Pushes
from hetmpi.table.request import JointRequest, Keys, Part, Phase, PullRequest


class SspClient:
    """See hetmpi/table/client.py, Client."""

    def __init__(self, parts: Parts, exchange: str):
        """exchange: messages, windows or auto. Collective."""
        self.parts, self._cache, self._spans = parts, parts.cache, parts.spans
        self._anticipate = parts.staleness.factor(parts.world.size)
        has_states = parts.rule.preview_dim > 0 and parts.cache.capacity_rows > 0
        self._arrays = ("weight", "mean_square") if has_states else ("weight",)  # of a line
        self._owner = SspOwner(parts.store, parts.rule)
        self._owner.set_step(parts.optimizer, 0)  # others may push before the first write of this rank
        weakref.finalize(self, self._owner.stop)  # also at exit, before MPI frees the memory
        endpoint = Endpoint(parts.window, parts.record, self._arrays, self._owner.applier)
        self.transport, self.why = choose(endpoint, exchange, parts.partition, parts.num_rows)
        world, origins = parts.world, parts.window.layouts[parts.world.rank].origins
        self._owner.start([ring for ring, origin in enumerate(origins) if origin % world.size != world.rank])
        self._reader = ShardReader(parts.window, self._owner.applier)
        if world.is_one_node:
            parts.serve(1)  # there is nothing to fetch ahead
        self._pushes = Pushes(parts, self._owner, self.transport)
        self._pulls = Pulls(parts, self._pushes, self.transport)

    # Read.

    def reading(self, keys: Keys) -> InFlight[torch.Tensor]:
        parts = self.parts
        with self._spans("find"):
            request = self._pulls.take(keys)  # first: a dropped request may release gradients
        with self._spans("drain"):
            self._pushes.progress()
        if request.part is None:
            rows, states = yield from self._pulling(request)
            with self._spans("fetch"):
                delivered = parts.deliver(request, rows, states)
        else:
            joint = request.part.joint
            if joint.phase is not Phase.READ:
                rows, states = yield from self._pulling(joint)
                with self._spans("fetch"):
                    parts.insert(joint, self._cache.local(self._cache.on_device(rows)), states)
                joint.keep(rows, states)
            with self._spans("fetch"):
                delivered = self._read_part(request, request.part)
            self._pulls.free_rows()
        with self._spans("prefetch"):
            self._pulls.request_next()
        return delivered

    def _pulling(self, request: PullRequest) -> InFlight[tuple[np.ndarray, np.ndarray]]:
        """Rows (n, dim) and states (n, preview_dim) of the keys of a request, valid for those without a line. Refreshes
        stale lines."""
        with self._spans("find"):
            self.parts.find(request, is_looked_up=request.phase is not Phase.NEW)
        is_stale, left = yield from timed(self._spans("validate"), self._checking_valid(request))
        if isinstance(request, JointRequest):
            left &= request.is_admitted
        with self._spans("fetch"):
            return self._fetch(request, is_stale, left)

    def _checking_valid(self, request: PullRequest) -> InFlight[tuple[np.ndarray, np.ndarray]]:
        """Masks (n,) bool of the lines that are stale or refreshed anyway, and of the rows needed that the reply does
        not bring: those of this node. Fetches the clocks for that."""
        bound = self.parts.bound
        if request.phase is Phase.NEW:
            self._pushes.await_keys(request.array, np.ones(request.num, bool))
            self._pulls.request(request, None)
            yield
        if request.phase is Phase.REQUESTED:
            self._pulls.serve(request)
            yield
        self._pulls.receive(request)
        request.in_transit = self._pushes.in_transit()
        is_bounded = bound != _C.UNBOUNDED
        near = request.local_route
        if isinstance(request, JointRequest):
            near = near.where(request.is_admitted)  # the others of this node are read with their batch
        if not is_bounded:
            near = near.where(request.slots < 0)
        self.parts.read_clocks(self._reader, request, near)
        is_stale, left, *numbers = self._cache.judge(
            request.slots, request.fetched, request.is_remote, request.clocks, request.num, bound
        )
        self.parts.count_lines(*numbers, are_judged=is_bounded)
        return is_stale, left

    def _fetch(self, request: PullRequest, is_stale: np.ndarray, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As _pulling, once lines have been judged."""
        slots, (rows, states) = request.slots, self._buffers(request.num)
        request.reply.place(rows, states)
        self._preview_held(request, rows, states, request.fetched)
        route = request.route.where(left)
        self._read_near(request, route, left, rows)
        if "mean_square" in self._arrays:
            self.parts.read_rows(self._reader, route.where(request.is_admitted), "mean_square", states)
        if self._cache.capacity_rows > 0:
            self._cache.refresh(slots, is_stale, rows, states, request.clocks, self._anticipate)
        request.enter(Phase.READ, Phase.SERVED)
        request.reply = None  # breaks the reference cycle, so that both are freed at once
        return rows, states

    def _read_part(self, request: PullRequest, part: Part) -> torch.Tensor:
        """The rows (U, dim) of a batch whose joint request is complete. A line has this rank's own updates since. Rows
        without a line have not: those of other nodes get them from held messages, those of this node are read now."""
        joint, counters = part.joint, self.parts.counters
        self._preview_held(joint, joint.rows, joint.states, joint.is_kept)
        rows, left = self._cache.empty((request.num, self.parts.dim), np.float32), np.empty(request.num, bool)
        num_left, num_again, num_hits = _C.part_of_pull(
            part.places, joint.slots, joint.clocks, joint.is_kept, joint.rows, request.is_admitted, part.num_before,
            request.slots, request.clocks, rows, left,
        )  # fmt: skip
        counters.hits += num_hits
        counters.misses += num_again - num_hits
        if num_left > 0:
            request.in_transit, route = self._pushes.in_transit(), request.local_route.where(left)
            self.parts.read_clocks(self._reader, request, route)
            self._read_near(request, route, left, rows)
        request.enter(Phase.READ, Phase.NEW)
        return self._cache.deliver(request.slots, rows)

    def _buffers(self, num: int) -> tuple[np.ndarray, np.ndarray]:
        """Memory for fetched rows (num, dim) and states of lines (num, preview_dim)."""
        empty, parts = self._cache.empty, self.parts
        return empty((num, parts.dim), np.float32), empty((num, parts.rule.preview_dim), np.float32)

    def _preview_held(self, request: PullRequest, rows: np.ndarray, states: np.ndarray, chosen: np.ndarray):
        """Previews on the chosen (n,) bool rows the messages that are held since the last call."""
        held = self._pushes.held  # empty without a cache, where no state is fetched
        for message in held[request.num_previewed :]:
            places = _C.places_of(message.keys, request.array, chosen)
            self._cache.preview(
                places, rows, states, request.clocks, message.values, message.counts, message.clocks, self._anticipate
            )
        request.num_previewed = len(held)

    def _read_near(self, request: PullRequest, route: Route, left: np.ndarray, rows: np.ndarray):
        """Reads the rows left (n,) bool, of this node, whose route is given."""
        if len(request.in_transit):
            late = _C.contained(request.array, request.in_transit, left)
            if np.count_nonzero(late):
                self._pushes.await_keys(request.array, late)
                self.parts.read_clocks(self._reader, request, route.where(late))
        self.parts.read_rows(self._reader, route, "weight", rows)

    # Ahead of the read.

    def announce(self, keys: Keys):
        self._pulls.announce(keys)

    # Write.

    def check_write(self):
        """No effect: a write is always allowed."""

    def writing(self, keys: Keys, grads: torch.Tensor) -> InFlight[None]:
        with self._spans("push"):
            request = self._update(keys, grads)
        with self._spans("validate"):
            is_requested = self._pulls.request_rest()
        if is_requested:
            yield
        with self._spans("validate"):
            self._pulls.serve_next()
        yield
        with self._spans("push"):
            self._take_due(request)
            self._pushes.send()
        self.parts.step += 1

    def _update(self, keys: Keys, grads: torch.Tensor) -> PullRequest:
        """HET's Update of the lines; releases gradients of keys without a line."""
        request = self._pulls.of_write(keys)
        self._cache.set_step(self.parts.optimizer.lr_at(self.step), self.step + 1)
        self._owner.set_step(self.parts.optimizer, self.step)
        if request.phase is not Phase.READ:
            self._find_unread(request)
        values = self._cache.local(grads)
        self._cache.update(request.slots, values, self._anticipate)
        self._cache.pass_on(request.array, request.slots, request.clocks, values)
        return request

    def _find_unread(self, request: PullRequest):
        """Looks up keys that were not read, and fetches the clocks that need no reply of another rank."""
        request.reset()
        self._cache.look_up(request.array, request.slots)
        request.clocks[:] = _C.UNKNOWN_CLOCK
        self.parts.read_clocks(self._reader, request, request.local_route)

    def _take_due(self, request: PullRequest):
        """Releases gradients that are due for push."""
        self._cache.take_due(request.slots, self.parts.bound)
        for known in (request, self._pulls.last):
            if known is not None and known.phase in (Phase.READ, Phase.NEW):
                known.phase = Phase.WRITTEN  # its clocks are older than this write

    # Flush.

    @property
    def step(self) -> int:
        return self.parts.step

    @property
    def num_windows(self) -> int:
        return self._owner.applier.num_windows

    def settling(self) -> InFlight[None]:
        """No effect: a write is complete when it returns."""
        yield from ()

    def flush(self):
        with self._spans("drain"):
            self._pulls.drop_all()
            self._pushes.send_all()
            self.parts.window.fence(f"in step {self.step + 1} for all ranks to flush")

    def push_pending(self, timeout_s: float):
        if not self.transport.is_collective:
            deadline = time.monotonic() + timeout_s
            with self.transport.until(deadline):
                self._pulls.drop_all()
                self._pushes.send_all(deadline)
        elif self._pushes.num_held:
            num = self._pushes.num_held
            raise RuntimeError(f"{num:,} gradients are pending: with table.exchange=messages no rank can push alone")

    def await_owners(self):
        self._pulls.drop_all()
        self._pushes.progress()
        self._pushes.deliver()

    def peek(self, keys: Keys) -> torch.Tensor:
        rows = np.empty((len(keys.array), self.parts.dim), np.float32)
        self._reader.read_local("weight", keys.route, rows)
        self.transport.fetch(keys.route, rows)
        return self._cache.on_device(rows)

    def resume_at(self, step: int):
        self.parts.step = step
        self._owner.set_step(self.parts.optimizer, step)

    def close(self):
        self._pulls.drop_all()
        self.parts.world.meet("for all ranks to close the table")  # the owner serves ranks that still read and write
        self._owner.stop()
        self.transport.close()
