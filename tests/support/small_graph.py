"""A small graph as a source of nodes, in plain Python. data._target_=small_graph.SmallGraph"""

import numpy as np
from sampling import sampled

from hetmpi.data.batch import Bag
from hetmpi.data.graph.samples import Block, NodeSamples
from hetmpi.data.source import check_slice

TRAIN, VALID = 0, 1  # streams of random numbers


def concatenated(lists):
    """Lists of integers -> (offsets, values)."""
    sizes = np.array([len(one) for one in lists], np.int64)
    values = np.concatenate([np.empty(0, np.int64), *[np.asarray(one, np.int64) for one in lists]])
    return np.concatenate([[0], np.cumsum(sizes)]), values


class SmallGraph:
    """Nodes of `num_classes` classes with neighbours mostly of their own class, and words of their class. Node 0 has no
    neighbours and no ids, node 1 no label but is a training node."""

    name = "small graph"

    def __init__(
        self, seed, num_nodes=120, num_classes=3, num_dense=0, num_words=40, fanout=(3, 2), replace=True,
        is_multilabel=False, heads_left_out=0,
    ):  # fmt: skip
        """heads_left_out: every batch that begins at a position below it is empty."""
        draw = np.random.default_rng(7)
        self.seed, self.num_nodes, self.num_classes, self.num_dense = seed, num_nodes, num_classes, num_dense
        self.fanout, self.replace, self.is_multilabel = list(fanout), replace, is_multilabel
        self.heads_left_out = heads_left_out
        kind = draw.integers(num_classes, size=num_nodes)
        of_kind = [np.flatnonzero(kind == one) for one in range(num_classes)]
        self.adjacency = [[]] + [
            [int(draw.choice(of_kind[kind[v]] if draw.random() < 0.8 else num_nodes)) for _ in range(draw.integers(8))]
            for v in range(1, num_nodes)
        ]
        word_of = draw.integers(num_classes, size=num_words)
        own = [np.flatnonzero(word_of == one) for one in range(num_classes)]
        self.ids = [[]] + [
            [v, *(num_nodes + draw.choice(own[kind[v]] if draw.random() < 0.6 else num_words, draw.integers(1, 5)))]
            for v in range(1, num_nodes)
        ]
        self.class_names = [f"class-{number}" for number in range(num_classes)]
        self.max_ids, self.num_rows = max(map(len, self.ids)), num_nodes + num_words
        self.dense = draw.normal(size=(num_nodes, num_dense)).astype(np.float32)
        self.labels = kind.copy()
        self.labels[1] = -1
        if is_multilabel:
            self.labels = np.eye(num_classes, dtype=np.float32)[kind]
            self.labels[:, 0] = draw.integers(2, size=num_nodes)
            self.labels[1] = np.nan
        self.split = np.array([0, 0, 1, 2], np.int8)[np.arange(num_nodes) % 4]
        self.heads = {which: np.flatnonzero(self.split == which) for which in (TRAIN, VALID)}
        self.num_train, self.num_valid = (len(self.heads[which]) for which in (TRAIN, VALID))

    def prepare(self, rank, size, barrier):
        pass

    def train(self, start, stop):
        check_slice(start, stop, None)
        stop = start if start < self.heads_left_out else stop
        heads = [self._order(epoch)[place] for epoch, place in (divmod(p, self.num_train) for p in range(start, stop))]
        return self._samples(heads, range(start, stop), TRAIN)

    def valid(self, start, stop):
        check_slice(start, stop, self.num_valid)
        return self._samples(self.heads[VALID][start:stop].tolist(), range(start, stop), VALID)

    def _order(self, epoch):
        """The training nodes of an epoch."""
        return np.random.default_rng((self.seed, epoch)).permutation(self.heads[TRAIN]).tolist()

    def _samples(self, heads, positions, stream):
        heads, positions = np.array(heads, np.int64), np.array(positions, np.int64)
        nodes, edges = sampled(self.adjacency, heads, positions, self.fanout, self.replace, self.seed, stream)
        blocks = tuple(Block(*(np.array(part, np.int64) for part in block)) for block in edges)
        nodes = np.array(nodes, np.int64)
        return NodeSamples(nodes, blocks, *self.inputs(nodes), self.labels[heads])

    def inputs(self, nodes):
        offsets, values = concatenated([self.ids[node] for node in nodes])
        return Bag(values, offsets), self.dense[nodes]

    def neighbours(self, first, last):
        return concatenated(self.adjacency[first:last])

    def names(self, nodes):
        return np.array([f"node-{node}" for node in nodes])
