"""Common parts of the click-through-rate models: look-up of a batch's rows, and MLPs."""

import torch
from torch import Tensor, nn

from hetmpi.layers import look_up


class CTRModel(nn.Module):
    """A model of `num_fields` categorical and `num_dense` numeric features per sample.

    `forward(rows, batch)` takes rows (U, row_dim) float32, one per unique key, and a batch with `index` (B, F) int64
    into rows and `dense` (B, num_dense) float32. It returns logits (B,) float32: the loss is
    `torch.nn.BCEWithLogitsLoss`. Gradients of `rows` are summed over the occurrences of a key by autograd.

    Attributes: `row_dim` (int), the width of the table rows that the model reads.
    """

    def __init__(self, num_fields: int, num_dense: int, dim: int, row_dim: int):
        super().__init__()
        for name, size in (("num_fields", num_fields), ("num_dense", num_dense), ("dim", dim)):
            if size < 1:
                raise ValueError(f"{type(self).__name__}: {name} must be at least 1, got {size}")
        self.num_fields, self.num_dense, self.dim, self.row_dim = num_fields, num_dense, dim, row_dim

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

    The last width is the output; `relu_at_end=False` leaves it linear, as needed for a logit.
    """

    def __init__(self, sizes: list[int], bias: bool, relu_at_end: bool = True):
        layers = []
        for inputs, outputs in zip(sizes, sizes[1:]):
            layers += [nn.Linear(inputs, outputs, bias=bias), nn.ReLU()]
        super().__init__(*(layers if relu_at_end else layers[:-1]))


def concat(*features: Tensor) -> Tensor:
    """The features of each sample, flattened and concatenated: (B, sum of widths)."""
    return torch.cat([feature.flatten(1) for feature in features], dim=1)
