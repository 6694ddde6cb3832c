"""Graph: nodes with neighbours, ids, numbers and labels, as arrays; functions that make these arrays, and their checks.

N nodes, E edges, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hetmpi.data.batch import Bag
from hetmpi.data.files import DataError
from hetmpi.errors import UserError, check_number
from hetmpi.memory import check_fits

TRAIN, VALID, TEST, NO_PART = 0, 1, 2, -1
NO_LABEL = -1
MOST_CLASSES = 1 << 20  # the last layer has weights of each
LEAST_WEIGHT, LARGEST_WEIGHT = 1e-20, 1e20  # of an edge


@dataclass
class Graph:
    """Node v reads from its neighbours indices[indptr[v] : indptr[v + 1]]; several edges to one node count each. Its
    input is the ids[id_offsets[v] : id_offsets[v + 1]], keys of the table, and dense[v]."""

    indptr: np.ndarray  # (N + 1,) int64
    indices: np.ndarray  # (E,) integers
    id_offsets: np.ndarray  # (N + 1,) int64
    ids: np.ndarray  # integers, 0 <= id < sum of field_rows
    field_rows: list[int]  # rows of the nodes' own ids, if any, then of each list; METIS's order: of all
    labels: np.ndarray  # (N,) int64, -1 for none; of several labels (N, C) float32 of 0 and 1, rows of NaN for none
    num_classes: int
    split: np.ndarray  # (N,) int8: 0 train, 1 valid, 2 test, -1 none
    dense: np.ndarray  # (N, num_dense) float32
    names: np.ndarray | None = None  # (N,) int64 or texts: the user's ids of nodes; None: their numbers
    class_names: list[str] = field(default_factory=list)  # texts of the classes, if they have any
    weights: np.ndarray | None = None  # (E,) float32 above 0, of indices; None: all 1
    dense_names: list[str] = field(default_factory=list)  # of the columns of dense, if they have any
    key_hashes: np.ndarray | None = None  # (num_rows,) int64 of what each key stands for; None: unknown
    digests: dict[str, str] = field(default_factory=dict)  # of a prepared graph: prepared.py, digests_of

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_rows(self) -> int:
        return sum(self.field_rows)


@dataclass
class RawGraph:
    """A graph as it is in files: `lists` in place of ids, no split where the files have none."""

    adjacency: tuple[np.ndarray, np.ndarray]  # indptr and indices of a Graph
    lists: list[tuple[Bag, int]]  # ids of all nodes, and their number of rows
    labels: np.ndarray
    num_classes: int
    split: np.ndarray | None = None
    dense: np.ndarray | None = None
    names: np.ndarray | None = None
    class_names: list[str] = field(default_factory=list)
    weights: np.ndarray | None = None
    dense_names: list[str] = field(default_factory=list)
    node_hashes: np.ndarray | None = None  # (N,) int64 of the users' ids of nodes; None: unknown
    value_hashes: list[np.ndarray] = field(default_factory=list)  # (rows,) int64 of the values of each list


def from_edges(sources: np.ndarray, targets: np.ndarray, num_nodes: int, undirected: bool):
    """indptr (num_nodes + 1,), indices (e,) int64 of edges from sources (n,) to targets (n,): a node's neighbours are
    the sources of its edges, ascending. undirected: each edge counts in both directions, and once however often it is
    given. REQUIRES: 0 <= both ends < num_nodes < 2^31."""
    edges = targets * np.int64(num_nodes) + sources
    if undirected:
        edges = np.concatenate([edges, sources * np.int64(num_nodes) + targets])
    edges.sort()
    if undirected and len(edges):
        edges = edges[np.concatenate([[True], edges[1:] != edges[:-1]])]
    targets, sources = np.divmod(edges, num_nodes)
    return offsets_of(np.bincount(targets, minlength=num_nodes)), sources


def from_weighted_edges(
    sources: np.ndarray, targets: np.ndarray, weights: np.ndarray, num_nodes: int, undirected: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """indptr and indices as from_edges, and weights (e,) float32: each neighbour of a node once, with the sum of the
    weights (n,) float64 of its edges; undirected: with their mean, whatever their direction."""
    edges = targets * np.int64(num_nodes) + sources
    if undirected:
        edges, weights = np.concatenate([edges, sources * np.int64(num_nodes) + targets]), np.tile(weights, 2)
    edges, places = np.unique(edges, return_inverse=True)
    totals = np.bincount(places, weights, len(edges))
    if undirected and len(edges):
        totals /= np.bincount(places, minlength=len(edges))
    targets, sources = np.divmod(edges, num_nodes)
    return offsets_of(np.bincount(targets, minlength=num_nodes)), sources, totals.astype(np.float32)


def made_undirected(indptr: np.ndarray, indices: np.ndarray):
    """As from_edges, of a graph that is checked."""
    num_nodes = len(indptr) - 1
    return from_edges(indices.astype(np.int64), np.repeat(np.arange(num_nodes), np.diff(indptr)), num_nodes, True)


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """sizes (n,) -> (n + 1,) int64 from 0."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def lists_by(owners: np.ndarray, values: np.ndarray, num_owners: int, most: int | None = None) -> Bag:
    """The values (n,) of each owner, in their order; at most the first `most`. owners (n,) int64."""
    order = np.argsort(owners, kind="stable")
    sizes = np.bincount(owners, minlength=num_owners)
    offsets = offsets_of(sizes)
    if most is not None:
        place = np.arange(len(order)) - np.repeat(offsets[:-1], sizes)
        order, offsets = order[place < most], offsets_of(np.minimum(sizes, most))
    return Bag(values[order], offsets)


