"""Two towers (Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", 2019)."""

from torch import Tensor, nn
from torch.nn.functional import normalize

from hetmpi.layers import look_up
from hetmpi.models.ctr import MLP, concat


class TwoTower(nn.Module):
    """A query and an item each become a vector of unit length, by an MLP of their columns; the score of both is the
    product of their vectors, divided by `temperature`.

    Args: fields, numbers, sequences: names of the columns of the data: of one row per sample, of numbers, with
    `pool: none`. item: names of the columns of items, the first of which identifies one; query: those of queries, all
    others if empty. hidden: widths of the layers of each MLP, the last is that of the vectors; dropout, batch_norm: as
    in MLP.

    Attributes: those that hetmpi.tasks.retrieval.Retrieval describes.
    """

    history = None

    def __init__(
        self, dim: int, fields: list[str], numbers: list[str], sequences: list[str], item: list[str], query: list[str],
        hidden: list[int], temperature: float = 0.1, dropout: float = 0.0, batch_norm: bool = False,
    ):  # fmt: skip
        super().__init__()
        if not item:
            raise ValueError("TwoTower: model.item must name the columns of items, first the one that identifies them")
        if not hidden:
            raise ValueError("TwoTower: model.hidden needs at least one layer, whose width is that of the vectors")
        if temperature <= 0:
            raise ValueError(f"TwoTower: model.temperature must be above 0, got {temperature}")
        query = list(query) or [name for name in (*fields, *numbers) if name not in item]
        if not query:
            left_out = f"; {', '.join(sequences)} have pool: none, which it does not read" if sequences else ""
            raise ValueError(f"TwoTower: there are no columns of queries beside those in model.item{left_out}")
        for name in (*query, *item):
            if name not in (*fields, *numbers, *sequences):
                raise ValueError(f"TwoTower: no column is named {name}, the data have {', '.join((*fields, *numbers))}")
            if name in sequences:
                raise ValueError(f"TwoTower does not read {name}, with pool: none: choose pool: mean")
            if name in query and name in item:
                raise ValueError(f"TwoTower: {name} is in model.query and in model.item")
        self.row_dim, self.temperature, self.query, self.item = dim, temperature, query, list(item)

        def tower(names):
            width = dim * sum(name in fields for name in names) + sum(name in numbers for name in names)
            sizes = [width, *hidden]
            return MLP(sizes, bias=True, relu_at_end=False, dropout=dropout, batch_norm=batch_norm)

        self.query_tower, self.item_tower = tower(query), tower(item)

    def queries(self, rows: Tensor, batch) -> Tensor:
        """Vectors (B, W) float32. rows (U, dim); a batch with the columns of queries."""
        return self._vectors(self.query_tower, rows, batch) / self.temperature

    def items(self, rows: Tensor, batch) -> Tensor:
        """Vectors (n, W) float32. rows (U, dim); a batch with the columns of items."""
        return self._vectors(self.item_tower, rows, batch)

    @staticmethod
    def _vectors(tower: nn.Module, rows: Tensor, batch) -> Tensor:
        return normalize(tower(concat(look_up(rows, batch.index), batch.dense)), dim=1)
