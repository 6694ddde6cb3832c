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

from hetmpi.bounded_file import shown
from hetmpi.data.batch import Bag
from hetmpi.data.files import DataError, first_line
from hetmpi.data.graph.columns import Remark
from hetmpi.data.graph.graph import NO_PART, RawGraph, check_nodes, classes_below, from_edges, lists_by, whole_labels
from hetmpi.data.graph.reading import read_csv_file
from hetmpi.errors import one_line

IDS_PER_KIND = 10
MOST_NODES = 1 << 31
PARTS = ("train", "valid", "test")


def is_ogb(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, "raw"))


def read_ogb(folder: str, undirected: bool, remark: Remark) -> RawGraph:
    """remark: takes lines about files that are not read. Raises DataError for files that are missing, cannot be read or
    contradict each other."""
    raw = os.path.join(folder, "raw")
    if os.path.exists(os.path.join(raw, "edge-feat.csv.gz")):
        remark(f"data.path={shown(folder)}: numbers of edges are not read: edge-feat.csv.gz")
    if os.path.exists(os.path.join(raw, "triplet-type-list.csv.gz")):
        return read_kinds(folder, raw, undirected)
    path = os.path.join(raw, "num-node-list.csv.gz")
    num_nodes = size_of(integers(path)[0, 0], path)
    labels = labels_in(raw, num_nodes)
    edges = edges_in(raw, num_nodes, num_nodes)
    return raw_of(folder, edges, [], labels, undirected, numbers=raw, kind="")


def read_kinds(folder: str, raw: str, undirected: bool) -> RawGraph:
    """Of a data set with several kinds of nodes."""
    place = f"data.path={shown(folder)}"
    sizes = {
        name: size_of(size, os.path.join(raw, "num-node-dict.csv.gz"))
        for name, size in header_and_line(raw, "num-node-dict.csv.gz").items()
    }
    has_label = header_and_line(raw, "nodetype-has-label.csv.gz")
    kinds = [name for name in sizes if str(has_label.get(name)).lower() == "true"]
    if len(kinds) != 1:
        found = one_line(", ".join(kinds)) or "none"
        raise DataError(f"{place}: one kind of nodes must have labels, {found} have")
    [kind], lists, edges = kinds, [], []
    labels = labels_in(os.path.join(raw, "node-label", kind), sizes[kind])
    for head, relation, tail in relations_in(raw, sizes):
        if kind not in (head, tail):
            continue
        found = edges_in(os.path.join(raw, "relations", f"{head}___{relation}___{tail}"), sizes[head], sizes[tail])
        if head == tail:
            edges.append(found)
        else:
            (owners, others), other = (found, tail) if head == kind else (found[::-1], head)
            lists.append((lists_by(owners, others, sizes[kind], IDS_PER_KIND), sizes[other]))
    if len(edges) != 1:
        name = one_line(kind)
        raise DataError(f"{place}: {len(edges)} relations of {name} to {name}, there must be one")
    return raw_of(folder, edges[0], lists, labels, undirected, numbers=os.path.join(raw, "node-feat", kind), kind=kind)


def relations_in(raw: str, sizes: dict[str, int]) -> list[tuple[str, str, str]]:
    """Kind of the heads, name, and kind of the tails of each relation. sizes: the known kinds."""
    path = os.path.join(raw, "triplet-type-list.csv.gz")
    found = table(path, is_text=True)
    if found.num_columns != 3:
        raise DataError(f"{shown(path)} must have three columns, it has {found.num_columns:,}")
    relations = list(zip(*found.to_pydict().values()))
    for head, relation, tail in relations:
        for name in (head, tail):
            if name not in sizes:
                raise DataError(f"{shown(path)} names {one_line(name)}, which is not in num-node-dict.csv.gz")
        if "/" in relation:
            raise DataError(f"{shown(path)}: the name of a relation has no /, got {one_line(relation)}")
    return relations


def size_of(value, path: str) -> int:
    """The number of nodes of a kind. Raises DataError for what is none."""
    if not str(value).isdecimal() or not 0 < int(value) < MOST_NODES:
        raise DataError(f"{shown(path)} must hold numbers of nodes from 1 to 2^31 - 1, it holds {one_line(value)}")
    return int(value)


