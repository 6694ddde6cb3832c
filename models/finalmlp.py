"""FinalMLP (Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", AAAI 2023)."""

import torch
from torch import Tensor, nn

from hetmpi.models.ctr import MLP, CTRModel, concat


class FinalMLP(CTRModel):
    """Two MLPs, the streams, on embeddings and dense features, each behind a gate per feature; a bilinear form of their
    outputs is the logit.

    Args: first, second: widths of the streams' layers, the last ones multiples of num_heads; gate: widths of the gates'
    hidden layers; first_context, second_context: fields that set the gates of a stream, such as those of the user and
    those of the item, [] for a learned vector; num_heads: parts of the outputs that are fused separately; dropout,
    batch_norm: as in MLP, for the streams.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, first: list[int], second: list[int], gate: list[int],
        first_context: list[int], second_context: list[int], num_heads: int, dropout: float = 0.0,
        batch_norm: bool = False,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, row_dim=dim)
        width = num_fields * dim + num_dense
        sizes = [[width, *first], [width, *second]]
        for name, fields in (("first_context", first_context), ("second_context", second_context)):
            if any(not 0 <= field < num_fields for field in fields):
                raise ValueError(f"FinalMLP: {name} must hold fields from 0 to {num_fields - 1}, got {list(fields)}")
        self.gates = nn.ModuleList(Gate(fields, dim, gate, width) for fields in (first_context, second_context))
        self.streams = nn.ModuleList(MLP(widths, True, dropout=dropout, batch_norm=batch_norm) for widths in sizes)
        self.fusion = Fusion(sizes[0][-1], sizes[1][-1], num_heads)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32; arguments as in CTRModel."""
        embeddings = self.look_up(rows, batch)  # (B, F, dim)
        features = concat(embeddings, batch.dense)  # (B, width)
        outputs = [stream(features * gate(embeddings)) for gate, stream in zip(self.gates, self.streams)]
        return self.fusion(*outputs)


class Gate(nn.Module):
    """Factors from 0 to 2, one per feature: twice the sigmoid of an MLP on the embeddings of some fields, or on a
    learned vector (section "Stream-Specific Feature Selection")."""

    def __init__(self, fields: list[int], dim: int, hidden: list[int], width: int):
        super().__init__()
        self.register_buffer("fields", torch.tensor(list(fields), dtype=torch.int64), persistent=False)  # (n,)
        # As small as the rows at their start.
        self.context = None if len(fields) else nn.Parameter(0.01 * torch.randn(1, dim))
        self.mlp = MLP([max(1, len(fields)) * dim, *hidden, width], bias=True, relu_at_end=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        """embeddings (B, F, dim) -> (B, width), or (1, width) without fields."""
        context = embeddings.index_select(1, self.fields).flatten(1) if self.context is None else self.context
        return 2 * torch.sigmoid(self.mlp(context))


class Fusion(nn.Module):
    """b + w1 . x + w2 . y + the sum over heads of x_h W_h y_h, where x_h and y_h are the parts of x and y (section
    "Stream-Level Fusion")."""

    def __init__(self, first: int, second: int, num_heads: int):
        """first, second: widths of x and y."""
        super().__init__()
        if num_heads < 1 or first % num_heads or second % num_heads:
            raise ValueError(
                f"FinalMLP: num_heads must divide the last widths of first and second, {first} and {second}, got "
                f"{num_heads}"
            )
        self.num_heads = num_heads
        self.first, self.second = nn.Linear(first, 1), nn.Linear(second, 1, bias=False)
        sizes, bound = (first // num_heads, second // num_heads), second**-0.5
        self.weight = nn.Parameter(torch.empty(num_heads, *sizes).uniform_(-bound, bound))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """x (B, first) and y (B, second) -> (B,)."""
        heads = [x.unflatten(1, (self.num_heads, -1)).transpose(0, 1) for x in (first, second)]  # (heads, B, n)
        products = torch.bmm(heads[0], self.weight) * heads[1]  # (heads, B, n)
        return (self.first(first) + self.second(second)).squeeze(1) + products.sum((0, 2))
