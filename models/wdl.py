"""Wide & Deep (Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016), in HET's variant."""

from torch import Tensor, nn

from hetmpi.models.ctr import MLP, CTRModel, concat


class WDL(CTRModel):
    """An MLP on the dense features, and one linear layer on its output concatenated with all embeddings; no biases.
    Without dense features only the linear layer on the embeddings is left. `widedeep` is the model of the paper.

    Args: hidden: widths of the MLP's layers; dropout, batch_norm: as in MLP.
    """

    def __init__(
        self, num_fields: int, num_dense: int, dim: int, hidden: list[int], dropout: float = 0.0,
        batch_norm: bool = False, num_classes: int | None = None,
    ):  # fmt: skip
        super().__init__(num_fields, num_dense, dim, dim, num_classes)
        sizes = [num_dense, *hidden] if num_dense > 0 else [0]
        self.deep = MLP(sizes, bias=False, dropout=dropout, batch_norm=batch_norm)
        self.out = nn.Linear(sizes[-1] + num_fields * dim, self.num_outputs, bias=False)

    def forward(self, rows: Tensor, batch) -> Tensor:
        """Logits (B,) float32, or (B, num_classes); arguments as in CTRModel."""
        embeddings = self.look_up(rows, batch)  # (B, F, dim)
        return self.logits(self.out(concat(self.deep(batch.dense), embeddings)))
