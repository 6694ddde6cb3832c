"""Deep & Cross Network (Wang et al., "Deep & Cross Network for Ad Click Predictions", ADKDD 2017)."""

import torch
from torch import Tensor, nn

from hetmpi.models.ctr import MLP, CTRModel, concat


class DCN(CTRModel):
    """Cross layers and an MLP in parallel on embeddings and dense features; biases in the cross layers only.

    Args: hidden: widths of the MLP's layers; num_cross_layers: number of cross layers, 0 passes the input through;
    dropout, batch_norm: as in MLP.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, hidden: list[int], num_cross_layers: int,
        dropout: float = 0.0, batch_norm: bool = False, num_classes: int | None = None,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, dim, num_classes)
        width = num_fields * dim + num_dense
        sizes = [width, *hidden]
        self.cross = nn.ModuleList(CrossLayer(width) for _ in range(num_cross_layers))
        self.deep = MLP(sizes, bias=False, dropout=dropout, batch_norm=batch_norm)
        self.out = nn.Linear(width + sizes[-1], self.num_outputs, bias=False)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32, or (B, num_classes); arguments as in CTRModel."""
        first = concat(self.look_up(rows, batch), batch.dense)  # (B, width)
        crossed = first
        for layer in self.cross:
            crossed = layer(first, crossed)
        return self.logits(self.out(concat(crossed, self.deep(first))))


class CrossLayer(nn.Module):
    """x0 * (x . weight) + bias + x, where x0 is the network's input and x the layer below (section 2.3)."""

    def __init__(self, width: int):
        super().__init__()
        # As small as in nn.Linear: x0 enters once more in every layer, so larger weights grow without bound.
        self.weight = nn.Parameter(torch.empty(width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, first: Tensor, below: Tensor) -> Tensor:
        """Arguments and result are (B, width) float32."""
        return first * (below @ self.weight).unsqueeze(1) + self.bias + below
