"""How a rank reaches other nodes: one-sided (Owners, Outbox, RmaAsking), or by calls of all ranks; and which of both to take.

Some MPI libraries have slow one-sided calls between hosts, or none. By `alltoall` the ids of rows go out and rows come back,
at s = 0 by MPI_Alltoallv as here, at s >= 1 by hetmpi/rounds.py. Gradients of s = 0 go by MPI_Alltoallv too: each rank puts
what it is sent into the rings of its own memory, as if the origin had, so that Inbox sees no difference. Ranks of this node
go on using each other's memory.

Every rank must make the same calls in the same order, with no keys if it has none. A call may wait for another rank to
make it, never for that rank's rings to have room: whoever waits for room goes on with what is on its way (progress).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from hetmpi import _C
from hetmpi.inbox import Message, NearRing, Outbox, Sending
from hetmpi.owners import FarRows, NearOwners, Owners
from hetmpi.partition import Route
from hetmpi.rounds import HoldingOutbox
from hetmpi.window import RmaWindow
from hetmpi.world import MPI, World, wait_for

EXCHANGES = ("auto", "rma", "alltoall")
TRIAL_KEYS = 2048  # about what a batch asks for, and fetched within 0.1 s by the slowest library measured
TRIALS = 5


@dataclass
class Exchange:
    """This rank's ways to the owners. name: rma or alltoall, None where all ranks share a node; why: one sentence, if it
    was chosen here.

    owners      for reads; at s >= 1 of what nobody was asked for
    outbox      for writes
    looks       for EmbeddingTable.peek"""

    name: str | None
    owners: Owners
    outbox: Outbox | AlltoallOutbox | HoldingOutbox
    looks: Owners
    why: str | None = None


def open_exchange(
    kind: str, window: RmaWindow, engine: _C.Engine | None, record: _C.RecordFormat, partition: _C.Partition, num_rows: int
) -> Exchange:  # fmt: skip
    """The exchange called `kind`; for auto the one that fetches rows of other nodes faster. engine: at s >= 1. Collective."""
    if window.world.is_one_node:
        return replace(open_rma(window, engine, record), name=None)
    makes = {"rma": open_rma, "alltoall": open_alltoall}
    if kind != "auto":
        return makes[kind](window, engine, record)
    if not window.reaches_far:
        return replace(makes["alltoall"](window, engine, record), why="this MPI makes no one-sided window over several nodes")
    ways = {name: make(window, engine, record) for name, make in makes.items()}
    times = fetch_ms([way.looks for way in ways.values()], partition, num_rows)
    trials = dict(zip(ways, times.tolist()))
    chosen = ways.pop("rma" if trials["rma"] <= trials["alltoall"] else "alltoall")
    for other in ways.values():
        other.outbox.close()
    shown = ", ".join(f"{ms:.2f} ms by {name}" for name, ms in trials.items())
    return replace(chosen, why=f"fetching {TRIAL_KEYS:,} random rows took {shown}")


def open_rma(window: RmaWindow, engine: _C.Engine | None, record: _C.RecordFormat) -> Exchange:
    owners = Owners(window, engine)
    return Exchange("rma", owners, Outbox(window, record), looks=owners)


def open_alltoall(window: RmaWindow, engine: _C.Engine | None, record: _C.RecordFormat) -> Exchange:
    owners = AlltoallOwners(window, engine)
    if engine is None:
        return Exchange("alltoall", owners, AlltoallOutbox(window, record), looks=owners)
    return Exchange("alltoall", NearOwners(window, engine), HoldingOutbox(window, record), looks=owners)


def fetch_ms(ways: list[Owners], partition: _C.Partition, num_rows: int) -> np.ndarray:
    """Milliseconds in which each way fetches some random rows of other nodes: the median, on the slowest rank, the same
    everywhere. Reads only. Collective."""
    window, comm = ways[0].window, ways[0].window.world.comm
    keys = np.random.default_rng(comm.rank).integers(0, num_rows, TRIAL_KEYS)
    route = Route.of_keys(partition, keys).of_ranks(window.world.is_far)
    rows = np.empty((TRIAL_KEYS, window.local.weight.shape[1]), np.float32)
    times = np.empty((TRIALS, len(ways)))
    for trial in range(TRIALS):
        for i, owners in enumerate(ways):
            comm.Barrier()
            began = time.perf_counter()
            owners.read("weight", route, rows)
            times[trial, i] = 1000 * (time.perf_counter() - began)
    slowest = np.median(times[1:], axis=0)  # the first one makes connections
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return slowest


def swap_counts(world: World, counts: np.ndarray) -> np.ndarray:
    """Tells each rank its entry of counts (size,) int64; what the others tell this one, (size,) int64. Collective."""
    came = np.empty(world.size, np.int64)
    await_all(world, world.comm.Ialltoall(np.ascontiguousarray(counts, np.int64), came))
    return came


def await_all(world: World, request: MPI.Request):
    """Waits for the call in which ranks meet, and says so if some do not come."""
    wait_for(world, request.Test, "for all ranks to read or write the table as often as it does")


class AlltoallOwners(Owners):
    """Owners of which those on other nodes are asked by MPI_Alltoallv."""

    is_collective = True

    def read(self, array: str, route: Route, out: np.ndarray):
        """As Owners.read. Collective."""
        comm, (width, dtype), part = self.window.world.comm, self.shape(array), route.of_ranks(self.window.world.is_far)
        counts = np.diff(part.first)
        self.window.sync()
        asked = swap_counts(self.window.world, counts)  # ranks meet: at s = 0 all have applied the last step
        self.window.sync()
        rows = self._buffer("asked", asked.sum(), 1, np.int64)[:, 0]
        comm.Alltoallv([part.rows, counts, MPI.INT64_T], [rows, asked, MPI.INT64_T])
        answers = self._serve(array, rows)
        came = self._buffer(f"came {array}", len(part.rows), width, dtype)
        item, _ = self.window.items[array]
        comm.Alltoallv([answers, asked, item], [came, counts, item])
        FarRows(array, [(part.order, came)]).place(out)
        self.read_near(array, route, out)

    def _serve(self, array: str, rows: np.ndarray) -> np.ndarray:
        """Rows (m,) of this rank's array: (m, width)."""
        answers = self._buffer(f"answers {array}", len(rows), *self.shape(array))
        rank = self.window.world.rank
        out = answers[:, 0] if array == "clock" else answers
        self._gather(array, rank)(getattr(self.window.local, array), rows, out, np.arange(len(rows)))
        return answers

    def _buffer(self, use: str, num: int, width: int, dtype) -> np.ndarray:
        return self.window.buffer(use, self.window.world.rank, int(num), width, dtype)


