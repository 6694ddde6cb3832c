"""Mailbox: the sending side of the inboxes. The owner's memory has one ring per origin (cpp/owner/ring.h).

A ring of an owner on this node is written in place. A ring on another node is mirrored here: the record is written into
the mirror, its bytes are put at the same position of the ring, and the head is stored after a flush. So an owner that
sees the head sees the record. The flush is delayed until this rank has to wait anyway: the transfer overlaps with
computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hetmpi import _C
from hetmpi.comm.route import Route
from hetmpi.comm.waiting import Patience, ranks_text
from hetmpi.comm.window import RmaWindow
from hetmpi.in_flight import InFlight

NO_KEYS = np.empty(0, np.int64)
HEAD, TAIL = 0, 64  # bytes from a ring's start, cpp/owner/ring.h RingHeader


@dataclass
class Message:
    """The gradients that one rank sends to the owners in one step: for each key of `route` a row of `values`; in
    SSP also its clock, the number of iterations summed, their first and last step unless the rule is plain SGD, and
    the key."""

    step: int
    route: Route
    values: np.ndarray  # (n, width) float32
    clocks: np.ndarray | None = None  # (n,) int32
    counts: np.ndarray | None = None  # (n,) int32
    steps: np.ndarray | None = None  # (n, 2) int32
    keys: np.ndarray | None = None  # (n,) int64


class LocalRing:
    """The producer's end of a ring in memory that this rank can address."""

    def __init__(self, memory: np.ndarray, record: _C.RecordFormat):
        self.memory = memory
        self.producer = _C.Producer(memory[_C.RING_HEADER_BYTES :], record)

    def send(self, message: Message, owner: int, begin: int) -> int:
        """Sends rows from `begin` on as far as there is room. Returns the number of rows sent, -1 if no record fits."""
        self.producer.set_tail(_C.ring_tail(self.memory))
        sent = write(self.producer, message, owner, begin)
        _C.publish_head(self.memory, self.producer.head)
        return sent

    def publish(self):
        """No effect: send() has stored the head."""

    @property
    def tail(self) -> int:
        """Position up to which the owner has applied records, in bytes since the start."""
        return _C.ring_tail(self.memory)

    def is_drained(self) -> bool:
        """Whether the owner has applied all records sent."""
        return self.tail == self.producer.head


class RemoteRing:
    """The producer's end of a ring on another node, reached by MPI_Put."""

    def __init__(self, window: RmaWindow, owner: int, origin: int, record: _C.RecordFormat):
        layout = window.layouts[owner]
        self.window, self.owner = window, owner
        self.begin = layout.rings + layout.ring(origin) * layout.ring_bytes
        self.capacity = layout.ring_bytes - _C.RING_HEADER_BYTES
        self.mirror = np.zeros(self.capacity, np.uint8)
        self.producer = _C.Producer(self.mirror, record)
        self.published = np.zeros(1, np.uint64)

    @property
    def tail(self) -> int:
        """Position up to which the owner has applied records, in bytes since the start, as last read."""
        return self.producer.tail

    @property
    def tail_place(self) -> tuple[int, int]:
        """(rank, byte) of the tail in the owner's memory, for window.load_counters."""
        return self.owner, self.begin + TAIL

    def send(self, message: Message, owner: int, begin: int) -> int:
        """Posts rows from `begin` on as far as there is room. Returns the number of rows posted, -1 if no record
        fits."""
        head = self.producer.head
        sent = write(self.producer, message, owner, begin)
        if sent < 0:
            tails = self.window.load_counters([self.tail_place])
            self.window.flush()
            self.producer.set_tail(int(tails[0]))
            sent = write(self.producer, message, owner, begin)
        if self.producer.head != head:
            offset, nbytes = head % self.capacity, self.producer.head - head
            self.window.put(
                self.owner, self.begin + _C.RING_HEADER_BYTES + offset, self.mirror[offset : offset + nbytes]
            )
        return sent

    def publish(self):
        """Posts the store of the head. REQUIRES: the puts of send(), and the last store, are flushed."""
        if self.producer.head != self.published[0]:
            self.published[0] = self.producer.head
            self.window.store_counter(self.owner, self.begin + HEAD, self.published)

    def is_drained(self) -> bool:
        """Whether the owner has applied all records sent, as far as the tail last read shows."""
        return self.producer.tail == self.producer.head


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """One array (n,) int64 of all parts (m,) int64; a copy only if several are not empty."""
    filled = [part for part in parts if len(part)]
    return np.concatenate(filled) if len(filled) > 1 else filled[0] if filled else NO_KEYS


def write(producer: _C.Producer, message: Message, owner: int, begin: int) -> int:
    """Writes one record of the message's rows for `owner`, from `begin` on."""
    rows, order = message.route.of(owner)
    columns = message.clocks, message.counts, message.steps
    return producer.write(message.step, rows, message.values, order, *columns, begin, True)


