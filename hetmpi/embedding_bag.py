"""EmbeddingBag: a table in the place of torch.nn.EmbeddingBag (docs/embedding_bag.md).

    bag = torch.nn.EmbeddingBag(10_000_000, 64, mode="sum")         bag = hetmpi.EmbeddingBag(10_000_000, 64, mode="sum")
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
from hetmpi.table import EmbeddingTable, kind_of
from hetmpi.world import Refused, World, default_world

MODES = ("sum", "mean", "max")
TORCHS = ("max_norm", "norm_type", "scale_grad_by_freq", "sparse", "_weight", "dtype")  # arguments that mean nothing here
NUMBERS = itertools.count()  # of the bags of this process: all ranks make them in the same order


class EmbeddingBag(torch.nn.Module):
    """Bags of rows of a table that is spread over all ranks: sums, means or maxima, as torch.nn.EmbeddingBag makes them.

    It has no parameters, so torch's optimizers and Horovod's broadcasts pass it by, and no place in a state_dict: hetmpi.Checkpoints saves
    its rows. `table` is the EmbeddingTable."""

    def __init__(
        self, num_rows: int, dim: int, *, optimizer: RowOptimizer = RowOptimizer(), mode: str = "mean", padding_idx: int | None = None,
        include_last_offset: bool = False, world: World | None = None, **settings,
    ):  # fmt: skip
        """optimizer: of the rows. mode, padding_idx, include_last_offset: as torch's. world: its ranks, default all of the job. settings: of
        EmbeddingTable; rows begin as torch's, with deviation 1, and bags made one after the other with other ones, unless init_std
        and name say otherwise. Collective.

        Raises ValueError for an unknown mode, a padding_idx that is no key or an argument of torch's that means nothing here, Refused as World
        and EmbeddingTable do."""
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"EmbeddingBag: mode must be one of {', '.join(MODES)}, got {mode}")
        if padding_idx is not None and not -num_rows <= padding_idx < num_rows:
            raise ValueError(f"EmbeddingBag: padding_idx must lie in [-{num_rows:,}, {num_rows:,}), got {padding_idx}")
        for name in set(TORCHS) & set(settings):
            raise ValueError(f"EmbeddingBag: leave out {name}: rows are float32, and what is done with their gradients is RowOptimizer's")
        settings = {"init_std": 1.0, "name": f"bag {next(NUMBERS)}", **settings}
        self.table = EmbeddingTable(world or default_world(), num_rows, dim, optimizer, **settings)
        self.mode, self.include_last_offset = mode, include_last_offset
        self.padding_idx = padding_idx if padding_idx is None else padding_idx % num_rows
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and rows that got gradients since the last step

    def forward(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input (B, N), or (N,) with offsets (B,), where bags begin, or (B + 1,) with include_last_offset; all int64 or int32.
        per_sample_weights float32 of input's shape, for mode sum -> (B, dim), on a GPU if input or the table is.

        Without gradients it reads the owners' rows, which at staleness 1 and above takes flush() before. Raises Refused for another dtype, or
        ids out of range, and as torch does for shapes that do not fit."""
        if input.dtype not in (torch.int64, torch.int32):
            raise Refused(f"EmbeddingBag: input must be int64 or int32, got {kind_of(input)}")
        keys, index = _C.unique(input.detach().to("cpu", torch.int64).reshape(-1).contiguous().numpy())
        keys, index, device = torch.from_numpy(keys), torch.from_numpy(index).view(input.shape), self.table.device
        if torch.is_grad_enabled():
            rows = self.table.read(keys).requires_grad_()
            rows.register_post_accumulate_grad_hook(lambda rows: self._note(keys, rows))
        else:
            rows = self.table.peek(keys)
        padding = None if self.padding_idx is None else torch.nonzero(keys == self.padding_idx).flatten().tolist()
        bags = functional.embedding_bag(
            index.to(device), rows, None if offsets is None else offsets.to(device, torch.int64), mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(device),
            include_last_offset=self.include_last_offset, padding_idx=padding[0] if padding else None,
        )  # fmt: skip
        return bags if input.is_cpu else bags.to(input.device)

    def step(self):
        """Gives the owners the gradients of all calls since the last one, as means over the ranks, which is how Horovod gives the dense
        layers theirs. At staleness 0 collective: a rank that made no call makes this one all the same."""
        read, self._read = [(keys, rows.grad) for keys, rows in self._read], []
        if len(read) == 1:
            keys, total = read[0]
        else:
            keys, place = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *(keys for keys, _ in read)]), return_inverse=True)
            total = torch.zeros(len(keys), self.table.dim, device=self.table.device)
            if read:
                total.index_add_(0, place.to(total.device), torch.cat([grads for _, grads in read]))
        self.table.write(keys, total / self.table.world.size)
        if self.table.staleness.is_synchronous:
            self.table.flush()  # here, as the caller may wait for other ranks before it reads again

    def _note(self, keys: torch.Tensor, rows: torch.Tensor):
        if all(known is not rows for _, known in self._read):
            self._read.append((keys, rows))

    def flush(self):
        """Brings all updates to their owners, for an evaluation at staleness 1 and above. Collective."""
        self.table.flush()

    def fill(self, rows: torch.Tensor):
        """Takes rows (num_rows, dim), of a torch.nn.EmbeddingBag's weight for one, in the place of the first ones. REQUIRES: no call yet. Collective.
        Raises Refused for another shape."""
        if tuple(rows.shape) != (self.table.num_rows, self.table.dim):
            raise Refused(f"EmbeddingBag.fill: rows must be of shape ({self.table.num_rows}, {self.table.dim}), got {tuple(rows.shape)}")
        self.table.shard.weight[:] = rows.detach().to("cpu", torch.float32)[self.table.keys()].numpy()
        self.table.touched[:] = 1
        self.table.window.fence()

    def extra_repr(self) -> str:
        """What repr() says of the bag."""
        return f"{self.table.num_rows}, {self.table.dim}, mode={self.mode}, padding_idx={self.padding_idx}, ranks={self.table.world.size}"

    def __reduce_ex__(self, protocol):
        raise TypeError("EmbeddingBag: its rows are spread over the ranks, it cannot be copied or pickled: save rows by hetmpi.Checkpoints")
