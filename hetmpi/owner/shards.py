"""ShardReader: reads the current rows, their mean squares and clocks of the owners of a node."""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.owner.node_memory import NodeMemory


class ShardReader:
    """Reads the shards of this node in shared memory. A row of another rank may be read while it is being written,
    which SSP accepts (docs/sharp_bits.md)."""

    def __init__(self, memory: NodeMemory, applier: _C.PushApplier | None = None):
        """applier: writes this rank's shard concurrently; None if nothing does."""
        self.memory = memory
        kinds = {"weight": _C.NodeRows, "mean_square": _C.NodeRows, "clock": _C.NodeClocks}
        shards = memory.on_node
        directories = {rank: shard.directory for rank, shard in shards.items()}
        files = {rank: shard.file for rank, shard in shards.items() if shard.file is not None}
        self._arrays = {
            array: kind(
                applier,
                memory.world.rank,
                {rank: shard.in_memory[array] for rank, shard in shards.items()},
                directories,
                files if array == "weight" else {},
            )  # fmt: skip
            for array, kind in kinds.items()
        }

    def read(self, array: str, route: _C.Route, out: np.ndarray) -> int:
        """Reads `array` (weight, mean_square or clock) of the route's keys that ranks of this node own, to their
        positions in out (n, width) or (n,); those of other nodes are left as they are. Returns the bytes of all keys
        of the route that ranks other than this one own, for the counters of traffic."""
        return self._arrays[array].gather(route, out)
