"""Lists in files: which of their values remain after max_len, alike in texts, Parquet, streams and files to predict."""

import os
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hetmpi.data.tabular import Encoder, Reader, Tabular
from hetmpi.data.tabular.encoder import FIRST_KEY
from hetmpi.data.tabular.reading import StoredColumn
from hetmpi.data.tabular.rules import Column
from hetmpi.data.tabular.source import kind_text
from hetmpi.data.tabular.stream import Ranks

LISTS = [[f"v{i}" for i in range(n)] for n in (0, 1, 2, 3, 5, 4, 3, 8)] * 3
KEPT = {"first": [one[:3] for one in LISTS], "last": [one[-3:] for one in LISTS]}


def written(folder, form):
    """The lists, a number of each row and a label, as a file."""
    rows = np.arange(len(LISTS))
    path = folder / f"log.{form}"
    if form == "csv":
        lines = [f"{'|'.join(one)},{row}.0,{row % 2}" for one, row in zip(LISTS, rows)]
        path.write_text("\n".join(["viewed,row,click", *lines]) + "\n")
    else:
        kind = {"list": pa.list_(pa.string()), "large": pa.large_list(pa.string())}[form]
        path = folder / "log.parquet"
        pq.write_table(pa.table({"viewed": pa.array(LISTS, kind), "row": rows / 1.0, "click": rows % 2}), path)
    return path


def source_of(folder, form, **settings):
    rule = {"name": "viewed", "pool": "none", "max_len": 3, **({"separator": "|"} if form == "csv" else {})}
    rules = [{**rule, **settings}, {"name": "row", "transform": "none"}]
    return Tabular(str(written(folder, form)), 0, "click", 0.3, rules, cache=str(folder))


def lists_of(source, samples):
    """The lists of samples by the numbers of their rows, without those whose values were not all seen in training."""
    [bag] = samples.bags
    names = dict(zip(source.encoder.coders["viewed"].values, range(FIRST_KEY, 99)))
    texts = {names.get(value): text for text, value in hashes_of(source)}
    lists = [bag.values[a:b].tolist() for a, b in zip(bag.offsets, bag.offsets[1:])]
    return {int(row): [texts.get(key) for key in one] for row, one in zip(samples.dense[:, 0], lists)}


def hashes_of(source):
    texts = [f"v{i}" for i in range(8)]
    return zip(texts, source.encoder.ids_of("viewed", pa.array(texts)))


@pytest.mark.parametrize("form", ["csv", "list", "large"])
@pytest.mark.parametrize("settings, end", [({}, "last"), ({"keep": "first"}, "first"), ({"pool": "mean"}, "first"),
                                           ({"pool": "sum", "keep": "last"}, "last")])  # fmt: skip
def test_the_newest_values_of_a_sequence_remain_and_the_first_ones_of_a_pooled_list(tmp_path, form, settings, end):
    source = source_of(tmp_path, form, **settings)
    source.prepare(0, 1, lambda: None, lambda line: None)
    found = lists_of(source, source.train(0, source.num_train)) | lists_of(source, source.valid(0, source.num_valid))
    assert found == dict(enumerate(KEPT[end]))
    encoder = Encoder.from_arrays(source.encoder.to_arrays())
    reader = Reader(source.path, encoder.reading)
    blocks = [block for unit in reader.units for block in reader.blocks(unit)]
    source.encoder = encoder
    assert {k: v for block in blocks for k, v in lists_of(source, encoder.samples(block)).items()} == found


def test_a_stream_keeps_the_newest_values_too(tmp_path):
    (tmp_path / "log").mkdir()
    os.utime(written(tmp_path / "log", "list"), (1e9, 1e9))  # complete at once
    rules = [{"name": "viewed", "pool": "none", "max_len": 3, "rows": 50}, {"name": "row", "transform": "none"}]
    source = Tabular(str(tmp_path / "log"), 0, "click", columns=rules, cache=str(tmp_path / "c"), follow=True)
    (tmp_path / "log/_END").touch()
    ranks = Ranks(0, 1, lambda: None, lambda call: call())
    source.stream.open(ranks, None)
    [bag] = source.train(0, source.stream.num_samples).bags
    newest = [source.encoder.coders["viewed"].keys(source.encoder.ids_of("viewed", pa.array(one, pa.string())), "")
              for one in KEPT["last"]]  # fmt: skip
    assert sorted(map(tuple, newest)) == sorted(
        tuple(bag.values[a:b].tolist()) for a, b in zip(bag.offsets, bag.offsets[1:])
    )


def test_the_line_of_a_column_says_which_values_remain():
    columns = [
        Column("a", "id", "list", pool="none", max_len=50, keep="last"), Column("a", "id", "list", pool="none"),
        Column("a", "id", "list", pool="mean", max_len=2000), Column("a", "id", "list", pool="sum"),
    ]  # fmt: skip
    lines = ["id, last 50 of a sequence", "id, a sequence", "id, mean of the first 2,000", "id, sum of several"]
    assert list(map(kind_text, columns)) == lines


def test_encoders_that_were_saved_before_keep_their_first_values():
    saved = {key: value for key, value in asdict(Column("a", "id", "list", pool="none", max_len=2)).items()}
    del saved["keep"]
    assert Column(**saved).keep == "first"
    saved = asdict(StoredColumn("a", "hash", is_list=True, max_len=2))
    del saved["keep"]
    assert StoredColumn(**saved).keep == "first"
