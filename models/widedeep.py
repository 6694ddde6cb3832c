"""Wide & Deep (Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016)."""

from torch import Tensor

from hetmpi.models.ctr import MLP, CTRModel, concat


class WideDeep(CTRModel):
    """The sum of a weight per id (wide) and an MLP on embeddings and dense features (deep), with biases. The wide part
    of the paper also reads products of ids: give such a product as a field of its own.

    A table row consists of the embedding in its first `dim` columns and the wide weight of its id in the last one, so
    `row_dim` is `dim + 1`.

    Args: hidden: widths of the MLP's layers before its logit; dropout, batch_norm: as in MLP.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, hidden: list[int], dropout: float = 0.0,
        batch_norm: bool = False,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, row_dim=dim + 1)
        sizes = [num_fields * dim + num_dense, *hidden, 1]
        self.deep = MLP(sizes, bias=True, relu_at_end=False, dropout=dropout, batch_norm=batch_norm)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32; arguments as in CTRModel."""
        rows_of_sample = self.look_up(rows, batch)  # (B, F, dim + 1)
        wide = rows_of_sample[..., -1].sum(1)  # (B,)
        return wide + self.deep(concat(rows_of_sample[..., :-1], batch.dense)).squeeze(1)
