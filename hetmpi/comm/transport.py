"""Transport: the protocol for rows and gradients between a rank and their owners; and the trial that selects one.

Ranks of one node use shared memory. Between nodes a rank asks the owners by a wire (wire.py): at s >= 1 by requests.py,
at s = 0 by exact.py where a thread of the wire answers, otherwise by collective.py.
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
from hetmpi.comm.mailbox import Message
from hetmpi.comm.mpi import MPI
from hetmpi.comm.node_memory import NodeMemory
from hetmpi.comm.rounds import MakeWire, Shared
from hetmpi.comm.route import Route
from hetmpi.comm.world import World
from hetmpi.errors import UserError
from hetmpi.in_flight import InFlight

TRIAL_KEYS = 2048  # about as many as a batch reads; the slowest library measured fetches them within 0.1 s
TRIALS = 5
FORMER_NAMES = {"alltoall": "messages", "rma": "windows"}  # name in earlier versions -> name


@dataclass
class Endpoint:
    """The constructor arguments of a transport, on one rank.

    window      the shards, and the rings of the mailboxes
    record      format of a pushed record
    arrays      the arrays that a reply has of each row: weight, or weight and mean_square
    applier     applies gradients to this rank's shard; None in BSP, where the inbox does
    steps()     steps that this rank has written; in BSP"""

    window: NodeMemory
    record: _C.RecordFormat
    arrays: tuple[str, ...] = ("weight",)
    applier: _C.PushApplier | None = None
    steps: Callable[[], int] | None = None


class Transport(Protocol):
    """Communication of a rank with the owners.

    name            messages or windows, or the path of a class; None if all ranks share a node
    is_collective   whether all ranks must make the same calls in the same order
    shared          its messages to other nodes, which it may share with other tables"""

    name: str | None
    is_collective: bool
    shared: Sequence[Shared]

    def peek(self, route: Route, out: np.ndarray) -> None:
        """Reads the owners' rows (weight) of a route's keys, of all nodes, to their positions in out (n, dim)."""

    @staticmethod
    def share(transports: list[Transport]) -> None:
        """Lets tables that are used together share their messages. Collective."""

    def close(self) -> None:
        """Ends the transfers in progress. Collective."""


class ExactTransport(Transport, Protocol):
    """A transport of BSP.

    origins   blocks (first, last) of ranks whose gradients reach this rank as one, ascending"""

    origins: list[tuple[int, int]]

    def reading(self, route: Route, out: np.ndarray) -> InFlight[None]:
        """Reads as peek(), once all ranks that own such rows have applied this rank's last step. This rank applies its
        share between the call, which may send a request, and the first step of the result."""

    def sending(self, message: Message, to_all: bool, while_waiting: Callable[[], object]) -> InFlight[int]:
        """As Mailbox.send, to owners on all nodes."""

    def publish(self) -> None:
        """Lets gradients leave, before this rank waits for those of others."""

    def progress(self) -> None:
        """As publish(), without waiting."""


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
        if found.has_thread:
            raise AttributeError("a wire of your own must have has_thread = False")
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


def trial_route(window: NodeMemory, partition: _C.Partition, num_rows: int) -> Route:
    """The route of random keys, limited to keys on other nodes."""
    keys = np.random.default_rng(window.world.rank).integers(0, num_rows, TRIAL_KEYS)
    return Route.of_keys(partition, keys).of_ranks(window.world.is_remote)
