"""The problem of all contenders of `bench step` and `bench cluster`: network, samples, initial weights.

Imports only numpy and torch, so that peers in their own environments can use it.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

HIDDEN = (256, 256, 256)
NUM_DENSE = 13
ROWS_LR, DENSE_LR = 1.0, 0.1  # of SGD


class Mlp(nn.Module):
    """Embeddings and dense features through three hidden layers, plus a linear term on them."""

    def __init__(self, num_fields: int, dim: int):
        super().__init__()
        width = NUM_DENSE + num_fields * dim
        sizes = [width, *HIDDEN]
        self.deep = nn.Sequential(*[layer for pair in zip(sizes, sizes[1:]) for layer in (nn.Linear(*pair), nn.ReLU())])
        self.out, self.linear = nn.Linear(HIDDEN[-1], 1), nn.Linear(width, 1, bias=False)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """embeddings (B, F, dim), dense (B, NUM_DENSE) -> logits (B,)."""
        features = torch.cat([dense, embeddings.flatten(1)], dim=1)
        return (self.out(self.deep(features)) + self.linear(features)).squeeze(1)


class Het(nn.Module):
    """HET's WDL: an MLP on the dense features, and one linear layer on its output concatenated with all embeddings."""

    def __init__(self, num_fields: int, dim: int):
        super().__init__()
        sizes = [NUM_DENSE, *HIDDEN]
        layers = [layer for pair in zip(sizes, sizes[1:]) for layer in (nn.Linear(*pair, bias=False), nn.ReLU())]
        self.deep = nn.Sequential(*layers)
        self.out = nn.Linear(HIDDEN[-1] + num_fields * dim, 1, bias=False)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """embeddings (B, F, dim), dense (B, NUM_DENSE) -> logits (B,)."""
        return self.out(torch.cat([self.deep(dense), embeddings.flatten(1)], dim=1)).squeeze(1)


NETWORKS = {"mlp": Mlp, "het": Het}


SAMPLED = ("sage", "complex")  # nets whose samples the contenders draw themselves (sampled.py)


class Problem:
    """One workload, described by the file `problem.json` in the folder of its samples.

    ranks, batch, dim, net, steps   of a run; samples on file may be of fewer steps, which later ones repeat
    field_rows                      rows of each field; keys of field f begin at sum(field_rows[:f])
    ids (steps, ranks, batch, F) int32, dense (..., NUM_DENSE) float32, label (...) float32
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)
        for name, value in json.loads((self.folder / "problem.json").read_text()).items():
            setattr(self, name, value)
        if self.net in SAMPLED:
            return
        self.num_fields, self.num_rows = len(self.field_rows), sum(self.field_rows)
        self.ids, self.dense, self.label = (
            np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "dense", "label")
        )

    def network(self) -> nn.Module:
        """The dense network, with the same initial weights in every contender."""
        torch.manual_seed(1)
        return NETWORKS[self.net](self.num_fields, self.dim)

    def samples(self, step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """ids (B, F) int64, dense (B, NUM_DENSE), label (B,) of one rank and step."""
        step %= len(self.ids)
        ids, dense, label = self.ids[step, rank], self.dense[step, rank], self.label[step, rank]
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(dense.copy()), torch.from_numpy(label.copy())

    def first_rows(self, keys: np.ndarray) -> np.ndarray:
        """Initial weights of rows: keys (n,) int64 -> (n, dim) float32 in [-0.01, 0.01)."""
        of_key = (keys * 2654435761 % (1 << 20)).astype(np.float32) / (1 << 20)
        of_column = (np.arange(self.dim) * 40503 % (1 << 16)).astype(np.float32) / (1 << 16)
        sums = of_key[:, None] + of_column
        sums -= sums >= 1
        sums *= 0.02
        sums -= 0.01
        return sums


def describe(folder: str, **settings):
    """Writes the description of a problem."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "problem.json").write_text(json.dumps(settings))


def make(folder: str, data, ranks: int, batch: int, dim: int, net: str, steps: int, distinct: int):
    """Writes a problem: samples of `data`, a hetmpi data set, for `distinct` steps, which later steps repeat."""
    path, shape = Path(folder), (distinct, ranks, batch)
    path.mkdir(parents=True, exist_ok=True)
    arrays = {
        "ids": np.lib.format.open_memmap(path / "ids.npy", "w+", np.int32, (*shape, data.num_fields)),
        "dense": np.lib.format.open_memmap(path / "dense.npy", "w+", np.float32, (*shape, data.num_dense)),
        "label": np.lib.format.open_memmap(path / "label.npy", "w+", np.float32, shape),
    }
    for step in range(distinct):
        begin, size = step * ranks * batch, ranks * batch
        samples = data.train(begin, begin + size)
        for name, array in arrays.items():
            array[step] = getattr(samples, name).reshape(array.shape[1:])
    field_rows = list(map(int, data.field_rows))
    describe(folder, ranks=ranks, batch=batch, dim=dim, net=net, steps=steps, field_rows=field_rows)


def report(result: dict):
    """Prints the result of a contender, by its rank 0: loss of each step (mean over ranks), step_ms of each chunk of
    steps, and further counts. The caller finds the line by its mark."""
    print("CONTENDER " + json.dumps(result), flush=True)


class Laps:
    """Measures one rank of a contender: the time of each chunk of steps, and the loss of its last step. Starts
    immediately."""

    def __init__(self):
        self.chunk, self.num_steps = chunk_steps(), 0
        self.losses, self.step_ms = [], []
        self.began = time.perf_counter()

    def step(self, loss: Tensor) -> bool:
        """To be called after a step with its loss (). Returns whether it ends a chunk."""
        self.num_steps += 1
        if self.num_steps % self.chunk:
            return False
        if loss.is_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.losses.append(loss.detach())
        self.step_ms.append(1000 * (now - self.began) / self.chunk)
        self.began = now
        return True

    def report(self, rank: int, size: int, add_over_ranks):
        """Prints the report on rank 0. add_over_ranks(losses (n,)): replaces them by their sums over ranks.
        Collective."""
        losses = torch.stack(self.losses)
        add_over_ranks(losses)
        if rank == 0:
            report({"step_ms": self.step_ms, "loss": (losses / size).tolist()})


def chunk_steps() -> int:
    """Steps timed together."""
    return int(os.environ.get("CHUNK", 10))
