"""Shared bottom (Caruana, "Multitask Learning", Machine Learning 28, 1997)."""

from torch import Tensor

from hetmpi.models.ctr import MLP, CTRModel, concat
from hetmpi.models.towers import Towers


class SharedBottom(CTRModel):
    """An MLP on embeddings and dense features that all labels share, and one of each label on its output.

    Args: hidden, tower: widths of the layers of the shared MLP, and of the hidden layers of the others; dropout,
    batch_norm: as in MLP.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, num_labels: int, hidden: list[int], tower: list[int],
        dropout: float = 0.0, batch_norm: bool = False,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, row_dim=dim)
        sizes = [num_fields * dim + num_dense, *hidden]
        self.bottom = MLP(sizes, bias=True, dropout=dropout, batch_norm=batch_norm)
        self.towers, self.num_labels = Towers(num_labels, [sizes[-1], *tower], dropout, batch_norm), num_labels

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B, K) float32 of the K labels; arguments as in CTRModel."""
        shared = self.bottom(concat(self.look_up(rows, batch), batch.dense))
        return self.towers([shared] * self.num_labels)
