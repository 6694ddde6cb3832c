"""An example of a user-defined task with two tables: ratings of items by users, predicted by the product of their rows.

data._target_=ratings.Ratings task._target_=ratings.Rating model._target_=ratings.Factors loss._target_=torch.nn.MSELoss
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from hetmpi import _C
from hetmpi.table.spec import TableSpec
from hetmpi.tasks.task import Task

ROWS = {"users": 300, "items": 50}


@dataclass
class Batch:
    keys: dict  # table -> (U,) int64
    index: dict  # table -> (B,) int64 into its keys
    rating: torch.Tensor  # (B,) float32

    def on(self, device):
        return replace(self, rating=self.rating.to(device))


@dataclass
class Ratings:
    """Samples (user, item, rating), (B, 3) float64; a rating is the product of two numbers."""

    seed: int = 0
    name: str = "ratings"
    num_train: int | None = None
    num_valid: int = 200

    def prepare(self, rank, size, barrier):
        barrier()

    def train(self, start, stop):
        return np.array([self._sample(position) for position in range(start, stop)]).reshape(-1, 3)

    def valid(self, start, stop):
        return self.train(10**6 + start, 10**6 + stop)

    def _sample(self, position):
        user, item = np.random.default_rng([self.seed, position]).integers([ROWS["users"], ROWS["items"]])
        return user, item, np.sin(user) * np.cos(item)


class Factors(torch.nn.Module):
    def __init__(self, dim, **_):
        super().__init__()
        self.dim, self.bias = dim, torch.nn.Parameter(torch.zeros(1))

    def forward(self, rows, batch):
        return (rows["users"][batch.index["users"]] * rows["items"][batch.index["items"]]).sum(1) + self.bias


class Rating(Task):
    """See hetmpi/tasks/task.py, Task."""

    sample_bytes, keys_per_sample = 40, {"users": 1, "items": 1}

    def __init__(self, source, loss):
        self.criterion = loss

    def model_arguments(self, dim):
        return {"dim": dim}

    def tables(self, model):
        return {name: TableSpec(num_rows, model.dim) for name, num_rows in ROWS.items()}

    def batches(self, device):
        return self._batch

    def _batch(self, samples):
        found = {name: _C.unique(samples[:, column].astype(np.int64)) for column, name in enumerate(ROWS)}
        keys, index = ({name: torch.from_numpy(pair[i]) for name, pair in found.items()} for i in (0, 1))
        return Batch(keys, index, torch.from_numpy(samples[:, 2].astype(np.float32)))

    def keys(self, batch):
        return batch.keys

    def loss(self, forward, rows, batch):
        return self.criterion(forward(rows, batch), batch.rating)

    def predict(self, forward, rows, batch):
        return batch.rating.numpy(), forward(rows, batch).numpy()

    def figures(self, columns):
        return {"rmse": float(np.sqrt(np.mean((columns[0] - columns[1]) ** 2))) if columns else None}

    def without_figures(self, columns):
        return None if columns else "no RMSE: there are no held-out samples"

    def not_finite(self, batch):
        return None
