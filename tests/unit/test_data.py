"""Data sets and loader, in one process, which plays the ranks of a job one after another."""

import errno
import gzip
import json
import os
import random
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetmpi import _C
from hetmpi.data import criteo as criteo_module
from hetmpi.data.batch import to_batch
from hetmpi.data.criteo import Criteo
from hetmpi.data.distinct import NUM_REGISTERS, estimate, observe
from hetmpi.data.loader import Loader
from hetmpi.data.synthetic import KAGGLE_FIELD_ROWS, Synthetic, Zipf, scattering_stride
from hetmpi.data.tabular import DataError
from hetmpi.data.tabular import prepare as preparing
from hetmpi.data.tabular.files import list_units
from hetmpi.data.tabular.text import TextRows, pieces
from hetmpi.errors import UserError
from hetmpi.metrics import auc

SAMPLE = Path(__file__).resolve().parents[3] / "shared/data/criteo/sample.tsv"
SIZES = [1, 2, 3, 4]


def quiet(line):
    """A report that discards its lines."""


def check_slices(train, start, size, batch):
    """The slices of `size` ranks are parts of the same stream."""
    whole = train(start, start + size * batch)
    for rank in range(size):
        part = slice(rank * batch, (rank + 1) * batch)
        assert equal(train(start + part.start, start + part.stop), whole[part])


def equal(a, b):
    """Whether two Samples are equal, bit for bit."""
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "dense", "label"))


def make_line(rng):
    """A valid line of raw text, without its end; label and first integer are rarely missing, the other values often."""
    integers = [str(rng.choice([-1, 0, 1, 7, 300])) if rng.random() < 0.8 else "" for _ in range(13)]
    strings = [f"{rng.randrange(1 << 32):08x}" if rng.random() < 0.8 else "" for _ in range(26)]
    return "\t".join([str(int(rng.random() < 0.25)), *integers, *strings])


def make_lines(num, seed=0):
    """`num` valid lines."""
    rng = random.Random(seed)
    return [make_line(rng) for _ in range(num)]


def write(path, lines, end="\n"):
    """Writes lines to a file and returns its name."""
    path.write_bytes("".join(line + end for line in lines).encode("latin-1"))
    return str(path)


def job_of(source, cache, report=quiet, **settings):
    """The preparation of Criteo text."""
    return Criteo(source, 0, str(cache), **settings)._job(0, lambda: None, report)[0]


def opened(source, cache, size=1, seed=0, **settings):
    """The Criteo data set of `source`, prepared by `size` ranks."""
    for rank in range(size):
        preparing.prepare(job_of(source, cache, **settings), rank, size)
    data = Criteo(source, seed, str(cache), **settings)
    data.prepare(0, 1, lambda: None, report=quiet)
    return data


def manifest_of(cache):
    """The manifest of the only prepared folder in `cache`."""
    (folder,) = Path(cache).glob("*.tsv-*")
    return json.loads((folder / "manifest.json").read_text())


def contents(cache):
    """All prepared files: name in the prepared folder -> bytes. The folder's name depends on the source's path."""
    files = [path for path in Path(cache).rglob("*") if path.is_file()]
    return {"/".join(path.relative_to(cache).parts[1:]): path.read_bytes() for path in files}


def rows_of(data):
    """All rows of a Criteo data set as sorted tuples: training rows, held-out rows."""
    splits = data.train(0, data.num_train), data.valid(0, data.num_valid)
    return [sorted(zip(s.label.tolist(), map(tuple, s.dense), map(tuple, s.ids), strict=True)) for s in splits]


@pytest.fixture(scope="module")
def synthetic():
    return Synthetic(seed=3, scale=0.001, num_valid=20_000)


def shrink(patch):
    """Small sizes, so that a few rows make several units, groups, blocks and shuffles."""
    sizes = {"writer.GROUP_ROWS": 16, "writer.FILE_ROWS": 64, "buckets.BATCH_BYTES": 1_000, "buckets.TAKE_ROWS": 24}
    for name, value in {**sizes, "buckets.SHARED_BYTES": 50_000}.items():
        patch.setattr(f"hetmpi.data.tabular.{name}", value)
    patch.setattr("hetmpi.data.tabular.source.UNIT_BYTES", 20_000)
    patch.setattr("hetmpi.data.tabular.text.BLOCK_BYTES", 5_000)


