"""Two-sided transport of SSP: per step one message in each direction between every pair of ranks on different nodes, in
collective rounds.

    begin     sends every rank of another node the pushes held since the last round, and a request for the rows that a
              batch reads there, each with the clock of the local copy
    advance   applies the pushes received from all ranks, then replies with clocks and the wanted rows (Owner.reply)
    receive   receives the replies

In a round all ranks send before any of them waits: no rank waits for room in rings of another node, or for more than
its message. A reply reflects all pushes that the requester sent before its request. Later pushes are held
(`HoldingMailbox.held`) for the next round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetmpi import _C
from hetmpi.comm.collective import CollectiveShardReader
from hetmpi.comm.mailbox import NO_KEYS, Mailbox, Message
from hetmpi.comm.mpi import MPI
from hetmpi.comm.route import Route
from hetmpi.comm.shards import NodeShardReader
from hetmpi.comm.transport import Endpoint, Pull
from hetmpi.comm.waiting import wait_for
from hetmpi.comm.window import RmaWindow
from hetmpi.in_flight import finish

REQUEST, REPLY = 1, 2  # tags
UNANNOUNCED, ANNOUNCED, FLUSH = range(3)
REASONS = ("reads a batch that was not announced", "announces a batch", "flushes")  # of a round
MAX_IDLE_WRITES = 8  # successive writes without a round


class HoldingMailbox(Mailbox):
    """A Mailbox to the owners on this node, which holds messages for other nodes until the next round."""

    def __init__(self, window: RmaWindow, record: _C.RecordFormat):
        super().__init__(window, record, window.world.node_ranks)
        self.held: list[Message] = []

    def send(self, message: Message, to_all: bool, while_waiting) -> int:
        """As Mailbox.send; the returned bytes include held messages."""
        if np.diff(message.route.first)[self.window.world.is_remote].any():
            self.held.append(message)
        return super().send(message, to_all, while_waiting)

    @property
    def num_held(self) -> int:
        """Upper bound of the number of pending gradients that have not left this node."""
        return sum(len(message.keys) for message in self.held)

    def take_held(self) -> list[Message]:
        """Removes and returns the held messages."""
        held, self.held = self.held, []
        return held


class TwoSided:
    """See hetmpi/comm/transport.py, Transport. Collective: all calls on all ranks in the same order."""

    carries_pushes = is_collective = True

    def __init__(self, endpoint: Endpoint):
        """Collective."""
        self.name: str | None = "alltoall"
        self.reader = NodeShardReader(endpoint.window, endpoint.gather_own)
        self._peeks = CollectiveShardReader(endpoint.window, endpoint.gather_own)
        self.mailbox = HoldingMailbox(endpoint.window, endpoint.record)
        self.owner, self.arrays = endpoint.owner, endpoint.arrays
        self.world, record = endpoint.window.world, endpoint.record
        self._record = record
        self._comm = self.world.comm.Dup()  # separates the messages of several tables
        self._remote = [int(rank) for rank in np.flatnonzero(self.world.is_remote)]
        self._reason = UNANNOUNCED  # of the current round
        self._num_idle = 0  # writes since the last round
        self.is_broken = False  # ranks made different calls: do not wait for replies
        self._sends: list[tuple[MPI.Request, np.ndarray]] = []  # with the buffers that MPI uses until completion

    def begin(self, pull: Pull) -> RoundTicket:
        return RoundTicket(self, pull)

    def peek(self, array: str, route: Route, out: np.ndarray):
        finish(self._peeks.reading(array, route, out))

    def idle(self, bound: int):
        """Makes a round after MAX_IDLE_WRITES writes without one, which bounds the held messages."""
        self._num_idle += 1
        if self._num_idle == MAX_IDLE_WRITES:
            self.flush(bound)

    def flush(self, bound: int):
        """A round without requests, which sends the held messages to their owners. REQUIRES: no round is open."""
        no_route = Route(NO_KEYS, NO_KEYS, np.zeros(self.world.size + 1, np.int64))
        no_clocks, no_rows = np.empty(0, np.int32), np.empty(0, bool)
        RoundTicket(self, Pull(no_route, no_clocks, lambda: no_clocks, lambda: no_rows, bound, FLUSH)).drop()

    def close(self):
        if not self.is_broken:
            sent = [request for request, _ in self._sends]
            wait_for(
                self.world,
                lambda: MPI.Request.Testall(sent),
                "for other ranks to receive its last message about the table",
            )
            self._comm.Free()

    # The steps of a round, called by RoundTicket.

    def send_requests(self, pull: Pull) -> dict[int, OwnerRequest]:
        """Sends each owner the held pushes and its part of the pull. Returns the requests by owner."""
        held, self._reason, self._num_idle = self.mailbox.take_held(), pull.reason, 0
        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        known, requests = pull.known(), {}
        for owner in self._remote:
            rows, order = pull.route.of(owner)
            requests[owner] = OwnerRequest(order, known[order])
            parts = [message.route.of(owner) for message in held]
            columns = joined(held, parts, self._record)
            header = np.array([pull.reason, len(columns[0]), len(rows), pull.bound])
            sent = [column for column in columns if column is not None]
            self._send(owner, REQUEST, [header, *sent, rows, requests[owner].known])
        return requests

    def serve(self):
        """Applies the pushes of all other ranks, then replies to all of them."""
        requests = {rank: self._apply(rank) for rank in self._remote}
        for requester, (rows, known, bound) in requests.items():
            clocks, values = self.owner.reply(rows, known, bound)
            self._send(requester, REPLY, [clocks, *values])

    def _apply(self, requester: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Applies the pushes in the message of one rank. Returns its request: rows (m,) int64, clocks of the
        requester's copies (m,) int32, bound."""
        message = Parts(self._receive(requester, REQUEST))
        reason, num_pushed, num_requested, bound = message.take((4,), np.int64)
        if reason != self._reason:
            self.is_broken = True
            raise RuntimeError(
                f"EmbeddingTable: rank {requester} {REASONS[reason]} while rank {self.world.rank} "
                f"{REASONS[self._reason]}: with table.exchange=alltoall all ranks must read, announce, write and flush "
                "alike"
            )
        self.owner.apply(*self._pushes_in(message, num_pushed))
        return message.take((num_requested,), np.int64), message.take((num_requested,), np.int32), int(bound)

    def _pushes_in(self, message: Parts, num: int) -> tuple:
        """The columns of `num` pushes, as from joined()."""
        record = self._record
        rows = message.take((num,), np.int64)
        clocks, counts = (message.take((num,), np.int32) for _ in range(2))
        steps = message.take((num, 2), np.int32) if record.has_steps else None
        grads = message.take((num, record.dim), np.float32)
        num_squares = int(record.has_squares(counts).sum())
        return rows, clocks, counts, steps, grads, message.take((num_squares, record.square_dim), np.float32)

    def reply_of(self, owner: int, request: OwnerRequest, bound: int) -> tuple[np.ndarray, np.ndarray, list]:
        """The requested clocks (m,) int32; positions (k,) int64 of the received rows; one array (k, width) per array of
        a row."""
        message = Parts(self._receive(owner, REPLY))
        clocks = message.take((len(request.order),), np.int32)
        order = request.order[self.owner.wants(request.known, clocks, bound)]
        widths = [self.reader.shape(array)[0] for array in self.arrays]
        return clocks, order, [message.take((len(order), width), np.float32) for width in widths]

    # A message consists of arrays, each aligned to 8 bytes.

    def _send(self, rank: int, tag: int, arrays: list[np.ndarray]):
        message = np.empty(sum(map(words, arrays)), np.int64)
        begin = 0
        for array in arrays:
            message[begin : begin + words(array)].view(array.dtype)[: array.size] = array.reshape(-1)
            begin += words(array)
        self._sends.append((self._comm.Isend([message, MPI.INT64_T], rank, tag), message))

    def _receive(self, rank: int, tag: int) -> np.ndarray:
        """The next message from `rank`: (n,) int64."""
        status, what = MPI.Status(), f"for rank {rank} to read or write the table as often as it does"
        matched = wait_for(self.world, lambda: self._comm.Improbe(rank, tag, status), what)
        message = np.empty(status.Get_count(MPI.INT64_T), np.int64)
        matched.Recv([message, MPI.INT64_T])
        return message


