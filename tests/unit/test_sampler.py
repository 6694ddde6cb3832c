"""The sampler of neighbourhoods against the same rule in plain Python."""

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import adjacency, edges_of, power_law, sampled

from hetmpi import _C

SEED, STREAM = 7, 1


@st.composite
def graphs(draw):
    """Neighbours of each node: with isolated nodes, loops, multi-edges, nodes of large degree."""
    num_nodes = draw(st.integers(1, 12))
    node = st.integers(0, num_nodes - 1)
    return draw(st.lists(st.lists(node, max_size=9), min_size=num_nodes, max_size=num_nodes))


@st.composite
def batches(draw, num_nodes):
    """Heads, duplicates included, and their positions in several windows."""
    heads = draw(st.lists(st.integers(0, num_nodes - 1), max_size=10))
    windows = draw(st.lists(st.sampled_from([0, 1, 5, 1 << 40]), min_size=len(heads), max_size=len(heads)))
    positions = [window * _C.SAMPLE_WINDOW + i for i, window in enumerate(windows)]
    return np.array(heads, np.int64), np.array(positions, np.int64)


def run(graph, heads, positions, fanouts, replace, dtype=np.int64, seed=SEED, stream=STREAM):
    indptr, indices = adjacency(graph)
    return _C.sample_neighbours(indptr, indices.astype(dtype), heads, positions, fanouts, replace, seed, stream)


fanouts = st.lists(st.integers(1, 12), max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.data(), graphs(), fanouts, st.booleans(), st.sampled_from([np.int32, np.int64]))
def test_samples_are_those_of_the_rule(data, graph, fanouts, replace, dtype):
    heads, positions = data.draw(batches(len(graph)))
    nodes, blocks = run(graph, heads, positions, fanouts, replace, dtype)
    expected_nodes, expected_blocks = sampled(graph, heads, positions, fanouts, replace, SEED, STREAM)
    assert nodes.dtype == np.int64 and nodes.tolist() == expected_nodes
    assert [(offsets.tolist(), index.tolist()) for offsets, index in blocks] == expected_blocks


@settings(max_examples=100, deadline=None)
@given(st.data(), graphs(), st.lists(st.integers(1, 6), min_size=1, max_size=3), st.booleans())
def test_a_head_reads_the_same_in_every_batch(data, graph, fanouts, replace):
    heads, positions = data.draw(batches(len(graph)))
    whole = edges_of(*run(graph, heads, positions, fanouts, replace), len(heads))
    for i in range(len(heads)):
        alone = run(graph, heads[i : i + 1], positions[i : i + 1], fanouts, replace)
        assert edges_of(*alone, 1) == whole[i : i + 1]


@settings(max_examples=100, deadline=None)
@given(st.data(), graphs(), st.integers(1, 6), st.integers(0, 6), st.booleans())
def test_smaller_fan_outs_are_prefixes(data, graph, fanout, more, replace):
    heads, positions = data.draw(batches(len(graph)))
    nodes, [(offsets, index)] = run(graph, heads, positions, [fanout], replace)
    wide_nodes, [(wide_offsets, wide_index)] = run(graph, heads, positions, [fanout + more], replace)
    for i in range(len(heads)):
        few = nodes[index[offsets[i] : offsets[i + 1]]].tolist()
        many = wide_nodes[wide_index[wide_offsets[i] : wide_offsets[i + 1]]].tolist()
        assert many[: len(few)] == few and len(many) == (
            min(fanout + more, len(graph[heads[i]])) if not replace else len(graph[heads[i]]) and fanout + more
        )


def test_equal_fan_outs_reach_nothing_new_from_the_heads():
    indptr, indices = power_law(500, 4_000)
    heads = np.arange(0, 100)
    nodes, [one, two] = _C.sample_neighbours(indptr, indices, heads, heads, [5, 5], True, SEED, STREAM)
    assert np.array_equal(two[0][:101], one[0]) and np.array_equal(two[1][: len(one[1])], one[1])
    assert len(two[0]) - 1 == one[1].max() + 1 and len(np.unique(nodes)) == len(nodes)


