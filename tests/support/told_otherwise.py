"""Logs of what users viewed, told in many ways: as texts with a separator or lists of several types, in any order of
rows, files and columns, with padding, nulls, quotes and compression."""

import csv
import gzip

import pyarrow as pa
import pyarrow.parquet as pq
from rank_threads import on_threads

from hetmpi.data.tabular import Tabular

MISSING = ["", "NA", "null", " "]
SEPARATORS = ["|", ";", " "]


def log_of(rng, has_label):
    """Rows: row, day, user, item, viewed, a list of items, which may have None, and click."""
    num_items, num = rng.choice([3, 12]), rng.randrange(20, 80)
    named = rng.choice([lambda i: str(i), lambda i: f"i{i}", lambda i: f"é-{i}"])
    longest, rows = rng.choice([1, 4, 9]), []
    for row in range(num):
        viewed = [named(rng.randrange(num_items)) for _ in range(rng.randrange(longest + 1))]
        rows.append({
            "row": row / 1.0, "day": min(2, row * 3 // num), "user": f"u{rng.randrange(6)}",
            "item": named(rng.randrange(num_items)), "click": rng.randrange(2),
            "viewed": [None if rng.random() < 0.1 else one for one in viewed],
        })  # fmt: skip
    return [{key: value for key, value in row.items() if has_label or key != "click"} for row in rows]


def told(rng, rows, folder, rule):
    """Writes the rows in one way, the columns of the first file in their order. Returns the rule of `viewed` for it."""
    folder.mkdir(parents=True)
    rows, names = rng.sample(rows, len(rows)), list(rows[0])
    is_text, separator = rng.random() < 0.5, rng.choice(SEPARATORS)
    ends = sorted(rng.sample(range(1, len(rows)), rng.choice([0, 0, 1, 2])))
    for number, (begin, end) in enumerate(zip([0, *ends], [*ends, len(rows)])):
        part, path = rows[begin:end], folder / f"{number}-{rng.randrange(1000)}"
        names = rng.sample(names, len(names)) if number else names
        write_text(rng, part, names, path, separator) if is_text else write_parquet(rng, part, names, path)
    return {**rule, **({"separator": separator} if is_text else {})}


def write_text(rng, rows, names, path, separator):
    lines = [[padded(rng, text_of(rng, row[name], separator), separator) for name in names] for row in rows]
    path = path.with_suffix(".csv")
    with open(path, "w", newline="") as file:
        quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        writer = csv.writer(file, quoting=quoting, lineterminator=rng.choice(["\n", "\r\n"]))
        writer.writerows([names, *lines])
    if rng.random() < 0.3:
        path.with_suffix(".csv.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def padded(rng, text, separator):
    """With a space before it, where that divides no values."""
    return f" {text}" if separator != " " and rng.random() < 0.3 else text


def text_of(rng, value, separator):
    if not isinstance(value, list):
        return str(int(value)) if isinstance(value, float) and rng.random() < 0.5 else str(value)
    missing = [text for text in MISSING if separator not in text]
    parts = [rng.choice(missing) if part is None else part for part in value] + [""] * rng.choice([0, 0, 2])
    return separator.join(padded(rng, part, separator) for part in parts)


def write_parquet(rng, rows, names, path):
    columns = {name: [row[name] for row in rows] for name in names}
    values = [*columns["item"], *(one for lists in columns["viewed"] for one in lists if one is not None)]
    are_integers = all(value.isdecimal() for value in values)
    if are_integers and rng.random() < 0.5:
        columns["viewed"] = [[None if one is None else int(one) for one in lists] for lists in columns["viewed"]]
        columns["item"] = [int(one) for one in columns["item"]] if rng.random() < 0.5 else columns["item"]
        value = rng.choice([pa.int64(), pa.int32(), pa.uint16()])
    else:
        value = rng.choice([pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
    kind = rng.choice([pa.list_, pa.large_list])(value)
    if pa.types.is_dictionary(value):
        kind = pa.list_(pa.string())
    viewed = [None if not lists and rng.random() < 0.5 else lists for lists in columns["viewed"]]
    arrays = {name: pa.array(viewed, kind) if name == "viewed" else pa.array(columns[name]) for name in names}
    options = {"compression": rng.choice(["snappy", "zstd", "none"]), "row_group_size": rng.choice([5, 1000])}
    pq.write_table(pa.table(arrays), path.with_suffix(".parquet"), **options)


def source_of(rng, folder, rule, **settings):
    """Prepared by one rank or two, in threads."""
    rules = [{"name": "viewed", **rule}, {"name": "row", "kind": "number", "transform": "none"},
             {"name": "item", "kind": "id"}]  # fmt: skip
    size = rng.choice([1, 2])

    def prepare(rank, barrier):
        source = Tabular(str(folder), 0, valid={"column": "day", "last": 1}, columns=rules,
                         cache=str(folder) + "-cache", **settings)  # fmt: skip
        source.prepare(rank, size, barrier, lambda line: None)
        return source

    return on_threads(size, prepare)[0]