@pytest.fixture
def small_units(monkeypatch):
    shrink(monkeypatch)


# Batches


def test_a_batch_names_the_ids_by_unique_keys(synthetic):
    samples = synthetic.train(0, 500)
    batch = to_batch(samples)
    keys = batch.keys["table"]
    assert len(keys.unique()) == len(keys) < batch.index.numel()
    assert torch.equal(keys[batch.index], torch.from_numpy(samples.ids))


def test_a_batch_refuses_ids_that_are_not_int64(synthetic):
    samples = synthetic.train(0, 2)
    samples.ids = samples.ids.astype(np.float32)
    with pytest.raises(TypeError, match=r"ids must be int64 of shape \(B, F\), got float32 \(2, 26\)"):
        to_batch(samples)


# Synthetic


@settings(max_examples=20, deadline=None)
@given(size=st.sampled_from(SIZES), start=st.integers(0, 1 << 40), batch=st.integers(1, 50))
def test_synthetic_samples_depend_on_their_position_alone(synthetic, size, start, batch):
    check_slices(synthetic.train, start, size, batch)


def test_synthetic_streams_of_two_seeds_differ(synthetic):
    assert not equal(synthetic.train(0, 100), Synthetic(seed=4, scale=0.001).train(0, 100))


def test_synthetic_held_out_samples_are_not_those_of_training(synthetic):
    assert not equal(synthetic.train(0, 100), synthetic.valid(0, 100))


def test_synthetic_fields_have_kaggle_sizes():
    assert Synthetic(seed=0, scale=1).field_rows == list(KAGGLE_FIELD_ROWS)
    assert Synthetic(seed=0, scale=0.1).num_rows == pytest.approx(3.376e6, rel=1e-3)
    assert min(Synthetic(seed=0, scale=1e-6).field_rows) == 3


@example(seed=-(1 << 63), scale=0.01, zipf=1.0)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(-(1 << 63), (1 << 63) - 1), scale=st.floats(1e-7, 1), zipf=st.floats(0, 3))
def test_synthetic_keys_lie_in_their_fields(seed, scale, zipf):
    data = Synthetic(seed, scale, zipf)
    ends = np.cumsum(data.field_rows)
    ids = data.train(0, 1000).ids
    assert ids.dtype == np.int64 and (ids < ends).all() and (ids >= ends - data.field_rows).all()


def test_the_teacher_reaches_an_auc_of_080_with_a_quarter_positive():
    for seed, scale in [(0, 0.01), (1, 0.1)]:
        samples = Synthetic(seed, scale).valid(0, 50_000)
        assert auc(samples.label, samples.teacher) == pytest.approx(0.80, abs=0.015)
        assert samples.label.mean() == pytest.approx(0.25, abs=0.015)
        assert samples.teacher.mean() == pytest.approx(samples.label.mean(), abs=0.01)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.05])
def test_zipf_knows_the_chances_of_its_ranks(exponent):
    law = Zipf(np.array([3, 50]), exponent)
    ranks = law.ranks(np.random.default_rng(0).random((200_000, 2)))
    for field, num in enumerate((3, 50)):
        chances = law.chances(field)
        assert abs(chances.sum() - 1) < 1e-9
        assert np.abs(np.bincount(ranks[:, field], minlength=num) / len(ranks) - chances).max() < 4e-3


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.05, 2.0])
def test_zipf_ranks_follow_the_law(exponent):
    rows = np.array([1, 4, 1000])
    numbers = (np.arange(200_000) + 0.5) / 200_000
    ranks = Zipf(rows, exponent).ranks(np.stack([numbers] * 3, axis=1))
    for field, n in enumerate(rows):
        law = np.arange(1, n + 1) ** -exponent
        share = np.bincount(ranks[:, field], minlength=n) / len(numbers)
        assert len(share) == n
        assert share == pytest.approx(law / law.sum(), rel=0.08, abs=1e-5)


@given(rows=st.integers(1, 5000))
def test_scattering_is_a_bijection(rows):
    assert np.array_equal(np.sort(np.arange(rows) * scattering_stride(rows) % rows), np.arange(rows))


