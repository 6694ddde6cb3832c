"""Logistic regression (Richardson et al., "Predicting Clicks: Estimating the Click-Through Rate for New Ads", WWW
2007)."""

from torch import Tensor

from hetmpi.models.ctr import CTRModel, FirstOrder


class LR(CTRModel):
    """A weight per id, a linear layer on the dense features, and a bias. A table row is the weight of its id: `row_dim`
    is 1, whatever `dim`."""

    def __init__(self, num_fields: int, num_dense: int, dim: int):
        super().__init__(num_fields, num_dense, dim, row_dim=1)
        self.linear = FirstOrder(num_dense)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32; arguments as in CTRModel."""
        return self.linear(self.look_up(rows, batch).squeeze(2), batch.dense)
