"""A graph attention network (Veličković et al., "Graph Attention Networks", ICLR 2018)."""

import torch
from torch import Tensor, nn

from hetmpi.models.graph import NodeModel, with_self

SLOPE = 0.2  # of LeakyReLU below 0


class GAT(NodeModel):
    """A layer is a weighted mean over a node and its neighbours, with weights from a softmax of LeakyReLU(a · [W x_i, W
    x_j]). Each of `heads` heads has its own weights; hidden layers concatenate them, the last one averages them. ReLU
    follows a hidden layer, where the paper has ELU; attention has no dropout. An
    edge of weight w counts as w edges, the self loop as one.

    Args: hidden: width of a hidden layer, all heads together, a multiple of heads; dropout, input_dropout,
    input_norm: as in NodeModel.
    """

    def __init__(
        self, dim: int, num_dense: int, num_classes: int, num_layers: int, hidden: int, heads: int = 4,
        dropout: float = 0.0, input_dropout: float = 0.0, input_norm: bool = False,
    ):  # fmt: skip
        super().__init__(dim, num_dense, num_classes, num_layers, hidden, dropout, input_dropout, input_norm)
        if heads < 1 or hidden % heads:
            raise ValueError(f"GAT: hidden must be a multiple of heads, got hidden={hidden}, heads={heads}")
        self.heads = heads
        outputs = [hidden // heads] * (num_layers - 1) + [num_classes]
        self.linear = nn.ModuleList(
            nn.Linear(inputs, heads * width, bias=False) for inputs, width in zip(self.sizes, outputs)
        )
        self.of_source, self.of_destination = (
            nn.ParameterList(nn.init.xavier_uniform_(torch.empty(heads, width)) for width in outputs) for _ in range(2)
        )
        self.bias = nn.ParameterList(torch.zeros(size) for size in self.sizes[1:])

    def convolve(self, number: int, x: Tensor, block) -> Tensor:
        index, offsets, weights = with_self(block)
        num = offsets.shape[0] - 1
        place = torch.repeat_interleave(torch.arange(num, device=x.device), offsets.diff())  # destination of each edge
        value = self.linear[number](x).unflatten(1, (self.heads, -1))  # (n_src, heads, width)
        source, destination = ((value * a[number]).sum(-1) for a in (self.of_source, self.of_destination))
        score = nn.functional.leaky_relu(source[index] + destination[:num][place], SLOPE)  # (e, heads)
        score = score if weights is None else score + weights.log()[:, None]
        score = score - torch.segment_reduce(score.detach(), "max", offsets=offsets)[place]
        weight = score.exp()
        total = torch.segment_reduce(weight, "sum", offsets=offsets)
        mean = torch.segment_reduce(weight[:, :, None] * value[index], "sum", offsets=offsets) / total[:, :, None]
        is_last = number == len(self.drop) - 1
        return (mean.mean(1) if is_last else mean.flatten(1)) + self.bias[number]
