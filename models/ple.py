"""PLE (Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for Personalized
Recommendations", RecSys 2020)."""

import torch
from torch import Tensor, nn

from hetmpi.models.ctr import MLP, CTRModel, concat
from hetmpi.models.towers import Gate, Towers


class PLE(CTRModel):
    """Levels of experts, of which some are of one label and some are shared. In a level each label weighs its own
    experts and the shared ones by a gate; the shared part weighs all. Each label has an MLP on its last result.

    Args: num_levels; num_own, num_shared: experts of a level for each label, and for all; expert, gate, tower: widths
    of the layers of an expert, and of the hidden layers of a gate and of a label's MLP; dropout, batch_norm: as in MLP,
    for experts and towers.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, num_labels: int, num_levels: int, num_own: int,
        num_shared: int, expert: list[int], gate: list[int], tower: list[int], dropout: float = 0.0,
        batch_norm: bool = False,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, row_dim=dim)
        for name, size in (("num_levels", num_levels), ("num_own", num_own), ("num_shared", num_shared)):
            if size < 1:
                raise ValueError(f"PLE: model.{name} must be at least 1, got {size}")
        width, extra = num_fields * dim + num_dense, {"dropout": dropout, "batch_norm": batch_norm}
        widths = [width, *[[width, *expert][-1]] * num_levels]
        self.levels = nn.ModuleList(
            Level([widths[i], *expert], gate, num_labels, num_own, num_shared, i == num_levels - 1, **extra)
            for i in range(num_levels)
        )
        self.towers, self.num_labels = Towers(num_labels, [widths[-1], *tower], dropout, batch_norm), num_labels

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B, K) float32 of the K labels; arguments as in CTRModel."""
        inputs = [concat(self.look_up(rows, batch), batch.dense)] * (self.num_labels + 1)
        for level in self.levels:
            inputs = level(inputs)
        return self.towers(inputs[: self.num_labels])


class Level(nn.Module):
    """The experts and gates of one level; of the last one without the gate of the shared part."""

    def __init__(
        self, sizes: list[int], gate: list[int], num_labels: int, num_own: int, num_shared: int, is_last: bool, **extra
    ):
        """sizes: widths of an expert, its input included; gate: of a gate's hidden layers; extra: as in MLP."""
        super().__init__()
        self.experts = nn.ModuleList(
            nn.ModuleList(MLP(sizes, bias=True, **extra) for _ in range(num))
            for num in [num_own] * num_labels + [num_shared]
        )
        of_label, of_all = num_own + num_shared, num_labels * num_own + num_shared
        counts = [of_label] * num_labels + ([] if is_last else [of_all])
        self.gates = nn.ModuleList(Gate(sizes[0], gate, num) for num in counts)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """inputs: (B, sizes[0]) of each label and of the shared part. Returns (B, sizes[-1]) of each, and of the shared
        part unless this is the last level."""
        outputs = [torch.stack([expert(x) for expert in own], 1) for own, x in zip(self.experts, inputs)]
        seen = [torch.cat([own, outputs[-1]], 1) for own in outputs[:-1]] + [torch.cat(outputs, 1)]
        return [gate(x, found) for gate, x, found in zip(self.gates, inputs, seen)]
