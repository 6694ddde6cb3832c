"""Rails: which ranks of different nodes exchange messages.

Every rank can read and write all memory that the ranks of its node share (node_memory.py). So a rank needs one partner
on each other node, its server there: that with its own place in the node, modulo the size of the other node. For N
nodes a rank sends N - 1 messages, however many ranks a node has, and all ranks of a node share the work.
"""

from __future__ import annotations

from hetmpi.world.world import World


class Rails:
    """The partners of this rank.

    servers   its server on each other node, in the order of the nodes' lowest ranks
    owners    the ranks of each of these nodes, ascending
    clients   the ranks that it serves, ascending"""

    def __init__(self, world: World):
        nodes = world.nodes
        here = nodes.index(world.node_ranks)
        others = [node for i, node in enumerate(nodes) if i != here]
        self.owners: list[list[int]] = others
        self.servers = [server_on(node, world.node_ranks.index(world.rank)) for node in others]
        self.clients = sorted(
            rank
            for node in others
            for place, rank in enumerate(node)
            if server_on(world.node_ranks, place) == world.rank
        )


def server_on(node: list[int], place: int) -> int:
    """The rank of a node that serves the `place`-th rank of another node."""
    return node[place % len(node)]