@pytest.mark.parametrize(
    "wrong, kind",
    [
        ({"scale": 0}, "a number"), ({"scale": float("inf")}, "a number"), ({"scale": None}, "a number"),
        ({"zipf": -1}, "a number"), ({"zipf": "x"}, "a number"), ({"num_train": 0}, "an integer"),
        ({"num_valid": 0}, "an integer"), ({"num_valid": 1e11}, "an integer"), ({"seed": [1]}, "an integer"),
    ],
)  # fmt: skip
def test_synthetic_refuses_impossible_settings(wrong, kind):
    with pytest.raises(UserError, match=f"^data.{next(iter(wrong))} must be {kind} of at least "):
        Synthetic(**{"seed": 0, **wrong})


@pytest.mark.parametrize("positions", [(-1, 1), (2, 1), (0, 20_001)])
def test_positions_outside_the_held_out_part_are_refused(synthetic, positions):
    with pytest.raises(IndexError, match="0 <= start <= stop <= 20,000"):
        synthetic.valid(*positions)


# Criteo: parsing


def test_parsed_values_are_those_of_the_text(tmp_path):
    strings = [f"{f:08x}" for f in range(25)]
    line = "\t".join(["1", "", "-2", *["3"] * 11, "", *strings])
    job = job_of(write(tmp_path / "one.tsv", [line]), tmp_path / "cache")
    (rows,) = TextRows(job.units[0], job.reading)
    row = [column[0].as_py() for column in rows.table.columns]
    assert row[0] == 1
    assert np.isnan(row[1]) and row[2:14] == [-2] + [3] * 11
    assert row[14:] == [xxhash.xxh3_64_intdigest(text.encode(), seed=f) >> 1 for f, text in enumerate(["", *strings])]


def test_integers_are_logarithms_and_ids_are_hashes_modulo_the_rows(tmp_path):
    line = "\t".join(["1", "", "-2", *["3"] * 11, *["68fd1e64"] * 26])
    data = opened(write(tmp_path / "a.tsv", [line] * 100), tmp_path / "cache", field_rows=list(range(10, 36)))
    samples = data.train(0, 1)
    assert samples.dense[0] == pytest.approx([0, 0] + [np.log(4)] * 11)
    keys = [(xxhash.xxh3_64_intdigest(b"68fd1e64", seed=f) >> 1) % (10 + f) for f in range(26)]
    assert (samples.ids[0] - np.cumsum([0, *data.field_rows[:-1]])).tolist() == keys


def test_one_text_has_another_hash_in_each_field():
    offsets, text = np.array([0, 8], np.int32), np.frombuffer(b"68fd1e64", np.uint8)
    assert len({int(_C.hash_texts(offsets, text, f, [])[0]) for f in range(26)}) == 26


