"""Random streams, told twice: cut into other files, as text or Parquet, compressed, in other types, written and quoted
otherwise, read by several ranks: the same samples, or a refusal."""

import csv
import gzip
import io
import os
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzz import fuzz

from hetmpi.data.tabular import Tabular
from hetmpi.data.tabular.stream import END, Ranks

COLUMNS = ["user", "tags", "item", "price", "click"]


def test_a_stream_told_otherwise_has_the_same_samples(tmp_path):
    fuzz(__file__, tmp_path)


def case(rng, folder):
    rows = [row_of(rng) for _ in range(rng.randrange(2, 90))]
    first = rng.randrange(1, len(rows) + 1)  # the rows of the first file set the scales of numbers
    rules = rules_of(rng)
    found = [told(rng, folder / str(number), rows, first, rules) for number in range(2)]
    for one, other in zip(*found):
        assert np.array_equal(one, other), (rules, one, other)


def row_of(rng):
    return {
        "user": rng.choice(["ada", "grace", "Zoë", "x y", 'a"b', "", "7", "7.5", "true", f"u{rng.randrange(50)}"]),
        "tags": [f"t{rng.randrange(9)}" for _ in range(rng.randrange(4))],
        "item": rng.choice([None, rng.randrange(20), rng.randrange(10**12)]),
        "price": rng.choice([None, rng.randrange(9) / 8, rng.randrange(-(10**6), 10**6) / 64]),
        "click": rng.randrange(2),
    }


def rules_of(rng):
    """Rules that do not depend on the types of the first file."""
    ids = rng.choice([{"rows": 11}, {"rows": "open", "max_rows": 99}])
    return [
        {"name": ["user", "item"], **ids},
        {"name": "tags", "separator": "|", "rows": 7, "pool": rng.choice(["sum", "none"])},
        {"name": "price", "kind": "number", "transform": rng.choice(["auto", "none", "standardize"])},
    ]


def told(rng, folder, rows, first, rules):
    """The samples of rows as a stream of random files, in an order of their own."""
    is_text, settings, rules = rng.random() < 0.6, {}, [dict(rule) for rule in rules]
    if is_text:
        settings = {"delimiter": rng.choice([None, ";", "::", "\t"]), "encoding": rng.choice([None, "utf-8", "utf-16"])}
    else:
        rules[1].pop("separator")
    cuts = [0, first, *sorted(rng.randrange(first, len(rows) + 1) for _ in range(rng.randrange(4))), len(rows)]
    parts = [rows[begin:end] for begin, end in zip(cuts, cuts[1:])]
    write_part = written_text if is_text else written_parquet
    (folder / "in").mkdir(parents=True)
    names = sorted(rng.sample(range(1000), len(parts)))
    for i, (number, part) in enumerate(zip(names, parts)):
        order = rng.sample(COLUMNS, len(COLUMNS)) if i else COLUMNS  # that of the first file numbers the columns
        write_part(rng, folder / "in" / f"{number:03d}", part, order, settings)
    for path in (folder / "in").iterdir():
        os.utime(path, (time.time() - 100,) * 2)
    (folder / "in" / END).touch()
    return read(folder, rng.choice([1, 1, 2]), columns=rules, **settings)


def written_text(rng, path, rows, names, settings):
    delimiter, text = settings["delimiter"] or ",", io.StringIO()
    quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
    out = csv.writer(text, delimiter="\x1f" if len(delimiter) > 1 else delimiter, quoting=quoting,
                     lineterminator=rng.choice(["\n", "\r\n"]))  # fmt: skip
    out.writerow(names)
    space = rng.choice(["", " "])
    for row in rows:
        cells = {name: "" if value is None else value for name, value in row.items()} | {"tags": "|".join(row["tags"])}
        out.writerow([f"{cells[name]}{space}" if name == "user" and cells[name] else cells[name] for name in names])
    content = text.getvalue().replace("\x1f", delimiter).encode(settings["encoding"] or "utf-8")
    if rng.random() < 0.3:
        path.with_suffix(".csv.gz").write_bytes(gzip.compress(content))
    else:
        path.with_suffix(".csv").write_bytes(content)


def written_parquet(rng, path, rows, names, _):
    kinds = {
        "user": rng.choice([pa.string(), pa.large_string(), pa.binary()]),
        "tags": pa.list_(rng.choice([pa.string(), pa.large_string()])),
        "item": rng.choice([pa.int64(), pa.string()]),
        "price": rng.choice([pa.float64(), pa.string()]),
        "click": rng.choice([pa.int8(), pa.uint64(), pa.float32(), pa.bool_()]),
    }
    arrays = {}
    for name, kind in kinds.items():
        values = [row[name] for row in rows]
        if kind == pa.string() and name in ("item", "price"):
            values = [value if value is None else str(value) for value in values]
        elif kind == pa.bool_():
            values = list(map(bool, values))
        elif kind == pa.float32():
            values = list(map(float, values))
        arrays[name] = pa.array([v.encode() for v in values] if kind == pa.binary() else values, kind)
    if rng.random() < 0.3 and kinds["user"] == pa.string():
        arrays["user"] = arrays["user"].dictionary_encode()
    table = pa.table({name: arrays[name] for name in names})
    options = {"compression": rng.choice(["snappy", "zstd", "none"]), "row_group_size": rng.choice([3, 1000])}
    pq.write_table(table, path.with_suffix(".parquet"), **options)


def read(folder, size, **settings):
    """The samples of a stream that ranks in threads read, as arrays sorted by their rows: the order within a file is
    drawn by its name."""
    meeting, results, sources, errors = threading.Barrier(size), {}, {}, []

    def run(rank):
        def from_first(call):
            if rank == 0:
                results["found"] = call()
            meeting.wait()
            found = results["found"]
            meeting.wait()
            return found

        try:
            ranks = Ranks(rank, size, meeting.wait, from_first)
            sources[rank] = source = Tabular(
                str(folder / "in"), 3, "click", cache=str(folder / "cache"), follow=True, **settings
            )
            source.stream.open(ranks, None)
            while (name := from_first(source.stream.look)) != END:
                source.stream.add(name, ranks)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    found = [arrays_of(source.stream.train(0, source.stream.num_samples), source) for source in sources.values()]
    assert all(np.array_equal(a, b) for other in found for a, b in zip(found[0], other))
    return found[0]


def arrays_of(samples, source):
    """ids (B, F), numbers and labels (B, D + 1), lists (B,) as texts; rows sorted."""
    names = [feature.name for feature in source.features if feature.pool is None]
    ids = samples.ids[:, [names.index(name) for name in ("user", "item")]]
    [bag] = samples.bags
    lists = [str(bag.values[begin:end].tolist()) for begin, end in zip(bag.offsets, bag.offsets[1:])]
    numbers = np.column_stack([samples.dense, samples.label])
    order = np.lexsort([lists, *numbers.T, *ids.T])
    return ids[order], numbers[order], np.array(lists)[order]
