"""A graph convolutional network (Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks",
ICLR 2017), as HET trains it."""

from torch import Tensor, nn

from hetmpi.models.graph import NodeModel, mean_of, with_self


class GCN(NodeModel):
    """A layer is x W + b, then the product with the adjacency matrix with self loops, whose rows are normalised to a
    sum of 1: the mean of a node and its neighbours. The mean is taken before the product with W, which gives the same
    and is faster, as a block has more sources than destinations. Kipf and Welling's symmetric normalisation needs the
    degrees of sources, which a sample does not have. An edge of weight w
    counts as w edges, the self loop as one.

    Args: hidden, dropout, input_dropout, input_norm: as in NodeModel.
    """

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.linear = nn.ModuleList(nn.Linear(*shape) for shape in zip(self.sizes, self.sizes[1:]))
        for layer in self.linear:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def convolve(self, number: int, x: Tensor, block) -> Tensor:
        return self.linear[number](mean_of(x, *with_self(block)))
