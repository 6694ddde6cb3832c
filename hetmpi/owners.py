"""Owners: rows, optimizer state and clocks as the ranks that own them have them now, by Route.

From ranks of this node by plain loads, from the others by one MPI_Get per owner and array.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hetmpi import _C
from hetmpi.partition import Route
from hetmpi.window import RmaWindow


class Owners:
    """Reads the shards of all ranks. With an engine, this rank's own shard is read while the engine does not write it;
    a row of another rank may be seen half written, which bounded staleness accepts (docs/sharp_bits.md).

    is_collective   whether all ranks have to read equally often"""

    is_collective = False

    def __init__(self, window: RmaWindow, engine: _C.Engine | None):
        self.window = window
        self._gather_own = engine.gather if engine is not None else _C.gather

    def read(self, array: str, route: Route, out: np.ndarray):
        """Fetches `array` (weight, state or clock) for the keys of `route` to their positions in out (n, width)."""
        far = self.post(array, route, "read")
        self.read_near(array, route, out)
        if far.parts:
            self.window.flush()
        far.place(out)

    def asks(self, wanted: np.ndarray) -> bool:
        """Whether a read of the keys wanted (n,) bool is to be made: not one of none, unless others wait for it."""
        return self.is_collective or bool(wanted.any())

    def read_near(self, array: str, route: Route, out: np.ndarray):
        """The part of read() that this node's ranks own."""
        for owner in route.owners():
            if owner in self.window.near:
                rows, order = route.of(owner)
                self._gather(array, owner)(getattr(self.window.near[owner], array), rows, out, order)

    def post(self, array: str, route: Route, use: str) -> FarRows:
        """Starts fetching the part that other nodes own; it is here after window.flush(). `use` names the buffers."""
        parts = []
        for owner in route.owners():
            if owner not in self.window.near:
                rows, order = route.of(owner)
                width, dtype = self.shape(array)
                buffer = self.window.buffer(f"{use} {array}", owner, len(rows), width, dtype)
                self.window.get(array, owner, rows, buffer)
                parts.append((order, buffer))
        return FarRows(array, parts)

    def _gather(self, array: str, owner: int):
        if array == "clock":
            return _C.gather_clocks
        return self._gather_own if owner == self.window.world.rank else _C.gather

    def shape(self, array: str) -> tuple[int, type]:
        """(numbers, dtype) of one row."""
        layout = self.window.layouts[self.window.world.rank]
        return {"weight": (layout.dim, np.float32), "state": (layout.state_dim, np.float32), "clock": (1, np.int32)}[array]

    def row_bytes(self, arrays: Iterable[str]) -> int:
        """Bytes of one row of all these arrays."""
        return 4 * sum(self.shape(array)[0] for array in arrays)


class NearOwners(Owners):
    """Owners of which read() passes over those on other nodes."""

    def post(self, array: str, route: Route, use: str) -> FarRows:
        return FarRows(array, [])


@dataclass
class FarRows:
    """What was asked of other nodes, on its way into buffers: (positions (m,), values (m, width)) for each owner."""

    array: str
    parts: list[tuple[np.ndarray, np.ndarray]]

    def place(self, out: np.ndarray):
        """Copies everything to its positions in out (n, width). REQUIRES: window.flush()."""
        for order, buffer in self.parts:
            if self.array == "clock":
                out[order] = buffer[:, 0]
            else:
                _C.gather(buffer, np.arange(len(order)), out, order)

