"""One graph in tables of random order, types, formats and names: the same graph, or one line."""

import csv
import gzip
import io
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzz import fuzz

from hetmpi.data.graph.files import GraphFiles
from hetmpi.errors import UserError

MASKS = {"train_mask": "train", "val_mask": "valid", "test_mask": "test"}
MISSING = ["", "NA", "nan", "null", " NaN "]
ENDS = {"csv": ",", "tsv": "\t"}


def test_a_graph_is_the_same_however_it_is_told(tmp_path):
    fuzz(__file__, tmp_path)


def case(rng, folder):
    nodes, edges = graph(rng)
    expected = told(source_of(plainly(nodes, edges, folder / "plain"), 1))
    table, may_be_refused = retold(rng, nodes)
    try:
        write(rng, table, folder / "kg", "nodes", rng.random() < 0.5)
        write(rng, retold_edges(rng, edges), folder / "kg", "edges", rng.random() < 0.5)
        source = source_of(folder / "kg", rng.randint(1, 4))
    except UserError:
        assert may_be_refused
        raise
    assert told(source) == expected


def graph(rng):
    """Tables of nodes and edges: columns by name."""
    num = rng.randint(3, 12)
    ids = rng.sample(
        rng.choice([range(50), range(1000, 10**6), [f"{i:04}" for i in range(40)], list("abcdefghijklmn")]), num
    )
    classes = rng.choice([[0, 1, 2], ["a", "b"], ["new york", "paris"], [True, False]])
    label = [rng.choice([*classes, None]) for _ in range(num)]
    label[:2], split = classes[:2], ["train"] + [rng.choice(["train", "valid", "test", None]) for _ in range(num - 1)]
    nodes = {"id": ids, "label": label, "split": split}
    if rng.random() < 0.7:
        nodes["words"] = [[f"w{rng.randrange(5)}" for _ in range(rng.randrange(1, 4))] for _ in range(num)]
    if rng.random() < 0.5:
        nodes["size"] = [rng.choice([0.5, 1.25, 3.0, -7.5]) for _ in range(num)]
    if rng.random() < 0.3:
        nodes["vector"] = [[0.5 * rng.randrange(5), 0.25 + rng.randrange(3)] for _ in range(num)]
    pairs = [(rng.choice(ids), rng.choice(ids)) for _ in range(rng.randrange(12))]
    edges = {"src": [s for s, _ in pairs], "dst": [d for _, d in pairs]}
    if rng.random() < 0.5:
        weights = {}
        edges["weight"] = [weights.setdefault(frozenset(pair), rng.choice([0.5, 2.0, 4.0])) for pair in pairs]
    return nodes, edges


def plainly(nodes, edges, folder):
    folder.mkdir()
    for name, table in (("nodes", nodes), ("edges", edges)):
        kind = pa.string() if isinstance(nodes["id"][0], str) else pa.int64()
        of_edges = {"src": pa.array(edges["src"], kind), "dst": pa.array(edges["dst"], kind)}
        pq.write_table(pa.table({**table, **(of_edges if name == "edges" else {})}), folder / f"{name}.parquet")
    return folder


def retold(rng, nodes):
    """The table of nodes with other names, order and further columns; and whether it may be refused."""
    table, num, may_be_refused = dict(nodes), len(nodes["id"]), False
    if rng.random() < 0.3:  # another name of ids
        table = {
            rng.choice(["node_id", "nodeId", "Unnamed: 0", "__index_level_0__", "index"]): table.pop("id"),
            **table,
        }
    elif rng.random() < 0.3:  # a column that fits as well, or not at all
        table["other"] = table.pop("id")
        may_be_refused = True
    elif rng.random() < 0.2:
        table = {"Unnamed: 0": list(range(num)), **table}
    if rng.random() < 0.4:
        split = table.pop("split")
        table |= {name: [value == part for value in split] for name, part in MASKS.items()}
    if rng.random() < 0.3:
        table["nothing"] = [None] * num
    order, names = rng.sample(range(num), num), rng.sample(list(table), len(table))
    names = [name for name in names if name in table]
    numbers = [name for name in table if name in ("size", "vector")]  # their order is that of the input
    names = sorted(names, key=lambda name: (name in numbers, numbers.index(name) if name in numbers else 0))
    return {name: [table[name][i] for i in order] for name in names}, may_be_refused


def retold_edges(rng, edges):
    """Rows in another order and direction; some twice."""
    rows = list(zip(*edges.values()))
    rows += rng.sample(rows, rng.randrange(len(rows) + 1))
    rows = [(row[1], row[0], *row[2:]) if rng.random() < 0.3 else row for row in rows]
    rng.shuffle(rows)
    return {name: [row[i] for row in rows] for i, name in enumerate(edges)}


