"""GraphSAGE with the mean aggregator (Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs",
NIPS 2017, algorithm 1)."""

from torch import Tensor, nn

from hetmpi.models.graph import NodeModel, mean_of


class GraphSAGE(NodeModel):
    """A layer multiplies the concatenation of a node and the mean of its neighbours by a matrix, computed as a sum of
    two products, and adds a bias. A node without neighbours has a mean of zeros. Layers' outputs are not scaled to unit
    length. Of edges with weights the mean is the weighted one.

    Args: hidden, dropout, input_dropout, input_norm: as in NodeModel.
    """

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        shapes = list(zip(self.sizes, self.sizes[1:]))
        self.own = nn.ModuleList(nn.Linear(*shape) for shape in shapes)
        self.neighbours = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)

    def convolve(self, number: int, x: Tensor, block) -> Tensor:
        mean = mean_of(x, block.index, block.offsets, block.weights)
        return self.own[number](x[: block.offsets.shape[0] - 1]) + self.neighbours[number](mean)
