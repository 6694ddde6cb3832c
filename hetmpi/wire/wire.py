"""Wire: the protocol for messages between this rank and its partners on other nodes (rails.py).

A message is an array of words of 8 bytes, whose content only its sender and its receiver know. messages.py and
windows.py are the wires of table.exchange, tests/support/toy_wire.py is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np

from hetmpi import _C
from hetmpi.wire.rails import Rails
from hetmpi.world.world import World


@dataclass
class Pipes:
    """The pipes that a wire has to each partner: a pipe carries messages one way, in order.

    to_servers, to_clients  tags of the pipes from this rank to each of its servers, and to each of its clients; all
                            ranks have pipes with these tags, so those to this rank come from its clients and servers
    length_of(begin)        words of the message that begins with these words (n,) int64; None if they are too few to
                            tell
    server                  answers what clients send, of a wire with a thread that calls it"""

    world: World
    rails: Rails
    to_servers: tuple[int, ...]
    to_clients: tuple[int, ...]
    length_of: Callable[[np.ndarray], int | None]
    server: _C.Server | None = None

    @property
    def outgoing(self) -> list[tuple[int, int]]:
        """(partner, tag) of each pipe from this rank."""
        return [*product(self.rails.servers, self.to_servers), *product(self.rails.clients, self.to_clients)]

    @property
    def incoming(self) -> list[tuple[int, int]]:
        """(partner, tag) of each pipe to this rank."""
        return [*product(self.rails.clients, self.to_servers), *product(self.rails.servers, self.to_clients)]


class Wire(Protocol):
    """See above. The constructor takes Pipes, and is collective.

    has_thread  whether a thread of the wire receives what clients send and runs the server, so that this rank does not;
                False for a wire of your own
    is_idle     whether everything sent has reached its receivers' memory"""

    has_thread: bool
    is_idle: bool

    def send(self, tag: int, messages: Mapping[int, np.ndarray]) -> None:
        """Sends each partner its message (n,) int64, which must not be changed any more. Does not wait for the
        receivers: a part for which one has no room leaves with later calls of `publish` or `arrived`."""

    def expect(self, tag: int, partners: Sequence[int]) -> None:
        """Prepares for the next message of each partner, so that it can arrive while this rank computes."""

    def arrived(self, tag: int, partners: Sequence[int]) -> dict[int, np.ndarray]:
        """The next message of each of these partners from whom it is here."""

    def publish(self) -> bool:
        """Lets messages leave. Returns whether all have left: they then reach their receivers without another call on
        this rank."""

    def free(self) -> None:
        """Frees what the wire has taken. REQUIRES: is_idle on all ranks. Collective."""
