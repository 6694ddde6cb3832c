"""Mailbox: the sending side of the inboxes. The owner's memory has one ring per origin (cpp/owner/ring.h).

A ring of an owner on this node is written in place. A ring on another node is mirrored here: the record is written into
the mirror, its bytes are put at the same position of the ring, and the head is stored after a flush. So an owner that
sees the head sees the record. The flush is delayed until this rank has to wait anyway: the transfer overlaps with
computation. One rank of the other node, this rank's server there (rails.py), is the target for all rings of its node:
one put, one store of heads and one read of tails, however many owners there are.
"""

from __future__ import annotations

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
        self.arrays = _C.RingArrays(memory, self.producer)

    @property
    def tail(self) -> int:
        """Position up to which the owner has applied records, in bytes since the start."""
        return _C.ring_tail(self.memory)

    def is_drained(self) -> bool:
        """Whether the owner has applied all records sent."""
        return self.tail == self.producer.head


class RemoteRing:
    """The producer's end of a ring on another node, of which this rank has a mirror.

    ring_begin     where the ring's bytes begin, after its header, in the memory of its node
    mirror_begin   where its mirror begins in the memory of all mirrors of that node"""

    def __init__(self, ring_begin: int, mirror: np.ndarray, mirror_begin: int, record: _C.RecordFormat):
        self.ring_begin, self.mirror_begin, self.capacity = ring_begin, mirror_begin, len(mirror)
        self.producer = _C.Producer(mirror, record)
        self.arrays = _C.RingArrays(None, self.producer)
        self.num_put = 0  # bytes posted since the start: the head that may be stored once they are flushed

    @property
    def tail(self) -> int:
        """Position up to which the owner has applied records, in bytes since the start, as last read."""
        return self.producer.tail

    def is_drained(self) -> bool:
        """Whether the owner has applied all records sent, as far as the tail last read shows."""
        return self.producer.tail == self.producer.head

    def take_written(self) -> list[tuple[int, int, int]]:
        """The bytes written since the last call, in at most two blocks: (begin among the mirrors, begin in the memory
        of the node, bytes)."""
        offset, num = self.num_put % self.capacity, self.producer.head - self.num_put
        self.num_put += num
        to_end = min(num, self.capacity - offset)
        parts = (offset, to_end), (0, num - to_end)
        return [(self.mirror_begin + at, self.ring_begin + at, nbytes) for at, nbytes in parts if nbytes > 0]


class NodeRings:
    """The producer's ends of the rings of another node's owners, reached by calls to its server (rails.py).

    is_published   whether the heads of all bytes posted by put() are stored, or posted"""

    def __init__(self, window: RmaWindow, server: int, owners: list[int], record: _C.RecordFormat):
        headers = [window.ring_begin(owner, window.world.rank) for owner in owners]
        begins = [header + _C.RING_HEADER_BYTES for header in headers]
        ends = np.cumsum([window.layouts[owner].ring_bytes - _C.RING_HEADER_BYTES for owner in owners]).tolist()
        self.window, self.server, self._mirrors = window, server, np.zeros(ends[-1], np.uint8)
        self.rings = {
            owner: RemoteRing(ring_begin, self._mirrors[begin:end], begin, record)
            for owner, ring_begin, begin, end in zip(owners, begins, [0, *ends], ends)
        }
        self._head_places, self._tail_places = (
            window.counters([header + at for header in headers]) for at in (HEAD, TAIL)
        )
        self._heads, self._tails = np.zeros((2, len(owners)), np.uint64)  # as posted last, and as read last
        self.is_published = True
        self._is_requested = False

    def put(self):
        """Posts the bytes written since the last call."""
        blocks = [block for ring in self.rings.values() for block in ring.take_written()]
        if blocks:
            self.window.put(self.server, self._mirrors, *map(list, zip(*blocks)))
            self.is_published = False

    def publish(self):
        """Posts the stores of the heads. REQUIRES: the puts, and the last stores, are flushed."""
        self._heads[:] = [ring.num_put for ring in self.rings.values()]
        self.window.store_counters(self.server, self._head_places, self._heads)
        self.is_published = True

    def is_drained(self) -> bool:
        """Whether the owners have applied all records sent, as far as the tails last read show."""
        return all(ring.is_drained() for ring in self.rings.values())

    def request_tails(self):
        """Posts a read of the tails, unless one is posted already."""
        if not self._is_requested:
            self.window.load_counters(self.server, self._tail_places, self._tails)
            self._is_requested = True

    def store_tails(self):
        """Stores the tails that were requested, if any. REQUIRES: window.flush() since request_tails()."""
        if self._is_requested:
            for ring, tail in zip(self.rings.values(), self._tails.tolist()):
                ring.producer.set_tail(tail)
            self._is_requested = False


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """One array (n,) int64 of all parts (m,) int64; a copy only if several are not empty."""
    filled = [part for part in parts if len(part)]
    return np.concatenate(filled) if len(filled) > 1 else filled[0] if filled else NO_KEYS


