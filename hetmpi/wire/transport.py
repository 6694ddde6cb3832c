"""The choice of a transport: a channel (channel.py) on one of the wires, by name or by trial."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module

import numpy as np

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.wire.channel import Channel
from hetmpi.wire.exchange import MakeWire
from hetmpi.wire.messages import Messages
from hetmpi.wire.windows import Windows
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

WIRES = {"windows": Windows, "messages": Messages}
EXCHANGES = (*sorted(WIRES), "auto")
TRIAL_KEYS = 2048  # about as many as a batch reads; the slowest library measured fetches them within 0.1 s
TRIALS = 5
FORMER_NAMES = {"alltoall": "messages", "rma": "windows"}  # name in earlier versions -> name


@functools.cache  # so that it warns once
def current_name(exchange: str, warns: bool) -> str:
    """The name of a transport, also for one of FORMER_NAMES. warns: whether to print the new name of such a one."""
    name = FORMER_NAMES.get(exchange, exchange)
    if warns and name != exchange:
        print(f"hetmpi: table.exchange={exchange} is now called {name}", file=sys.stderr, flush=True)
    return name


def choose(
    world: World, kind: str, make: Callable[[str | None, MakeWire], Channel], partition: _C.Partition, num_rows: int
) -> tuple[Channel, str | None]:
    """Creates the transport called `kind`, for `auto` the one with the fastest trial. Returns it with the reason of the
    choice in one sentence, or None if `kind` named the transport.

    make(name, make_wire): a table's requests on a wire. kind: a name, auto, or the path of a class
    "package.module.Class", a Wire. Collective. Raises UserError for a path that names no class, and on all ranks where
    this MPI lacks what the wire takes."""
    if world.is_one_node:
        return make(None, Messages), None
    if kind != "auto":
        return make(kind, WIRES.get(kind) or imported(kind)), None
    opened, refusals = {}, []
    for name, make_wire in WIRES.items():
        try:
            opened[name] = make(name, make_wire)
        except UserError as refusal:
            refusals.append(refusal)
    if len(opened) == 1:
        return next(iter(opened.values())), str(refusals[0]).partition(":")[0]
    times = dict(zip(opened, trial_ms(world, opened.values(), partition, num_rows).tolist()))
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


def trial_ms(world: World, transports: Iterable[Channel], partition: _C.Partition, num_rows: int) -> np.ndarray:
    """Time in which each transport fetches those of TRIAL_KEYS random rows that are on other nodes, in ms: median over
    trials, maximum over ranks, equal on all ranks. Collective."""
    comm, transports = world.comm, list(transports)
    keys = np.random.default_rng(world.rank).integers(0, num_rows, TRIAL_KEYS)
    owners, _ = partition.locate(keys)
    keys = keys[world.is_remote[owners]]
    route = partition.route(keys)
    times = np.empty((TRIALS, len(transports)))
    for i in range(TRIALS):
        for j, transport in enumerate(transports):
            rows = np.empty((len(keys), transport.width), np.float32)
            comm.Barrier()
            began = time.perf_counter()
            transport.fetch(route, rows)
            times[i, j] = 1000 * (time.perf_counter() - began)
    slowest = np.median(times[1:], axis=0)  # without the first, which opens connections
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return slowest
