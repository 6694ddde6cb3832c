"""Data sets of the Open Graph Benchmark (Hu et al., "Open Graph Benchmark: datasets for machine learning on graphs",
NeurIPS 2020) in the folder that its download unpacks.

One kind of nodes, as ogbn-arxiv:

    raw/edge.csv.gz              two nodes a line    raw/num-node-list.csv.gz    the number of nodes
    raw/node-label.csv.gz        a column per label  raw/node-feat.csv.gz        optional: numbers
    split/NAME/{train,valid,test}.csv.gz             nodes

Several kinds, as ogbn-mag: num-node-dict.csv.gz has their numbers, nodetype-has-label.csv.gz the kind with labels, and
raw/relations/A___RELATION___B/edge.csv.gz the edges between two kinds; labels, numbers and split lie in folders of
their kind. As HET does, the nodes are those of the kind with labels, their edges those among themselves, and their
ids the first IDS_PER_KIND of each other kind that edges link to them: of ogbn-mag the papers with their citations,
authors and fields of study.
"""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

from hetmpi.data.batch import Bag
from hetmpi.data.graph.graph import NO_LABEL, NO_PART, Raw, check_nodes, from_edges, lists_by
from hetmpi.data.tabular.files import DataError, first_line

IDS_PER_KIND = 10
PARTS = ("train", "valid", "test")


def is_ogb(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, "raw"))


def read_ogb(folder: str, undirected: bool) -> Raw:
    """Raises DataError for files that are missing, cannot be read or contradict each other."""
    raw = os.path.join(folder, "raw")
    if os.path.exists(os.path.join(raw, "triplet-type-list.csv.gz")):
        return read_kinds(folder, raw, undirected)
    num_nodes = int(integers(os.path.join(raw, "num-node-list.csv.gz"))[0, 0])
    edges = edges_in(raw, num_nodes, num_nodes)
    return raw_of(folder, edges, [], num_nodes, undirected, labels=raw, numbers=raw, kind="")


def read_kinds(folder: str, raw: str, undirected: bool) -> Raw:
    """Of a data set with several kinds of nodes."""
    sizes = {name: int(size) for name, size in header_and_line(raw, "num-node-dict.csv.gz").items()}
    has_label = header_and_line(raw, "nodetype-has-label.csv.gz")
    kinds = [name for name in sizes if str(has_label.get(name)).lower() == "true"]
    if len(kinds) != 1:
        raise DataError(f"data.path={folder}: one kind of nodes must have labels, {', '.join(kinds) or 'none'} have")
    [kind], lists, edges = kinds, [], []
    for head, relation, tail in zip(*table(os.path.join(raw, "triplet-type-list.csv.gz")).to_pydict().values()):
        if kind not in (head, tail):
            continue
        found = edges_in(os.path.join(raw, "relations", f"{head}___{relation}___{tail}"), sizes[head], sizes[tail])
        if head == tail:
            edges.append(found)
        else:
            (owners, others), other = (found, tail) if head == kind else (found[::-1], head)
            lists.append((lists_by(owners, others, sizes[kind], IDS_PER_KIND), sizes[other]))
    if len(edges) != 1:
        raise DataError(f"data.path={folder}: {len(edges)} relations of {kind} to {kind}, there must be one")
    places = {"labels": os.path.join(raw, "node-label", kind), "numbers": os.path.join(raw, "node-feat", kind)}
    return raw_of(folder, edges[0], lists, sizes[kind], undirected, kind=kind, **places)


def raw_of(
    folder: str, edges: tuple[np.ndarray, np.ndarray], lists: list[tuple[Bag, int]], num_nodes: int, undirected: bool,
    labels: str, numbers: str, kind: str,
) -> Raw:  # fmt: skip
    """labels, numbers: folders of node-label.csv.gz and node-feat.csv.gz. kind: folder of the split's files."""
    label = floats(os.path.join(labels, "node-label.csv.gz"), num_nodes)
    is_one = label.shape[1] == 1
    label = np.where(np.isnan(label), NO_LABEL, label)[:, 0].astype(np.int64) if is_one else label.astype(np.float32)
    feat = os.path.join(numbers, "node-feat.csv.gz")
    dense = floats(feat, num_nodes) if os.path.exists(feat) else None
    adjacency = from_edges(*edges, num_nodes, undirected)
    num_classes = int(label.max()) + 1 if is_one else label.shape[1]
    return Raw(adjacency, lists, label, num_classes, split_in(folder, kind, num_nodes), dense)


def split_in(folder: str, kind: str, num_nodes: int) -> np.ndarray:
    place = os.path.join(folder, "split")
    names = sorted(os.listdir(place)) if os.path.isdir(place) else []
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise DataError(f"data.path={folder}: split/ must hold one folder, as split/time; there are: {found}")
    split = np.full(num_nodes, NO_PART, np.int8)
    for number, part in enumerate(PARTS):
        path = os.path.join(place, names[0], kind, f"{part}.csv.gz")
        nodes = integers(path)[:, 0]
        check_nodes(nodes, num_nodes, path)
        split[nodes] = number
    return split


def edges_in(folder: str, num_heads: int, num_tails: int) -> tuple[np.ndarray, np.ndarray]:
    """Both ends (e,) int64 of the edges in a folder."""
    path = os.path.join(folder, "edge.csv.gz")
    found = integers(path)
    if found.shape[1] != 2:
        raise DataError(f"{path} must have two columns, it has {found.shape[1]}")
    for column, limit in enumerate((num_heads, num_tails)):
        check_nodes(found[:, column], limit, f"{path}, column {column + 1}:")
    return found[:, 0], found[:, 1]


def integers(path: str) -> np.ndarray:
    """(lines, columns) int64."""
    return cast(path, pa.int64(), "integers")


def floats(path: str, num_nodes: int) -> np.ndarray:
    """(num_nodes, columns) float64, NaN for none."""
    found = cast(path, pa.float64(), "numbers")
    if len(found) != num_nodes:
        raise DataError(f"{path} must have a line for each of the {num_nodes:,} nodes, it has {len(found):,}")
    return found


def cast(path: str, kind: pa.DataType, noun: str) -> np.ndarray:
    found = table(path)
    try:
        return np.stack([column.cast(kind).to_numpy() for column in found.columns], axis=1)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise DataError(f"{path} must hold {noun}: {first_line(error)}") from error


def header_and_line(folder: str, name: str) -> dict[str, object]:
    """The names in the first line of a file, and the values in the second."""
    return {names[0]: names[1] for names in table(os.path.join(folder, name), is_text=True).to_pydict().values()}


def table(path: str, is_text: bool = False) -> pa.Table:
    """The lines of a file without a header. Raises DataError if it is missing, empty or damaged."""
    kinds = csv.ConvertOptions(
        column_types=dict.fromkeys(map("f{}".format, range(1000)), pa.string()) if is_text else None
    )
    try:
        return csv.read_csv(path, csv.ReadOptions(autogenerate_column_names=True), convert_options=kinds)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"data.path: {path} cannot be read: {first_line(error)}") from error