def write(rng, table, folder, name, is_text):
    """In one file or several."""
    folder.mkdir(exist_ok=True)
    num, end = len(next(iter(table.values()))), rng.choice(list(ENDS))
    kinds, forms = {column: rng.random() for column in table}, {column: rng.randrange(3) for column in table}
    cuts = [0, *sorted(rng.randrange(num + 1) for _ in range(rng.choice([0, 0, 1, 2]))), num]
    for number, (begin, stop) in enumerate(zip(cuts, cuts[1:])):
        part = {column: values[begin:stop] for column, values in table.items()}
        path = folder / (f"{name}.{end}" if len(cuts) == 2 else f"{name}-{rng.randrange(10)}{number}.{end}")
        if is_text:
            write_text(rng, part, path, forms)
        else:
            options = {
                "compression": rng.choice(["snappy", "zstd", "gzip", "none"]),
                "row_group_size": rng.choice([2, 100]),
            }
            pq.write_table(typed(rng, part, kinds), path.with_suffix(".parquet"), **options)


def typed(rng, part, kinds):
    """A table whose columns have one of the types that hold their values."""
    columns = {}
    for name, values in part.items():
        sample = next((value for value in values if value is not None), None)
        column = pa.array(values)
        if isinstance(sample, bool) or sample is None:
            column = (
                pa.array([None if value is None else str(value) for value in values]) if kinds[name] < 0.2 else column
            )
        elif isinstance(sample, int) and name != "Unnamed: 0":
            column = column.cast([pa.int64(), pa.int32(), pa.float64(), pa.string(), pa.uint32()][int(5 * kinds[name])])
        elif isinstance(sample, str):
            column = [column, column.cast(pa.large_string()), column.dictionary_encode()][int(3 * kinds[name])]
        elif isinstance(sample, float):
            column = column.cast(pa.float32()) if kinds[name] < 0.5 else column
        elif name == "words" and kinds[name] < 0.5:
            column = pa.array([" ".join(value) for value in values])
        columns[name] = column
    return pa.table(columns)


def write_text(rng, part, path, forms):
    padded, quoting = rng.random() < 0.3, rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
    separators = {"csv": ",;|"}.get(path.suffix[1:], "\t")
    between = rng.choice(separators)
    no_value = rng.choice(MISSING)

    def cell(name, value):
        if value is None:
            text = no_value
        elif isinstance(value, list):
            text = [" ".join(map(str, value)), str(value), str(value).replace(",", "").replace("'", "")][forms[name]]
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and name in ("src", "dst", "label")
            and forms[name] == 2
        ):
            text = f"{value}.0"
        else:
            text = str(value)
        return f" {text} " if padded else text

    file = io.StringIO()
    rows = csv.writer(file, delimiter=between, quoting=quoting, lineterminator=rng.choice(["\n", "\r\n"]))
    rows.writerow([f" {name}" if padded else name for name in part])
    rows.writerows([cell(name, value) for name, value in zip(part, row)] for row in zip(*part.values()))
    data = file.getvalue().encode(rng.choice(["utf-8", "utf-8-sig"]))
    if rng.random() < 0.2:
        path, data = path.with_name(f"{path.name}.gz"), gzip.compress(data)
    path.write_bytes(data)


def source_of(folder, num_ranks):
    """The source of the last of so many ranks; all read the same."""
    found = []
    for rank in range(num_ranks):
        source = GraphFiles(str(folder), 1, cache=str(folder.parent / f"prepared {folder.name}"), fanout=[2, 2])
        source.prepare(rank, num_ranks, lambda: None, lambda line: None)
        found.append(source.train(0, 8))
    assert all(np.array_equal(samples.nodes, found[0].nodes) for samples in found)
    return source


def told(source):
    """What is known of each node by its name, and which nodes share an id."""
    names = [str(name) for name in source.names(np.arange(source.num_nodes)).tolist()]
    offsets, near = source.neighbours(0, source.num_nodes)
    weights = source.edge_weights(0, source.num_nodes)
    weights = np.ones(len(near)) if weights is None else weights
    bag, dense = source.inputs(np.arange(source.num_nodes))
    nodes, owners = {}, {}
    for v, name in enumerate(names):
        label, edges = source.labels[v], slice(offsets[v], offsets[v + 1])
        of_edges = sorted(zip([names[u] for u in near[edges]], weights[edges].tolist()))
        shown = source.class_names[label] if label >= 0 else None
        nodes[name] = shown, int(source.split[v]), dense[v].tolist(), of_edges
        for key in bag.values[bag.offsets[v] : bag.offsets[v + 1]].tolist():
            owners.setdefault(key, []).append(name)
    return nodes, Counter(tuple(sorted(of_key)) for of_key in owners.values()), source.num_rows
