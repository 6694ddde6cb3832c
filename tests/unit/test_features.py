"""Features and their tables, bags of values, batches over several tables."""

import numpy as np
import pytest
import torch
from click_features import WANTED, Clicks
from hypothesis import given
from hypothesis import strategies as st

from hetmpi import _C
from hetmpi.data.batch import Bag, FeatureBatches, SamplesError, concatenate
from hetmpi.data.features import TABLE, FeatureRequest, FeatureTable, arrange
from hetmpi.errors import UserError
from hetmpi.metrics import auc, grouped_auc
from hetmpi.tasks.ctr import ClickThroughRate


def test_features_of_equal_settings_share_a_table_and_shared_features_their_rows():
    features, tables = arrange(WANTED)
    assert [f.name for f in features] == ["user", "item", "city", "hour", "tags", "clicked"]
    assert {f.name: (f.table, f.first, f.rows) for f in features} == {
        "user": (TABLE, 0, 100), "item": ("dim12", 0, 60), "city": ("dim4", 40, 20), "hour": (TABLE, 100, 24),
        "tags": ("dim4", 0, 40), "clicked": ("dim12", 0, 60),
    }  # fmt: skip
    sgd = {"rows": "sgd", "rows_lr": 0.5}
    assert tables == {
        "dim4": FeatureTable((40, 20), 4, sgd), TABLE: FeatureTable((100, 24)), "dim12": FeatureTable((60,), 12),
    }  # fmt: skip
    assert tables["dim4"].num_rows == 60


def test_tables_have_names_of_their_own():
    own = [
        FeatureRequest("a", 1), FeatureRequest("b", 1, dim=8), FeatureRequest("c", 1, dim=8, optim={"rows": "sgd"}),
        FeatureRequest("d", 1, optim={"rows": "sgd"}), FeatureRequest("e", 1, cache={"capacity_rows": 5}),
        FeatureRequest("f", 1, dim=8),
    ]  # fmt: skip
    features, tables = arrange(own)
    assert list(tables) == [TABLE, "dim8", "dim8-2", "table-2", "table-3"]
    assert [f.table for f in features] == [*tables, "dim8"]


def test_a_task_has_the_auc_of_the_groups_of_a_column():
    task = ClickThroughRate(Clicks(), torch.nn.BCEWithLogitsLoss(), group="item")
    samples = Clicks().train(0, 50)
    batch = task.batches(torch.device("cpu"))(samples)
    assert np.array_equal(batch.group, samples.ids[:, 1])  # user, item, city, hour
    logits = torch.arange(50) % 7 / 1.0
    columns = task.predict(lambda rows, batch: logits, {}, batch)
    found, expected = task.figures(list(columns)), grouped_auc(samples.label, logits.numpy(), samples.ids[:, 1])
    assert found["gauc"] == expected and found["auc"] == auc(samples.label, logits.numpy())
    assert list(task.figures([])) == list(found) and task.figures([])["gauc"] is None


@pytest.mark.parametrize("group", ["tags", "nobody", "", 3])
def test_groups_of_no_column_of_one_value_are_refused(group):
    with pytest.raises(UserError, match="must name a categorical column of one value: clicks has user, item, city"):
        ClickThroughRate(Clicks(), torch.nn.BCEWithLogitsLoss(), group=group)


lists = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=8)


def bag_of(values):
    return Bag(np.array(sum(values, []), np.int64), np.cumsum([0, *map(len, values)]))


def lists_of(bag):
    return [bag.values[begin:end].tolist() for begin, end in zip(bag.offsets, bag.offsets[1:])]


@given(lists, st.data())
def test_samples_of_a_bag_are_taken_as_from_a_list(values, data):
    bag = bag_of(values)
    begin, end = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(values))])))
    assert lists_of(bag[begin:end]) == values[begin:end]
    order = data.draw(st.permutations(range(len(values))))
    assert lists_of(bag[np.array(order, np.int64)]) == [values[i] for i in order]


