"""data=graph_synthetic: sizes, laws, and the best accuracy that it claims."""

import numpy as np
import pytest

from hetmpi.data.graph.synthetic import SyntheticGraph
from hetmpi.errors import UserError

SMALL = {"nodes": 3_000, "edges": 20_000, "classes": 8, "lists": [[2_000, 6], [300, 3]]}


def graph_of(seed=3, **settings):
    return SyntheticGraph(seed, **{**SMALL, **settings}).read()


def sources_of(graph):
    """The node that reads each edge's neighbour."""
    return np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))


def test_equal_seeds_give_equal_graphs_and_others_others():
    first, again, other = graph_of(), graph_of(), graph_of(seed=4)
    for name in ("indptr", "indices", "id_offsets", "ids", "labels", "split"):
        assert np.array_equal(getattr(first, name), getattr(again, name)), name
        assert not np.array_equal(getattr(first, name), getattr(other, name)) or name == "indptr"


def test_scale_multiplies_nodes_edges_and_rows():
    graph, half = graph_of(), graph_of(scale=0.5)
    assert (half.num_nodes, half.field_rows) == (1_500, [1_500, 1_000, 150])
    degree, of_half = (len(one.indices) / one.num_nodes for one in (graph, half))
    assert of_half == pytest.approx(degree, rel=0.3)  # more edges of hubs are repeated, and left out
    assert graph_of(scale=0.001, classes=3, lists=[[500, 2]]).field_rows == [3, 1]
    with pytest.raises(UserError, match="data.classes must be"):
        graph_of(scale=0.001)


def test_edges_count_in_both_directions_once_and_join_different_nodes():
    graph = graph_of()
    edges = set(zip(sources_of(graph).tolist(), graph.indices.tolist()))
    assert len(edges) == len(graph.indices) and all((b, a) in edges and a != b for a, b in edges)
    assert 30_000 < len(edges) <= 40_000


def test_degrees_follow_a_power_law():
    degrees = np.sort(np.diff(graph_of(nodes=20_000, edges=200_000, degree_exponent=2.3).indptr))[::-1]
    assert degrees[0] > 30 * degrees.mean() and np.median(degrees) < degrees.mean()
    tail = degrees[:1_000].astype(float)
    slope = 1 + 1 / np.log(tail / tail[-1]).mean()  # Hill's estimate
    assert 1.9 < slope < 2.9


def test_mixing_is_the_share_of_edges_that_do_not_heed_classes():
    def inside(mixing):
        graph = graph_of(mixing=mixing, noise=0.0)
        return (graph.labels[sources_of(graph)] == graph.labels[graph.indices]).mean()

    assert inside(0.0) == 1.0 and inside(1.0) < 0.3 and inside(0.0) > inside(0.3) > inside(0.7) > inside(1.0)


def test_a_model_that_knows_the_kinds_has_the_best_accuracy():
    for noise in (0.0, 0.2, 1.0):
        source = SyntheticGraph(3, **SMALL, noise=noise)
        kinds, labels = graph_of(noise=0.0).labels, source.read().labels  # noise changes nothing else
        spread = np.sqrt(noise / len(labels))
        assert abs((kinds == labels).mean() - source.best_accuracy) <= 4 * spread
    assert SyntheticGraph(3, **SMALL, noise=0.2).best_accuracy == pytest.approx(0.8 + 0.2 / 8)


def test_edges_and_ids_reveal_the_kinds():
    """Naive Bayes from the training nodes' labels: of the neighbours, and of the nodes with the same ids."""
    source = SyntheticGraph(3, **SMALL | {"nodes": 10_000, "edges": 100_000}, noise=0.1, id_mixing=0.3)
    graph, num_classes = source.read(), SMALL["classes"]
    known = graph.split == 0
    owner = np.repeat(np.arange(graph.num_nodes), np.diff(graph.id_offsets))
    of_id = np.full((graph.num_rows, num_classes), 0.1)
    np.add.at(of_id, (graph.ids[known[owner]], graph.labels[owner[known[owner]]]), 1)
    score = np.zeros((graph.num_nodes, num_classes))
    np.add.at(score, owner, np.log(of_id / of_id.sum(1, keepdims=True))[graph.ids])
    edges, near = sources_of(graph), graph.indices
    votes = known[near]
    np.add.at(score, (edges[votes], graph.labels[near[votes]]), 2.5)
    held_out = graph.split > 0
    accuracy = (score.argmax(1) == graph.labels)[held_out].mean()
    assert source.best_accuracy - 0.05 < accuracy < source.best_accuracy + 0.02


def test_sizes_are_those_of_the_settings():
    graph = graph_of(train_share=0.5, valid_share=0.25)
    assert graph.num_nodes == 3_000 and graph.field_rows == [3_000, 2_000, 300] and graph.num_classes == 8
    assert np.bincount(graph.split).tolist() == [1_500, 750, 750]
    sizes = np.diff(graph.id_offsets) - 1  # the node's own id
    assert sizes.min() == 2 and sizes.max() == 9
    assert graph.ids.min() == 0 and 5_000 < graph.ids.max() < 5_300
    assert graph_of(node_ids=False, lists=[[50, 1]]).field_rows == [50]
    reddit = graph_of(lists=[])
    assert np.array_equal(reddit.ids, np.arange(3_000)) and np.diff(reddit.id_offsets).max() == 1


def test_few_ids_are_frequent():
    graph = graph_of(nodes=20_000, edges=0, lists=[[50_000, 10]], node_ids=False)
    counts = np.sort(np.bincount(graph.ids))[::-1]
    assert counts[:500].sum() > 0.4 * counts.sum()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"nodes": 1}, "data.nodes must be an integer of at least 2"),
        ({"classes": 1}, "data.classes must be an integer of at least 2"),
        ({"classes": 4_000}, "data.classes must be at most 3,000"),
        ({"mixing": 1.5}, "data.mixing must be at most 1"),
        ({"noise": -0.1}, "data.noise must be a number of at least 0"),
        ({"degree_exponent": 1.0}, "data.degree_exponent must be a number of at least 1.5"),
        ({"lists": [5]}, "each of data.lists must be rows and most ids of a node"),
        ({"lists": [[0, 1]]}, "rows in data.lists must be an integer of at least 1"),
        ({"lists": 3}, "data.lists must be pairs"),
        ({"train_share": 0.8, "valid_share": 0.3}, "with data.valid_share at most 1"),
        ({"train_share": 0}, "data.train_share must be above 0"),
        ({"node_ids": 1}, "data.node_ids must be true or false"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        graph_of(**settings)
