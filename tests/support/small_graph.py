"""A small graph as a source of nodes, with a sampler in numpy: slow and obvious, the reference for others."""

import numpy as np

from hetmpi.data.batch import Bag
from hetmpi.data.graph.samples import Block, NodeSamples
from hetmpi.data.source import check_slice
from hetmpi.data.synthetic import GOLDEN, base_of, mix, words

TRAIN, VALID, ORDER = 0, 1, 2  # streams of random numbers
WINDOW = 4096


def concatenated(lists):
    """Lists of integers -> (offsets, values)."""
    sizes = np.array([len(one) for one in lists], np.int64)
    values = np.concatenate([np.empty(0, np.int64), *[np.asarray(one, np.int64) for one in lists]])
    return np.concatenate([[0], np.cumsum(sizes)]), values


def below(random, limit):
    """random (n,) uint64, limit (n,) < 2^32 -> floor(random * limit / 2^64)."""
    limit = np.asarray(limit).astype(np.uint64)
    low = (random & np.uint64(0xFFFFFFFF)) * limit >> np.uint64(32)
    return ((random >> np.uint64(32)) * limit + low >> np.uint64(32)).astype(np.int64)


def drawn(neighbours, fanout, replace, word):
    """The neighbours drawn from a list, and how many: the k-th draw is the same for every fan-out."""
    degree = len(neighbours)
    if degree == 0:
        return []
    random = mix(np.array([word], np.uint64) + np.arange(1, fanout + 1, dtype=np.uint64) * GOLDEN)
    if replace:
        return [neighbours[place] for place in below(random, np.full(fanout, degree))]
    order = list(range(degree))
    for k in range(min(fanout, degree)):
        place = k + int(below(random[k : k + 1], [degree - k])[0])
        order[k], order[place] = order[place], order[k]
    return [neighbours[place] for place in order[: min(fanout, degree)]]


def sample(adjacency, heads, positions, fanout, replace, seed, stream):
    """nodes and blocks of NodeSamples. adjacency: neighbours of each node."""
    places, nodes = {}, []
    base = base_of(seed, stream)
    for head, position in zip(heads, positions):
        places.setdefault((position // WINDOW, head), len(nodes))
        nodes.append((position // WINDOW, head))
    blocks = []
    for width in fanout:
        lists = []
        for window, node in list(nodes):
            of_window = mix(np.array([window], np.uint64) * GOLDEN + base)
            word = mix(np.array([node], np.uint64) * GOLDEN + of_window)[0]
            found = [(window, int(one)) for one in drawn(adjacency[node], width, replace, word)]
            for one in found:
                if one not in places:
                    places[one] = len(nodes)
                    nodes.append(one)
            lists.append([places[one] for one in found])
        blocks.append(Block(*concatenated(lists)))
    return np.array([node for _, node in nodes], np.int64), tuple(blocks)


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
        self.class_names = np.array([f"class-{number}" for number in range(num_classes)])
        self.max_ids, self.field_rows = max(map(len, self.ids)), [num_nodes, num_words]
        self.num_rows = sum(self.field_rows)
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
        order = np.argsort(words(self.seed, ORDER, np.array([epoch]), self.num_train)[0])
        return self.heads[TRAIN][order].tolist()

    def _samples(self, heads, positions, stream):
        nodes, blocks = sample(self.adjacency, heads, positions, self.fanout, self.replace, self.seed, stream)
        ids, dense = self.inputs(nodes)
        return NodeSamples(nodes, blocks, ids, dense, self.labels[nodes[: len(heads)]])

    def inputs(self, nodes):
        offsets, values = concatenated([self.ids[node] for node in nodes])
        return Bag(values, offsets), self.dense[nodes]

    def neighbours(self, first, last):
        return concatenated(self.adjacency[first:last])

    def names(self, nodes):
        return np.array([f"node-{node}" for node in nodes])
