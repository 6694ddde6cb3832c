"""Random CSV and Parquet files, whole and damaged: rows that a model can read, or one line."""

import csv
import gzip

import numpy as np
import pyarrow.parquet as pq
from fuzz import fuzz
from mutations import damage, odd_table

from hetmpi.data.tabular import Tabular
from hetmpi.errors import UserError


def test_any_tabular_file_is_read_or_refused_in_one_line(tmp_path):
    fuzz(__file__, tmp_path)


def case(rng, folder):
    table = odd_table(rng, odd_names=rng.random() < 0.3)
    paths = [written(rng, table, folder / "d", number) for number in range(rng.choice([1, 1, 2]))]
    if rng.random() < 0.5:
        damage(rng, rng.choice(paths), rng.randrange(1, 4))
    source = Tabular(str(folder / "d"), 0, "click", cache=str(folder / "cache"), **settings(rng, table.column_names))
    try:
        source.prepare(0, 1, lambda: None, lambda line: None)
    except UserError as refusal:
        if "bad rows" not in str(refusal):  # which has a line for each example
            raise
        assert len(str(refusal).splitlines()) <= 7 and len(str(refusal)) < 3_000
        return
    for samples in (source.train(0, source.num_train), source.valid(0, source.num_valid)):
        assert np.isfinite(samples.dense).all() and np.isin(samples.label, (0, 1)).all()
        assert (samples.ids >= 0).all() and all((bag.values >= 0).all() for bag in samples.bags)


def written(rng, table, folder, number):
    folder.mkdir(exist_ok=True)
    if rng.random() < 0.5:
        path = folder / f"{number}.parquet"
        options = {"compression": rng.choice(["snappy", "zstd", "none"]), "row_group_size": rng.choice([7, 1000])}
        pq.write_table(table, path, **options)
        return path
    path = folder / f"{number}.csv"
    encoding = rng.choice(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"])
    with open(path, "w", newline="", encoding=encoding, errors="replace") as file:
        quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
        ends = rng.choice(["\n", "\n", "\r\n", "\r"])
        rows = csv.writer(file, delimiter=rng.choice(",,,;\t|"), quoting=quoting, lineterminator=ends)
        rows.writerow(table.column_names)
        rows.writerows(zip(*(map(str, column.to_pylist()) for column in table.columns)))
    if rng.random() < 0.1:
        path = path.rename(f"{path}.gz")
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def settings(rng, names):
    rules = [
        {"kind": "id"}, {"kind": "number"}, {"kind": "drop"}, {"rows": 9}, {"rows": 9, "hash": False}, {"min_count": 2},
        {"rows": "open", "max_rows": 5}, {"rows": "open", "max_rows": 5, "evict": "lru", "expire_steps": 1},
        {"separator": "|"}, {"transform": "standardize"}, {"transform": [0, 1]}, {"share": rng.choice(names)},
    ]  # fmt: skip
    found = {"max_bad_rows": rng.choice([0, 5, 1_000])}
    if rng.random() < 0.5:
        found["columns"] = [{"name": rng.choice([*names, "*"]) or "x", **rng.choice(rules)}]
    if rng.random() < 0.2:
        found["valid"] = {"column": rng.choice(names) or "x", "last": rng.randrange(1, 4)}
    if rng.random() < 0.1:
        found["positive"] = ["1"]
    if rng.random() < 0.1:
        found["names"] = [f"n{i}" for i in range(len(names) - 1)] + ["click"]
    if rng.random() < 0.1:
        found["quote"] = None
    return found