class AlltoallOutbox:
    """Outbox for s = 0 of which owners on other nodes are sent their part by MPI_Ialltoallv.

    A message is on its way (`_request`), then goes into this rank's own rings as they have room (`_sending`), where the
    owner's side takes it. One at a time: send() waits for the one before."""

    def __init__(self, window: RmaWindow, record: _C.RecordFormat):
        self.window, self.world, self.record = window, window.world, record
        self._near = Outbox(window, record, self.world.node_ranks)
        self._inlets = {int(origin): NearRing(window.local.rings[origin], record) for origin in np.flatnonzero(self.world.is_far)}
        self._item = MPI.BYTE.Create_contiguous(record.row_bytes).Commit()
        self._packed = packed_rows(record)
        self._request: MPI.Request | None = None
        self._coming: tuple | None = None  # (message sent, whether to_all, counts, rows): MPI's until the request is done
        self._sending: Sending | None = None

    def send(self, message: Message, to_all: bool, while_waiting) -> int:
        """As Outbox.send. Collective."""
        self.publish()
        while self._sending is not None:
            while_waiting()
        self._post(message, to_all)
        return self._near.send(message, to_all, while_waiting)

    def publish(self):
        """Waits for what all ranks sent with this rank's last message, and puts it into the rings as far as they have room."""
        if self._request is not None:
            self._request.Wait()
        self._take()

    def progress(self):
        """As publish(), without waiting."""
        self.world.progress()
        self._take()

    def close(self):
        """Waits for what is on its way, which nobody will use."""
        if self._request is not None:
            self._request.Wait()
        self._item.Free()

    def _post(self, message: Message, to_all: bool):
        """Sends all other nodes their rows of the message."""
        part = message.route.of_ranks(self.world.is_far)
        counts = np.diff(part.first)
        going = np.empty(len(part.rows), self._packed)
        going["row"], going["value"] = part.rows, message.values[part.order]
        came_counts = swap_counts(self.world, counts)
        came = np.empty(came_counts.sum(), self._packed)
        self._coming = going, message.step, to_all, came_counts, came
        self._request = self.world.comm.Ialltoallv(
            [going.view(np.uint8), counts, self._item], [came.view(np.uint8), came_counts, self._item]
        )

    def _take(self):
        """Puts what has come into the rings, as far as they have room."""
        if self._request is not None and self._request.Test():
            self._request, self._sending = None, Sending(self._inlets, *self._arrived())
        if self._sending is not None and self._sending.proceed():
            self._sending = None

    def _arrived(self) -> tuple[Message, bool]:
        """What came as a message whose route names origins, and whether origins without rows count."""
        (_, step, to_all, counts, came), self._coming = self._coming, None
        route = Route(
            np.arange(len(came)), np.ascontiguousarray(came["row"]), np.concatenate([[0], np.cumsum(counts)])
        )
        return Message(step, route, np.ascontiguousarray(came["value"])), to_all


def packed_rows(record: _C.RecordFormat) -> np.dtype:
    """A row of a record as it travels, record.row_bytes in all."""
    return np.dtype([("row", np.int64), ("value", np.float32, (record.width,))])
