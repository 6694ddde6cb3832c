"""Two-sided transport of SSP: one message each way per pair of ranks of different nodes and step, in rounds that all
ranks make.

    begin     to every rank of another node: the pushes held back since the last round, then the rows that a batch reads
              there, each with the clock of its copy here
    advance   applies everybody's pushes, then replies: clocks, and those rows that are wanted (Owner.reply)
    receive   takes the replies

In a round all ranks send before any waits: no rank waits for the rings of another node, or for more than its message. A
reply has all pushes that its asker sent before it asked. Those sent since are held back (`HoldingMailbox.held`) for the
next round.
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

ASK, REPLY = 1, 2  # tags
UNANNOUNCED, ANNOUNCED, FLUSH = range(3)
REASONS = ("reads a batch that was not announced", "announces a batch", "flushes")  # why a round is made
MOST_IDLE = 8  # writes without a round


class HoldingMailbox(Mailbox):
    """A Mailbox to the owners on this node; messages for other nodes are held until the next round."""

    def __init__(self, window: RmaWindow, record: _C.RecordFormat):
        super().__init__(window, record, window.world.node_ranks)
        self.held: list[Message] = []

    def send(self, message: Message, to_all: bool, while_waiting) -> int:
        """As Mailbox.send; all of it counts as sent."""
        if np.diff(message.route.first)[self.window.world.is_remote].any():
            self.held.append(message)
        return super().send(message, to_all, while_waiting)

    @property
    def num_held(self) -> int:
        """Sums that have not left this node, at most."""
        return sum(len(message.keys) for message in self.held)

    def take_held(self) -> list[Message]:
        """What is held, which is held no more."""
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
        self.world, self._sum_dim = endpoint.window.world, endpoint.record.width
        self._comm = self.world.comm.Dup()  # messages of several tables must not be taken for each other's
        self._remote = [int(rank) for rank in np.flatnonzero(self.world.is_remote)]
        self._reason = UNANNOUNCED  # of the round that is open
        self._num_idle = 0  # writes since the last round
        self.is_broken = False  # ranks do not make the same calls: nobody waits for a reply
        self._sends: list[tuple[MPI.Request, np.ndarray]] = []  # and what they send, MPI's until they are done

    def begin(self, pull: Pull) -> RoundTicket:
        return RoundTicket(self, pull)

    def peek(self, array: str, route: Route, out: np.ndarray):
        finish(self._peeks.reading(array, route, out))

    def idle(self, bound: int):
        """What is held back must not grow without end."""
        self._num_idle += 1
        if self._num_idle == MOST_IDLE:
            self.flush(bound)

    def flush(self, bound: int):
        """A round that asks for nothing: what is held comes to its owners. REQUIRES: no round is open."""
        nobody = Route(NO_KEYS, NO_KEYS, np.zeros(self.world.size + 1, np.int64))
        no_clocks, no_rows = np.empty(0, np.int32), np.empty(0, bool)
        RoundTicket(self, Pull(nobody, no_clocks, lambda: no_clocks, lambda: no_rows, bound, FLUSH)).drop()

    def close(self):
        if not self.is_broken:
            sent = [request for request, _ in self._sends]
            wait_for(
                self.world,
                lambda: MPI.Request.Testall(sent),
                "for other ranks to receive its last message about the table",
            )
            self._comm.Free()

    # One round, as a ticket makes it.

    def ask(self, pull: Pull) -> dict[int, Asked]:
        """Sends each owner the pushes held for it and its part of the pull; what each was asked."""
        held, self._reason, self._num_idle = self.mailbox.take_held(), pull.reason, 0
        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        known, asked = pull.known(), {}
        for owner in self._remote:
            rows, order = pull.route.of(owner)
            asked[owner] = Asked(order, known[order])
            parts = [message.route.of(owner) for message in held]
            sums = [  # rows, clocks, counts, values
                np.concatenate([NO_KEYS, *(rows for rows, _ in parts)]),
                *(joined(held, parts, name) for name in ("clocks", "counts")),
                joined(held, parts, "values", self._sum_dim),
            ]
            header = np.array([pull.reason, len(sums[0]), len(rows), pull.bound])
            self._send(owner, ASK, [header, *sums, rows, asked[owner].known])
        return asked

    def serve(self):
        """Applies the pushes of all others, then replies to all."""
        questions = {rank: self._apply(rank) for rank in self._remote}
        for asker, (rows, known, bound) in questions.items():
            clocks, values = self.owner.reply(rows, known, bound)
            self._send(asker, REPLY, [clocks, *values])

    def _apply(self, asker: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Applies the pushes of one message; its questions: rows (m,) int64, clocks of the asker's copies (m,) int32,
        bound."""
        came = Parts(self._receive(asker, ASK))
        reason, num_sums, num_asked, bound = came.take((4,), np.int64)
        if reason != self._reason:
            self.is_broken = True
            raise RuntimeError(
                f"EmbeddingTable: rank {asker} {REASONS[reason]} while rank {self.world.rank} "
                f"{REASONS[self._reason]}: with table.exchange=alltoall all ranks must read, announce, write and flush "
                "alike"
            )
        rows = came.take((num_sums,), np.int64)
        clocks, counts = (came.take((num_sums,), np.int32) for _ in range(2))
        self.owner.apply(rows, came.take((num_sums, self._sum_dim), np.float32), clocks, counts)
        return came.take((num_asked,), np.int64), came.take((num_asked,), np.int32), int(bound)

    def reply_of(self, owner: int, asked: Asked, bound: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """The clocks asked for (m,) int32; positions (k,) int64 of the rows that came; one array (k, width) per array
        of a row."""
        came = Parts(self._receive(owner, REPLY))
        clocks = came.take((len(asked.order),), np.int32)
        order = asked.order[self.owner.wants(asked.known, clocks, bound)]
        return (
            clocks,
            order,
            [came.take((len(order), self.reader.shape(array)[0]), np.float32) for array in self.arrays],
        )

    # Messages: arrays one after the other, each from a multiple of 8 bytes on.

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
        self._asked, self._is_served = transport.ask(pull), False
        self._came: list[tuple[np.ndarray, list[np.ndarray]]] = []  # positions (m,), and the rows that came

    def advance(self):
        self._transport.serve()
        self._is_served = True

    def receive(self):
        self.fetched = np.zeros(len(self._pull.versions), bool)
        for owner, asked in self._asked.items():
            clocks, order, values = self._transport.reply_of(owner, asked, self._pull.bound)
            self._pull.versions[asked.order] = clocks
            self.fetched[order] = True
            self._came.append((order, values))

    def place(self, *outs: np.ndarray):
        for order, values in self._came:
            for out, value in zip(outs, values):
                _C.gather(value, np.arange(len(order)), out, order)
        self._came = []

    def drop(self):
        """Others wait for this rank's replies, and to be rid of theirs."""
        if self._transport.is_broken:
            return
        if not self._is_served:
            self.advance()
        self.receive()


@dataclass
class Asked:
    """What one owner was asked in a round: positions of the keys (m,) int64, clocks of this rank's copies (m,)
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
    """How many int64 hold it."""
    return -(-array.nbytes // 8)


def joined(messages: list[Message], parts: list[tuple], column: str, width: int | None = None) -> np.ndarray:
    """One column of the rows that `parts`, (rows, positions) of each message, choose: (n,) int32, or (n, width)
    float32."""
    nothing = np.empty(0, np.int32) if width is None else np.empty((0, width), np.float32)
    return np.concatenate([nothing, *(getattr(message, column)[order] for message, (_, order) in zip(messages, parts))])
