"""Common part of the models of several labels: a small network for each label on top of what they share."""

import torch
from torch import Tensor, nn

from hetmpi.models.ctr import MLP


class Towers(nn.Module):
    """An MLP for each label, of inputs of its own: K tensors (B, sizes[0]) to logits (B, K) float32."""

    def __init__(self, num_labels: int, sizes: list[int], dropout: float, batch_norm: bool):
        """sizes: widths of an MLP's input and hidden layers."""
        super().__init__()
        self.towers = nn.ModuleList(
            MLP([*sizes, 1], bias=True, relu_at_end=False, dropout=dropout, batch_norm=batch_norm)
            for _ in range(num_labels)
        )

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """inputs: one for each label."""
        return torch.cat([tower(x) for tower, x in zip(self.towers, inputs, strict=True)], 1)


class Gate(nn.Module):
    """The mean of the outputs of experts, weighted by a softmax of an MLP of the gate's input."""

    def __init__(self, width: int, hidden: list[int], num_experts: int):
        """width: of the gate's input; hidden: widths of its hidden layers."""
        super().__init__()
        self.mlp = MLP([width, *hidden, num_experts], bias=True, relu_at_end=False)

    def forward(self, x: Tensor, outputs: Tensor) -> Tensor:
        """x (B, width), outputs (B, experts, W) -> (B, W)."""
        return (torch.softmax(self.mlp(x), 1)[:, :, None] * outputs).sum(1)
