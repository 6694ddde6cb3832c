"""One set of triples in files of random order, types and formats: the same triples, or one line."""

import csv
import io
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzz import fuzz

from hetmpi.data.triples.reading import PARTS
from hetmpi.data.triples.source import TripleFiles

HEADERS = [("head", "relation", "tail"), ("h", "r", "t"), ("subject", "predicate", "object"), ("a", "b", "c")]
ORDER = ("h", "r", "t")


def test_triples_are_the_same_however_they_are_told(tmp_path):
    fuzz(__file__, tmp_path)


def case(rng, folder):
    parts, weights = triples(rng)
    (folder / "plain").mkdir()
    for name, rows in parts.items():
        lines = ["\t".join([*row, *([weights[row]] if weights and name == "train" else [])]) + "\n" for row in rows]
        (folder / f"plain/{name}.txt").write_text("".join(lines))
    expected = told(TripleFiles(str(folder / "plain"), 1), 1)
    (folder / "kg").mkdir()
    form = rng.choice(["txt", "tsv", "csv", "csv without header", "parquet", "nt"])
    form = "txt" if form == "nt" and (weights or any(" " in name for row in parts["train"] for name in row)) else form
    settings = {}
    if form.startswith("csv without"):
        settings["columns"] = rng.sample(ORDER, 3)
    elif form in ("csv", "parquet"):
        header = rng.choice(HEADERS)
        settings |= {"columns": list(header)} if header == HEADERS[-1] or rng.random() < 0.3 else {}
    elif form != "nt" and rng.random() < 0.5:
        settings["columns"] = rng.sample(ORDER, 3)
    if form in ("txt", "tsv") and rng.random() < 0.4:
        settings["delimiter"] = rng.choice([";", "|"])
    for name, rows in parts.items():
        rows = rng.sample(rows, len(rows))
        of_rows = [weights[row] for row in rows] if weights and name == "train" else None
        if form == "parquet":
            write_parquet(rng, rows, of_rows, folder / f"kg/{name}.parquet", header)
        elif form == "nt":
            text = "".join("<{}> <{}>\t<{}> .\n".format(*row) for row in rows)
            (folder / f"kg/{name}.nt").write_text("# comment\n" + text)
        else:
            header = header if form == "csv" else None
            path = folder / f"kg/{name}.{form.split()[0]}"
            path.write_bytes(text_of(rng, rows, of_rows, header, settings, form))
    if form in ("txt", "tsv") and rng.random() < 0.3:
        listed(rng, parts, folder / "kg")
    assert told(TripleFiles(str(folder / "kg"), 1, **settings), rng.randint(1, 3)) == expected


def triples(rng):
    """Rows of each part, and weights by row, or none."""
    entities = rng.choice(
        [["a", "b c", "d,e", "\u00e9", "x'y"], ["7", "12", "300"], ["00030", "30", "3.0", "3"], ["NA", "null", "nan"]]
    )
    relations = rng.choice([["likes", "knows of"], ["1", "2"], ["r"]])
    draw = [(rng.choice(entities), rng.choice(relations), rng.choice(entities)) for _ in range(rng.randint(2, 15))]
    draw.append((entities[0], relations[0], entities[1]))
    parts = {"train": draw}
    for name in PARTS[1:]:
        if rng.random() < 0.6:
            parts[name] = [rng.choice(draw) for _ in range(rng.randint(1, 4))]
    return parts, {row: str(rng.choice([0.5, 2, 3.25])) for row in draw} if rng.random() < 0.3 else None


def write_parquet(rng, rows, weights, path, header):
    columns = {}
    for name, values in zip(header, map(list, zip(*rows))):
        column = pa.array(values)
        if all(value.isdecimal() and str(int(value)) == value for value in values) and rng.random() < 0.5:
            column = column.cast(rng.choice([pa.int64(), pa.int32()]))
        elif rng.random() < 0.3:
            column = column.dictionary_encode() if rng.random() < 0.5 else column.cast(pa.large_string())
        elif rng.random() < 0.3:
            column = pa.array([f" {value} " for value in values])
        columns[name] = column
    if weights:
        columns["weight"] = pa.array(list(map(float, weights)))
    names = rng.sample(list(columns), len(columns))
    table = pa.table({**{name: columns[name] for name in names}, "further": list(range(len(rows)))})
    pq.write_table(table, path, compression=rng.choice(["snappy", "zstd", "none"]), row_group_size=rng.choice([2, 100]))


def text_of(rng, rows, weights, header, settings, form):
    is_csv, padded = form.startswith("csv"), rng.random() < 0.3
    between = rng.choice(",;\t|") if is_csv else settings.get("delimiter", "\t")
    order = [ORDER.index(name) for name in settings["columns"]] if not header and "columns" in settings else [0, 1, 2]
    if header:  # columns are found by name
        order = rng.sample(range(3), 3)
    lines = [[row[i] for i in order] + ([weights[n]] if weights else []) for n, row in enumerate(rows)]
    if header:
        lines = [[header[i] for i in order] + (["weight"] if weights else []), *lines]
    lines = [[f" {value} " for value in line] for line in lines] if padded else lines
    end = rng.choice(["\n", "\r\n"])
    if is_csv:
        file = io.StringIO()
        quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        csv.writer(file, delimiter=between, quoting=quoting, lineterminator=end).writerows(lines)
        text = file.getvalue()
    else:
        text = "".join(between.join(line) + end for line in lines)
    return text.encode(rng.choice(["utf-8", "utf-8-sig"]))


def listed(rng, parts, folder):
    """entities.dict and relations.dict, in any order."""
    rows = [row for part in parts.values() for row in part]
    for name, found in (
        ("entities", {row[i] for row in rows for i in (0, 2)}),
        ("relations", {row[1] for row in rows}),
    ):
        order = rng.sample(sorted(found), len(found))
        (folder / f"{name}.dict").write_text("".join(f"{number}\t{value}\n" for number, value in enumerate(order)))


def told(source, num_ranks):
    """The triples of each part by their names, with their weights."""
    batches = []
    for rank in range(num_ranks):
        source.prepare(rank, num_ranks, lambda: None, lambda line: None)
        batches.append(source.train(0, 2 * source.num_train))
    batch = batches[0]
    assert all(np.array_equal(batch.triples, other.triples) for other in batches)
    names = source.entities, source.relations, source.entities

    def of(triples, weights):
        rows = [tuple(names[i][number] for i, number in enumerate(row)) for row in triples.tolist()]
        return Counter(zip(rows, weights))

    weights = [1.0] * len(batch) if batch.weights is None else batch.weights.round(4).tolist()
    parts = {part: of(rows, [1.0] * len(rows)) for part, rows in source.parts.items()}
    return parts, of(batch.triples, weights), set(source.entities), set(source.relations)