def joined_ids(num_nodes: int, node_ids: bool, lists: Sequence[tuple[Bag, int]]):
    """id_offsets, ids and field_rows of a graph: each node's own id, if node_ids, then its lists. lists: the nodes'
    values of each, and its number of rows."""
    own = [(Bag(np.arange(num_nodes), np.arange(num_nodes + 1)), num_nodes)] if node_ids else []
    lists = [*own, *lists]
    rows = [rows for _, rows in lists]
    sizes = sum((np.diff(bag.offsets) for bag, _ in lists), np.zeros(num_nodes, np.int64))
    offsets = offsets_of(sizes)
    ids, begins, first = np.empty(offsets[-1], smallest_integers(sum(rows))), offsets[:-1].copy(), 0
    for bag, num_rows in lists:
        sizes = np.diff(bag.offsets)
        ids[np.arange(len(bag.values)) + np.repeat(begins - bag.offsets[:-1], sizes)] = bag.values + first
        begins += sizes
        first += num_rows
    return offsets, ids, rows


def smallest_integers(limit: int) -> np.dtype:
    """int32 if it holds all numbers below `limit`, else int64."""
    return np.dtype(np.int32 if limit <= 1 << 31 else np.int64)


def classes_of(values: Sequence) -> tuple[np.ndarray, list[str]]:
    """Labels (N,) int64 by the order of the distinct values, None for none, and the values as texts."""
    known = sorted({value for value in values if value is not None})
    number = {value: i for i, value in enumerate(known)}
    return np.array([number.get(value, NO_LABEL) for value in values], np.int64), [str(value) for value in known]


def whole_labels(found: np.ndarray, what: str) -> np.ndarray:
    """Labels (N,) int64 of integers, or of whole numbers with NaN for none. Raises DataError for other numbers. what:
    for the message."""
    values = found.astype(np.float64) if found.dtype.kind == "f" else found  # 1 << 62 is beyond float16
    is_wrong = (values >= 1 << 62) | (values <= -(1 << 62))
    if values.dtype.kind == "f":
        known = ~np.isnan(values)
        is_wrong |= known & (np.floor(values) != values)
        values = np.where(known, values, NO_LABEL)
    wrong = np.flatnonzero(is_wrong)
    if len(wrong):
        raise DataError(
            f"{what} must be integers that number the classes from 0; {len(wrong):,} of {len(found):,} are not, the "
            f"first is {found[wrong[0]]}"
        )
    return values.astype(np.int64)


def classes_below(num_classes: int, what: str) -> int:
    """The number of classes. Raises DataError if a model cannot have so many. what: for the message."""
    if num_classes > MOST_CLASSES:
        raise DataError(
            f"{what}: at most {MOST_CLASSES:,} classes are possible, there are {num_classes:,}: number them from 0, or "
            "predict another column"
        )
    return num_classes


def check_labels_fit(num_nodes: int, num_classes: int, what: str):
    """Raises UserError if several labels of each node do not fit into memory."""
    check_fits(
        4 * num_nodes * classes_below(num_classes, what), f"{what}: {num_classes:,} labels of each node", "use fewer"
    )


def has_label(labels: np.ndarray) -> np.ndarray:
    """(N,) bool."""
    return ~np.isnan(labels).any(1) if labels.ndim == 2 else labels >= 0


