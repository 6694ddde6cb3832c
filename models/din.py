"""Deep Interest Network (Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018)."""

import torch
from torch import Tensor

from hetmpi.layers import look_up
from hetmpi.models.ctr import MLP, CTRModel, concat


class DIN(CTRModel):
    """An MLP on all features and on the user's interest in the target: the values of a history, each weighted by an MLP
    of it, the target, their difference and their product. Weights are not normalised, as in the paper.

    Args: target: names of features of one value, such as an item and its kind; history: those of as many features with
    `pool: none`, whose values stand at the same positions and usually share the rows of the targets. hidden, attention:
    widths of the layers of the two MLPs; dropout, batch_norm: as in MLP, for the first.

    Attributes: `needed_fields`, `needed_sequences`, names of the features that the data must have.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, target: list[str], history: list[str],
        hidden: list[int], attention: list[int], dropout: float = 0.0, batch_norm: bool = False,
        num_classes: int | None = None,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, dim, num_classes)
        if not target or len(target) != len(history):
            raise ValueError(
                f"DIN: model.target and model.history must name as many features, and at least one, got {list(target)} "
                f"and {list(history)}"
            )
        self.needed_fields, self.needed_sequences = list(target), list(history)
        width = dim * len(target)
        self.attention = MLP([4 * width, *attention, 1], bias=True, relu_at_end=False)
        sizes = [num_fields * dim + width + num_dense, *hidden, self.num_outputs]
        self.deep = MLP(sizes, bias=True, relu_at_end=False, dropout=dropout, batch_norm=batch_norm)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32, or (B, num_classes); arguments as in CTRModel, and batch.fields, name -> place in
        batch.index, and batch.sequences, name -> index (B, L) int64 into rows, and which of the positions have a value,
        (B, L) bool."""
        fields = self.look_up(rows, batch)  # (B, F, dim)
        query = torch.cat([fields[:, batch.fields[name]] for name in self.needed_fields], 1)  # (B, W)
        found = [batch.sequences[name] for name in self.needed_sequences]
        if any(has_value.shape != found[0][1].shape or (has_value != found[0][1]).any() for _, has_value in found[1:]):
            raise ValueError(
                f"DIN: the histories {', '.join(self.needed_sequences)} have other lengths in a sample: their values "
                "must stand at the same positions; missing ones are skipped, so give these a value, as 'none'"
            )
        keys = torch.cat([look_up(rows, index) for index, _ in found], 2)  # (B, L, W)
        query = query[:, None].expand_as(keys)
        weights = self.attention(torch.cat([query, keys, query - keys, query * keys], 2))  # (B, L, 1)
        interest = (weights * found[0][1][:, :, None] * keys).sum(1)  # (B, W)
        return self.logits(self.deep(concat(fields, interest, batch.dense)))
