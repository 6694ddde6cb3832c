"""What is shuffled when data are prepared: all rows, over all files; and the sample of eval.max_samples."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tabular import SMALL_SIZES, equal, samples_of, source_of, table_of, text_of, write

from hetmpi.data.batch import Samples, concatenate
from hetmpi.data.files import DataError
from hetmpi.data.source import held_out
from hetmpi.data.tabular import Tabular, buckets, prepare
from hetmpi.data.tabular.files import list_units
from hetmpi.data.tabular.stream import Ranks
from hetmpi.data.triples.source import TripleFiles

NONE = [{"name": "at", "transform": "none"}]


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

    assert [number(1 << 20), number(12 << 20), number(100 << 20), number(2 << 30)] == [1, 1, 6, 32]
    assert number(128 << 20, "b.csv.gz") == 16 and number(1 << 30, "b.csv.gz") == 128
    pq.write_table(pa.table({"x": np.zeros(1 << 24, np.int8)}), tmp_path / "a.parquet")
    assert buckets.num_buckets_of(list_units([str(tmp_path / "a.parquet")], [], 256 << 20)) == 2


def test_buckets_follow_from_the_texts_of_parquet_that_are_divided(tmp_path):
    texts = pa.array([f"{i}|" * 200 for i in range(1 << 15)])
    pq.write_table(pa.table({"x": texts}), tmp_path / "a.parquet", use_dictionary=False)
    units = list_units([str(tmp_path / "a.parquet")], [], 256 << 20)
    assert [buckets.num_buckets_of(units, divided) for divided in ((), {"x"})] == [1, 2]


# eval.max_samples


def by_time(folder, num):
    """A CSV of `num` rows, ordered by a number."""
    table = pa.table({"click": np.arange(num) % 2, "user": np.arange(num) % 9, "at": np.arange(num) + 0.5})
    csv.write_csv(table, folder / "a.csv")
    return folder / "a.csv"


def is_spread(values, least, most):
    """Whether ascending values are as a random sample of [least, most], by their mean and ends."""
    span = most - least
    mean, deviation = np.mean(values), span / np.sqrt(12 * len(values))
    ends = values[0] - least < span / 10 and most - values[-1] < span / 10
    return abs(mean - (least + most) / 2) < 5 * deviation and ends


def test_a_sample_of_rows_in_their_order_is_random_and_the_same_in_parts(tmp_path, small):
    data = source_of(by_time(tmp_path, 2_000), tmp_path / "cache", valid=0.5, shuffle=False, columns=NONE)
    valid = held_out(data, 300)
    whole = valid(0, 300)
    assert is_spread(np.sort(whole.dense[:, 0]), 0, 2_000) and len(np.unique(whole.dense[:, 0])) == 300
    assert equal(whole, concatenate([valid(0, 7), valid(7, 7), valid(7, 200), valid(200, 300)]))
    assert equal(held_out(data, data.num_valid)(0, 300), data.valid(0, 300))


def test_a_sample_of_the_last_file_of_a_stream_is_random(tmp_path, small):
    (tmp_path / "d").mkdir()
    by_time(tmp_path / "d", 2_000)
    for shuffle in (True, False):
        rules = [{"name": "user", "rows": 9}, *NONE]
        data = Tabular(
            str(tmp_path / "d"), 0, "click", cache=str(tmp_path), follow=True, columns=rules, shuffle=shuffle
        )
        (tmp_path / "d/_END").touch()
        os.utime(tmp_path / "d/a.csv", (0, 0))
        data.stream.open(Ranks(0, 1, lambda: None, lambda call: call()), None)
        assert is_spread(np.sort(held_out(data, 300)(0, 300).dense[:, 0]), 0, 2_000)
        in_order = (np.diff(data.train(0, 2_000).dense[:, 0]) > 0).all()
        assert in_order != shuffle


def test_a_sample_of_triples_is_random(tmp_path):
    lines = [f"e{i}\tr\te{i + 1}\n" for i in range(1_000)]
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.txt").write_text("".join(lines))
    data = TripleFiles(str(tmp_path), 0)
    data.prepare(0, 1, lambda: None, lambda line: None)
    numbers = {name: int(name[1:]) for name in data.entities}
    heads = [numbers[data.entities[head]] for head in held_out(data, 100)(0, 100).triples[:, 0]]
    assert is_spread(np.sort(heads), 0, 1_000)
    assert sorted(map(tuple, data.valid(0, 1_000).triples)) == sorted(map(tuple, data.parts["valid"]))


@pytest.mark.parametrize("has_teacher", [True, False])
def test_a_sample_of_samples_of_ones_own_source_is_random_and_of_other_types_the_first(has_teacher):
    class Own:
        num_valid = 200_000

        def valid(self, start, stop):
            at = np.arange(start, stop)
            teacher = np.float32(at / 200_000) if has_teacher else None
            return Samples(at[:, None], np.zeros((len(at), 0), np.float32), np.float32(at % 2), teacher)

    samples = held_out(Own(), 500)(0, 500)
    assert is_spread(samples.ids[:, 0], 0, 200_000)
    assert (samples.label == samples.ids[:, 0] % 2).all()
    assert samples.teacher is None if not has_teacher else np.allclose(samples.teacher * 200_000, samples.ids[:, 0])

    class Other:
        num_valid = 100

        def valid(self, start, stop):
            return list(range(start, stop))

    assert held_out(Other(), 3)(0, 3) == [0, 1, 2]


def test_a_job_that_ends_leaves_the_counts_that_another_made_of_the_same_parts(tmp_path):
    for name, seconds in {"counts-old.npy": 1, "part": 2, "counts-new.npy": 3}.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    prepare.remove_leftovers(str(tmp_path), {"part"})
    assert sorted(os.listdir(tmp_path)) == ["counts-new.npy", "part"]
