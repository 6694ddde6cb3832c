"""The same rows told in other ways, as CSV and Parquet: the same values share their keys and numbers, or one line."""

import csv
import gzip

import pyarrow as pa
import pyarrow.parquet as pq
from fuzz import fuzz
from rank_threads import on_threads

from hetmpi.data.batch import concatenate
from hetmpi.data.tabular import Tabular

NUM = 240
NAMES = ["row", "user", "city", "price", "note"]
RULES = [{"name": ["row", "price"], "kind": "number", "transform": "none"}, {"name": ["user", "note"], "min_count": 1}]


def test_the_same_rows_are_the_same_samples_however_they_are_told(tmp_path):
    fuzz(__file__, tmp_path)


def case(rng, folder):
    rows = drawn(rng)
    tellings = [told(rng, rows, folder / name) for name in ("a", "b")]
    plain, other = (samples(rng, path, folder / f"cache{i}", settings) for i, (path, settings) in enumerate(tellings))
    assert plain.keys() == other.keys() == set(range(NUM))
    for column in range(3):
        pairs = {(plain[row][0][column], other[row][0][column]) for row in range(NUM)}
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}), f"id column {column}"
    assert all(plain[row][1:] == other[row][1:] for row in range(NUM))


def drawn(rng):
    """Rows with nulls: integers as ids, texts, fractions, texts that seem to be numbers."""
    return [
        {
            "row": i,
            "user": None if rng.random() < 0.1 else i % 20,  # of each so many rows that training sees one
            "city": None if rng.random() < 0.1 else rng.choice(["Oslo", "Köln", "a b", "x"]),
            "price": None if rng.random() < 0.1 else rng.randrange(1, 800) / 8,
            "note": rng.choice(["007", "7", "true", "1.5"]),
            "click": i % 2,
        }
        for i in range(NUM)
    ]


def told(rng, rows, folder):
    """Writes the rows in some order, in some files of some form, and returns their path and settings."""
    folder.mkdir()
    rows = rng.sample(rows, len(rows))
    names = rng.sample([*NAMES, "click"], len(NAMES) + 1)
    num_files, is_text = rng.randrange(1, 4), rng.random() < 0.5
    delimiter, settings = rng.choice(",;\t|"), {}
    for number in range(num_files):
        part = rows[number::num_files]
        if is_text:
            write_text(rng, part, names, folder / f"{number}.csv", delimiter)
        else:
            write_parquet(rng, part, names, folder / f"{number}.parquet")
    return folder, {"delimiter": delimiter} if is_text else settings


def write_text(rng, rows, names, path, delimiter):
    is_float, pad = rng.random() < 0.3, rng.choice(["", "", " "])
    encoding = rng.choice(["utf-8", "utf-8-sig"])
    with open(path, "w", newline="", encoding=encoding) as file:
        ends, quoting = rng.choice(["\n", "\r\n"]), rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        writer = csv.writer(file, delimiter=delimiter, quoting=quoting, lineterminator=ends)
        writer.writerow(names)
        for row in rows:
            row = {**row, "user": row["user"] if row["user"] is None or not is_float else float(row["user"])}
            none = rng.choice(["", "NA", "null"])
            writer.writerow([none if row[name] is None else f"{row[name]}{pad}" for name in names])
    if rng.random() < 0.2:
        path.with_suffix(".csv.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def write_parquet(rng, rows, names, path):
    users = [pa.int64(), pa.int32(), pa.uint16(), pa.float64(), pa.decimal128(21, 2), pa.string(), pa.large_string()]
    texts = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
    kinds = {
        "row": rng.choice([pa.int64(), pa.float64()]), "user": rng.choice(users), "city": rng.choice(texts),
        "price": rng.choice([pa.float64(), pa.float32()]), "note": rng.choice(texts[:3]),
        "click": rng.choice([pa.int8(), pa.float32(), pa.bool_()]),
    }  # fmt: skip
    columns = {name: [row[name] for row in rows] for name in names}
    if kinds["user"] in (pa.string(), pa.large_string()):
        columns["user"] = [None if value is None else str(value) for value in columns["user"]]
    arrays = [pa.array(columns[name]).cast(kinds[name], safe=False) for name in names]
    pq.write_table(
        pa.table(arrays, names=names), path,
        compression=rng.choice(["none", "snappy", "zstd"]), row_group_size=rng.choice([50, 1000]),
    )  # fmt: skip


def samples(rng, path, cache, settings):
    """Row -> its keys, price and label, of all rows; prepared by some ranks, which are threads."""
    size = rng.randrange(1, 4)

    def run(rank, barrier):
        source = Tabular(str(path), 0, "click", columns=RULES, cache=str(cache), **settings)
        source.prepare(rank, size, barrier, lambda line: None)
        return source

    source = on_threads(size, run)[0]
    whole = concatenate([source.train(0, source.num_train), source.valid(0, source.num_valid)])
    names, order = [feature.name for feature in source.features], ["user", "city", "note"]
    assert sorted(names) == sorted(order) and sorted(source.dense_names) == ["price", "row"]
    ids = whole.ids[:, [names.index(name) for name in order]].tolist()
    row, price = (whole.dense[:, source.dense_names.index(name)].tolist() for name in ("row", "price"))
    return {int(row): (tuple(key), *rest) for row, key, *rest in zip(row, ids, price, whole.label.tolist())}
