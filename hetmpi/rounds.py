"""Rounds: sums and questions to the owners on other nodes, one message each way per pair of ranks and step (s >= 1).

    ask      to every rank of another node: the sums this rank has handed out since the last round, then the rows that a
             batch reads there, each with the clock of its line here
    serve    takes in everybody's sums, then answers: the clocks, and those rows that are missing or too old there
    answer   takes the answers

All ranks make the same rounds, and in a round everybody sends before anybody waits: no rank waits for the rings of another node,
or for more than its message. An answer has all sums that the asker had handed out when it asked; those it has handed out since
(`HoldingOutbox.held`) are added to a row that comes, and leave with its clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetmpi import _C
from hetmpi.asking import NO_SLOTS
from hetmpi.inbox import NO_KEYS, Message, Outbox
from hetmpi.metrics import Counters
from hetmpi.owners import Owners
from hetmpi.partition import Route
from hetmpi.reading import Reading
from hetmpi.window import RmaWindow
from hetmpi.world import MPI, wait_for

ASK, ANSWER = 1, 2  # tags
KINDS = ("reads a batch that was not announced", "announces a batch", "flushes")  # why a round is made
MOST_IDLE = 8  # writes without a round


class HoldingOutbox(Outbox):
    """Outbox to the owners on this node; what others are sent is held until the next round."""

    def __init__(self, window: RmaWindow, record: _C.RecordFormat):
        super().__init__(window, record, window.world.node_ranks)
        self.held: list[Message] = []

    def send(self, message: Message, to_all: bool, while_waiting) -> int:
        """As Outbox.send; all of it counts as sent."""
        if np.diff(message.route.first)[self.window.world.is_far].any():
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


class RoundAsking:
    """The calls of hetmpi/asking.py by rounds. Collective: all calls on all ranks in the same order."""

    takes_sums = True

    def __init__(
        self, cache, owners: Owners, outbox: HoldingOutbox, counters: Counters, arrays: tuple[str, ...],
        engine: _C.Engine, rule: _C.RowOptimizer, anticipate: float,
    ):  # fmt: skip
        """cache: the table's (hetmpi/cache.py). arrays: what a line is made of, weight or weight and state. Collective."""
        self._cache, self._owners, self._outbox, self._counters = cache, owners, outbox, counters
        self._arrays, self._engine, self._rule, self._anticipate = arrays, engine, rule, anticipate
        self.world, self._local = owners.window.world, owners.window.local
        self._comm = self.world.comm.Dup()  # messages of several tables must not be taken for each other's
        self._far = [int(rank) for rank in np.flatnonzero(self.world.is_far)]
        self._asks: dict[int, Ask] = {}  # by owner, of the round that is open
        self._came: list[tuple[np.ndarray, list[np.ndarray]]] = []  # positions (m,) and rows, and states, of an answer
        self._kind = 0  # of the round that is open, of KINDS
        self._num_idle = 0  # writes since the last round
        self._is_broken = False  # ranks do not make the same calls: nobody waits for an answer
        self._sends: list[tuple[MPI.Request, np.ndarray]] = []  # and what they send, MPI's until they are done

    def beside(self, reading: Reading, last: Reading, bound: int) -> np.ndarray:
        """Nothing need be asked for along with a batch."""
        return NO_KEYS

    def ask(self, reading: Reading, last: Reading | None, bound: int):
        """Sends questions, and the sums handed out so far. last: the batch that is written in between, if any.
        REQUIRES: reading.slots; what the cache has handed out is sent."""
        asked = reading.is_far
        if bound == _C.UNBOUNDED:
            asked = asked & (reading.slots < 0)
        reading.asked = asked
        self._counters.clock_bytes += 4 * int(asked.sum())
        known = self._cache.clocks_within(reading.slots, last is not None, bound)
        self._begin(0 if last is None else 1, reading.route.where(asked), known, bound)

    def idle(self, bound: int):
        """A write before which no batch was asked for: what is held must not grow without end."""
        self._num_idle += 1
        if self._num_idle == MOST_IDLE:
            self.flush(bound)

    def order(self, reading: Reading, bound: int) -> np.ndarray:
        """Answers what the others ask. No line need wait for its row before its sum may go: (0,) int64."""
        self._serve()
        return NO_SLOTS

    def answer(self, reading: Reading):
        """Takes the answers: clocks, and which rows come with them."""
        reading.posted = np.zeros(len(reading.array), bool)
        self._came = []
        for owner in self._far:
            clocks, order, values = self._receive_answer(owner)
            reading.clocks[self._asks[owner].order] = clocks
            reading.posted[order] = True
            self._came.append((order, values))

    def judge(self, reading: Reading, is_stale: np.ndarray):
        """Of lines of other nodes holds what their owners say: is_stale (n,) bool. A line that was written since, in another
        batch than the one read last, may so be read after one own update more than the bound has."""
        is_stale[reading.is_far] = (reading.posted & (reading.slots >= 0))[reading.is_far]

    def place(self, reading: Reading, rows: np.ndarray, states: np.ndarray):
        """Puts the rows that came into rows (n, dim), their states into states (n, state_dim), as they will be when the
        owners have the sums that are still held here."""
        for order, values in self._came:
            for out, value in zip((rows, states), values):
                _C.gather(value, np.arange(len(order)), out, order)
        self._came = []
        for message in self._outbox.held:  # none without a cache, where no state comes along
            positions, chosen = places_of(message.keys, reading, reading.posted)
            if len(chosen):
                self._cache.preview(
                    positions, rows, states, reading.clocks, message.values[chosen], message.counts[chosen], self._anticipate
                )
                message.clocks[chosen] = reading.clocks[positions]  # they leave as sums of the renewed row

    def forget(self, reading: Reading, bound: int):
        """Makes nothing of what was asked, and of the answers that others wait to be rid of."""
        if reading.asked is not None and not self._is_broken:
            if not reading.is_ordered:
                self._serve()
            self._drop_answers()
        reading.only_batch()

    def flush(self, bound: int):
        """A round without questions: what is held comes to its owners. REQUIRES: no round is open."""
        nobody = Route(NO_KEYS, NO_KEYS, np.zeros(self.world.size + 1, np.int64))
        self._begin(2, nobody, np.empty(0, np.int32), bound)
        self._serve()
        self._drop_answers()

    def close(self):
        """Ends what is on its way."""
        if not self._is_broken:
            MPI.Request.Waitall([request for request, _ in self._sends])
            self._comm.Free()

    # One round.

    def _begin(self, kind: int, route: Route, known: np.ndarray, bound: int):
        """Sends each owner the sums held for it and the questions of `route`; known (n,) int32: what is said of each key."""
        held, self._kind, self._num_idle = self._outbox.take_held(), kind, 0
        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        for owner in self._far:
            rows, order = route.of(owner)
            self._asks[owner] = Ask(order, known[order], bound)
            parts = [message.route.of(owner) for message in held]
            sums = [  # rows, clocks, counts, values
                np.concatenate([NO_KEYS, *(rows for rows, _ in parts)]),
                *(joined(held, parts, name) for name in ("clocks", "counts")),
                joined(held, parts, "values", self._rule.sum_dim),
            ]
            header = np.array([kind, len(sums[0]), len(rows), bound])
            self._send(owner, ASK, [header, *sums, rows, self._asks[owner].known])

    def _serve(self):
        """Takes in the sums that all others sent, then answers all."""
        questions = {owner: self._take_in(owner) for owner in self._far}
        for asker, (rows, known, bound) in questions.items():
            clocks = np.empty(len(rows), np.int32)
            _C.gather_clocks(self._local.clock, rows, clocks, np.arange(len(rows)))  # before the rows, which may be newer
            wanted = rows[needs_row(known, clocks, bound)]
            values = [np.empty((len(wanted), self._owners.shape(array)[0]), np.float32) for array in self._arrays]
            for array, value in zip(self._arrays, values):
                self._engine.gather(getattr(self._local, array), wanted, value, np.arange(len(wanted)))
            self._send(asker, ANSWER, [clocks, *values])

    def _take_in(self, asker: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Applies the sums of one message; its questions: rows (m,) int64, clocks said (m,) int32, staleness."""
        came = Parts(self._receive(asker, ASK))
        kind, num_sums, num_asked, bound = came.take((4,), np.int64)
        if kind != self._kind:
            self._is_broken = True
            raise RuntimeError(
                f"EmbeddingTable: rank {asker} {KINDS[kind]} while rank {self.world.rank} {KINDS[self._kind]}: with "
                "table.exchange=alltoall all ranks must read, announce, write and flush alike"
            )
        rows = came.take((num_sums,), np.int64)
        clocks, counts = (came.take((num_sums,), np.int32) for _ in range(2))
        sums = came.take((num_sums, self._rule.sum_dim), np.float32)
        self._engine.apply(rows, sums, np.arange(num_sums), clocks, counts)
        return came.take((num_asked,), np.int64), came.take((num_asked,), np.int32), int(bound)

    def _receive_answer(self, owner: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """The clocks asked for (m,) int32; positions (k,) int64 of the rows that came with them; those rows, and states."""
        asked = self._asks[owner]
        came = Parts(self._receive(owner, ANSWER))
        clocks = came.take((len(asked.order),), np.int32)
        order = asked.order[needs_row(asked.known, clocks, asked.bound)]
        self._counters.row_bytes += self._owners.row_bytes(self._arrays) * len(order)
        return clocks, order, [came.take((len(order), self._owners.shape(array)[0]), np.float32) for array in self._arrays]

    def _drop_answers(self):
        """Receives what nobody will use."""
        for owner in self._far:
            self._receive_answer(owner)

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


@dataclass
class Ask:
    """What one owner was asked in a round: positions of the keys (m,) int64, what was said of each (m,) int32."""

    order: np.ndarray
    known: np.ndarray
    bound: int


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
    """One column of the rows that `parts`, (rows, positions) of each message, choose: (n,) int32, or (n, width) float32."""
    nothing = np.empty(0, np.int32) if width is None else np.empty((0, width), np.float32)
    return np.concatenate([nothing, *(getattr(message, column)[order] for message, (_, order) in zip(messages, parts))])


def needs_row(known: np.ndarray, clocks: np.ndarray, bound: int) -> np.ndarray:
    """Which of the rows asked for are to be sent: (n,) bool. known (n,) int32: the askers' lines, clocks (n,): the owner's."""
    if bound == _C.UNBOUNDED:
        return known == _C.NO_LINE
    return (known == _C.NO_LINE) | (clocks > known.astype(np.int64) + bound)


def places_of(keys: np.ndarray, reading: Reading, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where keys (m,) are among the chosen (n,) bool keys of a batch: positions in it (k,) int64, and which keys (k,)."""
    here = np.flatnonzero(chosen)
    which = np.flatnonzero(_C.contained(keys, reading.array[here]))
    by_key = here[np.argsort(reading.array[here])]
    return by_key[np.searchsorted(reading.array[by_key], keys[which])], which