BAD = {
    "short": lambda cells: cells[:-1],
    "long": lambda cells: cells + ["0"],
    "integer": lambda cells: cells[:5] + ["1,5"] + cells[6:],
    "label": lambda cells: ["2"] + cells[1:],
    "garbage": lambda cells: ["\xff\x00\xfe"],
    "no label": lambda cells: [""] + cells[1:],
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_dropped_counted_and_shown(tmp_path, kind):
    lines = make_lines(200)
    bad = "\t".join(BAD[kind](lines[7].split("\t")))
    data = opened(write(tmp_path / "bad.tsv", lines[:50] + [bad] + lines[50:]), tmp_path / "cache")
    clean = opened(write(tmp_path / "good.tsv", lines), tmp_path / "clean")
    manifest = manifest_of(tmp_path / "cache")
    assert manifest["bad"]["rows"] == sum(manifest["bad"]["kinds"].values()) == 1
    assert f"{tmp_path}/bad.tsv, line 51, " in manifest["bad"]["examples"][0]
    assert data.num_train + data.num_valid == clean.num_train + clean.num_valid == 200


@settings(max_examples=15, deadline=None)
@given(spoilt=st.lists(st.sampled_from(sorted(BAD)) | st.none(), min_size=30, max_size=120))
def test_good_rows_and_bad_rows_add_up(tmp_path_factory, spoilt):
    folder = tmp_path_factory.mktemp("mixed")
    lines = make_lines(len(spoilt))
    mixed = ["\t".join(BAD[kind](line.split("\t"))) if kind else line for line, kind in zip(lines, spoilt)]
    job = job_of(write(folder / "mixed.tsv", [make_line(random.Random(0)), *mixed]), folder / "cache")
    rows = list(TextRows(job.units[0], job.reading))
    assert sum(len(block.table) for block in rows) == spoilt.count(None) + 1
    assert sum(block.bad.rows for block in rows) == len(spoilt) - spoilt.count(None)


def test_more_bad_rows_than_allowed_end_the_prepare(tmp_path):
    source = write(tmp_path / "bad.tsv", make_lines(50) + ["1\t2"] * 3)
    with pytest.raises(DataError, match="more bad rows than data.max_bad_rows=2") as error:
        opened(source, tmp_path / "cache", max_bad_rows=2)
    assert "wrong number of columns 3" in str(error.value) and "2 columns instead of 40" in str(error.value)
    assert opened(source, tmp_path / "cache", max_bad_rows=3).num_train


def test_bad_rows_are_summed_over_units(tmp_path, small_units):
    lines = make_lines(400)
    lines[10] = lines[390] = "1\t2"
    with pytest.raises(DataError, match="data.max_bad_rows=1"):
        opened(write(tmp_path / "bad.tsv", lines), tmp_path / "cache", size=2, max_bad_rows=1)


def test_missing_values_are_counted(tmp_path):
    lines = make_lines(300)
    opened(write(tmp_path / "a.tsv", lines), tmp_path / "cache")
    missing = manifest_of(tmp_path / "cache")["missing"]
    assert missing == [sum(not line.split("\t")[c] for line in lines) for c in range(1, 40)]


# Criteo: preparing


@pytest.mark.parametrize("size", SIZES)
def test_prepared_files_do_not_depend_on_the_rank_count(tmp_path, small_units, size):
    source = write(tmp_path / "a.tsv", make_lines(500))
    opened(source, tmp_path / "one")
    opened(source, tmp_path / "many", size)
    assert len(list((tmp_path / "one").glob("*/*"))) > 5
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


@settings(max_examples=12, deadline=None)
@given(num=st.integers(1, 60), cut=st.integers(50, 4000), end=st.sampled_from(["\n", "\r\n"]), has_end=st.booleans())
def test_units_share_out_every_line_once(tmp_path_factory, num, cut, end, has_end):
    lines = make_lines(num, seed=cut)
    path = tmp_path_factory.mktemp("cut") / "a.tsv"
    write(path, lines, end)
    if not has_end:
        path.write_bytes(path.read_bytes().removesuffix(end.encode()))
    units, reading = list_units([str(path)], [], cut), job_of(str(path), path.parent / "cache").reading
    assert b"".join(text for unit in units for text in pieces(unit)) == path.read_bytes()
    assert sum(len(rows.table) for unit in units for rows in TextRows(unit, reading)) == num


def test_an_interrupted_prepare_goes_on_with_what_is_missing(tmp_path, small_units, monkeypatch):
    source, cache = write(tmp_path / "a.tsv", make_lines(500)), str(tmp_path / "cache")
    opened(source, tmp_path / "whole")
    done, resumed = [], []
    job = job_of(source, cache, done.append)

    def killed_in_the_third(*paths):
        if len(done) == 2:
            raise KeyboardInterrupt
        os.rename(*paths)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing, "publish", killed_in_the_third)
        preparing.prepare(job)
    kept = {name: data for name, data in contents(cache).items() if not name.startswith("pieces-")}
    preparing.prepare(job_of(source, cache, resumed.append))
    preparing.shuffle(job_of(source, cache))
    preparing.finish(job_of(source, cache))
    assert len(done) == 2 and len(resumed) == len(job.units) - 2
    assert kept and kept.items() <= contents(cache).items()
    assert contents(cache) == contents(tmp_path / "whole")