def raw_of(
    folder: str, edges: tuple[np.ndarray, np.ndarray], lists: list[tuple[Bag, int]], labels: np.ndarray,
    undirected: bool, numbers: str, kind: str,
) -> RawGraph:  # fmt: skip
    """numbers: folder of node-feat.csv.gz. kind: folder of the split's files."""
    num_nodes = len(labels)
    feat = os.path.join(numbers, "node-feat.csv.gz")
    dense = floats(feat, num_nodes) if os.path.exists(feat) else None
    adjacency = from_edges(*edges, num_nodes, undirected)
    num_classes = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    place = f"data.path={shown(folder)}"
    classes_below(num_classes, place)
    return RawGraph(adjacency, lists, labels, num_classes, split_in(folder, kind, num_nodes), dense)


def labels_in(folder: str, num_nodes: int) -> np.ndarray:
    """Labels as in Graph."""
    path = os.path.join(folder, "node-label.csv.gz")
    found = floats(path, num_nodes)
    return whole_labels(found[:, 0], shown(path)) if found.shape[1] == 1 else found.astype(np.float32)


def split_in(folder: str, kind: str, num_nodes: int) -> np.ndarray:
    place = os.path.join(folder, "split")
    names = sorted(os.listdir(place)) if os.path.isdir(place) else []
    if len(names) != 1:
        found = one_line(", ".join(names)) or "none"
        raise DataError(f"data.path={shown(folder)}: split/ must hold one folder, as split/time; there are: {found}")
    split = np.full(num_nodes, NO_PART, np.int8)
    for number, part in enumerate(PARTS):
        path = os.path.join(place, names[0], kind, f"{part}.csv.gz")
        nodes = integers(path)[:, 0]
        check_nodes(nodes, num_nodes, shown(path))
        split[nodes] = number
    return split


def edges_in(folder: str, num_heads: int, num_tails: int) -> tuple[np.ndarray, np.ndarray]:
    """Both ends (e,) int64 of the edges in a folder."""
    path = os.path.join(folder, "edge.csv.gz")
    found = integers(path)
    if found.shape[1] != 2:
        raise DataError(f"{shown(path)} must have two columns, it has {found.shape[1]}")
    for column, limit in enumerate((num_heads, num_tails)):
        check_nodes(found[:, column], limit, f"{shown(path)}, column {column + 1}:")
    return found[:, 0], found[:, 1]


def integers(path: str) -> np.ndarray:
    """(lines, columns) int64."""
    return cast(path, pa.int64(), "integers")


def floats(path: str, num_nodes: int) -> np.ndarray:
    """(num_nodes, columns) float64, NaN for none."""
    found = cast(path, pa.float64(), "numbers")
    if len(found) != num_nodes:
        raise DataError(f"{shown(path)} must have a line for each of the {num_nodes:,} nodes, it has {len(found):,}")
    return found


def cast(path: str, kind: pa.DataType, noun: str) -> np.ndarray:
    found = table(path)
    if pa.types.is_integer(kind) and any(column.null_count for column in found.columns):
        raise DataError(f"{shown(path)} must hold {noun}, some are missing")
    try:
        return np.stack([column.cast(kind).to_numpy() for column in found.columns], axis=1)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise DataError(f"{shown(path)} must hold {noun}: {one_line(first_line(error))}") from error


def header_and_line(folder: str, name: str) -> dict[str, str]:
    """The names in the first line of a file, and the values in the second."""
    path = os.path.join(folder, name)
    found = table(path, is_text=True)
    if len(found) < 2:
        raise DataError(f"{shown(path)} must have a line of names and a line of values")
    return {names[0]: names[1] for names in found.to_pydict().values()}


def table(path: str, is_text: bool = False) -> pa.Table:
    """The lines of a file without a header. Raises DataError if it is missing, empty or damaged."""
    kinds = csv.ConvertOptions(
        column_types=dict.fromkeys(map("f{}".format, range(1000)), pa.string()) if is_text else None
    )
    return read_csv_file(path, csv.ReadOptions(autogenerate_column_names=True), None, kinds)
