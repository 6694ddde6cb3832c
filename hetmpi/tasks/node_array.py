"""NodeArray: an array with a copy in the memory of each cluster node, which all ranks of the job fill together."""

from __future__ import annotations

from functools import partial

import numpy as np

from hetmpi.world.at_exit import at_exit, free_window
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World


def ranks_by_node(world: World) -> dict[int, int]:
    """Rank -> first rank of its cluster node, in the order of the shares of a NodeArray. Collective."""
    first = world.comm.allgather(world.node_ranks[0])
    return {rank: first[rank] for rank in sorted(range(world.size), key=lambda rank: (first[rank], rank))}


class NodeArray:
    """`num` rows of `width` float32 in the memory of each cluster node. Each rank fills the rows of its share; after
    exchange() every rank reads all of them.

    array          (num, width) float32, the same memory on all ranks of a cluster node
    share          this rank's rows, [begin, end); the shares of a cluster node are contiguous
    largest_share  rows of the largest share of all ranks"""

    def __init__(self, world: World, num: int, width: int):
        """Allocates the memory. Collective."""
        self.world, self.width = world, width
        bounds = [num * place // world.size for place in range(world.size + 1)]
        order = ranks_by_node(world)
        place, begins = list(order).index(world.rank), {}  # first row of each cluster node
        for first, begin in zip(order.values(), bounds):
            begins.setdefault(first, begin)
        self.share, self.largest_share = (bounds[place], bounds[place + 1]), int(max(np.diff(bounds)))
        self._begins = [*begins.values(), num]
        nbytes = 4 * num * width if world.node.rank == 0 else 0
        self._window = MPI.Win.Allocate_shared(nbytes, 4, comm=world.node)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._free = at_exit(world, partial(free_window, self._window))
        memory, _ = self._window.Shared_query(0)
        self.array = np.frombuffer(memory, np.float32).reshape(num, width)
        self._firsts = world.comm.Split(0 if world.node.rank == 0 else MPI.UNDEFINED, key=place)

    def exchange(self):
        """Makes the rows of all shares readable for all ranks. Collective."""
        self._meet()
        if self._firsts != MPI.COMM_NULL and self._firsts.size > 1:
            row = MPI.FLOAT.Create_contiguous(self.width).Commit()
            counts = np.diff(self._begins).tolist()
            self._firsts.Allgatherv(MPI.IN_PLACE, [self.array, counts, self._begins[:-1], row])
            row.Free()
        self._meet()

    def free(self):
        """Frees the memory; `array` becomes invalid. Collective."""
        self.array = None
        self._meet()  # others may still read
        self._free()
        if self._firsts != MPI.COMM_NULL:
            self._firsts.Free()

    def _meet(self):
        """Barrier: stores made before it are visible to the ranks of a cluster node after it."""
        self._window.Sync()
        self.world.meet("for all ranks to compute their share of the nodes")
        self._window.Sync()
