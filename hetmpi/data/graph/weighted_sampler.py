"""Samples of a graph whose edges have weights: as cpp/graph/sampler.h draws them of edges without weights.

With replacement a neighbour is drawn with a probability in proportion to its weight, and each of k draws weighs W / k,
where W is the sum of a node's weights. Without replacement k of n neighbours are drawn uniformly, each weighs its own
weight times n / k. So the weighted sum over the draws is that over all neighbours on average, and a model's weighted
mean tends to it; where all are drawn it is the same.
"""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.data.graph.graph import Graph
from hetmpi.data.graph.samples import Block

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser of (n,) uint64."""
    x = (x ^ (x >> SHIFTS[0])) * FACTORS[0]
    x = (x ^ (x >> SHIFTS[1])) * FACTORS[1]
    return x ^ (x >> SHIFTS[2])


def hashed(base: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """(n,) uint64 of bases (n,) uint64 and numbers (n,) int64."""
    return mix(base + numbers.astype(np.uint64) * GOLDEN)


def uniform(words: np.ndarray) -> np.ndarray:
    """words (n,) uint64 -> (n,) float64 in [0, 1)."""
    return (words >> np.uint64(11)) * 2.0**-53


class WeightedSampler:
    """Thread-safe. Needs 8 bytes for each edge."""

    def __init__(self, graph: Graph, fanouts: list[int], replace: bool, seed: int):
        self._graph, self._fanouts, self._replace = graph, fanouts, replace
        self._seed = mix(np.array([seed], np.uint64))
        owners, num = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr)), graph.num_nodes
        self._totals = np.bincount(owners, graph.weights, num)  # (N,) float64
        self._reach = np.cumsum(graph.weights / self._totals[owners])  # (E,) float64: each node's edges fill 1

    def sample(self, heads: np.ndarray, positions: np.ndarray, stream: int) -> tuple[np.ndarray, tuple[Block, ...]]:
        """The nodes and blocks of NodeSamples, for heads (n,) int64 at positions (n,) int64 of a stream. Positions of
        one window draw the same neighbours of a node."""
        windows, of_node = np.unique(positions // _C.SAMPLE_WINDOW, return_inverse=True)
        words, nodes, blocks = hashed(hashed(self._seed, np.array([stream + 1])), windows), heads, []
        for fanout in self._fanouts:
            offsets, edges, weights = self._drawn(nodes, hashed(words[of_node], nodes), fanout)
            destinations = np.repeat(np.arange(len(nodes)), np.diff(offsets))
            reached = of_node[destinations] * np.int64(self._graph.num_nodes) + self._graph.indices[edges]
            index, new = places_of(of_node * np.int64(self._graph.num_nodes) + nodes, reached)
            blocks.append(Block(offsets, index, weights.astype(np.float32)))
            of_new, new = np.divmod(new, self._graph.num_nodes)
            nodes, of_node = np.concatenate([nodes, new]), np.concatenate([of_node, of_new])
        return nodes, tuple(blocks)

    def _drawn(self, nodes: np.ndarray, words: np.ndarray, fanout: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """offsets (n + 1,) int64, edges and weights (e,) of the draws of nodes (n,) int64. words: (n,) uint64."""
        begins, degrees = self._graph.indptr[nodes], np.diff(self._graph.indptr)[nodes]
        counts = np.where(degrees == 0, 0, fanout) if self._replace else np.minimum(fanout, degrees)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        if not self._replace:
            edges = first_edges(begins, degrees, words, fanout)
            return offsets, edges, self._graph.weights[edges] * np.repeat(degrees / np.maximum(counts, 1), counts)
        number = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts) + 1
        aims = uniform(hashed(np.repeat(words, counts), number))
        before = np.where(begins > 0, self._reach[begins - 1], 0.0) if len(self._reach) else np.zeros(len(nodes))
        edges = np.searchsorted(self._reach, np.repeat(before, counts) + aims, side="right")
        edges = np.clip(edges, np.repeat(begins, counts), np.repeat(begins + degrees - 1, counts))
        return offsets, edges, np.repeat(self._totals[nodes] / fanout, counts)


def first_edges(begins: np.ndarray, degrees: np.ndarray, words: np.ndarray, most: int) -> np.ndarray:
    """At most `most` edges of each node, drawn uniformly without replacement: the first by a hash of their places.
    begins, degrees (n,) int64: of their edges."""
    owners = np.repeat(np.arange(len(begins)), degrees)
    place = np.arange(len(owners)) - np.repeat(np.cumsum(degrees) - degrees, degrees)
    order = np.lexsort((hashed(words[owners], place + 1), owners))
    edges = (np.repeat(begins, degrees) + place)[order]
    return edges[place < most]


def places_of(present: np.ndarray, reached: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of keys `reached` (e,) int64 among `present` (n,) int64, which may repeat, and after them; and the
    keys that come after them, in order of first appearance."""
    unique, index = _C.unique(np.concatenate([present, reached]))
    places, num = np.full(len(unique), -1), len(present)
    places[index[:num][::-1]] = np.arange(num)[::-1]
    is_new = places < 0
    places[is_new] = num + np.arange(is_new.sum())
    return places[index[num:]], unique[is_new]
