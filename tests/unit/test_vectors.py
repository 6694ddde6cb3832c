"""Columns of vectors in Parquet: as the same numbers in columns of their own."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hetmpi.data.tabular import DataError, Encoder, Reader, Tabular
from hetmpi.data.tabular.saved import encoder_from
from hetmpi.inspect import inspected

NUM, SIZE = 200, 3
RNG = np.random.default_rng(0)
VECTORS = RNG.gamma(2, 3, (NUM, SIZE)).astype(np.float32)
KINDS = {
    "list": pa.list_(pa.float32()), "large": pa.large_list(pa.float64()), "fixed": pa.list_(pa.float32(), SIZE),
    "halves": pa.list_(pa.float16()),
}  # fmt: skip


def written(folder, name, columns):
    base = {"user": [f"u{i % 9}" for i in range(NUM)], "click": np.arange(NUM) % 2}
    pq.write_table(pa.table({**base, **columns}), folder / f"{name}.parquet")
    return folder / f"{name}.parquet"


def source_of(path, rules=None, report=lambda line: None, **settings):
    source = Tabular(str(path), 0, "click", 0.3, rules, cache=str(path.parent / "cache"), **settings)
    source.prepare(0, 1, lambda: None, report)
    return source


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_is_as_its_numbers_in_columns_of_their_own(tmp_path, kind):
    vectors, told = VECTORS.astype(np.float16 if kind == "halves" else np.float32), []
    nulls = [None if i % 7 == 0 else row.tolist() for i, row in enumerate(vectors)]
    values = pa.array([None if row is None else list(map(np.float16, row)) if kind == "halves" else row
                       for row in nulls], KINDS[kind])  # fmt: skip
    found = source_of(written(tmp_path, "vec", {"v": values}), report=told.append)
    columns = {f"v{i}": [None if row is None else row[i] for row in nulls] for i in range(SIZE)}
    split = source_of(written(tmp_path, "split", columns))
    assert found.dense_names == ["v[0]", "v[1]", "v[2]"] and found.num_dense == SIZE
    for one, other in ((found.train(0, 99), split.train(0, 99)), (found.valid(0, 9), split.valid(0, 9))):
        assert np.array_equal(one.label, other.label)
        np.testing.assert_allclose(one.dense, other.dense, atol=1e-6)
    [line] = [line for line in told if line.startswith("v ")]
    assert line.split()[1:3] == ["3", "numbers"]
    encoder = encoder_from(found.encoder.to_arrays())
    reader = Reader(found.path, encoder.reading)
    block = next(iter(reader.blocks(reader.units[0])))
    plain = Reader(split.path, split.encoder.reading)
    wanted = split.encoder.samples(next(iter(plain.blocks(plain.units[0]))))
    np.testing.assert_allclose(Encoder.samples(encoder, block).dense, wanted.dense, atol=1e-6)


def test_a_rule_of_numbers_holds_for_all_numbers_of_a_vector(tmp_path):
    path = written(tmp_path, "vec", {"v": pa.array(list(VECTORS), KINDS["list"])})
    source = source_of(path, [{"name": "v", "transform": "none"}])
    rows = {tuple(row) for row in VECTORS.tolist()}
    assert {tuple(row) for row in source.train(0, source.num_train).dense.tolist()} <= rows
    assert source_of(path, [{"name": "v", "kind": "drop"}]).dense_names == []
    with pytest.raises(DataError, match="column v holds vectors of numbers, which cannot be used as id"):
        source_of(path, [{"name": "v", "kind": "id"}])


def test_vectors_of_other_lengths_and_infinite_numbers_are_refused_with_their_row(tmp_path):
    rows = [row.tolist() for row in VECTORS]
    rows[4] = rows[4][:2]
    with pytest.raises(DataError, match="(?s)row 5, column v: .* has another length than 3, that of the first"):
        source_of(written(tmp_path, "vec", {"v": pa.array(rows, KINDS["list"])}))
    rows[4] = [1.0, np.inf, 2.0]
    with pytest.raises(DataError, match="(?s)row 5, column v: .* has a number that is not finite"):
        source_of(written(tmp_path, "vec", {"v": pa.array(rows, KINDS["list"])}))
    (tmp_path / "log").mkdir()
    written(tmp_path / "log", "a", {"v": pa.array(list(VECTORS), KINDS["list"])})
    written(tmp_path / "log", "b", {"v": pa.array([row.tolist()[:2] for row in VECTORS], KINDS["list"])})
    with pytest.raises(
        DataError, match="column v has vectors of 3 numbers in .*a.parquet and vectors of 2 numbers in .*b.parquet"
    ):
        source_of(tmp_path / "log")


def test_inspect_shows_vectors(tmp_path):
    path = written(tmp_path, "vec", {"v": pa.array(list(VECTORS), KINDS["fixed"])})
    assert 'name: "v", kind: number, transform: auto}  # vectors of 3 numbers' in inspected(str(path), "click")