def test_an_interrupted_shuffle_goes_on_with_what_is_missing_and_reads_no_unit_again(
    tmp_path, small_units, monkeypatch
):
    source, cache, again = write(tmp_path / "a.tsv", make_lines(500)), str(tmp_path / "cache"), []
    opened(source, tmp_path / "whole")
    job = job_of(source, cache)
    assert job.num_buckets > 3
    preparing.prepare(job)

    def killed_in_the_third(part, final):
        if job.bucket_names[2] in final:
            raise KeyboardInterrupt
        os.rename(part, final)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing, "publish", killed_in_the_third)
        preparing.shuffle(job)
    preparing.prepare_together(job_of(source, cache, again.append), 0, 1, lambda: None)
    assert not any("prepared part" in line for line in again)
    assert contents(cache) == contents(tmp_path / "whole")


def test_a_job_whose_pieces_another_job_removes_takes_the_parts_of_that_job(tmp_path, small_units):
    source, cache = write(tmp_path / "a.tsv", make_lines(500)), str(tmp_path / "cache")
    job = job_of(source, cache)
    preparing.prepare(job)

    def other_job_ends():
        preparing.prepare_together(job_of(source, cache), 0, 1, lambda: None)

    preparing.prepare_together(job, 0, 1, other_job_ends)
    preparing.write_bucket(job, 0, job.bucket_names[0])
    assert contents(cache) == contents(opened(source, tmp_path / "whole") and tmp_path / "whole")


def test_pieces_that_a_job_writes_after_the_end_of_another_one_are_removed(tmp_path, small_units):
    source, cache = write(tmp_path / "a.tsv", make_lines(500)), tmp_path / "cache"
    job = job_of(source, cache)
    preparing.prepare(job)
    preparing.prepare_together(job_of(source, cache), 0, 1, lambda: None)
    left = Path(job.folder) / (preparing.PIECES + job.names[0])
    left.mkdir()
    preparing.finish(job)
    assert not left.exists()


def test_what_a_killed_prepare_left_is_not_counted_and_goes_after_an_hour(tmp_path):
    source, cache = write(tmp_path / "a.tsv", make_lines(50)), tmp_path / "cache"
    folder = Path(job_of(source, cache).folder)
    parts = [folder / f"00000-{'0' * 16}.part-host-{pid}" for pid in (1, 2)]
    for part in parts:
        part.mkdir(parents=True)
    os.utime(parts[0], (0, 0))
    opened(source, cache)
    assert [part.exists() for part in parts] == [False, True]


def test_what_a_killed_prepare_left_is_no_hindrance_to_one_of_the_same_name(tmp_path):
    source = write(tmp_path / "a.tsv", make_lines(50))
    job = job_of(source, tmp_path / "cache")
    left = Path(job.folder) / f"{job.names[0]}.part-{socket.gethostname()}-{os.getpid()}"
    left.mkdir(parents=True)
    (left / "junk").touch()
    opened(source, tmp_path / "cache")
    assert not any(Path(tmp_path / "cache").rglob("junk"))


def test_prepared_data_are_not_prepared_again(tmp_path):
    source, cache = write(tmp_path / "a.tsv", make_lines(50)), str(tmp_path / "cache")
    opened(source, cache)
    before = {path: path.stat().st_mtime_ns for path in Path(cache).rglob("*")}
    told = []
    Criteo(source, 0, cache).prepare(0, 1, lambda: None, report=told.append)
    assert told == [] and before == {path: path.stat().st_mtime_ns for path in Path(cache).rglob("*")}


def test_a_changed_source_is_prepared_anew_and_said_so(tmp_path):
    source, cache = write(tmp_path / "a.tsv", make_lines(50)), str(tmp_path / "cache")
    opened(source, cache)
    write(tmp_path / "a.tsv", make_lines(70, seed=1))
    told = []
    data = Criteo(source, 0, cache)
    data.prepare(0, 1, lambda: None, report=told.append)
    assert "has changed since it was prepared" in told[0]
    assert data.num_train + data.num_valid == 70
    assert [len(list(Path(data.folder).glob(name))) for name in ("0*", "bucket-*")] == [1, 1]


