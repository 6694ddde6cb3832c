"""SASRec (Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hetmpi.layers import look_up

START_STD = 0.02  # of positions and of the start, initially


class SASRec(nn.Module):
    """The next item after a history, by causal self-attention over its values; the score of an item is the product of
    its row with the output at the last position. A learned start stands before the first value, so that an empty
    history has an output as well.

    Args: fields, numbers, sequences: as in TwoTower. item, history: the column that identifies an item, and a column
    with `pool: none` that shares its rows. max_len: last values of a history that are read. num_blocks, num_heads: of
    the attention; dropout: probability with which a number of the inputs, of an attention's output or of a layer is set
    to zero in training.

    Attributes: as TwoTower's, and `history`, `max_len`.
    """

    def __init__(
        self, dim: int, fields: list[str], numbers: list[str], sequences: list[str], item: list[str],
        history: list[str], max_len: int, num_blocks: int = 2, num_heads: int = 1, dropout: float = 0.2,
    ):  # fmt: skip
        super().__init__()
        if len(item) != 1 or len(history) != 1:
            raise ValueError("SASRec: model.item and model.history must name one column each, as [item] and [viewed]")
        if history[0] not in sequences:
            there = ", ".join(sequences) or "none"
            raise ValueError(f"SASRec: {history[0]} must be a column with pool: none; those of the data: {there}")
        if max_len < 1:
            raise ValueError(f"SASRec: model.max_len must be at least 1, got {max_len}")
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"SASRec: table.dim={dim} must be a multiple of model.num_heads={num_heads}")
        self.row_dim, self.item, self.query = dim, list(item), list(history)
        self.history, self.max_len = history[0], max_len
        self.start = nn.Parameter(START_STD * torch.randn(dim))
        self.positions = nn.Parameter(START_STD * torch.randn(max_len + 1, dim))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)

    def queries(self, rows: Tensor, batch) -> Tensor:
        """Vectors (B, L + 1, dim) float32, those after 0 to L values of the history. rows (U, dim); a batch with
        `sequences`."""
        index, _ = batch.sequences[self.history]  # (B, L)
        values = look_up(rows, index) * self.row_dim**0.5
        start = self.start.expand(len(index), 1, -1)
        x = self.drop(torch.cat([start.to(values), values], 1) + self.positions[: index.shape[1] + 1])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def items(self, rows: Tensor, batch) -> Tensor:
        """Vectors (n, dim) float32: the rows of items."""
        return look_up(rows, batch.index[:, 0])


class Block(nn.Module):
    """Causal self-attention, then two layers for each position; each adds to its input, which it normalises first.
    Positions behind the last value have outputs too, on which no other depends."""

    def __init__(self, dim: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.of_layers = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.inputs, self.outputs = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, dim) -> (B, L, dim)."""
        heads = self.inputs(self.norm(x)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(*heads, is_causal=True)  # (B, heads, L, dim / heads)
        x = x + self.drop(self.outputs(found.transpose(1, 2).flatten(2)))
        return x + self.drop(self.layers(self.of_layers(x)))
