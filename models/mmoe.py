"""MMoE (Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", KDD
2018)."""

import torch
from torch import Tensor, nn

from hetmpi.models.ctr import MLP, CTRModel, concat
from hetmpi.models.towers import Gate, Towers


class MMoE(CTRModel):
    """Several MLPs on embeddings and dense features, the experts, which all labels share. Each label weighs them by a
    gate of its own, and has an MLP on the result.

    Args: num_experts; expert, gate, tower: widths of the layers of an expert, and of the hidden layers of a gate and of
    a label's MLP; dropout, batch_norm: as in MLP, for experts and towers.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, num_labels: int, num_experts: int, expert: list[int],
        gate: list[int], tower: list[int], dropout: float = 0.0, batch_norm: bool = False,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, row_dim=dim)
        if num_experts < 1:
            raise ValueError(f"MMoE: model.num_experts must be at least 1, got {num_experts}")
        width = num_fields * dim + num_dense
        sizes, extra = [width, *expert], {"dropout": dropout, "batch_norm": batch_norm}
        self.experts = nn.ModuleList(MLP(sizes, bias=True, **extra) for _ in range(num_experts))
        self.gates = nn.ModuleList(Gate(width, gate, num_experts) for _ in range(num_labels))
        self.towers = Towers(num_labels, [sizes[-1], *tower], dropout, batch_norm)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B, K) float32 of the K labels; arguments as in CTRModel."""
        x = concat(self.look_up(rows, batch), batch.dense)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)  # (B, experts, W)
        return self.towers([gate(x, outputs) for gate in self.gates])
