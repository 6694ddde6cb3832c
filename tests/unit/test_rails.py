"""Rails: every rank has one server on each other node, and serves about as many ranks as its neighbours."""

from types import SimpleNamespace

import pytest

from hetmpi.comm.rails import Rails, blocks_of, origins_by_node
from hetmpi.comm.world import grouped

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
def test_each_rank_of_another_node_has_one_collector_whose_server_knows_it(nodes):
    rails = rails_of(nodes)
    for node in nodes:
        others = sorted(rank for other in nodes if other is not node for rank in other)
        assert sorted(rank for one in rails[node[0]].collectors for rank in one) == others
        for rank in node:
            one = rails[rank]
            assert one.collectors[node.index(rank)] == sorted(owner for of_node in one.collected for owner in of_node)
            for server, collected in zip(one.servers, one.collected):
                there = next(other for other in nodes if server in other)
                served = rails[server].served[rails[server].clients.index(rank)]
                assert [there[place] for place in served] == collected


@pytest.mark.parametrize(
    "node, blocks",
    [
        ([0, 1, 2], [(0, 1), (2, 2)]),
        ([3], [(3, 3)]),
        ([8, 9, 10, 11, 12, 13, 14, 15], [(8, 15)]),
        ([6, 7, 8, 9, 10, 11], [(6, 7), (8, 11)]),
        ([1, 2, 3, 4], [(1, 1), (2, 3), (4, 4)]),
        ([0, 2, 4], [(0, 0), (2, 2), (4, 4)]),
    ],
)
def test_a_node_is_cut_into_aligned_blocks_of_ranks(node, blocks):
    assert blocks_of(node) == blocks


def test_an_owner_gets_gradients_of_its_node_rank_by_rank_and_of_others_by_block():
    first, second = origins_by_node([[0, 1, 2], [3, 4, 5]])
    assert first == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 5)]
    assert second == [(0, 1), (2, 2), (3, 3), (4, 4), (5, 5)]


@pytest.mark.parametrize("nodes", NODES)
def test_nodes_are_known_by_their_lowest_ranks(nodes):
    first = {rank: node[0] for node in nodes for rank in node}
    assert grouped([first[rank] for rank in sorted(first)]) == nodes
