"""One-sided transport: MPI_Get fetches clocks and rows, MPI_Put fills the owners' rings, without action by the owners.
All owners of a node are reached by one call to one of them (rails.py).

A pull takes two round trips, each overlapped with other work: it fetches clocks when it begins, and when it advances
the rows that are wanted by these clocks. A row must not be older than its clock, and MPI does not order gets: so the
clocks must arrive before the rows are requested.
"""

from __future__ import annotations

import numpy as np

from hetmpi.comm.mailbox import Mailbox
from hetmpi.comm.shards import ShardReader
from hetmpi.comm.transport import Endpoint, Immediate, Pull
from hetmpi.errors import UserError


class OneSided(Immediate):
    """See hetmpi/comm/transport.py, Transport."""

    carries_pushes = is_collective = False

    def __init__(self, endpoint: Endpoint, name: str | None = "windows"):
        """name: None on one node. Raises UserError if its window does not reach other nodes."""
        if name is not None and not endpoint.window.reaches_remote:
            raise UserError("this MPI supports no one-sided window over several nodes: set table.exchange=messages")
        self.name = name
        self.window, self.arrays = endpoint.window, endpoint.arrays
        self.mailbox = Mailbox(endpoint.window, endpoint.record)
        self.reader = ShardReader(endpoint.window, endpoint.applier)

    def begin(self, pull: Pull) -> OneSidedTicket:
        return OneSidedTicket(self, pull)


class OneSidedTicket:
    """See hetmpi/comm/transport.py, Ticket."""

    def __init__(self, transport: OneSided, pull: Pull):
        self._transport, self._pull, self.fetched = transport, pull, None
        self._versions = transport.reader.post("clock", pull.route, "early")
        self._rows = []
        transport.mailbox.request_tails()

    def advance(self):
        transport, pull = self._transport, self._pull
        transport.window.flush()
        transport.mailbox.store_tails()
        transport.mailbox.publish()
        self._versions.place(pull.versions)
        self.fetched = pull.wanted()
        route = pull.route.where(self.fetched)
        self._rows = [transport.reader.post(array, route, "early") for array in transport.arrays]

    def receive(self):
        """No effect: the versions arrived in advance(), before the rows were requested."""

    def place(self, *outs: np.ndarray):
        if self.fetched.any():
            self._transport.window.flush()
            for rows, out in zip(self._rows, outs):
                rows.place(out)

    def drop(self):
        self._transport.window.flush()
