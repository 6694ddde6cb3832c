"""Rails: every rank has one server on each other node, and serves about as many ranks as its neighbours."""

from types import SimpleNamespace

import pytest

from hetmpi.wire.rails import Rails
from hetmpi.world.world import grouped

NODES = [[[0]], [[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0, 1], [2, 3], [4]], [[0, 2, 4], [1, 3]], [[0], [1], [2]]]


def rails_of(nodes):
    """rank -> its Rails."""
    return {rank: Rails(SimpleNamespace(rank=rank, node_ranks=node, nodes=nodes)) for node in nodes for rank in node}


@pytest.mark.parametrize("nodes", NODES)
def test_a_rank_has_one_server_on_each_other_node_which_knows_it(nodes):
    rails = rails_of(nodes)
    for node in nodes:
        others = [other for other in nodes if other is not node]
        for rank in node:
            assert rails[rank].owners == others
            assert all(server in other for server, other in zip(rails[rank].servers, others))
            assert all(rank in rails[server].clients for server in rails[rank].servers)
    assert sum(len(one.clients) for one in rails.values()) == sum(len(one.servers) for one in rails.values())


@pytest.mark.parametrize("nodes", NODES)
def test_the_ranks_of_a_node_share_the_serving(nodes):
    rails = rails_of(nodes)
    for node in nodes:
        for other in nodes:
            if other is not node:
                served = [sum(client in other for client in rails[rank].clients) for rank in node]
                assert max(served) - min(served) <= 1


@pytest.mark.parametrize("nodes", NODES)
def test_nodes_are_known_by_their_lowest_ranks(nodes):
    first = {rank: node[0] for node in nodes for rank in node}
    assert grouped([first[rank] for rank in sorted(first)]) == nodes
