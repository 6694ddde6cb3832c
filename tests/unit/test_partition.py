"""Partitions are bijections between keys and (owner, row), balanced over owners."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetmpi import _C
from hetmpi.owner.route import PARTITIONS, make_partition

names = st.sampled_from(sorted(PARTITIONS))


@given(names, st.integers(1, 3000), st.integers(1, 17))
def test_every_key_has_one_place_and_every_place_one_key(name, num_rows, size):
    partition = make_partition(name, num_rows, size)
    owner, row = partition.locate(np.arange(num_rows))
    for rank in range(size):
        keys = partition.keys_of(rank, 0, partition.num_local_rows(rank))
        assert (owner[keys] == rank).all()
        assert (row[keys] == np.arange(len(keys))).all()
    assert sum(partition.num_local_rows(rank) for rank in range(size)) == num_rows


@given(names, st.integers(1, 3000), st.integers(1, 17))
def test_shards_differ_by_at_most_one_row(name, num_rows, size):
    sizes = [make_partition(name, num_rows, size).num_local_rows(rank) for rank in range(size)]
    assert max(sizes) - min(sizes) <= 1


def test_hash_spreads_keys_that_share_a_remainder():
    owner, _ = make_partition("hash", 1 << 20, 8).locate(np.arange(0, 1 << 20, 8))
    share = np.bincount(owner, minlength=8) / len(owner)
    assert share.max() < 0.13  # 1/8 each; round robin would give one owner all


def test_hash_holds_for_keys_near_2_to_40():
    partition = make_partition("hash", (1 << 40) + 7, 3)
    keys = np.array([0, 1, 12345678901, 1 << 39, (1 << 40) + 6])
    owner, row = partition.locate(keys)
    back = [partition.keys_of(int(o), int(r), int(r) + 1)[0] for o, r in zip(owner, row)]
    assert back == keys.tolist()


@given(st.integers(1, 1 << 61), st.integers(1, 5000), st.data())
def test_ranges_hold_where_products_exceed_64_bits(num_rows, size, data):
    partition = make_partition("range", num_rows, size)
    rank = data.draw(st.integers(0, size - 1))
    begin, end = rank * num_rows // size, (rank + 1) * num_rows // size
    assert partition.num_local_rows(rank) == end - begin
    keys = sorted({key for key in (0, begin - 1, begin, end - 1, end, num_rows - 1) if 0 <= key < num_rows})
    owner, row = partition.locate(np.array(keys))
    expected = [((key + 1) * size - 1) // num_rows for key in keys]
    assert owner.tolist() == expected
    assert row.tolist() == [key - owner * num_rows // size for key, owner in zip(keys, expected)]


def test_unknown_partition_is_refused_by_name():
    with pytest.raises(ValueError, match="round_robin, range, hash, got ring"):
        make_partition("ring", 10, 2)


@given(names, st.lists(st.integers(0, 499), unique=True), st.integers(1, 7))
def test_route_sends_each_key_to_its_owner_once(name, keys, size):
    partition = make_partition(name, 500, size)
    keys = np.array(keys, np.int64)
    route = partition.route(keys)
    owner, _ = partition.locate(keys)
    positions = []
    for rank in range(size):
        found, order = route.of(rank)
        assert (owner[order] == rank).all() and (keys[order] == found).all()
        positions += order.tolist()
    assert sorted(positions) == list(range(len(keys))) and route.owners == sorted(set(owner.tolist()))


@given(names, st.integers(1, 3000), st.integers(1, 17), st.data())
def test_a_directory_knows_the_rows_of_its_owner_and_refuses_other_keys(name, num_rows, size, data):
    partition = make_partition(name, num_rows, size)
    keys = np.arange(num_rows)
    owner, row = partition.locate(keys)
    for rank in range(size):
        directory = _C.Directory(partition, rank)
        assert directory.rows_of(keys[owner == rank]).tolist() == row[owner == rank].tolist()
    rank = data.draw(st.integers(0, size - 1))
    mine = set(keys[owner == rank].tolist())
    for key in {-1, num_rows, int(data.draw(st.sampled_from(keys)))} - mine:
        with pytest.raises(IndexError, match=f"rank {rank} does not own key {key}"):
            _C.Directory(partition, rank).rows_of(np.array([key]))
