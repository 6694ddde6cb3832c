"""data.partition=metis: nodes and keys in another order, with the same meaning, that keeps neighbours together."""

import sys

import graph_files
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetmpi.data.graph.files import GraphFiles
from hetmpi.data.graph.metis import num_parts_of, placed
from hetmpi.data.graph.synthetic import SyntheticGraph
from hetmpi.errors import UserError
from hetmpi.owner.route import make_partition

BATCH = 32
SETTINGS = {"nodes": 4_000, "edges": 20_000, "classes": 16, "mixing": 0.1, "lists": [[3_000, 5]], "id_mixing": 0.2}


def opened(tmp_path, size=4, **common):
    source = SyntheticGraph(1, **SETTINGS, cache=str(tmp_path), batch_size=BATCH, fanout=[4, 4], **common)
    source.prepare(0, size, lambda: None, lambda line: None)
    return source


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The graph as it is and in METIS's order, for 4 ranks."""
    pytest.importorskip("pymetis")
    folder = tmp_path_factory.mktemp("metis")
    return opened(folder), opened(folder, partition="metis")


def test_nodes_keep_names_labels_split_and_neighbours(pair):
    plain, arranged = pair
    names = arranged.names(np.arange(arranged.num_nodes))
    assert np.array_equal(np.sort(names), np.arange(plain.num_nodes)) and not np.array_equal(names, np.sort(names))
    assert np.array_equal(arranged.labels, plain.labels[names]) and np.array_equal(arranged.split, plain.split[names])
    for node in range(0, arranged.num_nodes, 97):
        near = names[arranged.neighbours(node, node + 1)[1]]
        assert np.array_equal(np.sort(near), plain.neighbours(names[node], names[node] + 1)[1])


def test_keys_are_renamed_one_to_one(pair):
    plain, arranged = pair
    names = arranged.names(np.arange(arranged.num_nodes))
    ours, theirs = arranged.inputs(np.arange(arranged.num_nodes))[0], plain.inputs(names)[0]
    assert np.array_equal(ours.offsets, theirs.offsets)
    pairs = np.unique(np.stack([ours.values, theirs.values]), axis=1)
    assert len(np.unique(pairs[0])) == len(np.unique(pairs[1])) == pairs.shape[1]
    assert arranged.num_rows == plain.num_rows and sum(arranged.field_rows) == arranged.num_rows


def own_share(source, partition, size=4):
    """Share of a batch's distinct keys that the rank that reads it owns."""
    owners, shares = make_partition(partition, source.num_rows, size), []
    for slot in range(5 * size):
        keys = np.unique(source.train(slot * BATCH, slot * BATCH + BATCH).ids.values)
        own, _ = owners.route(keys).of(slot % size)
        shares.append(len(own) / len(keys))
    return np.mean(shares)


def test_most_rows_that_a_rank_reads_are_its_own(pair):
    plain, arranged = pair
    assert own_share(plain, "round_robin") < 0.28
    assert own_share(arranged, "range") > 0.45


def test_each_rank_has_an_equal_part_of_the_heads_and_all_are_visited(pair):
    _, arranged = pair
    size, num_train = 4, arranged.num_train
    heads = [[] for _ in range(size)]
    steps = num_train // (size * BATCH) + 1
    for slot in range(steps * size):
        heads[slot % size] += arranged.train(slot * BATCH, slot * BATCH + BATCH).nodes[:BATCH].tolist()
    parts = [set(part[: num_train // size]) for part in heads]
    assert all(len(part) == num_train // size for part in parts)  # an epoch repeats no node
    assert len(set().union(*map(set, heads))) == num_train and not parts[0] & parts[1]


def test_a_batch_is_the_same_in_parts(pair):
    for source in pair:
        whole = source.train(0, 3 * BATCH).nodes[: 3 * BATCH]
        parts = [source.train(begin, begin + 8).nodes[:8] for begin in range(0, 3 * BATCH, 8)]
        assert np.array_equal(whole, np.concatenate(parts))


def test_the_order_does_not_depend_on_the_number_of_ranks(pair, tmp_path):
    _, arranged = pair
    other = opened(tmp_path, size=3, partition="metis")
    nodes = np.arange(arranged.num_nodes)
    assert np.array_equal(arranged.names(nodes), other.names(nodes))
    assert np.array_equal(arranged.inputs(nodes)[0].values, other.inputs(nodes)[0].values)


def test_texts_stay_the_names_of_nodes(tmp_path):
    pytest.importorskip("pymetis")
    source = GraphFiles(
        graph_files.parquet(tmp_path / "tables"), 1, partition="metis", batch_size=1, cache=str(tmp_path / "prepared")
    )
    source.prepare(0, 2, lambda: None, lambda line: None)
    assert sorted(source.names(np.arange(6))) == [f"node {v}" for v in range(6)]
    [of_b] = source.names(np.flatnonzero(source.split == 1))
    assert of_b == "node 2"


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 30))
def test_parts_get_exactly_their_room_and_what_they_use_most(data, num_parts, num_rows):
    use = st.tuples(st.integers(0, num_rows - 1), st.integers(0, num_parts - 1))
    counts = data.draw(st.dictionaries(use, st.integers(1, 9), max_size=40))
    uses = sorted(counts, key=lambda use: -counts[use])
    keys, parts = np.array(uses or np.empty((0, 2)), np.int64).reshape(-1, 2).T
    room = np.diff(np.arange(num_parts + 1) * num_rows // num_parts)
    place = placed(keys, parts, room, num_rows)
    assert np.array_equal(np.bincount(place, minlength=num_parts), room)
    for (key, part), count in counts.items():  # no part would rather have another key that would rather be there
        if count > counts.get((key, place[key]), 0):
            held = [counts.get((other, part), 0) for other in np.flatnonzero(place == part)]
            assert min(held, default=count) >= count


def test_parts_are_a_power_of_two():
    assert [num_parts_of(n) for n in (2, 63, 64, 2_708, 13_752, 1 << 30)] == [1, 1, 1, 32, 128, 256]


def test_settings_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(UserError, match="data.partition must be metis or null, got hash"):
        opened(tmp_path, partition="hash")
    with pytest.raises(UserError, match="which needs table.partition=range, got round_robin"):
        opened(tmp_path, partition="metis", table_partition="round_robin")


def test_more_ranks_than_training_nodes_are_refused(tmp_path):
    pytest.importorskip("pymetis")
    source = SyntheticGraph(1, nodes=10, edges=9, classes=2, train_share=0.2, partition="metis", cache=str(tmp_path))
    with pytest.raises(UserError, match="needs a training node for each of the 3 ranks, there are 2"):
        source.prepare(0, 3, lambda: None, lambda line: None)


def test_without_pymetis_the_message_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(UserError, match="needs METIS: pip install pymetis"):
        opened(tmp_path, partition="metis")
