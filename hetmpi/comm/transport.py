"""Transport: the protocol for rows and gradients between a rank and owners on other nodes; and the trial that selects a
transport.

One-sided (one_sided.py): MPI_Get and MPI_Put, without action by the owners; the client (`Pull.wanted`) decides which
rows are sent. Two-sided (two_sided.py): messages between ranks of different nodes, for MPI libraries whose one-sided
calls between hosts are slow or missing; the owner decides by the same rule (cpp/wire/round.h, is_wanted). Ranks of one
node use shared memory either way.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol

import numpy as np

from hetmpi import _C
from hetmpi.comm.mailbox import Mailbox
from hetmpi.comm.mpi import MPI
from hetmpi.comm.rounds import MakeWire, Shared
from hetmpi.comm.route import Route
from hetmpi.comm.shards import ShardReader
from hetmpi.comm.window import RmaWindow
from hetmpi.comm.world import World
from hetmpi.errors import UserError
from hetmpi.in_flight import finish

TRIAL_KEYS = 2048  # about as many as a batch reads; the slowest library measured fetches them within 0.1 s
TRIALS = 5
FORMER_NAMES = {"alltoall": "messages", "rma": "windows"}  # name in earlier versions -> name


@dataclass
class Endpoint:
    """The constructor arguments of a transport, on one rank.

    window      the shards, and the rings of the mailboxes
    record      format of a pushed record
    arrays      the arrays that a pull fetches of each row: weight, or weight and mean_square
    applier     applies gradients to this rank's shard; None in BSP, where the inbox does"""

    window: RmaWindow
    record: _C.RecordFormat
    arrays: tuple[str, ...] = ("weight",)
    applier: _C.PushApplier | None = None


@dataclass
class Pull:
    """Rows of other nodes that a batch needs or may need.

    route    the requested keys, at their positions in a batch of n
    versions (n,) int32, output: the owners' clocks, by position
    known()  (n,) int32: the clock of this rank's copy of each row, NO_LINE if it has no usable copy
    wanted() (n,) bool: the rows to fetch; valid once the versions have arrived
    bound    how far an owner's clock may be ahead of `known` without a need for the row; opaque to the transport
    reason   why the rows are requested, an index of two_sided.REASONS"""

    route: Route
    versions: np.ndarray
    known: Callable[[], np.ndarray]
    wanted: Callable[[], np.ndarray]
    bound: int
    reason: int


class Ticket(Protocol):
    """A pull in progress. begin() creates it; advance(), receive() and place() follow in this order, or drop() at any
    time.

    fetched  (n,) bool: rows that are received, known after advance() (one-sided) or after receive() (two-sided)"""

    fetched: np.ndarray | None

    def advance(self) -> None:
        """Makes the next step that depends on other ranks. One-sided: completes the versions and posts the gets of
        rows. Two-sided: replies to the requests of the other ranks."""

    def receive(self) -> None:
        """Waits for the versions and for `fetched`."""

    def place(self, *outs: np.ndarray) -> None:
        """Waits for the rows and copies them to their positions: one out (n, width) per array of the transport."""

    def drop(self) -> None:
        """Ends the pull in any state; fetched remains as it is."""


class Transport(Protocol):
    """Communication of a rank with the owners.

    name            messages or windows; None if all ranks share a node
    reader          reads the owners' current rows
    mailbox         sends gradients to their owners
    carries_pushes  whether a pull request includes the gradients sent before it; the owner applies these first and
                    decides which rows it returns. Then mailbox.held has all gradients sent to other nodes since
    is_collective   whether all ranks must make the same calls in the same order
    shared          its Rounds and Posts, which count messages to other nodes; empty where it has none
    origins         blocks (first, last) of ranks whose gradients reach this rank as one, ascending; at s = 0"""

    name: str | None
    reader: ShardReader
    mailbox: Mailbox
    carries_pushes: bool
    is_collective: bool
    shared: Sequence[Shared]
    origins: list[tuple[int, int]]

    def begin(self, pull: Pull) -> Ticket:
        """Requests rows from the owners on other nodes."""

    def peek(self, array: str, route: Route, out: np.ndarray) -> None:
        """As reader.reading, for rows of all nodes, independent of the order of pulls and pushes."""

    def idle(self) -> bool:
        """Counts a write that no pull preceded. Returns whether flush() must follow."""

    def flush(self, bound: int) -> None:
        """Sends the gradients that are held for the next pull."""

    def close(self) -> None:
        """Ends the transfers in progress. Collective."""


