"""Transport: how rows and gradients travel between a rank and the owners on other nodes; and the trial that chooses
one.

One-sided (one_sided.py): MPI_Get and MPI_Put, in which owners have no part. Two-sided (two_sided.py): messages between
all pairs of ranks of different nodes, for MPI libraries whose one-sided calls between hosts are slow, or missing. Ranks
of one node use each other's memory either way. A transport knows neither staleness nor the cache: which rows are worth
sending is said by the client (`Pull.wanted`) and the owner (`Owner.reply`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import numpy as np

from hetmpi import _C
from hetmpi.comm.mailbox import Mailbox
from hetmpi.comm.mpi import MPI
from hetmpi.comm.route import Route
from hetmpi.comm.shards import ShardReader
from hetmpi.comm.window import RmaWindow
from hetmpi.errors import UserError
from hetmpi.in_flight import finish

TRIAL_KEYS = 2048  # about as many as a batch reads, and fetched within 0.1 s by the slowest library measured
TRIALS = 5


@dataclass
class Endpoint:
    """What a transport is made from, on one rank.

    window      the shards, and the rings of the mailboxes
    record      of a push
    arrays      which a pull fetches of each row, weight or weight and state
    gather_own  reads this rank's shard, as _C.gather, where a thread of this rank may write it meanwhile
    owner       this rank as an owner; None in BSP, where the inbox alone applies gradients"""

    window: RmaWindow
    record: _C.RecordFormat
    arrays: tuple[str, ...] = ("weight",)
    gather_own: Callable | None = None
    owner: Owner | None = None


@dataclass
class Pull:
    """Rows of other nodes that a batch needs, or may need.

    route    the keys asked about, at their positions in a batch of n
    versions (n,) int32, filled in by position: the owners' clocks
    known()  (n,) int32: the clock of this rank's copy of each row, NO_LINE for none or one that will not do
    wanted() (n,) bool, once the versions are here: which rows are to be fetched
    bound    opaque to the transport: what Owner.reply compares `known` with
    reason   why the rows are asked for, one of two_sided.REASONS"""

    route: Route
    versions: np.ndarray
    known: Callable[[], np.ndarray]
    wanted: Callable[[], np.ndarray]
    bound: int
    reason: int


class Ticket(Protocol):
    """A pull under way: begin() made it; advance(), receive() and place() follow in this order, or drop() at any time.

    fetched  (n,) bool: rows that come, known from advance() on (one-sided) or from receive() on (two-sided)"""

    fetched: np.ndarray | None

    def advance(self) -> None:
        """Takes the next step that needs other ranks: one-sided, the versions are here, and rows begin to travel;
        two-sided, this rank replies to the others."""

    def receive(self) -> None:
        """Waits for the versions, and until `fetched` is known."""

    def place(self, *outs: np.ndarray) -> None:
        """Waits for the rows, and copies them to their positions: one out (n, width) per array of the transport."""

    def drop(self) -> None:
        """Ends the pull, whatever has come of it; fetched stays as it is."""


class Owner(Protocol):
    """The side of a rank that owns rows, as a two-sided transport calls it for other nodes' ranks."""

    def apply(self, rows, sums, clocks, counts) -> None:
        """Applies pushes: rows (m,) int64, sums (m, width) float32, clocks and counts (m,) int32."""

    def reply(self, rows, known, bound) -> tuple[np.ndarray, list[np.ndarray]]:
        """clocks (m,) int32 of rows (m,) int64, and those rows that the asker wants: one array (k, width) per array of
        a row."""

    def wants(self, known, clocks, bound) -> np.ndarray:
        """Which of the rows asked about a reply holds: (m,) bool, the same function on both sides."""


class Transport(Protocol):
    """A rank's ways to the owners.

    name            rma or alltoall; None where all ranks share a node
    reader          the owners' rows as they are now
    mailbox         gradients to their owners
    carries_pushes  whether a pull takes along the gradients sent before it; the owner applies them first and decides
                    which rows come
    is_collective   whether all ranks have to make the same calls in the same order"""

    name: str | None
    reader: ShardReader
    mailbox: Mailbox
    carries_pushes: bool
    is_collective: bool

    def begin(self, pull: Pull) -> Ticket:
        """Asks the owners on other nodes."""

    def peek(self, array: str, route: Route, out: np.ndarray) -> None:
        """As reader.reading, of all nodes, outside of the order of pulls and pushes."""

    def idle(self, bound: int) -> None:
        """Called for each write before which nothing was pulled."""

    def flush(self, bound: int) -> None:
        """Sends on what is held back for a pull to take along."""

    def close(self) -> None:
        """Ends what is on its way. Collective."""


class Immediate:
    """What transports have in common that hold nothing back: what they send has left when a call returns."""

    reader: ShardReader
    mailbox: Mailbox

    def peek(self, array: str, route: Route, out: np.ndarray):
        finish(self.reader.reading(array, route, out))

    def idle(self, bound: int):
        """Nothing is held back."""

    def flush(self, bound: int):
        """Nothing is held back."""

    def close(self):
        self.mailbox.close()


def choose(
    endpoint: Endpoint, ways: dict, kind: str, trial: Callable[[Transport], None]
) -> tuple[Transport, str | None]:
    """The transport called `kind`, and why, in one sentence, if that was chosen here: of auto, the one whose trial is
    fastest.

    ways: name -> its class, whose constructor takes an Endpoint. kind: one of these names, auto, or the path of another
    class, "package.module.Class". trial(transport): makes one exchange, of reads alone. Collective. Raises UserError
    for a path of no class."""
    window = endpoint.window
    if window.world.is_one_node:
        transport = ways["rma"](endpoint)
        transport.name = None
        return transport, None
    if kind != "auto":
        return (ways.get(kind) or imported(kind))(endpoint), None
    if not window.reaches_remote:
        return ways["alltoall"](endpoint), "this MPI makes no one-sided window over several nodes"
    opened = {name: make(endpoint) for name, make in ways.items()}
    times = dict(zip(opened, trial_ms(window, opened.values(), trial).tolist()))
    chosen = opened.pop(min(times, key=times.get))
    for other in opened.values():
        other.close()
    shown = ", ".join(f"{ms:.2f} ms by {name}" for name, ms in times.items())
    return chosen, f"fetching {TRIAL_KEYS:,} random rows took {shown}"


def imported(path: str) -> type:
    """The class that "package.module.Class" names."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"table.exchange={path}: there is no such class ({error}): give rma, alltoall, auto, or "
            "package.module.Class"
        ) from error


def trial_ms(window: RmaWindow, transports, trial: Callable[[Transport], None]) -> np.ndarray:
    """Milliseconds of one exchange by each transport: the median, on the slowest rank, the same everywhere.
    Collective."""
    comm, transports = window.world.comm, list(transports)
    times = np.empty((TRIALS, len(transports)))
    for i in range(TRIALS):
        for j, transport in enumerate(transports):
            comm.Barrier()
            began = time.perf_counter()
            trial(transport)
            times[i, j] = 1000 * (time.perf_counter() - began)
    slowest = np.median(times[1:], axis=0)  # the first one makes connections
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return slowest


def trial_route(window: RmaWindow, partition: _C.Partition, num_rows: int) -> Route:
    """The route of random keys, of which those of other nodes count."""
    keys = np.random.default_rng(window.world.rank).integers(0, num_rows, TRIAL_KEYS)
    return Route.of_keys(partition, keys).of_ranks(window.world.is_remote)
