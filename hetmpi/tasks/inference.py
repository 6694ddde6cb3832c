"""Inference over all neighbours: activations of all nodes of a graph, layer by layer, so that each is computed once.

Ranks share the nodes. The activations of a layer are in the memory of each cluster node, where its ranks read those of
any neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from hetmpi import _C
from hetmpi.data.graph.samples import Block
from hetmpi.errors import doing
from hetmpi.layers import segment_mean
from hetmpi.spans import Spans
from hetmpi.tasks.node_array import NodeArray, ranks_by_node
from hetmpi.world.world import World


class Inference:
    """The layers of a model over all neighbours. Each method is collective.

    sizes  as output_sizes
    order  the ranks in the order of their shares of the nodes"""

    def __init__(
        self, world: World, source, model: torch.nn.Module, chunk: int, device: torch.device, spans: Spans | None = None
    ):  # fmt: skip
        """source: hetmpi/tasks/node.py, GraphSource. chunk: nodes that a rank computes at a time. spans: of this rank,
        for the watchdog."""
        self.spans = spans or Spans()
        self.world, self.source, self.model, self.chunk, self.device = world, source, model, chunk, device
        self._weights = getattr(source, "edge_weights", lambda first, last: None)
        self.sizes, self.order = output_sizes(model, source), list(ranks_by_node(world))

    @torch.no_grad()
    def logits(self, peek: Callable) -> Iterator[tuple[np.ndarray, Tensor]]:
        """The nodes of this rank's share (n,) int64 and their logits (n, C) on the CPU, in chunks. peek(keys): the rows
        of keys (U,) int64, which all ranks call equally often."""
        for nodes, _, logits in self.outputs(peek):
            yield nodes, logits

    @torch.no_grad()
    def outputs(self, peek: Callable) -> Iterator[tuple[np.ndarray, np.ndarray, Tensor]]:
        """As logits(), with the activations (n, width) of the last hidden layer between both; for a model of one layer
        its input."""
        was_training = self.model.training
        self.model.eval()
        below = self._inputs(peek)
        for number in range(len(self.sizes) - 2):
            above = NodeArray(self.world, self.source.num_nodes, self.sizes[number + 1])
            for nodes in self._chunks(above):
                above.array[nodes[0] : nodes[-1] + 1] = self._layer(number, below, nodes).numpy()
            above.exchange()
            below.free()
            below = above
        for nodes in self._chunks(below):
            yield nodes, below.array[nodes[0] : nodes[-1] + 1], self._layer(len(self.sizes) - 2, below, nodes)
        below.free()
        self.model.train(was_training)

    def _inputs(self, peek: Callable) -> NodeArray:
        """Of all nodes: the means of their rows beside their numbers."""
        x = NodeArray(self.world, self.source.num_nodes, self.sizes[0])
        num_calls = 0
        for nodes in self._chunks(x):
            ids, dense = self.source.inputs(nodes)
            keys, index = _C.unique(np.ascontiguousarray(ids.values))
            rows, num_calls = peek(torch.from_numpy(keys)).cpu(), num_calls + 1
            pooled = segment_mean(rows, torch.from_numpy(index), torch.from_numpy(ids.offsets))
            x.array[nodes[0] : nodes[-1] + 1] = np.concatenate([pooled.numpy(), dense], axis=1)
        for _ in range(num_calls, -(-x.largest_share // self.chunk)):  # others may need this rank's replies
            peek(torch.empty(0, dtype=torch.int64))
        x.exchange()
        return x

    def _layer(self, number: int, below: NodeArray, nodes: np.ndarray) -> Tensor:
        """The output (n, width) of a layer for consecutive nodes (n,), on the CPU."""
        offsets, neighbours = self.source.neighbours(int(nodes[0]), int(nodes[-1]) + 1)
        sources, index = _C.unique(np.concatenate([nodes, neighbours]))  # the destinations come first
        x = np.empty((len(sources), below.width), np.float32)
        _C.gather(below.array, sources, x)
        weights = self._weights(int(nodes[0]), int(nodes[-1]) + 1)
        parts = offsets, index[len(nodes) :], *(() if weights is None else (weights.copy(),))  # of a mapped file
        block = Block(*(torch.from_numpy(part).to(self.device) for part in parts))
        with doing("layer() of the model"):
            return self.model.layer(number, torch.from_numpy(x).to(self.device), block).cpu()

    def _chunks(self, array: NodeArray) -> Iterator[np.ndarray]:
        """The nodes of this rank's share, in chunks."""
        begin, end = array.share
        for first in range(begin, end, self.chunk):
            self.spans.now("inference over all nodes")
            yield np.arange(first, min(first + self.chunk, end))


@torch.no_grad()
def output_sizes(model: torch.nn.Module, source) -> list[int]:
    """The widths (L + 1,) of a model's input and of each layer's output, by a trial with one node."""
    device = next(model.parameters()).device
    none = Block(torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.int64, device=device))
    x = torch.zeros(1, model.row_dim + source.num_dense, device=device)
    sizes, was_training = [x.shape[1]], model.training
    model.eval()
    for number in range(len(source.fanout)):
        with doing("layer() of the model"):
            x = model.layer(number, x, none)
        sizes.append(x.shape[1])
    model.train(was_training)
    return sizes


def activation_bytes(source, sizes: list[int]) -> int:
    """Memory of a cluster node during inference: two layers at a time. sizes: as output_sizes."""
    held = sizes[:-1]  # logits are not kept
    return 4 * source.num_nodes * max([sum(pair) for pair in zip(held, held[1:])] or held)
