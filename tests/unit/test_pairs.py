"""Columns of queries and items, the places of queries among vectors, and histories that are cut."""

import numpy as np
import pytest
import torch

from hetmpi.data.batch import Bag, Samples
from hetmpi.data.features import FeatureRequest, arrange
from hetmpi.data.pairs import Side, batches_of, last_values, query_places
from hetmpi.gathered import gathered, of_ranks


def bag_of(*lists):
    return Bag(np.array(sum(lists, []), np.int64), np.cumsum([0, *map(len, lists)]))


@pytest.mark.parametrize("most, kept", [(1, [[3], [], [5]]), (2, [[2, 3], [], [4, 5]]), (3, [[1, 2, 3], [], [4, 5]])])
def test_the_last_values_of_a_history_stay(most, kept):
    found, expected = last_values(bag_of([1, 2, 3], [], [4, 5]), most), bag_of(*kept)
    assert found.values.tolist() == expected.values.tolist() and found.offsets.tolist() == expected.offsets.tolist()


def test_a_query_stands_after_each_value_that_precedes_it():
    sizes, is_item = np.array([2, 0, 1]), np.array([True, False, True])
    at, ends = query_places(sizes, np.array([True, False, True]), is_item, True)  # three vectors of each sample
    assert ends.tolist() == [2, 7] and at.tolist() == [2, 7, 0, 6]
    at, ends = query_places(np.zeros(3, np.int64), np.array([True, False, True]), np.zeros(0, bool), False)
    assert at.tolist() == ends.tolist() == [0, 2]
    assert [found.tolist() for found in query_places(sizes[:0], is_item[:0], is_item[:0], True)] == [[], []]


def test_batches_share_keys_and_find_their_rows():
    features, tables = arrange([
        FeatureRequest("user", 10), FeatureRequest("item", 10), FeatureRequest("kind", 5, dim=2),
        FeatureRequest("viewed", 0, pool="none", share="item"),
    ])  # fmt: skip
    queries, items = (Side.of(names, features, ["age"]) for names in (["viewed", "user", "age"], ["item", "kind"]))
    ids = np.array([[1, 12, 3], [1, 13, 3]])
    samples = Samples(ids, np.ones((2, 1), np.float32), np.zeros(2, np.float32), bags=(bag_of([13, 14], []),))
    keys, [of_queries, of_items] = batches_of(
        [(queries, queries.take(samples)), (items, items.take(samples))], list(tables)
    )
    assert {name: sorted(found.tolist()) for name, found in keys.items()} == {"table": [1, 12, 13, 14], "dim2": [3]}
    joined = torch.cat(list(keys.values()))
    assert joined[of_queries.index].tolist() == [[1], [1]] and joined[of_items.index].tolist() == [[12, 3], [13, 3]]
    assert joined[of_queries.bags[0][0]].tolist() == [13, 14] and of_queries.bags[0][1].tolist() == [0, 2, 2]
    assert of_queries.dense.tolist() == [[1], [1]] and of_items.dense.shape == (2, 0)


def test_one_rank_gathers_its_own_vectors():
    vectors, labels = torch.ones(3, 2), torch.tensor([1, 2, 1 << 40])
    found = gathered(vectors, labels, of_ranks([3])[:, 0])
    assert found[0] is vectors and found[1] is labels