class RoundTicket:
    """See hetmpi/comm/transport.py, Ticket."""

    def __init__(self, transport: TwoSided, pull: Pull):
        self._transport, self._pull, self.fetched = transport, pull, None
        self._requests, self._is_served = transport.send_requests(pull), False
        self._received: list[tuple[np.ndarray, list[np.ndarray]]] = []  # positions (m,), and the rows received

    def advance(self):
        self._transport.serve()
        self._is_served = True

    def receive(self):
        self.fetched = np.zeros(len(self._pull.versions), bool)
        for owner, request in self._requests.items():
            clocks, order, values = self._transport.reply_of(owner, request, self._pull.bound)
            self._pull.versions[request.order] = clocks
            self.fetched[order] = True
            self._received.append((order, values))

    def place(self, *outs: np.ndarray):
        for order, values in self._received:
            for out, value in zip(outs, values):
                _C.gather(value, np.arange(len(order)), out, order)
        self._received = []

    def drop(self):
        """Completes the round: the other ranks wait for this rank's replies, and their replies must be received."""
        if self._transport.is_broken:
            return
        if not self._is_served:
            self.advance()
        self.receive()


@dataclass
class OwnerRequest:
    """The request to one owner in a round: positions of the keys (m,) int64, clocks of this rank's copies (m,)
    int32."""

    order: np.ndarray
    known: np.ndarray


class Parts:
    """The arrays of a message, in the order they were sent."""

    def __init__(self, message: np.ndarray):
        self.message, self.begin = message, 0

    def take(self, shape: tuple, dtype) -> np.ndarray:
        num = int(np.prod(shape))
        array = self.message[self.begin :].view(dtype)[:num].reshape(shape)
        self.begin += words(array)
        return array


def words(array: np.ndarray) -> int:
    """Number of int64 words that hold the array."""
    return -(-array.nbytes // 8)


def joined(messages: list[Message], parts: list[tuple], record: _C.RecordFormat) -> tuple:
    """The columns, as in a record (cpp/owner/ring.h), of the rows selected by `parts`, which has (rows, positions) for
    each message: rows, clocks, counts, steps or None, grads, squares."""

    def column(name: str, dtype, *shape) -> np.ndarray:
        chosen = [getattr(message, name)[order] for message, (_, order) in zip(messages, parts)]
        return np.concatenate([np.empty((0, *shape), dtype), *chosen])

    rows = np.concatenate([NO_KEYS, *(rows for rows, _ in parts)])
    counts, values = column("counts", np.int32), column("values", np.float32, record.width)
    steps = column("steps", np.int32, 2) if record.has_steps else None
    grads, squares = values[:, : record.dim], values[record.has_squares(counts), record.dim :]
    return rows, column("clocks", np.int32), counts, steps, grads, squares