class Mailbox:
    """This rank's rings to other owners.

    rings  by owner, ascending
    held   messages kept for the next collective call; always empty in this class"""

    held: tuple | list = ()

    def __init__(self, window: RmaWindow, record: _C.RecordFormat, reaches_remote: bool = True):
        """reaches_remote: whether it sends to owners on other nodes, by one-sided calls."""
        world = window.world
        self.window, self.record, self._nodes = window, record, []
        if reaches_remote:
            self._nodes = [NodeRings(window, *node, record) for node in zip(window.rails.servers, window.rails.owners)]
        rings: dict[int, LocalRing | RemoteRing] = {
            owner: LocalRing(window.local_ring(owner, world.rank), record)
            for owner in world.node_ranks
            if owner != world.rank
        }
        for node in self._nodes:
            rings |= node.rings
        self.rings = dict(sorted(rings.items()))
        self._ends = [self.rings[rank].arrays if rank in self.rings else None for rank in range(world.size)]
        self._sent: list[tuple[np.ndarray, dict[int, int]]] = []  # keys, and the head of each ring after they were sent

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
        columns = message.values, message.clocks, message.counts, message.steps
        push = _C.PushArrays(message.step, _C.RouteArrays(*message.route.arrays), *columns, to_all)
        sending = _C.Delivery(self._ends, push, self.record)
        if not self._proceed(sending):

            def reason():
                return f"in step {message.step + 1} for {ranks_text(sending.full)} to make room for its gradients"

            with Patience(self.window.world, reason) as patience:
                while not self._proceed(sending):
                    self.publish()
                    while_waiting()
                    patience.check()

    def _proceed(self, sending: _C.Delivery) -> bool:
        """Sends as much as fits. Returns True once all rows and the end of the step are sent."""
        is_sent = sending.proceed()
        if not is_sent:
            full = set(sending.full)
            behind = [node for node in self._nodes if not full.isdisjoint(node.rings)]
            if behind:
                self._read_tails(behind)
                is_sent = sending.proceed()
        for node in self._nodes:
            node.put()
        return is_sent

    def _read_tails(self, nodes: list[NodeRings]):
        self.window.flush()
        self.store_tails()  # of an earlier request, which may have been served long ago
        for node in nodes:
            node.request_tails()
        self.window.flush()
        self.store_tails()

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
        unpublished = [node for node in self._nodes if not node.is_published]
        if unpublished:
            self.window.flush()
        for node in unpublished:
            node.publish()

    def progress(self):
        """Publishes sent records, completes posted operations, which MPI may otherwise delay, and lets MPI progress
        messages of other ranks while this rank waits."""
        self.publish()
        self.window.flush()
        self.window.world.progress()

    def is_drained(self) -> bool:
        """Whether all owners have applied everything sent; reads the tails of owners on other nodes."""
        behind = [node for node in self._nodes if not node.is_drained()]
        if behind:
            self._read_tails(behind)
        return all(ring.is_drained() for ring in self.rings.values())

    def request_tails(self):
        """Posts reads of the tails on other nodes, as far as they may have changed."""
        for node in self._nodes:
            if not node.is_drained():
                node.request_tails()

    def store_tails(self):
        """Stores the tails that were requested. REQUIRES: window.flush() since request_tails()."""
        for node in self._nodes:
            node.store_tails()

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
