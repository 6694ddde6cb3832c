"""Rails: which ranks of different nodes exchange messages.

Every rank can read and write all memory that the ranks of its node share (node_memory.py). So a rank needs one partner
on each other node, its server there: that with its own place in the node, modulo the size of the other node. For N
nodes a rank sends N - 1 messages, however many ranks a node has, and all ranks of a node share the work.

At s = 0 the ranks of a node share the messages of collective.py too: a rank is the collector for its node of some ranks
on each other node, those whose place there is its own, modulo the size of its node. What several ranks of the node read
or write of these crosses the network once.
"""

from __future__ import annotations

from hetmpi.comm.world import World


class Rails:
    """The partners of this rank.

    servers     its server on each other node, in the order of the nodes' lowest ranks
    owners      the ranks of each of these nodes, ascending
    collected   those of them, per node, that this rank collects for
    clients     the ranks that it serves, ascending
    served      for each of them, the ranks of this node that the client collects for, as places in the node
    collectors  for each rank of this node, all ranks that it collects for, ascending"""

    def __init__(self, world: World):
        nodes = world.nodes
        here = nodes.index(world.node_ranks)
        others = [node for i, node in enumerate(nodes) if i != here]
        self.owners: list[list[int]] = others
        self.servers = [server_on(node, world.node_ranks.index(world.rank)) for node in others]
        clients = sorted(
            (rank, place, len(node))
            for node in others
            for place, rank in enumerate(node)
            if server_on(world.node_ranks, place) == world.rank
        )
        self.clients = [rank for rank, _, _ in clients]
        num_here = len(world.node_ranks)
        self.served = [list(range(num_here))[place::size] for _, place, size in clients]
        self.collected = [node[world.node_ranks.index(world.rank) :: num_here] for node in others]
        self.collectors = [sorted(rank for node in others for rank in node[i::num_here]) for i in range(num_here)]


def server_on(node: list[int], place: int) -> int:
    """The rank of a node that serves the `place`-th rank of another node."""
    return node[place % len(node)]


def blocks_of(node: list[int]) -> list[tuple[int, int]]:
    """The ranks of a node as blocks (first, last) of 2^l ranks from a multiple of 2^l on, as large as they can be: the
    sums of their gradients are parts of the sum over all ranks (cpp/owner/rank_sums.h)."""
    found, begin = [], 0
    while begin < len(node):
        first, num = node[begin], 1
        while first % (2 * num) == 0 and node[begin : begin + 2 * num] == list(range(first, first + 2 * num)):
            num *= 2
        found.append((first, first + num - 1))
        begin += num
    return found


def origins_by_node(nodes: list[list[int]]) -> list[list[tuple[int, int]]]:
    """For each node, the blocks of ranks whose gradients reach its owners as one, ascending: its own one by one."""
    blocks = [blocks_of(node) for node in nodes]
    return [
        sorted([(rank, rank) for rank in node] + [block for other in blocks if other is not own for block in other])
        for node, own in zip(nodes, blocks)
    ]
