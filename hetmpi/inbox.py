"""Outbox: the origin's side of the inboxes. One ring per (origin, owner) lies in the owner's memory (cpp/ring.h).

A ring of an owner on this node is written in place. A ring elsewhere is mirrored here: the record is written into the
mirror, its bytes are put at the same place of the ring, and after a flush the head is stored: whoever sees the head sees
the record.
"""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.partition import Route
from hetmpi.window import RmaWindow

HEAD, TAIL = 0, 64  # bytes from a ring's start, cpp/ring.h RingHeader


class NearRing:
    """The producer's end of a ring in memory that this rank can address."""

    def __init__(self, memory: np.ndarray, dim: int):
        self.memory = memory
        self.producer = _C.Producer(memory[_C.RING_HEADER_BYTES :], dim)

    def send(self, step: int, rows: np.ndarray, grads: np.ndarray, order: np.ndarray, begin: int) -> int:
        """Sends rows from `begin` on as far as there is room; returns how many, or -1 for no room at all."""
        self.producer.set_tail(_C.ring_tail(self.memory))
        sent = self.producer.write(step, rows, grads, order, begin, True)
        _C.publish_head(self.memory, self.producer.head)
        return sent

    def publish(self):
        """Nothing is left to do: send() stored the head."""


class FarRing:
    """The producer's end of a ring on another node, reached by MPI_Put."""

    def __init__(self, window: RmaWindow, owner: int, origin: int, dim: int):
        layout = window.layouts[owner]
        self.window, self.owner = window, owner
        self.begin = layout.rings + origin * layout.ring_bytes
        self.capacity = layout.ring_bytes - _C.RING_HEADER_BYTES
        self.mirror = np.zeros(self.capacity, np.uint8)
        self.producer = _C.Producer(self.mirror, dim)
        self.published = np.zeros(1, np.uint64)

    def send(self, step: int, rows: np.ndarray, grads: np.ndarray, order: np.ndarray, begin: int) -> int:
        """Posts rows from `begin` on as far as there is room; returns how many, or -1 for no room at all."""
        head = self.producer.head
        sent = self.producer.write(step, rows, grads, order, begin, True)
        if sent < 0:
            self.producer.set_tail(self.window.load_counter(self.owner, self.begin + TAIL))
            sent = self.producer.write(step, rows, grads, order, begin, True)
        if self.producer.head != head:
            offset, nbytes = head % self.capacity, self.producer.head - head
            self.window.put(
                self.owner, self.begin + _C.RING_HEADER_BYTES + offset, self.mirror[offset : offset + nbytes]
            )
        return sent

    def publish(self):
        """Posts the store of the head. REQUIRES: the puts of send() are flushed."""
        if self.producer.head != self.published[0]:
            self.published[0] = self.producer.head
            self.window.store_counter(self.owner, self.begin + HEAD, self.published)


class Outbox:
    """This rank's rings to all other owners."""

    def __init__(self, window: RmaWindow):
        world = window.world
        self.window = window
        self.rings = {owner: self._ring(owner) for owner in range(world.size) if owner != world.rank}
        self.has_far = any(isinstance(ring, FarRing) for ring in self.rings.values())

    def _ring(self, owner: int):
        origin, dim = self.window.world.rank, self.window.layouts[owner].dim
        if owner in self.window.near:
            return NearRing(self.window.near[owner].rings[origin], dim)
        return FarRing(self.window, owner, origin, dim)

    def send(self, step: int, route: Route, grads: np.ndarray, while_waiting) -> int:
        """Sends every owner its part of grads (n, dim) float32, an empty one too, and says "last" to each.

        while_waiting() is called whenever a ring is full: it must drain this rank's own inbox, or ranks that send to each
        other would wait for ever. Returns the bytes of keys and gradients sent."""
        left = {owner: 0 for owner in self.rings}  # owner -> first routed row not yet sent
        while left:
            for owner in list(left):
                if self._send_some(owner, step, route, grads, left):
                    del left[owner]
            self._publish()
            if left:
                while_waiting()
        return route.num_elsewhere(self.window.world.rank) * (8 + 4 * grads.shape[1])

    def _send_some(self, owner: int, step: int, route: Route, grads: np.ndarray, left: dict) -> bool:
        """Sends `owner` what its ring takes; True when all of it and "last" are sent."""
        rows, order = route.of(owner)
        while True:
            sent = self.rings[owner].send(step, rows, grads, order, left[owner])
            if sent < 0:
                return False
            left[owner] += sent
            if left[owner] == len(rows) and (sent > 0 or len(rows) == 0):
                return True

    def _publish(self):
        if not self.has_far:
            return
        self.window.flush()
        for ring in self.rings.values():
            ring.publish()
        self.window.flush()
