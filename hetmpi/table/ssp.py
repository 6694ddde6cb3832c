"""SSP, s >= 1: HET's client (Miao et al., PVLDB 15(2), 2022, section 3.2; docs/design.md, "The bound").

    read      Find, CheckValid, Fetch: lines within the bound are read as they are, the others and keys without a line
              have been fetched, or are now; new lines evict old ones
    announce  asks the owners of other nodes which lines of a batch are too old, while the batch before is computed
              (pulls.py)
    write     Update: each line takes the gradient, and applies it to its copy as a preview of what the owner will do.
              Pushed are: sums over more than s iterations, those of evicted lines, and gradients of keys without a line
              (pushes.py)

One-sided only `flush` and `close` are collective. Two-sided all ranks make the same calls in the same order.
"""

from __future__ import annotations

import time
import weakref

import numpy as np
import torch

from hetmpi import _C
from hetmpi.comm.one_sided import OneSided
from hetmpi.comm.route import Route
from hetmpi.comm.transport import TRIAL_KEYS, Endpoint, Pull, Transport, choose, trial_route
from hetmpi.comm.two_sided import UNANNOUNCED, TwoSided
from hetmpi.in_flight import InFlight, finish, timed
from hetmpi.table.client import Parts
from hetmpi.table.owner import SspOwner
from hetmpi.table.pulls import NO_SLOTS, Pulls
from hetmpi.table.pushes import Pushes
from hetmpi.table.request import Keys, Phase, PullRequest