def test_parts_are_concatenated_in_order():
    source = Clicks()
    whole, parts = source.train(0, 30), concatenate([source.train(0, 7), source.train(7, 7), source.train(7, 30)])
    for name in ("ids", "dense", "label"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name)), name
    assert [lists_of(bag) for bag in whole.bags] == [lists_of(bag) for bag in parts.bags]


@given(st.integers(0, 2**32 - 1))
def test_keys_of_a_table_are_those_of_its_columns_row_by_row_then_of_its_lists(seed):
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 9, (draw.integers(0, 20), 4)) * (1 << 40)
    columns = np.split(draw.permutation(4), draw.integers(0, 5, 1))
    lists = [[draw.integers(0, 12, draw.integers(0, 30)) * (1 << 40) for _ in range(draw.integers(0, 3))] for _ in "ab"]
    index, expected, first = np.full(ids.shape, -1), np.full(ids.shape, -1), 0
    found = _C.unique_of_tables(ids, columns, lists, index)
    for own, of_table, (keys, counts, places) in zip(columns, lists, found, strict=True):
        distinct, numbers = _C.unique(np.concatenate([ids[:, own].reshape(-1), *of_table]))
        ends = np.cumsum([len(ids) * len(own), *map(len, of_table)])
        expected[:, own] = first + numbers[: ends[0]].reshape(len(ids), len(own))
        assert keys.tolist() == distinct.tolist()
        assert counts.tolist() == np.bincount(numbers, minlength=len(distinct)).tolist()
        for of_list, begin, end in zip(places, ends, ends[1:]):
            assert of_list.tolist() == (first + numbers[begin:end]).tolist()
        first += len(keys)
    assert index.tolist() == expected.tolist()


@pytest.mark.parametrize("count", [0, 1, 40])
def test_a_batch_names_all_values_by_unique_keys_of_their_tables(count):
    source = Clicks()
    samples = source.train(0, count) if count else source.train(0, 1)[:0]
    batch = FeatureBatches(source.features, list(source.tables))(samples)
    assert list(batch.keys) == list(source.tables)
    table_of = [name for name, keys in batch.keys.items() for _ in keys]
    joined = torch.cat(list(batch.keys.values()))
    singles = [f for f in source.features if f.pool is None]
    assert torch.equal(joined[batch.index], torch.from_numpy(samples.ids))
    assert all(table_of[place] == f.table for row in batch.index for place, f in zip(row, singles))
    bags = [f for f in source.features if f.pool is not None]
    for (index, offsets), bag, feature in zip(batch.bags, samples.bags, bags):
        assert torch.equal(joined[index], torch.from_numpy(bag.values))
        assert torch.equal(offsets, torch.from_numpy(bag.offsets))
        assert all(table_of[place] == feature.table for place in index)
    for keys in batch.keys.values():
        assert len(keys.unique()) == len(keys)


@pytest.mark.parametrize(
    "bag, message",
    [
        (None, "expected 2 bags, one per feature with pool, got 1"),
        (Bag(np.zeros(3, np.int32), np.array([0, 1, 3])), r"values must be int64 of shape \(n,\), got int32 \(3,\)"),
        (Bag(np.zeros(3, np.int64), np.array([0, 3])), r"offsets must be int64 of shape \(3,\), got int64 \(2,\)"),
        (Bag(np.zeros(3, np.int64), np.array([0, 2, 1])), "offsets must rise from 0 to 3, the number of values"),
        (Bag(np.zeros(3, np.int64), np.array([1, 2, 3])), "offsets must rise from 0 to 3"),
        (Bag(np.zeros(3, np.int64), np.array([0, 5, 3])), "offsets must rise from 0 to 3"),
    ],
)
def test_a_bag_that_does_not_fit_is_refused(bag, message):
    source = Clicks()
    samples = source.train(0, 2)
    samples.bags = samples.bags[:1] if bag is None else (bag, samples.bags[1])
    with pytest.raises(SamplesError, match=message):
        FeatureBatches(source.features, list(source.tables))(samples)
