"""EmbeddingBag: a table in the place of torch.nn.EmbeddingBag.

    bag = torch.nn.EmbeddingBag(10_000_000, 64, mode="sum")         bag = hetmpi.EmbeddingBag(world, 10_000_000, 64, mode="sum")
    ...                                                             ...
    loss.backward()                                                 loss.backward()
    optimizer.step()                                                optimizer.step()  # of the dense layers alone
                                                                    bag.step()
"""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional

from hetmpi import _C
from hetmpi.optim import RowOptimizer
from hetmpi.table import EmbeddingTable
from hetmpi.world import World

MODES = ("sum", "mean", "max")
NUMBERS = itertools.count()  # of the bags of this process: all ranks make them in the same order


class EmbeddingBag(torch.nn.Module):
    """Bags of rows of a table that is spread over all ranks: sums, means or maxima, as torch.nn.EmbeddingBag makes them.

    table   the EmbeddingTable; it has no parameters for torch's optimizers, and no place in a state_dict (hetmpi.checkpoint saves it)

    At staleness 0 `step` and the next call are collective: all ranks make them, with empty bags if they have none."""

    def __init__(
        self, world: World, num_rows: int, dim: int, optimizer: RowOptimizer = RowOptimizer(), mode: str = "mean",
        padding_idx: int | None = None, **settings,
    ):  # fmt: skip
        """optimizer: of the rows. padding_idx: a key that counts for nothing. settings: of EmbeddingTable; rows begin as torch's, with
        deviation 1, and bags made one after the other with other ones, unless init_std and name say otherwise. Collective.

        Raises ValueError for an unknown mode or a padding_idx that is no key, Refused as EmbeddingTable does."""
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"EmbeddingBag: mode must be one of {', '.join(MODES)}, got {mode}")
        if padding_idx is not None and not 0 <= padding_idx < num_rows:
            raise ValueError(f"EmbeddingBag: padding_idx must lie in [0, {num_rows:,}), got {padding_idx}")
        settings = {"init_std": 1.0, "name": f"bag {next(NUMBERS)}", **settings}
        self.table, self.mode, self.padding_idx = EmbeddingTable(world, num_rows, dim, optimizer, **settings), mode, padding_idx
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and rows of calls since the last step

    def forward(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input (B, N) int64, or (N,) with offsets (B,) int64, where bags begin; per_sample_weights of input's shape, for mode sum
        -> (B, dim). Without gradients it reads the owners' rows, which takes table.flush() on all ranks before."""
        keys, index = _C.unique(input.detach().cpu().reshape(-1).numpy())
        keys, index = torch.from_numpy(keys), torch.from_numpy(index).view(input.shape).to(self.table.device)
        if torch.is_grad_enabled():
            rows = self.table.read(keys).requires_grad_()
            self._read.append((keys, rows))
        else:
            rows = self.table.peek(keys)
        padding = None if self.padding_idx is None else torch.nonzero(keys == self.padding_idx).flatten().tolist()
        return functional.embedding_bag(
            index, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights, padding_idx=padding[0] if padding else None
        )

    def step(self):
        """Gives the owners the gradients of all calls since the last one, as means over the ranks, which is how Horovod gives the dense
        layers theirs."""
        read, self._read = self._read, []
        grads = [torch.zeros_like(rows) if rows.grad is None else rows.grad for _, rows in read]
        if len(read) == 1:
            keys, total = read[0][0], grads[0]
        else:
            found = torch.cat([torch.empty(0, dtype=torch.int64), *(keys for keys, _ in read)])
            keys, place = torch.unique(found, return_inverse=True)
            total = torch.zeros(len(keys), self.table.dim, device=self.table.device)
            if grads:
                total.index_add_(0, place.to(total.device), torch.cat(grads))
        self.table.write(keys, total / self.table.world.size)