def split_per_class(labels: np.ndarray, train: int, valid: int, seed: int) -> np.ndarray:
    """(N,) int8: of each class `train` nodes to train on, then `valid` to hold out, the others to test, by chance."""
    known = np.random.default_rng(seed).permutation(np.flatnonzero(labels >= 0))
    known = known[np.argsort(labels[known], kind="stable")]
    sizes = np.bincount(labels[known])
    place = np.arange(len(known)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # in its class
    return split_of(len(labels), known, (place >= train).astype(np.int8) + (place >= train + valid))


def split_by_shares(labels: np.ndarray, train: float, valid: float, seed: int) -> np.ndarray:
    """(N,) int8: these shares of the nodes with a label, the others to test, by chance."""
    known = np.random.default_rng(seed).permutation(np.flatnonzero(has_label(labels)))
    place = np.arange(len(known)) / max(1, len(known))
    return split_of(len(labels), known, (place >= train).astype(np.int8) + (place >= train + valid))


def check_shares(train: float, valid: float):
    """Raises UserError unless data.train_share and data.valid_share are shares that leave out no more than all."""
    check_number("data.train_share", train, 0, 1)
    check_number("data.valid_share", valid, 0, 1)
    if train == 0 or train + valid > 1:
        raise UserError(
            f"data.train_share must be above 0, and with data.valid_share at most 1, got {train} and {valid}"
        )


def split_of(num_nodes: int, nodes: np.ndarray, parts: np.ndarray) -> np.ndarray:
    split = np.full(num_nodes, NO_PART, np.int8)
    split[nodes] = parts
    return split


def check_adjacency(indptr: np.ndarray, indices: np.ndarray, what: str):
    """Raises DataError unless indptr rises from 0 to the number of indices and these are nodes. what: for the
    message."""
    num_nodes = len(indptr) - 1
    if num_nodes < 1 or num_nodes >= 1 << 31:
        raise DataError(f"{what}: indptr must have between 2 and 2^31 offsets, got {len(indptr):,}")
    if indptr[0] != 0 or indptr[-1] != len(indices):
        raise DataError(
            f"{what}: indptr must rise from 0 to {len(indices):,}, the number of indices, it is {indptr[0]:,} to "
            f"{indptr[-1]:,}"
        )
    falls = np.flatnonzero(np.diff(indptr) < 0)
    if len(falls):
        v = falls[0]
        raise DataError(f"{what}: indptr must rise, after {indptr[v]:,} of node {v:,} it is {indptr[v + 1]:,}")
    check_nodes(indices, num_nodes, f"{what}: indices")


def check_weights(weights: np.ndarray, what: str):
    """Raises DataError unless the weights of edges are numbers above 0, at most LARGEST_WEIGHT. what: for the
    message."""
    wrong = np.flatnonzero(~((weights >= LEAST_WEIGHT) & (weights <= LARGEST_WEIGHT)))
    if len(wrong):
        raise DataError(
            f"{what} must be numbers from {LEAST_WEIGHT:g} to {LARGEST_WEIGHT:g}, {len(wrong):,} of {len(weights):,} "
            f"are not, the first is {weights[wrong[0]]:g}: remove these edges"
        )


def check_nodes(numbers: np.ndarray, limit: int, what: str, noun: str = "nodes"):
    """Raises DataError for a number that is not below `limit`. what, noun: for the message."""
    wrong = np.flatnonzero((numbers < 0) | (numbers >= limit))
    if len(wrong):
        raise DataError(
            f"{what} must be {noun}, from 0 to {limit - 1:,}; {len(wrong):,} of {len(numbers):,} are not, the first is "
            f"{numbers[wrong[0]]}"
        )


def check_graph(graph: Graph, what: str):
    """Takes nodes without a label out of the split. Raises DataError for labels out of range, numbers that are not
    finite, fewer than two classes, no ids or nothing to train on. what: for the message. REQUIRES: the adjacency is
    checked."""
    if not graph.num_rows:
        raise UserError(f"{what}: the nodes have no ids, so there is no table: set data.node_ids=true")
    if graph.num_classes < 2:
        raise DataError(f"{what}: labels of at least two classes are needed, there are {graph.num_classes}")
    known = has_label(graph.labels)
    if graph.labels.ndim == 2 and not np.isin(graph.labels[known], (0, 1)).all():
        raise DataError(f"{what}: several labels per node must be 0 or 1, or NaN in all columns for none")
    if graph.labels.ndim == 2 and not np.isnan(graph.labels[~known]).all():
        node = np.flatnonzero(~known & ~np.isnan(graph.labels).all(1))[0]
        raise DataError(f"{what}: node {node:,} has NaN in some columns of its labels: only in all of them it is none")
    if graph.labels.ndim == 1 and graph.labels.max() >= graph.num_classes:
        raise DataError(f"{what}: labels must be below {graph.num_classes}, the highest is {graph.labels.max()}")
    wrong = np.flatnonzero(~np.isfinite(graph.dense).all(1)) if graph.dense.size else ()
    if len(wrong):
        raise DataError(
            f"{what}: {len(wrong):,} nodes have numbers that are NaN or infinite, first node {wrong[0]:,}: fill them "
            "in, or set data.dense=false"
        )
    graph.split = np.where(known, graph.split, NO_PART).astype(np.int8)
    if not (graph.split == TRAIN).any():
        raise DataError(f"{what}: no node has both a label and the split 0 or train, so there is nothing to train on")
