"""Small graphs as files of each layout that data=graph reads."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

EDGES = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 4), (0, 1)]  # (source, target); node 5 is isolated
LABELS = [0, 1, 0, 1, 0, -1]
SPLIT = [0, 0, 1, 2, 2, 0]  # node 5 has no label
WORDS = [[0, 2], [], [1], [2], [0, 1, 2], [1]]


def csr(edges, num_nodes):
    """indptr, indices of (source, target) edges: the sources of each node's edges, in order."""
    lists = [[s for s, t in edges if t == v] for v in range(num_nodes)]
    return np.cumsum([0, *map(len, lists)]), np.array(sum(lists, []), np.int64)


def arrays(**others):
    """The arrays of an .npz file; None leaves one out."""
    indptr, indices = csr(EDGES, 6)
    found = {
        "indptr": indptr, "indices": indices, "label": np.array(LABELS), "split": np.array(SPLIT),
        "feature_indptr": np.cumsum([0, *map(len, WORDS)]), "feature_indices": np.array(sum(WORDS, [])),
        "num_features": 3,
    } | others  # fmt: skip
    return {name: array for name, array in found.items() if array is not None}


def npz(folder, **others):
    path = folder / "graph.npz"
    np.savez(path, **arrays(**others))
    return str(path)


def text(path, lines):
    """A .csv.gz file of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(map(str, line)) + "\n" for line in lines)


def ogb(folder, labels=LABELS, dense=None):
    """One kind of nodes, as ogbn-arxiv."""
    text(folder / "raw/num-node-list.csv.gz", [[6]])
    text(folder / "raw/num-edge-list.csv.gz", [[len(EDGES)]])
    text(folder / "raw/edge.csv.gz", EDGES)
    text(folder / "raw/node-label.csv.gz", [np.atleast_1d(label).tolist() for label in labels])
    if dense is not None:
        text(folder / "raw/node-feat.csv.gz", dense)
    for number, part in enumerate(("train", "valid", "test")):
        text(folder / f"split/time/{part}.csv.gz", [[v] for v in range(6) if SPLIT[v] == number])
    return str(folder)


def ogb_mag(folder, authors_per_paper=12):
    """Several kinds of nodes, as ogbn-mag."""
    raw = folder / "raw"
    text(raw / "num-node-dict.csv.gz", [["author", "field_of_study", "paper"], [20, 3, 6]])
    text(raw / "nodetype-has-label.csv.gz", [["author", "field_of_study", "paper"], [False, False, True]])
    relations = {
        ("paper", "cites", "paper"): EDGES,
        ("author", "writes", "paper"): [(a, 0) for a in range(authors_per_paper)] + [(19, 3)],
        ("paper", "has_topic", "field_of_study"): [(v, word) for v, words in enumerate(WORDS) for word in words],
        ("author", "affiliated_with", "field_of_study"): [(0, 0)],  # without papers: not read
    }
    text(raw / "triplet-type-list.csv.gz", relations)
    for names, edges in relations.items():
        text(raw / "relations" / "___".join(names) / "edge.csv.gz", edges)
    text(raw / "node-label/paper/node-label.csv.gz", [[label] for label in LABELS])
    text(raw / "node-feat/paper/node-feat.csv.gz", [[0.5, v] for v in range(6)])
    text(folder / "split/time/nodetype-has-split.csv.gz", [["author", "paper"], [False, True]])
    for number, part in enumerate(("train", "valid", "test")):
        text(folder / f"split/time/paper/{part}.csv.gz", [[v] for v in range(6) if SPLIT[v] == number])
    return str(folder)


PARTS = {0: "train", 1: "valid", 2: "test"}


def columns():
    """The table of nodes as it may be in Parquet: ids are texts, in another order than the numbers."""
    return {
        "id": [f"node {v}" for v in range(6)],
        "label": ["a" if label == 0 else "b" if label == 1 else None for label in LABELS],
        "split": [PARTS[part] for part in SPLIT],
        "words": [[f"w{word}" for word in words] for words in WORDS],
        "size": [1.5 * v for v in range(6)],
    }


def parquet(folder, **others):
    """Tables as Parquet. others: columns of nodes to replace, None leaves one out."""
    folder.mkdir(exist_ok=True)
    found = {name: values for name, values in (columns() | others).items() if values is not None}
    pq.write_table(pa.table(found), folder / "nodes.parquet")
    ids = others.get("id") or columns()["id"]
    edges = {"src": [ids[s] for s, _ in EDGES], "dst": [ids[t] for _, t in EDGES]}
    pq.write_table(pa.table(edges), folder / "edges.parquet")
    return str(folder)


def csv(folder):
    """Tables as CSV, in two files of nodes; ids are integers, words texts with spaces between."""
    folder.mkdir(exist_ok=True)
    numbers = [7, 3, 11, 2, 5, 13]
    rows = [
        f"{numbers[v]},{'' if LABELS[v] < 0 else LABELS[v]},{SPLIT[v]},{' '.join(f'w{word}' for word in WORDS[v])},{v}"
        for v in range(6)
    ]
    for i, part in enumerate((rows[:4], rows[4:])):
        (folder / f"nodes-{i}.csv").write_text("\n".join(["id,label,split,words,size", *part]) + "\n")
    lines = [f"{numbers[s]},{numbers[t]}" for s, t in EDGES]
    with gzip.open(folder / "edges.csv.gz", "wt") as file:
        file.write("\n".join(["src,dst", *lines]) + "\n")
    return str(folder)