class SspClient:
    """See hetmpi/table/client.py, Client."""

    def __init__(self, parts: Parts, exchange: str):
        """exchange: rma, alltoall or auto. Collective."""
        self.parts, self._cache, self._spans = parts, parts.cache, parts.spans
        self._anticipate = parts.staleness.factor(parts.world.size)
        self._arrays = (
            ("weight", "state") if parts.rule.state_dim > 0 and parts.cache.capacity_rows > 0 else ("weight",)
        )  # of a line
        parts.rule.set_step(parts.optimizer.lr_at(0), 1)  # others may push before this rank writes
        self._owner = SspOwner(parts.store, parts.rule, self._arrays)
        weakref.finalize(self, self._owner.stop)  # also at exit, before MPI takes the memory away
        endpoint = Endpoint(parts.window, parts.record, self._arrays, self._owner.gather, self._owner)
        self.transport, self.why = choose(endpoint, {"rma": OneSided, "alltoall": TwoSided}, exchange, self._try_out)
        self._owner.start(self.transport.mailbox.rings)  # who has a ring here is whom this rank has one at
        self._reader = self.transport.reader
        self._pushes = Pushes(parts, self._owner, self.transport)
        self._pulls = Pulls(parts, self._pushes, self.transport)

    def _try_out(self, transport: Transport):
        """One pull by a transport, of random rows."""
        route = trial_route(self.parts.window, self.parts.partition, self.parts.num_rows)
        is_asked, no_lines = np.zeros(TRIAL_KEYS, bool), np.full(TRIAL_KEYS, _C.NO_LINE, np.int32)
        is_asked[route.order] = True
        ticket = transport.begin(
            Pull(route, np.zeros(TRIAL_KEYS, np.int32), lambda: no_lines, lambda: is_asked, 0, UNANNOUNCED)
        )
        ticket.advance()
        ticket.receive()
        ticket.place(*self._buffers(TRIAL_KEYS))

    # Read.

    def reading(self, keys: Keys) -> InFlight[torch.Tensor]:
        parts = self.parts
        with self._spans("find"):
            request = self._pulls.take(keys)  # first: what it drops may hand out sums
        with self._spans("drain"):
            self._pushes.take_turn()
        with self._spans("find"):
            admitted = parts.is_admitted(request)
            parts.find(request, admitted, is_looked_up=request.phase is not Phase.NEW)
        is_stale = yield from timed(self._spans("validate"), self._checking_valid(request))
        rows = yield from timed(self._spans("fetch"), self._fetching(request, is_stale, admitted))
        with self._spans("prefetch"):
            self._pulls.ask_next()
        return rows

    def _checking_valid(self, request: PullRequest) -> InFlight[np.ndarray]:
        """Which lines are too old to be read, or are renewed beside: (n,) bool. Gets the clocks that this takes."""
        num, bound = request.num, self.parts.bound
        if request.phase is Phase.NEW:
            self._pushes.await_keys(request.array)
            self._pulls.ask(request, None)
            yield
        if request.phase is Phase.ASKED:
            self._pulls.order(request)
            yield
        self._pulls.receive(request)
        request.in_transit = np.concatenate([request.in_transit, self.transport.mailbox.in_transit()])
        local = ~request.is_remote
        asked = local & (request.slots < 0) if bound == _C.UNBOUNDED else local
        yield from self.parts.reading_clocks(self._reader, request, asked)
        is_stale, is_line = np.zeros(len(request.array), bool), request.slots >= 0
        kept = np.where(request.fetched[:num], -1, request.slots[:num])  # the other lines are renewed
        self._cache.validate(kept, request.clocks[:num], bound, is_stale[:num], counts_lags=True)
        if self.transport.carries_pushes:  # the owners have decided about lines of other nodes
            is_stale &= ~request.is_remote
        is_stale |= request.fetched & is_line
        self.parts.count_found(request, is_stale, are_judged=bound != _C.UNBOUNDED)
        return is_stale

    def _fetching(self, request: PullRequest, is_stale: np.ndarray, admitted: np.ndarray) -> InFlight[torch.Tensor]:
        """The rows (U, dim) of the batch, lines renewed and new ones made."""
        slots, rows, states = request.slots, *self._buffers(len(request.array))
        is_missing = slots < 0
        self._place(request, rows, states)
        yield from self._fetching_late(request, (is_missing | is_stale) & ~request.fetched, admitted, rows, states)
        if not is_missing.all():
            self._cache.refresh(slots, is_stale, rows, states, request.clocks, self._anticipate)
            self._cache.take_due(
                slots, self.parts.bound, held=NO_SLOTS
            )  # sums that waited for their lines to be renewed
        delivered = self.parts.deliver(request, admitted, rows, states)
        request.enter(Phase.READ, Phase.ORDERED)
        request.ticket = None  # which refers to the request: so that both are freed at once
        return delivered

    def _buffers(self, num: int) -> tuple[np.ndarray, np.ndarray]:
        """Memory for what is fetched: rows (num, dim) and states (num, state_dim)."""
        return tuple(
            self._cache.empty((num, width), np.float32) for width in (self.parts.dim, self.parts.rule.state_dim)
        )

    def _place(self, request: PullRequest, rows: np.ndarray, states: np.ndarray):
        """Puts the rows that the ticket brought in their places, as they will be when the owners have what is still
        held here."""
        request.ticket.place(rows, states)
        for message in self.transport.mailbox.held:  # none without a cache, where no state comes along
            positions, chosen = places_of(message.keys, request, request.fetched)
            if len(chosen):
                sums, counts = message.values[chosen], message.counts[chosen]
                self._cache.preview(positions, rows, states, request.clocks, sums, counts, self._anticipate)
                message.clocks[chosen] = request.clocks[positions]  # they leave as sums of the renewed row

    def _fetching_late(
        self, request: PullRequest, needed: np.ndarray, admitted: np.ndarray, rows: np.ndarray, states: np.ndarray
    ) -> InFlight[None]:
        """Fetches the needed keys' (n,) bool rows, of this node or kept back from the ticket, and the states of those
        that may get a line."""
        if not needed.any():
            return
        late = needed.copy()  # this rank's sums were on their way when their clocks were asked for
        late[needed] = _C.contained(request.array[needed], request.in_transit)
        if late.any():
            self._pushes.await_keys(request.array[late])
            yield from self.parts.reading_clocks(self._reader, request, late)
        yield from self.parts.reading_rows(self._reader, request, needed, "weight", rows)
        if "state" in self._arrays:
            yield from self.parts.reading_rows(self._reader, request, needed & admitted, "state", states)

    # Ahead of the read.

    def announce(self, keys: Keys):
        self._pulls.announce(keys)

    # Write.

    def check_write(self):
        """A write may always come."""

    def writing(self, keys: Keys, grads: torch.Tensor) -> InFlight[None]:
        with self._spans("push"):
            request = self._update(keys, grads)
        with self._spans("validate"):
            held = self._pulls.order_next()  # rows of the batch that is read next, if it is announced
        yield
        with self._spans("push"):
            self._take_due(request, held)
            self._pushes.send()
        self.parts.step += 1

    def _update(self, keys: Keys, grads: torch.Tensor) -> PullRequest:
        """HET's Update of the lines; gradients of keys without a line are handed out."""
        request = self._pulls.of_write(keys)
        for side in (self._cache, self._owner):
            side.set_step(self.parts.optimizer.lr_at(self.step), self.step + 1)
        if request.phase is not Phase.READ:
            self._find_unread(request)
        num, values = request.num, self._cache.local(grads)
        self._cache.update(request.slots[:num], values, self._anticipate)
        self._cache.pass_on(request.array[:num], request.slots[:num], request.clocks[:num], values)
        return request

    def _find_unread(self, request: PullRequest):
        """Brings what a read would have, of keys that were not read, as far as no other rank need reply."""
        request.reset()
        self._cache.look_up(request.array, request.slots)
        request.clocks[:] = _C.UNKNOWN_CLOCK
        asked = np.full(request.num, not self.transport.carries_pushes) | ~request.is_remote
        finish(self.parts.reading_clocks(self._reader, request, asked))

    def _take_due(self, request: PullRequest, held: np.ndarray):
        """Hands out sums that are due for push, but for lines held (m,) int64, which will be renewed."""
        self._cache.take_due(request.slots[: request.num], self.parts.bound, held)
        for known in (request, self._pulls.last):
            if known is not None and known.phase in (Phase.READ, Phase.NEW):
                known.phase = Phase.WRITTEN  # its clocks are those before this write

    # Flush.

    @property
    def step(self) -> int:
        return self.parts.step

    def settling(self) -> InFlight[None]:
        """A write leaves nothing to do."""
        yield from ()

    def flush(self):
        with self._spans("drain"):
            self._pulls.drop_all()
            self._pushes.send_all()
            self.parts.window.fence(f"in step {self.step + 1} for all ranks to flush")

    def push_pending(self, timeout_s: float):
        if not self.transport.carries_pushes:
            self._pulls.drop_all()
            self._pushes.send_all(time.monotonic() + timeout_s)
        elif self._pushes.num_held:
            raise RuntimeError(
                f"{self._pushes.num_held:,} sums of gradients: with exchange=alltoall no rank sends alone"
            )

    def await_owners(self):
        if self.transport.carries_pushes:
            self._pulls.drop_all()
        self._pushes.take_turn()
        self._pushes.bring()

    def peek(self, keys: Keys) -> torch.Tensor:
        rows = np.empty((len(keys.array), self.parts.dim), np.float32)
        self.transport.peek("weight", Route.of_keys(self.parts.partition, keys.array), rows)
        return self._cache.on_device(rows)

    def resume_at(self, step: int):
        self.parts.step = step
        self._owner.set_step(self.parts.optimizer.lr_at(step), step + 1)

    def close(self):
        self._pulls.drop_all()
        self.parts.window.flush()  # buffers of what was sent are MPI's until then
        self.parts.world.meet("for all ranks to close the table")  # the owner serves ranks that still read and write
        self._owner.stop()
        self.transport.close()


def places_of(keys: np.ndarray, request: PullRequest, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where keys (m,) are among the chosen (n,) bool keys of a request: positions in it (k,) int64, and which keys
    (k,)."""
    here = np.flatnonzero(chosen)
    which = np.flatnonzero(_C.contained(keys, request.array[here]))
    by_key = here[np.argsort(request.array[here])]
    return by_key[np.searchsorted(request.array[by_key], keys[which])], which
