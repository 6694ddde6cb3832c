"""Two-sided transport of BSP: rows and gradients by MPI_Alltoallv, a collective call of all ranks at every read and
write.

Received gradients are written into the rings in the receiver's own memory, as if the origin had put them there, so the
inbox treats both transports alike. All ranks make the same calls in the same order; a rank without keys passes none. A
call may wait for another rank to make the same call, but never for room in that rank's rings: a rank that waits for
room keeps its own transfers going (progress).
"""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.comm.mailbox import Delivery, LocalRing, Mailbox, Message
from hetmpi.comm.mpi import MPI
from hetmpi.comm.route import Route
from hetmpi.comm.shards import RemoteRows, ShardReader
from hetmpi.comm.transport import Endpoint, Immediate, Pull, Ticket
from hetmpi.comm.waiting import Patience, wait_for
from hetmpi.comm.window import RmaWindow
from hetmpi.comm.world import World
from hetmpi.in_flight import InFlight, finish


class Collective(Immediate):
    """See hetmpi/comm/transport.py, Transport. BSP pulls no rows in advance."""

    carries_pushes, is_collective = False, True

    def __init__(self, endpoint: Endpoint):
        self.name: str | None = "alltoall"
        self.reader = CollectiveShardReader(endpoint.window)
        self.mailbox = CollectiveMailbox(endpoint.window, endpoint.record)

    def begin(self, pull: Pull) -> Ticket:
        raise NotImplementedError("BSP reads when it needs rows")


def swapping_counts(world: World, counts: np.ndarray) -> InFlight[np.ndarray]:
    """All-to-all exchange of one number per rank: counts (size,) int64 to send -> (size,) int64 received.
    Collective."""
    received, counts = np.empty(world.size, np.int64), np.ascontiguousarray(counts, np.int64)
    yield from awaited(world, world.comm.Ialltoall(counts, received), "read or write the table as often as it does")
    return received


def awaited(world: World, request: MPI.Request, what: str) -> InFlight[None]:
    """Waits for the completion of a non-blocking collective call."""
    yield
    wait_for(world, request.Test, f"for all ranks to {what}")


class CollectiveShardReader(ShardReader):
    """A ShardReader that fetches the rows of other nodes by MPI_Alltoallv."""

    is_collective = True

    def reading(self, array: str, route: Route, out: np.ndarray) -> InFlight[None]:
        """As ShardReader.reading. Collective."""
        world, (width, dtype), item = self.window.world, self.shape(array), self.window.items[array][0]
        part = route.of_ranks(world.is_remote)
        counts = np.diff(part.first)
        self.window.sync()
        requested = yield from swapping_counts(world, counts)  # ranks meet: at s = 0 all have applied the last step
        self.window.sync()
        rows = self._buffer("requested", requested.sum(), 1, np.int64)[:, 0]
        request = world.comm.Ialltoallv([part.rows, counts, MPI.INT64_T], [rows, requested, MPI.INT64_T])
        yield from awaited(world, request, "send their requests for rows")
        replies = self._reply(array, rows)
        received = self._buffer(f"received {array}", len(part.rows), width, dtype)
        request = world.comm.Ialltoallv([replies, requested, item], [received, counts, item])
        self.read_local(array, route, out)
        yield from awaited(world, request, "reply to the requests for rows")
        RemoteRows(array, [(part.order, received)]).place(out)

    def _reply(self, array: str, rows: np.ndarray) -> np.ndarray:
        """Copies of the requested rows (m,) of this rank's array: (m, width)."""
        replies = self._buffer(f"replies {array}", len(rows), *self.shape(array))
        out = replies[:, 0] if array == "clock" else replies
        self.gather(array, self.window.world.rank)(getattr(self.window.local, array), rows, out, np.arange(len(rows)))
        return replies

    def _buffer(self, use: str, num: int, width: int, dtype) -> np.ndarray:
        return self.window.buffer(use, self.window.world.rank, int(num), width, dtype)


class CollectiveMailbox:
    """A Mailbox that sends gradients to owners on other nodes by MPI_Ialltoallv.

    A message is first in transfer (`_request`), then it is copied into this rank's own rings as they have room
    (`_delivery`), from which the owner's side reads. At most one message is under way: send() waits for the previous
    one."""

    def __init__(self, window: RmaWindow, record: _C.RecordFormat):
        self.window, self.world, self.record = window, window.world, record
        self._on_node = Mailbox(window, record, self.world.node_ranks)
        self._inlets = {
            int(origin): LocalRing(window.local.rings[origin], record)
            for origin in np.flatnonzero(self.world.is_remote)
        }
        self._item = MPI.BYTE.Create_contiguous(record.row_bytes).Commit()
        self._packed = packed_rows(record)
        self._request: MPI.Request | None = None
        # (message sent, its step, whether to_all, counts, rows): MPI uses these buffers until the request completes
        self._receiving: tuple | None = None
        self._delivery: Delivery | None = None

    def send(self, message: Message, to_all: bool, while_waiting) -> int:
        """As Mailbox.send. Collective."""
        self.publish()
        with Patience(self.world, lambda: f"in step {message.step + 1} to make room in its own rings") as patience:
            while self._delivery is not None:
                while_waiting()
                patience.check()
        self._post(message, to_all)
        return self._on_node.send(message, to_all, while_waiting)

    def publish(self):
        """Waits for the messages that all ranks sent with this rank's last one, and copies them into the rings as far
        as they have room."""
        self._await_arrival()
        self._take()

    def progress(self):
        """As publish(), without waiting."""
        self.world.progress()
        self._take()

    def close(self):
        """Waits for transfers under way; their data is not used."""
        self._await_arrival()
        self._item.Free()

    def _await_arrival(self):
        """Waits for the messages that all ranks sent with this rank's last one."""
        if self._request is not None:
            request = self._request  # drain(), called while waiting, may deliver the message and clear this
            wait_for(self.world, request.Test, "for the gradients of all ranks")

    def _post(self, message: Message, to_all: bool):
        """Sends the owners on other nodes their rows of the message."""
        part = message.route.of_ranks(self.world.is_remote)
        counts = np.diff(part.first)
        sent = np.empty(len(part.rows), self._packed)
        sent["row"], sent["value"] = part.rows, message.values[part.order]
        received_counts = finish(swapping_counts(self.world, counts))
        received = np.empty(received_counts.sum(), self._packed)
        self._receiving = sent, message.step, to_all, received_counts, received
        self._request = self.world.comm.Ialltoallv(
            [sent.view(np.uint8), counts, self._item], [received.view(np.uint8), received_counts, self._item]
        )

    def _take(self):
        """Copies received rows into the rings, as far as they have room."""
        if self._request is not None and self._request.Test():
            self._request, self._delivery = None, Delivery(self._inlets, *self._arrived())
        if self._delivery is not None and self._delivery.proceed():
            self._delivery = None

    def _arrived(self) -> tuple[Message, bool]:
        """The received rows as a message whose route names origins; and whether origins without rows count."""
        (_, step, to_all, counts, received), self._receiving = self._receiving, None
        first = np.concatenate([[0], np.cumsum(counts)])
        route = Route(np.arange(len(received)), np.ascontiguousarray(received["row"]), first)
        return Message(step, route, np.ascontiguousarray(received["value"])), to_all


def packed_rows(record: _C.RecordFormat) -> np.dtype:
    """dtype of one row of a record as sent, record.row_bytes in all."""
    return np.dtype([("row", np.int64), ("value", np.float32, (record.width,))])
