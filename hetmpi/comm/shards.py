"""ShardReader: reads the current rows, their mean squares and clocks of all owners by Route.

Shards of ranks on this node are read from shared memory, shards of another node by one MPI_Get per array.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetmpi import _C
from hetmpi.comm.route import Route
from hetmpi.comm.window import RmaWindow
from hetmpi.in_flight import InFlight


class ShardReader:
    """Reads the shards of all ranks. A row of another rank may be read while it is being written, which SSP
    accepts (docs/sharp_bits.md).

    is_collective   whether all ranks must make the same number of reads"""

    is_collective = False

    def __init__(self, window: RmaWindow, applier: _C.PushApplier | None = None):
        """applier: writes this rank's shard concurrently; None if nothing does."""
        self.window = window
        kinds = {"weight": _C.NodeRows, "mean_square": _C.NodeRows, "clock": _C.NodeClocks}
        shards = window.on_node
        self._directories = {rank: shard.directory for rank, shard in shards.items()}
        self._local = {
            array: kind(applier, window.world.rank, {r: getattr(shards[r], array) for r in shards}, self._directories)
            for array, kind in kinds.items()
        }
        # array -> for each other node its owners, and where their parts begin in its memory: (k,) int64 each
        self._remote = {
            array: [
                (np.array(owners), np.array([window.begin_of(owner, array) for owner in owners]))
                for owners in window.rails.owners
            ]
            for array in kinds
        }

    def reading(self, array: str, route: Route, out: np.ndarray) -> InFlight[None]:
        """Fetches `array` (weight, mean_square or clock) for the keys of `route` to their positions in out (n,
        width)."""
        remote = self.post(array, route, "read")
        self.read_local(array, route, out)
        if remote.parts:
            yield
            self.window.flush()
        remote.place(out)

    def is_needed(self, route: Route) -> bool:
        """Whether a read of these keys must be made: always if reads are collective, otherwise if there are any."""
        return self.is_collective or len(route.order) > 0

    def read_local(self, array: str, route: Route, out: np.ndarray):
        """Reads the rows that ranks of this node own, as part of reading()."""
        self._local[array].gather(*route.arrays, out)

    def post(self, array: str, route: Route, use: str) -> RemoteRows:
        """Posts the fetch of rows that other nodes own; complete after window.flush(). `use` names the buffers."""
        parts = []
        width, dtype = self.shape(array)
        for node, server in enumerate(self.window.rails.servers):
            begins, order = _C.route_in_memory(
                self.window.partition, *route.arrays, *self._remote[array][node], 4 * width
            )
            if len(order):
                buffer = self.window.buffer(f"{use} {array}", node, len(order), width, dtype)
                self.window.get(array, server, begins, buffer)
                parts.append((order, buffer))
        return RemoteRows(array, parts)

    def shape(self, array: str) -> tuple[int, type]:
        """(numbers, dtype) of one row."""
        layout = self.window.layouts[self.window.world.rank]
        return {"weight": (layout.dim, np.float32), "mean_square": (1, np.float32), "clock": (1, np.int32)}[array]


@dataclass
class RemoteRows:
    """Rows of other nodes being received into buffers: (positions (m,), values (m, width)) for each node."""

    array: str
    parts: list[tuple[np.ndarray, np.ndarray]]

    def place(self, out: np.ndarray):
        """Copies all rows to their positions in out (n, width). REQUIRES: window.flush()."""
        for order, buffer in self.parts:
            if self.array == "clock":
                out[order] = buffer[:, 0]
            else:
                _C.gather(buffer, np.arange(len(order)), out, order)
