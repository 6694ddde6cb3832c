"""DCN-V2 (Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank
Systems", WWW 2021)."""

from torch import Tensor, nn

from hetmpi.models.ctr import MLP, CTRModel, concat


class DCNv2(CTRModel):
    """Cross layers with full matrices, and an MLP beside them (parallel) or on their output (stacked), on embeddings
    and dense features. Biases everywhere but in the last layer, as in the paper (section 3).

    Args: hidden: widths of the MLP's layers; num_cross_layers: number of cross layers, 0 passes the input through;
    stacked: whether the MLP reads the cross layers' output; dropout, batch_norm: as in MLP.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, hidden: list[int], num_cross_layers: int,
        stacked: bool = False, dropout: float = 0.0, batch_norm: bool = False, num_classes: int | None = None,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, dim, num_classes)
        width = num_fields * dim + num_dense
        sizes, self.stacked = [width, *hidden], stacked
        self.cross = nn.ModuleList(CrossLayer(width) for _ in range(num_cross_layers))
        self.deep = MLP(sizes, bias=True, dropout=dropout, batch_norm=batch_norm)
        self.out = nn.Linear(sizes[-1] if stacked else width + sizes[-1], self.num_outputs, bias=False)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32, or (B, num_classes); arguments as in CTRModel."""
        first = concat(self.look_up(rows, batch), batch.dense)  # (B, width)
        crossed = first
        for layer in self.cross:
            crossed = layer(first, crossed)
        last = self.deep(crossed) if self.stacked else concat(crossed, self.deep(first))
        return self.logits(self.out(last))


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x, element by element, where x0 is the network's input and x the layer below (equation 1)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: Tensor, below: Tensor) -> Tensor:
        """Arguments and result are (B, width) float32."""
        return first * self.linear(below) + below
