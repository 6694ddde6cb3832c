"""The rule of cpp/graph/sampler.h in plain Python, and graphs to sample from."""

import numpy as np

GOLDEN, WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
WINDOW = 4096


def mix(x):
    """splitmix64's finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def hashed(base, number):
    return mix((base + number * GOLDEN) & WORD)


def draws(neighbours, node, window, fanout, replace, seed, stream):
    """The sampled neighbours of a node."""
    word = hashed(hashed(hashed(mix(seed), stream + 1), window), node)
    words = [hashed(word, k + 1) for k in range(fanout)]
    degree = len(neighbours)
    if degree == 0:
        return []
    if replace:
        return [neighbours[w * degree >> 64] for w in words]
    left = list(range(degree))
    for k in range(min(fanout, degree)):
        j = k + (words[k] * (degree - k) >> 64)
        left[k], left[j] = left[j], left[k]
    return [neighbours[edge] for edge in left[:fanout]]


def sampled(graph, heads, positions, fanouts, replace, seed, stream):
    """nodes, [(offsets, index) per fan-out] of a batch. graph: the neighbours of each node."""
    nodes = [(p // WINDOW, v) for v, p in zip(heads.tolist(), positions.tolist())]
    place, blocks = {}, []
    for i, node in enumerate(nodes):
        place.setdefault(node, i)
    for fanout in fanouts:
        offsets, index = [0], []
        for window, node in list(nodes):
            for neighbour in draws(graph[node], node, window, fanout, replace, seed, stream):
                if (window, neighbour) not in place:
                    place[window, neighbour] = len(nodes)
                    nodes.append((window, neighbour))
                index.append(place[window, neighbour])
            offsets.append(len(index))
        blocks.append((offsets, index))
    return [node for _, node in nodes], blocks


def edges_of(nodes, blocks, num_heads):
    """For each head the tree of what it reads: (node, trees of its sampled neighbours)."""

    def tree(place, hop):
        if hop == len(blocks):
            return int(nodes[place])
        offsets, index = blocks[hop]
        below = [tree(i, hop + 1) for i in index[offsets[place] : offsets[place + 1]]]
        return int(nodes[place]), tree(place, hop + 1), below

    return [tree(i, 0) for i in range(num_heads)]


def adjacency(graph):
    """indptr (n + 1,) int64, indices (e,) int64 of lists of neighbours."""
    return np.cumsum([0, *map(len, graph)]), np.array(sum(graph, []), np.int64)


def power_law(num_nodes, num_edges, seed=0):
    """indptr (n + 1,) int64, indices (e,) int64 of a graph with degrees of a power law at both ends of its edges."""
    rng = np.random.default_rng(seed)
    weight = np.cumsum(rng.pareto(1.2, num_nodes) + 1)
    ends = np.searchsorted(weight, rng.random((2, num_edges)) * weight[-1])
    order = np.argsort(ends[0], kind="stable")
    return np.concatenate([[0], np.cumsum(np.bincount(ends[0], minlength=num_nodes))]), ends[1][order]