@pytest.mark.parametrize("replace", [True, False])
def test_draws_are_uniform(replace):
    graph = [[1, 2, 3, 3], [], [], []]  # a multi-edge counts twice
    num = 20_000
    heads = np.zeros(num, np.int64)
    nodes, [(offsets, index)] = run(graph, heads, np.arange(num) * _C.SAMPLE_WINDOW, [2], replace)
    drawn = nodes[index].reshape(num, 2)
    pairs = Counter(map(tuple, drawn.tolist()))
    weight = {1: 1, 2: 1, 3: 2}
    for a in weight:
        for b in weight:
            chance = weight[a] * weight[b] / 16 if replace else weight[a] * (weight[b] - (a == b)) / 12
            spread = math.sqrt(num * chance * (1 - chance))
            assert abs(pairs[a, b] - num * chance) <= 5 * spread, (a, b)


def test_windows_seeds_and_streams_have_draws_of_their_own():
    indptr, indices = power_law(2_000, 40_000)
    heads = np.argsort(-np.diff(indptr))[:200].copy()

    def draws(window=0, seed=SEED, stream=STREAM):
        positions = np.arange(200) + window * _C.SAMPLE_WINDOW
        nodes, [(_, index)] = _C.sample_neighbours(indptr, indices, heads, positions, [3], True, seed, stream)
        return nodes[index].tolist()

    assert draws() == draws()
    others = [draws(window=1), draws(seed=8), draws(stream=2), draws()]
    assert len(set(map(tuple, others))) == 4


def test_batches_are_the_same_in_any_number_of_threads():
    indptr, indices = power_law(5_000, 50_000)
    rng = np.random.default_rng(0)
    calls = [(rng.integers(0, 5_000, 256), np.arange(256) + i * 256) for i in range(64)]

    def one(call):
        nodes, blocks = _C.sample_neighbours(indptr, indices, *call, [5, 5], False, SEED, STREAM)
        return nodes.tolist(), [(a.tolist(), b.tolist()) for a, b in blocks]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, calls)) == list(map(one, calls))


def test_an_empty_batch_and_no_hop():
    graph = [[0], []]
    none = np.empty(0, np.int64)
    nodes, [(offsets, index)] = run(graph, none, none, [3], True)
    assert nodes.shape == (0,) and offsets.tolist() == [0] and index.shape == (0,)
    assert run(graph, np.array([1, 1]), np.array([0, 1]), [], True)[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    "indptr, indices, heads, error, message",
    [
        ([0, 1, 1], [1], [2], IndexError, r"heads must lie in \[0, 2\), got 2"),
        ([0, 1, 1], [1], [-1], IndexError, r"heads must lie in \[0, 2\), got -1"),
        ([0, 1, 1], [2], [0], IndexError, r"indices must lie in \[0, 2\), got 2"),
        ([0, 2, 1], [1], [1], IndexError, "indptr must rise from 0 to 1, got 2, 1 for node 1"),
        ([0, 5, 5], [1], [0], IndexError, "indptr must rise from 0 to 1, got 0, 5 for node 0"),
        ([], [1], [0], ValueError, "indptr must have num_nodes"),
    ],
)
def test_a_damaged_graph_is_refused(indptr, indices, heads, error, message):
    arrays = (np.array(values, np.int64) for values in (indptr, indices, heads, [0]))
    with pytest.raises(error, match=message):
        _C.sample_neighbours(*arrays, [1], True, 0, 0)


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="fan-outs must be at least 1, got 0"):
        run([[0]], np.array([0]), np.array([0]), [0], True)
    with pytest.raises(ValueError, match="positions must have shape"):
        run([[0]], np.array([0]), np.array([0, 1]), [1], True)
    with pytest.raises(TypeError):
        run([[0]], np.array([0]), np.array([0]), [1], True, dtype=np.float32)


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8), st.data())
def test_lists_of_rows_are_gathered_in_order(lists, data):
    offsets = np.cumsum([0, *map(len, lists)])
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=9)) if lists else []
    for dtype in (np.int32, np.int64):
        found, values = _C.lists_of(offsets, np.array(sum(lists, []), dtype), np.array(rows, np.int64))
        assert values.dtype == np.int64
        assert [values[a:b].tolist() for a, b in zip(found, found[1:])] == [lists[row] for row in rows]


def test_lists_beyond_the_values_are_refused():
    with pytest.raises(IndexError, match=r"rows must lie in \[0, 1\), got 1"):
        _C.lists_of(np.array([0, 1]), np.array([5]), np.array([1]))
    with pytest.raises(IndexError, match="offsets must rise from 0 to 1"):
        _C.lists_of(np.array([0, 2]), np.array([5]), np.array([0]))
