"""One-sided transport of BSP: MPI_Get fetches rows, MPI_Put fills the owners' rings, without action by the owners.
All owners of a node are reached by one call to one of them (rails.py).
"""

from __future__ import annotations

from hetmpi.comm.mailbox import Mailbox
from hetmpi.comm.shards import ShardReader
from hetmpi.comm.transport import Endpoint, Immediate
from hetmpi.errors import UserError


class OneSided(Immediate):
    """See hetmpi/comm/transport.py, Transport."""

    is_collective = False

    def __init__(self, endpoint: Endpoint, name: str | None = "windows"):
        """name: None on one node. Raises UserError if its window does not reach other nodes."""
        if name is not None and not endpoint.window.reaches_remote:
            raise UserError("this MPI supports no one-sided window over several nodes: set table.exchange=messages")
        self.name = name
        self.window = endpoint.window
        self.mailbox = Mailbox(endpoint.window, endpoint.record)
        self.reader = ShardReader(endpoint.window, endpoint.applier)
