"""Common parts of the models of nodes of a graph."""

import torch
from torch import Tensor, nn

from hetmpi.batch_norm import BatchNorm
from hetmpi.layers import segment_mean, weighted_mean


class NodeModel(nn.Module):
    """A model of `num_layers` layers, each of which combines a node with its neighbours. A node's input is the mean of
    its rows (dim) beside its `num_dense` numbers.

    `forward(x, blocks)` takes x (N, dim + num_dense) float32 of all nodes of a batch and its blocks, L of
    hetmpi.data.graph.samples.Block from the heads outwards, and returns logits (B, num_classes) float32. It is a loop
    over `layer`, which inference over all neighbours calls for all nodes, layer by layer. A subclass defines
    `convolve`.

    Attributes: `row_dim` (int), the width of the table rows that the model reads; `sizes` (L + 1,), the widths of the
    input and of each layer's output.
    """

    def __init__(
        self, dim: int, num_dense: int, num_classes: int, num_layers: int, hidden: int, dropout: float = 0.0,
        input_dropout: float = 0.0, input_norm: bool = False,
    ):  # fmt: skip
        """hidden: width of each layer but the last. dropout: probability with which an output of a ReLU is set to zero
        in training; input_dropout: the same of a node's input. input_norm: normalise inputs, before dropout, by their
        mean and variance over the nodes of all ranks' batches (hetmpi.batch_norm.BatchNorm)."""
        super().__init__()
        least = {"dim": 1, "num_dense": 0, "num_classes": 1, "num_layers": 1, "hidden": 1}
        for name, size in zip(least, (dim, num_dense, num_classes, num_layers, hidden)):
            if size < least[name]:
                raise ValueError(f"{type(self).__name__}: {name} must be at least {least[name]}, got {size}")
        self.row_dim, self.sizes = dim, [dim + num_dense, *[hidden] * (num_layers - 1), num_classes]
        self.norm = BatchNorm(self.sizes[0]) if input_norm else nn.Identity()
        self.drop = nn.ModuleList(nn.Dropout(p) for p in [input_dropout, *[dropout] * (num_layers - 1)])

    def forward(self, x: Tensor, blocks) -> Tensor:
        """Logits (B, num_classes) float32."""
        if x.dim() != 2 or x.shape[1] != self.sizes[0] or len(blocks) != len(self.drop):
            raise ValueError(
                f"{type(self).__name__}: x must be (N, {self.sizes[0]}) with {len(self.drop)} blocks, got "
                f"{tuple(x.shape)} with {len(blocks)}"
            )
        for number, block in enumerate(reversed(blocks)):
            x = self.layer(number, x, block)
        return x

    def layer(self, number: int, x: Tensor, block) -> Tensor:
        """The activations (n_dst, sizes[number + 1]) of a block's destinations. number: 0 for the outermost layer. x
        (n_src, sizes[number]): activations of its sources."""
        x = self.drop[number](self.norm(x) if number == 0 else x)
        x = self.convolve(number, x, block)
        return x if number == len(self.drop) - 1 else torch.relu(x)

    def convolve(self, number: int, x: Tensor, block) -> Tensor:
        """As `layer`, without dropout and ReLU."""
        raise NotImplementedError


def mean_of(x: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of the rows of x (n_src, dim) that each destination reads, by the weights of its edges: (n_dst, dim)."""
    return segment_mean(x, index, offsets) if weights is None else weighted_mean(x, index, offsets, weights)


def with_self(block) -> tuple[Tensor, Tensor, Tensor | None]:
    """index (e + n_dst,), offsets (n_dst + 1,) and weights (e + n_dst,) of a block with an edge of weight 1 from each
    destination to itself, the first of its edges; None for weights that are all 1."""
    num = block.offsets.shape[0] - 1
    places = torch.arange(num + 1, device=block.offsets.device)
    offsets = block.offsets + places
    is_own = torch.zeros(block.index.shape[0] + num, dtype=torch.bool, device=offsets.device)
    is_own[offsets[:-1]] = True
    index = torch.empty_like(is_own, dtype=torch.int64)
    index[is_own], index[~is_own] = places[:-1], block.index
    if block.weights is None:
        return index, offsets, None
    weights = torch.ones(len(index), device=index.device)
    weights[~is_own] = block.weights
    return index, offsets, weights
