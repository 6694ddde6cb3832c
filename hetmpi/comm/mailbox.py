"""Mailbox: the origin's side of the inboxes. The owner's memory has one ring per origin (cpp/owner/ring.h).

A ring of an owner on this node is written in place. A ring elsewhere is mirrored here: the record is written into the
mirror, its bytes are put at the same place of the ring, and after a flush the head is stored: whoever sees the head
sees the record. The flush comes late, when this rank has to wait anyhow: the bytes travel while it computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hetmpi import _C
from hetmpi.comm.route import Route
from hetmpi.comm.waiting import Patience, ranks_text
from hetmpi.comm.window import RmaWindow

NO_KEYS = np.empty(0, np.int64)
HEAD, TAIL = 0, 64  # bytes from a ring's start, cpp/owner/ring.h RingHeader


@dataclass
class Message:
    """What one rank sends the owners in one step: for each key of `route` a row of `values`, and at staleness s >= 1
    its clock, how many iterations it sums, and the key."""

    step: int
    route: Route
    values: np.ndarray  # (n, width) float32
    clocks: np.ndarray | None = None  # (n,) int32
    counts: np.ndarray | None = None  # (n,) int32
    keys: np.ndarray | None = None  # (n,) int64


class LocalRing:
    """The producer's end of a ring in memory that this rank can address."""

    def __init__(self, memory: np.ndarray, record: _C.RecordFormat):
        self.memory = memory
        self.producer = _C.Producer(memory[_C.RING_HEADER_BYTES :], record)

    def send(self, message: Message, owner: int, begin: int) -> int:
        """Sends rows from `begin` on as far as there is room; returns how many, or -1 for no room at all."""
        self.producer.set_tail(_C.ring_tail(self.memory))
        sent = write(self.producer, message, owner, begin)
        _C.publish_head(self.memory, self.producer.head)
        return sent

    def publish(self):
        """Nothing is left to do: send() stored the head."""

    @property
    def tail(self) -> int:
        """How much the owner has applied, in bytes ever sent."""
        return _C.ring_tail(self.memory)

    def is_drained(self) -> bool:
        """Whether the owner has applied everything sent."""
        return self.tail == self.producer.head


class RemoteRing:
    """The producer's end of a ring on another node, reached by MPI_Put."""

    def __init__(self, window: RmaWindow, owner: int, origin: int, record: _C.RecordFormat):
        layout = window.layouts[owner]
        self.window, self.owner = window, owner
        self.begin = layout.rings + origin * layout.ring_bytes
        self.capacity = layout.ring_bytes - _C.RING_HEADER_BYTES
        self.mirror = np.zeros(self.capacity, np.uint8)
        self.producer = _C.Producer(self.mirror, record)
        self.published = np.zeros(1, np.uint64)

    @property
    def tail(self) -> int:
        """How much the owner has applied, in bytes ever sent, as far as this rank was told."""
        return self.producer.tail

    @property
    def tail_place(self) -> tuple[int, int]:
        """Where the owner keeps the tail, for window.load_counters."""
        return self.owner, self.begin + TAIL

    def send(self, message: Message, owner: int, begin: int) -> int:
        """Posts rows from `begin` on as far as there is room; returns how many, or -1 for no room at all."""
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
        """Whether the owner has applied everything sent, as far as this rank was told."""
        return self.producer.tail == self.producer.head


def write(producer: _C.Producer, message: Message, owner: int, begin: int) -> int:
    """Writes one record of the message's rows for `owner`, from `begin` on."""
    rows, order = message.route.of(owner)
    return producer.write(message.step, rows, message.values, order, message.clocks, message.counts, begin, True)


class Delivery:
    """A message on its way into rings, as far as they have room."""

    def __init__(self, rings: dict, message: Message, to_all: bool):
        """rings: by the rank that message.route names. to_all: a rank without rows gets an empty record, which says
        that the step is written."""
        self.rings, self.message = rings, message
        ranks = rings if to_all else [int(rank) for rank in message.route.owners() if rank in rings]
        self._left = {rank: 0 for rank in ranks}  # rank -> its first row not yet sent

    def proceed(self) -> bool:
        """Sends what fits now; True when all of it and "last" are sent."""
        for rank in list(self._left):
            num_rows, ring = len(self.message.route.of(rank)[0]), self.rings[rank]
            while (sent := ring.send(self.message, rank, self._left[rank])) >= 0:
                self._left[rank] += sent
                if self._left[rank] == num_rows and (sent > 0 or num_rows == 0):
                    del self._left[rank]
                    break
        return not self._left

    def full(self) -> list[int]:
        """Ranks whose rings have no room for the rest."""
        return list(self._left)