@pytest.mark.parametrize("form", ["gz", "gz of two members", "CRLF", "a folder", "a glob"])
def test_the_form_of_the_source_does_not_matter(tmp_path, form):
    lines = make_lines(200)
    plain = opened(write(tmp_path / "a.tsv", lines), tmp_path / "plain")
    other = tmp_path / "other"
    other.mkdir()
    source = str(other / "a.tsv")
    if form.startswith("gz"):
        source += ".gz"
        text = (tmp_path / "a.tsv").read_bytes()
        middle = 1000 if "two" in form else 0
        (other / "a.tsv.gz").write_bytes(gzip.compress(text[:middle]) + gzip.compress(text[middle:]))
    else:
        write(other / "a.tsv", lines, end="\r\n" if form == "CRLF" else "\n")
        (other / ".hidden").write_text("no data")
    source = {"a folder": str(other), "a glob": str(other / "*.tsv")}.get(form, source)
    assert rows_of(opened(source, tmp_path / "cache")) == rows_of(plain)


def test_a_tenth_is_held_out_and_no_row_is_lost(tmp_path):
    lines = make_lines(3000)
    data = opened(write(tmp_path / "a.tsv", lines), tmp_path / "cache", rows_per_value=1e6)
    assert data.num_train + data.num_valid == 3000
    assert 250 < data.num_valid < 350
    train, valid = rows_of(data)
    assert len({ids for _, _, ids in train + valid}) == 3000


def test_a_prepared_folder_can_be_the_source(tmp_path):
    data = opened(write(tmp_path / "a.tsv", make_lines(50)), tmp_path / "cache")
    (tmp_path / "a.tsv").unlink()
    again = Criteo(data.folder, 0)
    again.prepare(0, 1, lambda: None)
    assert equal(again.train(0, 100), data.train(0, 100))


@pytest.mark.parametrize("kind", ["missing", "empty", "empty folder", "blank", "empty gz", "other text"])
def test_a_source_without_data_is_refused_by_name(tmp_path, kind):
    source = tmp_path / "source.tsv"
    if kind == "empty folder":
        source.mkdir()
    elif kind == "empty gz":
        source = tmp_path / "source.gz"
        source.write_bytes(gzip.compress(b""))
    elif kind != "missing":
        source.write_text({"empty": "", "blank": "\n\n", "other text": "some,comma,separated\n" * 500}[kind])
    with pytest.raises(DataError, match=f"data.path.*{source.name}"):
        opened(str(source), tmp_path / "cache")


@pytest.mark.parametrize("kind", ["cut short", "no gzip at all"])
def test_a_broken_gz_file_is_refused_by_name(tmp_path, kind):
    compressed = gzip.compress("".join(line + "\n" for line in make_lines(500)).encode())
    (tmp_path / "a.gz").write_bytes(compressed[:-5000] if kind == "cut short" else b"plain text\n" * 10)
    with pytest.raises(DataError, match="a.gz cannot be decompressed"):
        opened(str(tmp_path / "a.gz"), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.parquet"))


def test_a_full_disk_is_told_and_keeps_complete_units_only(tmp_path, small_units, monkeypatch):
    source, done = write(tmp_path / "a.tsv", make_lines(500)), []

    def full(*arguments):
        if len(done) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return np_save(*arguments)

    np_save = np.save
    monkeypatch.setattr(np, "save", full)
    job = job_of(source, tmp_path / "cache", done.append)
    with pytest.raises(DataError, match="no space left while preparing .*a.tsv"):
        preparing.prepare(job)
    assert sorted(path.name[:6] for path in Path(job.folder).glob("0*")) == ["00000-", "00001-"]
    assert not any(Path(job.folder).glob("*.part-*"))


def test_a_cache_that_cannot_be_made_is_refused_by_name(tmp_path):
    source = write(tmp_path / "a.tsv", make_lines(50))
    with pytest.raises(DataError, match="data.cache=.*a.tsv.*: .* set data.cache to a folder"):
        preparing.prepare(job_of(source, source))


def test_a_unit_that_another_rank_has_not_prepared_is_missed(tmp_path, small_units):
    job = job_of(write(tmp_path / "a.tsv", make_lines(500)), tmp_path / "cache")
    preparing.prepare(job, 0, 2)
    with pytest.raises(DataError, match="prepared parts are missing; it must be a folder that all ranks share"):
        preparing.finish(job)


def test_prepare_is_also_a_command(tmp_path, capsys):
    criteo_module.main([write(tmp_path / "a.tsv", make_lines(50)), str(tmp_path / "cache")])
    assert "rows to train on" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no file"):
        criteo_module.main([str(tmp_path / "b.tsv"), str(tmp_path / "cache")])


# Criteo: reading


@pytest.fixture(scope="module")
def criteo(tmp_path_factory):
    """About 900 rows to train on, in 16 units and some 60 groups, of which 2 are cached."""
    folder = tmp_path_factory.mktemp("criteo")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        return opened(write(folder / "a.tsv", make_lines(1000)), folder / "cache", cached_groups=2)


@settings(max_examples=20, deadline=None)
@given(size=st.sampled_from(SIZES), start=st.integers(0, 5000), batch=st.integers(1, 400))
def test_criteo_samples_depend_on_their_position_alone(criteo, size, start, batch):
    check_slices(criteo.train, start, size, batch)


def test_every_epoch_goes_through_all_rows_in_an_order_of_its_own(criteo):
    n = criteo.num_train
    epochs = [criteo.train(e * n, (e + 1) * n) for e in range(3)]
    for a, b in [(0, 1), (1, 2), (0, 2)]:
        assert not equal(epochs[a], epochs[b])
        assert np.array_equal(np.sort(epochs[a].ids, axis=0), np.sort(epochs[b].ids, axis=0))


def test_the_seed_decides_the_order_and_not_the_held_out_rows(criteo):
    other = Criteo(criteo.folder, criteo.seed + 1)
    other.prepare(0, 1, lambda: None)
    assert not equal(other.train(0, 50), criteo.train(0, 50))
    assert equal(other.valid(0, other.num_valid), criteo.valid(0, criteo.num_valid))


def test_slices_of_no_samples_are_empty(criteo):
    for samples in (criteo.train(5, 5), criteo.valid(criteo.num_valid, criteo.num_valid)):
        assert samples.ids.shape == (0, 26) and samples.dense.shape == (0, 13) and samples.label.shape == (0,)


def test_threads_read_the_same_samples(criteo):
    expected = [criteo.train(i * 30, (i + 1) * 30) for i in range(60)]
    got = [None] * 60

    def read(first):
        for i in range(first, 60, 4):
            got[i] = criteo.train(i * 30, (i + 1) * 30)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(equal, got, expected))


