"""Common parts of the click-through-rate models: look-up of a batch's rows, MLPs, first-order weights."""

import torch
from torch import Tensor, nn

from hetmpi.batch_norm import BatchNorm
from hetmpi.layers import look_up


class CTRModel(nn.Module):
    """A model of `num_fields` categorical and `num_dense` numeric features per sample; `num_dense` may be 0.

    Args: outputs: logits of a sample, one per class; None for a label without classes.

    `forward(rows, batch)` takes rows (U, row_dim) float32, one per unique key, and a batch with `index` (B, F) int64
    into rows and `dense` (B, num_dense) float32. It returns logits (B,) float32, of `num_classes` classes, where a
    model takes that argument, (B, num_classes). Gradients of `rows` are summed over the occurrences of a key by
    autograd.

    Attributes: `row_dim` (int), the width of the table rows that the model reads.
    """

    def __init__(self, num_fields: int, num_dense: int, dim: int, row_dim: int, outputs: int | None = None):
        super().__init__()
        self.num_outputs, self.has_classes = outputs or 1, outputs is not None
        for name, size, least in (("num_fields", num_fields, 1), ("num_dense", num_dense, 0), ("dim", dim, 1)):
            if size < least:
                raise ValueError(f"{type(self).__name__}: {name} must be at least {least}, got {size}")
        self.num_fields, self.num_dense, self.dim, self.row_dim = num_fields, num_dense, dim, row_dim

    def logits(self, outputs: Tensor) -> Tensor:
        """outputs (B, num_outputs) as forward() returns them."""
        return outputs if self.has_classes else outputs.squeeze(1)

    def look_up(self, rows: Tensor, batch) -> Tensor:
        """The rows of every sample, (B, F, row_dim) float32. Checks the shapes of the model's inputs.

        Raises ValueError if rows, batch.index or batch.dense have another shape than the model was built for.
        """
        self._check("rows", rows, ("U", self.row_dim))
        self._check("batch.index", batch.index, ("B", self.num_fields))
        self._check("batch.dense", batch.dense, (batch.index.shape[0], self.num_dense))
        return look_up(rows, batch.index)

    def _check(self, name: str, tensor: Tensor, shape: tuple) -> None:
        fits = tensor.dim() == len(shape) and all(
            isinstance(expected, str) or got == expected for got, expected in zip(tensor.shape, shape)
        )
        if not fits:
            raise ValueError(
                f"{type(self).__name__}: {name} must be ({', '.join(map(str, shape))}), got {tuple(tensor.shape)}; the "
                f"model was built for num_fields={self.num_fields}, num_dense={self.num_dense}, row_dim={self.row_dim}"
            )


class MLP(nn.Sequential):
    """Linear layers of the given widths, a ReLU after each: (B, sizes[0]) to (B, sizes[-1]) float32.

    The last width is the output; `relu_at_end=False` leaves it linear, as needed for a logit. `batch_norm` normalises
    the input of every ReLU over the samples of all ranks. In training, every output of a ReLU is set to zero with
    probability `dropout` (Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR
    15, 2014).
    """

    def __init__(
        self, sizes: list[int], bias: bool, relu_at_end: bool = True, dropout: float = 0.0, batch_norm: bool = False
    ):
        layers = []
        for inputs, outputs in zip(sizes, sizes[1:]):
            before, after = [BatchNorm(outputs)] if batch_norm else [], [nn.Dropout(dropout)] if dropout > 0 else []
            relu = nn.Sequential(*before, nn.ReLU(), *after) if before or after else nn.ReLU()
            layers += [nn.Linear(inputs, outputs, bias=bias), relu]  # the names of the weights are always the same
        super().__init__(*(layers if relu_at_end else layers[:-1]))


class FirstOrder(nn.Module):
    """A logit of all features alone: the sum of a weight per id, weights of the dense features, and a bias. Except for
    the ids' weights, which are in the rows, all start at zero."""

    def __init__(self, num_dense: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_dense)) if num_dense > 0 else None
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, weights: Tensor, dense: Tensor) -> Tensor:
        """weights (B, F) of the ids, dense (B, num_dense) -> (B,)."""
        of_ids = weights.sum(1) + self.bias
        return of_ids if self.weight is None else of_ids + dense @ self.weight


def concat(*features: Tensor) -> Tensor:
    """The features of each sample, flattened and concatenated: (B, sum of widths)."""
    return torch.cat([feature.flatten(1) for feature in features], dim=1)