class Immediate:
    """Common part of transports that hold nothing back: data is sent when a call returns."""

    reader: ShardReader
    mailbox: Mailbox
    shared: Sequence[Shared] = ()

    @property
    def origins(self) -> list[tuple[int, int]]:
        return [(rank, rank) for rank in range(self.mailbox.window.world.size)]

    def peek(self, array: str, route: Route, out: np.ndarray):
        finish(self.reader.reading(array, route, out))

    def idle(self) -> bool:
        return False  # nothing is held back

    def flush(self, bound: int):
        """No effect: nothing is held back."""

    def close(self):
        self.mailbox.close()


@functools.cache  # so that it warns once
def current_name(exchange: str, warns: bool) -> str:
    """The name of a transport, also for one of FORMER_NAMES. warns: whether to print the new name of such a one."""
    name = FORMER_NAMES.get(exchange, exchange)
    if warns and name != exchange:
        print(f"hetmpi: table.exchange={exchange} is now called {name}", file=sys.stderr, flush=True)
    return name


class Ways(NamedTuple):
    """The transports of a consistency model.

    local      for ranks of one node
    by_name    of table.exchange -> for several nodes. Raises UserError, on all ranks alike, where this MPI lacks what
               it takes
    on_wire    with this name, on a wire of the user's own"""

    local: Callable[[Endpoint], Transport]
    by_name: dict[str, Callable[[Endpoint], Transport]]
    on_wire: Callable[[Endpoint, str, MakeWire], Transport]


def choose(
    endpoint: Endpoint, ways: Ways, kind: str, trial: Callable[[Transport], None]
) -> tuple[Transport, str | None]:
    """Creates the transport called `kind`, for `auto` the one with the fastest trial. Returns it with the reason of the
    choice in one sentence, or None if `kind` named the transport.

    kind: a name, auto, or the path of a class "package.module.Class", a Wire. trial(transport): makes one exchange that
    only reads. Collective. Raises UserError for a path that names no class."""
    window = endpoint.window
    if window.world.is_one_node:
        return ways.local(endpoint), None
    if kind in ways.by_name:
        return ways.by_name[kind](endpoint), None
    if kind != "auto":
        return ways.on_wire(endpoint, kind, imported(kind)), None
    opened, refusals = {}, []
    for name, make in ways.by_name.items():
        try:
            opened[name] = make(endpoint)
        except UserError as refusal:
            refusals.append(refusal)
    if len(opened) == 1:
        return next(iter(opened.values())), str(refusals[0]).partition(":")[0]
    times = dict(zip(opened, trial_ms(window.world, opened.values(), trial).tolist()))
    chosen = opened.pop(min(times, key=times.get))
    for other in opened.values():
        other.close()
    shown = ", ".join(f"{ms:.2f} ms by {name}" for name, ms in times.items())
    return chosen, f"fetching {TRIAL_KEYS:,} random rows took {shown}"


def imported(path: str) -> MakeWire:
    """The class that "package.module.Class" names."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
        if not callable(found):
            raise AttributeError(f"it is a {type(found).__name__}")
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: an empty name of a module
        raise UserError(
            f"table.exchange={path}: there is no such class ({error}): use messages, windows, auto, or "
            "package.module.Class"
        ) from error
    return found


def trial_ms(world: World, transports, trial: Callable[[Transport], None]) -> np.ndarray:
    """Time of one exchange by each transport in ms: median over trials, maximum over ranks, equal on all ranks.
    Collective."""
    comm, transports = world.comm, list(transports)
    times = np.empty((TRIALS, len(transports)))
    for i in range(TRIALS):
        for j, transport in enumerate(transports):
            comm.Barrier()
            began = time.perf_counter()
            trial(transport)
            times[i, j] = 1000 * (time.perf_counter() - began)
    slowest = np.median(times[1:], axis=0)  # without the first, which opens connections
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return slowest


def trial_route(window: RmaWindow, partition: _C.Partition, num_rows: int) -> Route:
    """The route of random keys, limited to keys on other nodes."""
    keys = np.random.default_rng(window.world.rank).integers(0, num_rows, TRIAL_KEYS)
    return Route.of_keys(partition, keys).of_ranks(window.world.is_remote)