def test_only_the_groups_that_a_slice_touches_are_read(criteo, monkeypatch):
    fresh = Criteo(criteo.folder, criteo.seed)
    fresh.prepare(0, 1, lambda: None)
    read = []
    read_row_group = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda *a, **k: read.append(a) or read_row_group(*a, **k))
    fresh.train(100, 120)
    fresh.train(100, 120)
    assert 2 <= len(read) <= 3


@pytest.mark.parametrize(
    "wish, rows",
    [({"rows_per_value": 3}, 900), ({"max_field_rows": 250}, 250), ({"field_rows": [7] * 26}, 7)],
)
def test_rows_of_a_field_follow_its_distinct_values_or_the_wish(tmp_path, wish, rows):
    lines = ["\t".join(["0"] * 14 + [f"{i % 300:x}"] * 26) for i in range(1000)]
    data = opened(write(tmp_path / "a.tsv", lines), tmp_path / "cache", **wish)
    assert data.field_rows == pytest.approx([rows] * 26, rel=0.03)
    assert data.num_rows == sum(data.field_rows)
    first = np.cumsum([0, *data.field_rows])
    ids = data.train(0, data.num_train).ids
    assert (ids >= first[:-1]).all() and (ids < first[1:]).all()


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"field_rows": [1, 2]}, "data.field_rows must be a list of 26 integers"),
        ({"field_rows": [0] * 26}, "each of data.field_rows must be an integer of at least 1, got 0"),
        ({"field_rows": "x" * 26}, "data.field_rows must be a list of 26 integers"),
        ({"path": 5}, "data.path must be a path, got 5"),
        ({"cache": [1]}, r"data.cache must be a path, got \[1\]"),
        ({"rows_per_value": 0}, "data.rows_per_value must be a number"),
        ({"cached_groups": 0}, "data.cached_groups must be"),
        ({"max_field_rows": 1.5}, "data.max_field_rows must be"),
        ({"max_bad_rows": None}, "data.max_bad_rows must be"),
    ],
)
def test_criteo_refuses_impossible_settings(wrong, told):
    with pytest.raises(UserError, match=told):
        Criteo(**{"path": "a.tsv", "seed": 0, **wrong})


