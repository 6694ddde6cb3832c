"""A deep network (Covington et al., "Deep Neural Networks for YouTube Recommendations", RecSys 2016, section 4)."""

from torch import Tensor

from hetmpi.models.ctr import MLP, CTRModel, concat


class DNN(CTRModel):
    """An MLP on embeddings and dense features, with biases.

    Args: hidden: widths of the MLP's layers before its logit; dropout, batch_norm: as in MLP.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, hidden: list[int], dropout: float = 0.0,
        batch_norm: bool = False, num_classes: int | None = None,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, dim, num_classes)
        sizes = [num_fields * dim + num_dense, *hidden, self.num_outputs]
        self.deep = MLP(sizes, bias=True, relu_at_end=False, dropout=dropout, batch_norm=batch_norm)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32, or (B, num_classes); arguments as in CTRModel."""
        return self.logits(self.deep(concat(self.look_up(rows, batch), batch.dense)))