class Delivery:
    """A message that is being written into rings, as far as they have room."""

    def __init__(self, rings: dict, message: Message, to_all: bool):
        """rings: by the ranks that message.route names. to_all: send an empty record to ranks without rows, which marks
        the step as written."""
        self.rings, self.message = rings, message
        ranks = rings if to_all else [rank for rank in message.route.owners if rank in rings]
        self._left = {rank: 0 for rank in ranks}  # rank -> its first row that is not yet sent

    def proceed(self) -> bool:
        """Sends as much as fits. Returns True once all rows and the end of the step are sent."""
        for rank in list(self._left):
            num_rows, ring = len(self.message.route.of(rank)[0]), self.rings[rank]
            while (sent := ring.send(self.message, rank, self._left[rank])) >= 0:
                self._left[rank] += sent
                if self._left[rank] == num_rows and (sent > 0 or num_rows == 0):
                    del self._left[rank]
                    break
        return not self._left

    def full(self) -> list[int]:
        """Ranks whose rings lack room for the remaining rows."""
        return list(self._left)


class Mailbox:
    """This rank's rings to other owners.

    held   messages kept for the next collective call; always empty in this class"""

    held: tuple | list = ()

    def __init__(self, window: RmaWindow, record: _C.RecordFormat, owners: Iterable[int] | None = None):
        """owners: ranks to reach, default all other ranks."""
        world = window.world
        self.window, self.record = window, record
        others = range(world.size) if owners is None else owners
        self.rings = {owner: self._ring(owner) for owner in others if owner != world.rank}
        self.remote = [ring for ring in self.rings.values() if isinstance(ring, RemoteRing)]
        self._requested: list[RemoteRing] = []  # rings whose tails are being read into _tails
        self._tails = np.empty(0, np.uint64)
        self._sent: list[tuple[np.ndarray, dict[int, int]]] = []  # keys, and the head of each ring after they were sent

    def _ring(self, owner: int):
        origin = self.window.world.rank
        if owner in self.window.on_node:
            return LocalRing(self.window.local_ring(owner, origin), self.record)
        return RemoteRing(self.window, owner, origin, self.record)

    def send(self, message: Message, to_all: bool, while_waiting) -> int:
        """Sends every owner its rows; with `to_all` also an empty record to owners without rows, which marks the step
        as written. Owners on other nodes see the records after publish().

        while_waiting() is called repeatedly while a ring is full: it must drain this rank's own inbox and call
        progress(), or ranks that send to each other would deadlock. Returns the number of bytes sent."""
        if self.rings:
            self._deliver(message, to_all, while_waiting)
            self._note(message)
        return self._bytes_sent(message)

    def _deliver(self, message: Message, to_all: bool, while_waiting):
        sending = Delivery(self.rings, message, to_all)
        if not sending.proceed():

            def reason():
                return f"in step {message.step + 1} for {ranks_text(sending.full())} to make room for its gradients"

            with Patience(self.window.world, reason) as patience:
                while not sending.proceed():
                    self.publish()
                    while_waiting()
                    patience.check()

    def sending(self, message: Message, to_all: bool, while_waiting) -> InFlight[int]:
        """As send()."""
        yield from ()
        return self.send(message, to_all, while_waiting)

    def _bytes_sent(self, message: Message) -> int:
        """Bytes of the message's rows for other ranks, as in records."""
        route, rank = message.route, self.window.world.rank
        parts = route.order[: route.first[rank]], route.order[route.first[rank + 1] :]
        return sum(self.record.num_bytes(part, message.counts) for part in parts)

    def _drop_applied(self):
        self._sent = [
            (keys, heads) for keys, heads in self._sent if any(self.rings[r].tail < head for r, head in heads.items())
        ]

    def publish(self):
        """Posts the heads of remote rings, which make sent records visible to their owners. progress(), or any later
        flush of the window, completes the posts."""
        if any(ring.producer.head != ring.published[0] for ring in self.remote):
            self.window.flush()
            for ring in self.remote:
                ring.publish()

    def progress(self):
        """Publishes sent records, completes posted operations, which MPI may otherwise delay, and lets MPI progress
        messages of other ranks while this rank waits."""
        self.publish()
        self.window.flush()
        self.window.world.progress()

    def is_drained(self) -> bool:
        """Whether all owners have applied everything sent; reads the tails of owners on other nodes."""
        self.request_tails()
        if self._requested:
            self.window.flush()
            self.store_tails()
        return all(ring.is_drained() for ring in self.rings.values())

    def request_tails(self):
        """Posts reads of the tails on other nodes, unless such reads are already posted."""
        if self._requested:
            return
        self._requested = [ring for ring in self.remote if not ring.is_drained()]
        self._tails = self.window.load_counters([ring.tail_place for ring in self._requested])

    def store_tails(self):
        """Stores the tails that were read. REQUIRES: window.flush() since request_tails()."""
        for ring, tail in zip(self._requested, self._tails):
            ring.producer.set_tail(max(ring.tail, int(tail)))
        self._requested = []

    def _note(self, message: Message):
        """Records the keys just sent, if the message has them, and the heads of their rings, for in_transit()."""
        if message.keys is None:
            return
        owners = [owner for owner in message.route.owners if owner in self.rings]
        if owners:
            self._drop_applied()
            order = joined([message.route.of(owner)[1] for owner in owners])
            self._sent.append((message.keys[order], {owner: self.rings[owner].producer.head for owner in owners}))

    def in_transit(self) -> np.ndarray:
        """Keys of sent messages, if they carry keys, that owners may not have applied yet: (m,) int64."""
        self._drop_applied()
        return joined([keys for keys, _ in self._sent])

    def behind(self) -> list[int]:
        """Owners that have not applied everything sent, as far as this rank knows."""
        return [owner for owner, ring in self.rings.items() if not ring.is_drained()]

    def close(self):
        """No effect: freeing the window completes posted operations."""