@pytest.mark.parametrize("num", [10, 30_000, 1_000_000])
def test_distinct_values_are_estimated_within_three_percent(num):
    rng = np.random.default_rng(num)
    halves = np.zeros((2, NUM_REGISTERS), dtype=np.uint8)
    values = rng.integers(0, 1 << 63, num, dtype=np.int64)
    for registers, part in zip(halves, (values[: num // 2 + 1], values[num // 3 :])):
        observe(registers, part)
        observe(registers, part)
    assert estimate(halves.max(axis=0)) == pytest.approx(num, rel=0.03)


def test_the_criteo_sample_is_read_whole(tmp_path):
    if not SAMPLE.exists():
        pytest.skip(f"{SAMPLE} is absent: it is not part of the project")
    data = opened(str(SAMPLE), tmp_path / "cache")
    assert data.num_train + data.num_valid == 14_606
    label = np.concatenate([data.train(0, data.num_train).label, data.valid(0, data.num_valid).label])
    assert label.mean() == pytest.approx(0.216, abs=0.001)
    assert sum(manifest_of(tmp_path / "cache")["distinct"]) == pytest.approx(58_000, rel=0.03)


# Loader


def counted(calls):
    """A `train` method that records its calls."""
    data = Synthetic(seed=0, scale=0.001)
    return lambda start, stop: calls.append((start, stop)) or data.train(start, stop)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_loader_gives_the_steps_in_order(synthetic, threads):
    with Loader(synthetic.train, 1, 3, 8, 5, 25, threads=threads, prefetch=4) as loader:
        labels = [(batch.label, batch.dense) for batch in loader]
    assert len(labels) == len(loader) == 20
    for step, (label, dense) in zip(range(5, 25), labels):
        expected = synthetic.train((3 * step + 1) * 8, (3 * step + 2) * 8)
        assert np.array_equal(label.numpy(), expected.label) and np.array_equal(dense.numpy(), expected.dense)


@pytest.mark.parametrize("size", SIZES)
def test_the_ranks_slices_make_the_global_batch(synthetic, size):
    loaders = [Loader(synthetic.train, rank, size, 12 // size, 0, 3) for rank in range(size)]
    for step, batches in enumerate(zip(*loaders)):
        dense = torch.cat([batch.dense for batch in batches])
        assert np.array_equal(dense.numpy(), synthetic.train(step * 12, (step + 1) * 12).dense)


def test_the_loader_makes_no_more_batches_ahead_than_it_may():
    calls = []
    with Loader(counted(calls), 0, 1, 4, 0, 100, threads=2, prefetch=3) as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: len(calls) >= 4)
        time.sleep(0.05)
        assert len(calls) == 4


def wait_until(condition):
    """Returns when `condition()` is true, or after ten seconds."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def test_an_error_in_a_thread_is_raised_at_its_step(synthetic):
    def train(start, stop):
        if start == 20:
            raise RuntimeError("a bad batch")
        return synthetic.train(start, stop)

    steps = 0
    with pytest.raises(RuntimeError, match="a bad batch"):
        for _ in Loader(train, 0, 1, 4, 0, 10, threads=2, prefetch=8):
            steps += 1
    assert steps == 5
    assert no_loader_thread()


def no_loader_thread():
    """Whether every thread of every loader has ended."""
    return not any(thread.name.startswith("hetmpi-loader") for thread in threading.enumerate())


def test_leaving_the_loop_ends_the_threads():
    calls = []

    def slow(start, stop):
        time.sleep(0.05)
        return train(start, stop)

    train = counted(calls)
    begin = time.perf_counter()
    with Loader(slow, 0, 1, 4, 0, 1000, threads=2, prefetch=100) as loader:
        for _ in loader:
            break
    assert time.perf_counter() - begin < 2 and no_loader_thread() and len(calls) < 20


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"threads": 0}, {"prefetch": 0}, {"rank": 2}])
def test_the_loader_refuses_impossible_counts(synthetic, wrong):
    counts = {"rank": 0, "size": 2, "batch_size": 1, "first_step": 0, "last_step": 1} | wrong
    with pytest.raises(ValueError, match=f"Loader: {next(iter(wrong))} must"):
        Loader(synthetic.train, **counts)