class Mailbox:
    """This rank's rings to other owners.

    held   messages kept back for a later call of all ranks; here none"""

    held: tuple | list = ()

    def __init__(self, window: RmaWindow, record: _C.RecordFormat, owners: Iterable[int] | None = None):
        """owners: ranks to reach, default all others."""
        world = window.world
        self.window, self.record = window, record
        others = range(world.size) if owners is None else owners
        self.rings = {owner: self._ring(owner) for owner in others if owner != world.rank}
        self.remote = [ring for ring in self.rings.values() if isinstance(ring, RemoteRing)]
        self._asked: list[RemoteRing] = []  # whose tails are on their way into _tails
        self._tails = np.empty(0, np.uint64)
        self._sent: list[tuple[np.ndarray, dict[int, int]]] = []  # keys, and the head of each ring they went into

    def _ring(self, owner: int):
        origin = self.window.world.rank
        if owner in self.window.on_node:
            return LocalRing(self.window.on_node[owner].rings[origin], self.record)
        return RemoteRing(self.window, owner, origin, self.record)

    def send(self, message: Message, to_all: bool, while_waiting) -> int:
        """Sends every owner its part; with `to_all` an empty one too, so that each learns that the step is written.
        Owners elsewhere see it after publish().

        while_waiting() is called whenever a ring is full: it must drain this rank's own inbox and call progress(), or
        ranks that send to each other would wait for ever. Returns the bytes sent."""
        sending = Delivery(self.rings, message, to_all)
        if not sending.proceed():

            def reason():
                return f"in step {message.step + 1} for {ranks_text(sending.full())} to make room for its gradients"

            with Patience(self.window.world, reason) as patience:
                while not sending.proceed():
                    self.publish()
                    while_waiting()
                    patience.check()
        if message.keys is not None:
            self._note(message)
        return message.route.num_elsewhere(self.window.world.rank) * self.record.row_bytes

    def _drop_applied(self):
        self._sent = [
            (keys, heads) for keys, heads in self._sent if any(self.rings[r].tail < head for r, head in heads.items())
        ]

    def publish(self):
        """Posts the heads of far rings, by which owners elsewhere see what was sent; progress(), or any later flush of
        the window, completes that."""
        if any(ring.producer.head != ring.published[0] for ring in self.remote):
            self.window.flush()
            for ring in self.remote:
                ring.publish()

    def progress(self):
        """Shows owners elsewhere what was sent, completes what is posted, as MPI may hold it back until then, and lets
        what others sent move along while this rank waits."""
        self.publish()
        self.window.flush()
        self.window.world.progress()

    def is_drained(self) -> bool:
        """Whether all owners have applied everything sent; asks those elsewhere."""
        self.ask_tails()
        if self._asked:
            self.window.flush()
            self.take_tails()
        return all(ring.is_drained() for ring in self.rings.values())

    def ask_tails(self):
        """Starts asking owners elsewhere how much they have applied, unless they are asked already."""
        if self._asked:
            return
        self._asked = [ring for ring in self.remote if not ring.is_drained()]
        self._tails = self.window.load_counters([ring.tail_place for ring in self._asked])

    def take_tails(self):
        """Takes note of their answers. REQUIRES: window.flush() since ask_tails()."""
        for ring, tail in zip(self._asked, self._tails):
            ring.producer.set_tail(max(ring.tail, int(tail)))
        self._asked = []

    def _note(self, message: Message):
        """Remembers what was just sent into rings."""
        owners = [int(owner) for owner in message.route.owners() if owner in self.rings]
        if owners:
            self._drop_applied()
            order = np.concatenate([message.route.of(owner)[1] for owner in owners])
            self._sent.append((message.keys[order], {owner: self.rings[owner].producer.head for owner in owners}))

    def in_transit(self) -> np.ndarray:
        """Keys of messages, where they tell them, that owners may not have applied yet: (m,) int64."""
        self._drop_applied()
        return np.concatenate([keys for keys, _ in self._sent]) if self._sent else NO_KEYS

    def behind(self) -> list[int]:
        """Owners that have not applied everything sent, as far as is known here."""
        return [owner for owner, ring in self.rings.items() if not ring.is_drained()]

    def close(self):
        """Nothing is left to do: freeing the window completes what was posted."""
