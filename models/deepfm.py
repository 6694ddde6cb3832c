"""DeepFM (Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017)."""

from torch import Tensor, nn

from hetmpi.models.ctr import MLP, CTRModel


class DeepFM(CTRModel):
    """A factorization machine and an MLP on the same embeddings, and a linear layer on the dense features, if there are
    any; no biases.

    A table row consists of the embedding in its first `dim` columns and the first-order weight of its id in the last
    one, so `row_dim` is `dim + 1`.

    Args: hidden: widths of the MLP's layers before its logit; dropout, batch_norm: as in MLP.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, hidden: list[int], dropout: float = 0.0,
        batch_norm: bool = False,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, row_dim=dim + 1)
        self.linear = nn.Linear(num_dense, 1, bias=False) if num_dense > 0 else None
        if self.linear is not None:
            nn.init.zeros_(self.linear.weight)  # random weights dominate the rows: .03 to .06 less AUC on 13 K samples
        sizes = [num_fields * dim, *hidden, 1]
        self.deep = MLP(sizes, bias=False, relu_at_end=False, dropout=dropout, batch_norm=batch_norm)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32; arguments as in CTRModel."""
        rows_of_sample = self.look_up(rows, batch)  # (B, F, dim + 1)
        embeddings = rows_of_sample[..., :-1]  # (B, F, dim)
        first_order = rows_of_sample[..., -1].sum(1)  # (B,)
        if self.linear is not None:
            first_order = first_order + self.linear(batch.dense).squeeze(1)
        return first_order + second_order(embeddings) + self.deep(embeddings.flatten(1)).squeeze(1)


def second_order(embeddings: Tensor) -> Tensor:
    """Sum of the dot products of all pairs of fields: (B, F, dim) to (B,), in O(F * dim) operations.

    The square of a sum minus the sum of squares contains every pair twice (Rendle, "Factorization Machines", ICDM 2010,
    lemma 3.1).
    """
    return 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1)
