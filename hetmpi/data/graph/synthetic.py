"""SyntheticGraph: a random graph of the shape of HET's, whose best accuracy is known.

A degree-corrected block model (Karrer and Newman, "Stochastic blockmodels and community structure in networks",
Physical Review E 83, 2011): each node has a kind and a weight, edges join nodes in proportion to their weights, most of
them nodes of one kind. Ids are drawn likewise: each kind orders all ids in its own way, and an id's place in the order
follows Zipf's law.

A node's label is its kind, but `noise` of the labels are drawn anew, uniformly, after edges and ids. So nothing that a
model reads says more of a held-out label than the kind does, and a model that knows all kinds is right with chance
1 - noise + noise / classes: best_accuracy. No model does better on average, and one comes close if edges and ids
reveal the kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetmpi.data.batch import Bag
from hetmpi.data.graph.graph import (
    Graph,
    check_shares,
    from_edges,
    joined_ids,
    offsets_of,
    smallest_integers,
    split_by_shares,
)
from hetmpi.data.graph.source import GraphData, check_flag
from hetmpi.data.synthetic import MOST_ZIPF, Zipf, scattering_stride
from hetmpi.errors import UserError, check_integer, check_number

MOST_NODES, MOST_EDGES, MOST_IDS = 1 << 28, 1 << 32, 1 << 10
LEAST_SCALE, MOST_SCALE = 1e-6, 1e3
LARGEST_SHARE = 0.1  # of all edges at a node, on average: the law has no limit of its own
KINDS, ENDS, IDS, LABELS = range(4)  # streams of random numbers


class SyntheticGraph(GraphData):
    """See GraphData.

    best_accuracy  the highest expected accuracy of any model on held-out nodes"""

    name = "graph_synthetic"

    def __init__(
        self,
        seed: int,
        scale: float = 1.0,
        nodes: int = 20_000,
        edges: int = 200_000,
        classes: int = 20,
        class_zipf: float = 0.5,
        degree_exponent: float = 2.3,
        mixing: float = 0.3,
        node_ids: bool = True,
        lists: Sequence[Sequence[int]] = ((20_000, 10), (2_000, 10)),
        id_zipf: float = 1.05,
        id_mixing: float = 0.5,
        noise: float = 0.1,
        train_share: float = 0.8,
        valid_share: float = 0.1,
        fanout: Sequence[int] = (10, 10),
        replace: bool = True,
        partition: str | None = None,
        batch_size: int = 1,
        table_partition: str = "range",
        cache: str | None = None,
    ):
        """scale: multiplies nodes, edges and the rows of lists, so that degrees stay. edges: pairs of nodes that are
        drawn; each counts in both directions, pairs of equal nodes and repeated ones are left out. class_zipf: exponent
        of the sizes of kinds, 0 for equal ones. degree_exponent: of the law of the weights. mixing: share of edges
        whose other end may be of any kind. lists: rows and most ids of each list of a node; a node has 1 to `most`.
        id_mixing: share of ids that do not depend on the kind. noise: share of labels drawn anew. Others as GraphData.
        Raises UserError for invalid values."""
        super().__init__(seed, fanout, replace, partition, batch_size, table_partition, cache)
        check_number("data.scale", scale, LEAST_SCALE, MOST_SCALE)
        check_integer("data.nodes", nodes, 2, MOST_NODES)
        check_integer("data.edges", edges, 0, MOST_EDGES)
        check_number("data.degree_exponent", degree_exponent, 1.5, 100)
        for name, value, most in (
            ("class_zipf", class_zipf, MOST_ZIPF), ("id_zipf", id_zipf, MOST_ZIPF), ("mixing", mixing, 1),
            ("id_mixing", id_mixing, 1), ("noise", noise, 1),
        ):  # fmt: skip
            check_number(f"data.{name}", value, 0, most)
        check_shares(train_share, valid_share)
        check_flag("node_ids", node_ids)
        nodes, edges = scaled(nodes, scale), scaled(edges, scale)
        lists = tuple((scaled(rows, scale), most) for rows, most in pairs_of(lists))
        check_integer("data.classes", classes, 2, nodes)
        self.settings = (
            nodes, edges, classes, class_zipf, degree_exponent, mixing, node_ids, lists, id_zipf,
            id_mixing, noise, train_share, valid_share,
        )  # fmt: skip
        self.num_classes = classes
        self.best_accuracy = 1 - noise + noise / classes

    def identity(self) -> tuple:
        return self.name, self.settings, self.seed

    def read(self) -> Graph:
        (nodes, edges, classes, class_zipf, exponent, mixing, node_ids, lists, id_zipf, id_mixing, noise, train, valid
         ) = self.settings  # fmt: skip
        kinds = Zipf(np.array([classes]), class_zipf).ranks(self._random(KINDS).random((nodes, 1)))[:, 0]
        indptr, indices = self._adjacency(kinds, edges, exponent, mixing)
        bags = [(self._list(number, kinds, *sizes, id_zipf, id_mixing), sizes[0]) for number, sizes in enumerate(lists)]
        id_offsets, ids, field_rows = joined_ids(nodes, node_ids, bags)
        random = self._random(LABELS)
        labels = np.where(random.random(nodes) < noise, random.integers(classes, size=nodes), kinds)
        return Graph(
            indptr, indices.astype(smallest_integers(nodes)), id_offsets, ids, field_rows, labels, classes,
            split_by_shares(labels, train, valid, self.seed), np.empty((nodes, 0), np.float32),
        )  # fmt: skip

    def _random(self, stream: int, number: int = 0) -> np.random.Generator:
        return np.random.default_rng((self.seed, stream, number))

    def _adjacency(self, kinds: np.ndarray, num_edges: int, exponent: float, mixing: float):
        """One end of an edge is drawn by the weights of all nodes, the other by those of its kind or of all: nodes lie
        on a line in the order of their kinds, each as long as its weight, and a random point of the line, or of a
        kind's part of it, hits a node."""
        random = self._random(ENDS)
        order = np.argsort(kinds, kind="stable")
        weights = (1 - random.random(len(kinds))) ** (-1 / (exponent - 1))
        line = np.concatenate([[0], np.cumsum(np.minimum(weights, LARGEST_SHARE * weights.sum())[order])])
        ends = offsets_of(np.bincount(kinds))
        first = hit(line, random.random(num_edges) * line[-1])
        kind = kinds[order][first]
        begin, end = line[ends[kind]], line[ends[kind + 1]]
        is_mixed = random.random(num_edges) < mixing
        begin[is_mixed], end[is_mixed] = 0, line[-1]
        second = hit(line, begin + random.random(num_edges) * (end - begin))
        differ = first != second
        return from_edges(order[first[differ]], order[second[differ]], len(kinds), undirected=True)

    def _list(self, number: int, kinds: np.ndarray, rows: int, most: int, zipf: float, mixing: float) -> Bag:
        """The order of a kind begins at a random place of one order of all ids."""
        random = self._random(IDS, number)
        begins = random.integers(rows, size=int(kinds.max()) + 2)
        offsets = offsets_of(random.integers(1, most + 1, size=len(kinds)))
        of_kind = np.repeat(kinds + 1, np.diff(offsets))
        of_kind[random.random(len(of_kind)) < mixing] = 0
        places = Zipf(np.array([rows]), zipf).ranks(random.random((len(of_kind), 1)))[:, 0]
        return Bag((begins[of_kind] + places) % rows * scattering_stride(rows) % rows, offsets)


def scaled(number: int, scale: float) -> int:
    """At least 1 of any."""
    return max(round(number * scale), min(number, 1))


def hit(line: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The numbers of the intervals [line[i], line[i + 1]) that hold the points (n,)."""
    return np.clip(np.searchsorted(line, points, side="right") - 1, 0, len(line) - 2)


def pairs_of(lists) -> tuple[tuple[int, int], ...]:
    """data.lists. Raises UserError unless they are pairs of integers."""
    if isinstance(lists, str) or not isinstance(lists, Sequence):
        raise UserError(f"data.lists must be pairs of rows and most ids of a node, as in [[20000,10]], got {lists}")
    for pair in lists:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise UserError(f"each of data.lists must be rows and most ids of a node, as in [20000,10], got {pair}")
        check_integer("rows in data.lists", pair[0], 1, MOST_EDGES)
        check_integer("most ids in data.lists", pair[1], 1, MOST_IDS)
    return tuple((int(rows), int(most)) for rows, most in lists)
