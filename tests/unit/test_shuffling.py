"""What is shuffled when data are prepared: all rows, over all files."""

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tabular import SMALL_SIZES, equal, samples_of, source_of, table_of, text_of, write

from hetmpi.data.files import DataError
from hetmpi.data.tabular import buckets, prepare
from hetmpi.data.tabular.files import list_units

LISTS = [{"name": "tags", "pool": "sum"}]


def shrink(patch):
    for name, value in SMALL_SIZES.items():
        patch.setattr(f"hetmpi.data.tabular.{name}", value)
    patch.setattr("hetmpi.data.tabular.source.UNIT_BYTES", 2_000)


@pytest.fixture
def small(monkeypatch):
    shrink(monkeypatch)


def by_label(folder, num, form="csv"):
    """A folder of a file of each label, of which 20 % are clicks."""
    folder.mkdir()
    label = np.repeat([0, 1], [num * 4 // 5, num // 5])
    table = pa.table({"user": np.arange(num) % 50, "number": np.arange(num) + 0.5, "click": label})
    for name, part in (("a", table.slice(num * 4 // 5)), ("b", table.slice(0, num * 4 // 5))):
        if form == "csv":
            csv.write_csv(part, folder / f"{name}.csv")
        else:
            pq.write_table(part, folder / f"{name}.parquet", row_group_size=40)
    return folder


def labels_of_groups(data, split):
    """Labels of each row group of the prepared files."""
    for path in sorted(pa.fs.LocalFileSystem().get_file_info(pa.fs.FileSelector(data.folder, recursive=True)), key=str):
        if path.base_name.startswith(split) and path.base_name.endswith(".parquet"):
            file = pq.ParquetFile(path.path)
            yield from (file.read_row_group(i)["label"].to_numpy() for i in range(file.num_row_groups))


def is_random_sample(labels, share):
    """Whether the labels are as many as of a random sample, within 5 standard deviations."""
    return abs(labels.mean() - share) <= 5 * np.sqrt(share * (1 - share) / len(labels))


def rows_of(samples):
    return sorted(zip(samples.label.tolist(), map(tuple, samples.dense), map(tuple, samples.ids), strict=True))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_each_group_of_files_sorted_by_label_is_a_random_sample(tmp_path, small, form):
    data = source_of(by_label(tmp_path / "d", 3_000, form), tmp_path / "cache", valid=0.2)
    for split in ("train", "valid"):
        groups = list(labels_of_groups(data, split))
        assert len(groups) > 30 and all(is_random_sample(labels, 0.2) for labels in groups)
    batches = [data.train(start, start + 200).label for start in range(0, 2_000, 200)]
    assert all(is_random_sample(labels, 0.2) for labels in batches)


def test_the_first_held_out_rows_are_a_random_sample(tmp_path, small):
    data = source_of(by_label(tmp_path / "d", 3_000), tmp_path / "cache", valid=0.2)
    assert all(is_random_sample(data.valid(0, num).label, 0.2) for num in (50, 100, 300))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_the_rows_are_those_of_the_files_in_their_order_without_shuffling(tmp_path, small, form):
    folder = by_label(tmp_path / "d", 1_000, form)
    data = source_of(folder, tmp_path / "cache", valid=0.2)
    in_order = source_of(folder, tmp_path / "cache", valid=0.2, shuffle=False)
    assert all(rows_of(one) == rows_of(other) for one, other in zip(samples_of(data), samples_of(in_order)))
    for part in samples_of(in_order):
        assert (np.diff(part.label) <= 0).all()  # clicks.csv comes first
        assert all((np.diff(part.dense[part.label == label, 0]) > 0).all() for label in (0, 1))
    again = in_order.train(in_order.num_train, 2 * in_order.num_train)
    assert equal(again, in_order.train(0, in_order.num_train))


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    num=st.integers(40, 200), parts=st.integers(1, 4), shared=st.sampled_from([1_000, 8_000]), seed=st.integers(0, 9)
)
def test_any_number_of_ranks_prepares_the_rows_of_the_files(tmp_path_factory, num, parts, shared, seed):
    folder, table = tmp_path_factory.mktemp("any"), table_of(num, seed)
    (folder / "d").mkdir()
    for part in range(parts):
        begin, end = num * part // parts, num * (part + 1) // parts
        write(folder / f"d/{part}.csv", text_of(table.slice(begin, end - begin)))
    rule = [{"name": "tags", "pool": "sum", "separator": "|"}]
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        patch.setattr("hetmpi.data.tabular.buckets.SHARED_BYTES", shared)
        one, two, three = (source_of(folder / "d", folder / f"{n}", columns=rule, size=n) for n in (1, 2, 3))
        assert all(map(equal, samples_of(one), samples_of(two))) and all(map(equal, samples_of(one), samples_of(three)))
        in_order = source_of(folder / "d", folder / "0", columns=rule, shuffle=False)
        for split, other in zip(samples_of(one), samples_of(in_order)):
            assert len(split) == len(other) and rows_of(split) == rows_of(other)
            assert np.bincount(split.bags[0].values).tolist() == np.bincount(other.bags[0].values).tolist()


def test_rows_held_out_by_a_file_or_by_a_column_are_the_same_whatever_is_shuffled(tmp_path, small):
    path = write(tmp_path / "a.csv", text_of(table_of(400)))
    other = write(tmp_path / "b.csv", text_of(table_of(100, seed=1)))
    for valid in (str(other), {"column": "day", "last": 2}):
        found = [source_of(path, tmp_path / "cache", valid=valid, columns=[{"name": "tags", "kind": "drop"}], shuffle=s)
                 for s in (True, False)]  # fmt: skip
        assert rows_of(samples_of(found[0])[1]) == rows_of(samples_of(found[1])[1])
        assert rows_of(samples_of(found[0])[0]) == rows_of(samples_of(found[1])[0])


def test_prepared_data_are_refused_by_a_run_of_the_other_order(tmp_path, small):
    folder = by_label(tmp_path / "d", 1_000)
    data = source_of(folder, tmp_path / "cache", shuffle=False)
    with pytest.raises(DataError, match="was prepared with data.shuffle=false: give the raw files"):
        source_of(data.folder, tmp_path / "cache")
    assert source_of(data.folder, tmp_path / "cache", shuffle=False).num_train == data.num_train


def test_no_pieces_are_left_over(tmp_path, small):
    data = source_of(by_label(tmp_path / "d", 1_000), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.arrow")) and not list((tmp_path / "cache").rglob("pieces-*"))
    assert data.num_train


@pytest.mark.parametrize("kind", ["cut", "empty", "other columns"])
def test_a_damaged_piece_is_named(tmp_path, small, kind):
    folder = by_label(tmp_path / "d", 1_000)
    source = source_of(folder, tmp_path / "first")
    job = source._job(0, lambda: None, print)[0]
    job.folder = str(tmp_path / "again")
    prepare.prepare(job)
    piece = tmp_path / "again" / f"pieces-{job.names[0]}" / "train.arrow"
    if kind == "other columns":
        with ipc.new_file(piece, pa.schema([("x", pa.int64())])) as file:
            for _ in range(job.num_buckets):
                file.write_batch(pa.record_batch({"x": [1]}))
    else:
        piece.write_bytes(piece.read_bytes()[: 300 if kind == "cut" else 0])
    with pytest.raises(DataError, match=r"part 1 of \d+ cannot be prepared in .*again"):
        prepare.shuffle(job)


def test_buckets_follow_from_the_size_of_the_files(tmp_path):
    def number(size, name="a.csv"):
        path = tmp_path / name
        path.touch()
        with open(path, "r+b") as file:
            file.truncate(size)
        return buckets.num_buckets_of(list_units([str(path)], [], 256 << 20))

    assert [number(1 << 20), number(12 << 20), number(100 << 20), number(2 << 30)] == [1, 3, 16, 32]
    assert number(128 << 20, "b.csv.gz") == 16 and number(1 << 30, "b.csv.gz") == 128
    pq.write_table(pa.table({"x": np.zeros(1 << 23, np.int8)}), tmp_path / "a.parquet")
    assert buckets.num_buckets_of(list_units([str(tmp_path / "a.parquet")], [], 256 << 20)) == 4
