"""EmbeddingBag: a distributed replacement of torch.nn.EmbeddingBag (docs/embedding_bag.md).

bag = torch.nn.EmbeddingBag(10_000_000, 64, mode="sum")         bag = hetmpi.EmbeddingBag(10_000_000, 64, mode="sum")
optimizer.zero_grad()                                           optimizer.zero_grad()
loss.backward()                                                 loss.backward()
optimizer.step()                                                optimizer.step()  # only of the dense layers
                                                                bag.step()
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hetmpi import _C
from hetmpi.errors import NotFinite, UserError
from hetmpi.open_rows import FIRST_KEY, LFU, OpenRows, check_open_rows
from hetmpi.table.client import kind_of
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.table import EmbeddingTable
from hetmpi.table.vocabularies import Vocabularies
from hetmpi.table.vocabulary import Vocabulary
from hetmpi.world.launch import default_world
from hetmpi.world.world import World

MODES = ("sum", "mean", "max")
# Arguments of torch.nn.EmbeddingBag that this one does not support.
UNSUPPORTED = "max_norm", "norm_type", "scale_grad_by_freq", "sparse", "_weight", "dtype"
NUMBERS = itertools.count()  # of the bags of this process: all ranks create them in the same order
MARK = 1e-20  # too small to change a norm of gradients; not zero after a loss scale or a clipping factor
MANY_BATCHES = 100
TO_CALLER = 6  # stack frames from a warning in forward() to the call of the bag, of which torch.nn.Module has two


class Rows(torch.autograd.Function):
    """Identity on the rows (U, dim) that were read. Its backward keeps their gradients in the bag and marks the anchor;
    autograd adds zero to the mark, so that hooks on the anchor run."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, bag: EmbeddingBag) -> torch.Tensor:
        ctx.keys, ctx.bag = keys, bag
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx, grads: torch.Tensor):
        ctx.bag._keep(ctx.keys, grads)
        return torch.zeros_like(ctx.bag.anchor), None, None, None


class EmbeddingBag(torch.nn.Module):
    """Sums, means or maxima of rows, as torch.nn.EmbeddingBag, of a table that is partitioned over all ranks.

    table   the EmbeddingTable
    anchor  Parameter (1,) float32 that represents the rows in module.parameters(). Gradients of rows are kept while
            `anchor.grad` is neither None nor zero, and none are computed while `anchor.requires_grad` is False. So
            zero_grad() and requires_grad_() of the bag or of a module that contains it, and zero_grad() of an optimizer
            that has the bag's parameters, affect the rows as in torch.

    A state_dict contains nothing of the bag: hetmpi.Checkpoints saves its rows."""

    def __init__(
        self, num_rows: int, dim: int, *, optimizer: RowOptimizer = RowOptimizer(), mode: str = "mean",
        padding_idx: int | None = None, include_last_offset: bool = False, world: World | None = None,
        vocabulary: str | None = None, min_count: int = 1, expire_steps: int | None = None, evict: str = LFU,
        maintain_steps: int = 1000, **settings,
    ):  # fmt: skip
        """optimizer: of the rows. mode, padding_idx, include_last_offset: as in torch.nn.EmbeddingBag. world: ranks to
        use, default all of the job. settings: arguments of EmbeddingTable. Unless init_std and name are given, rows
        start with standard deviation 1, as in torch, and successive bags with different values. Collective.

        vocabulary: "open" for ids that are any int64, of which num_rows have a row of their own at the same time
        (hetmpi.open_rows.OpenRows describes min_count, expire_steps and evict; docs/growing.md); the calls of the bag
        are then collective, as often on each rank. maintain_steps: steps between the flushes at which ids lose their
        rows.

        Raises ValueError for an unknown mode, a padding_idx out of range or an unsupported argument of
        torch.nn.EmbeddingBag, UserError as World and EmbeddingTable do."""
        super().__init__()
        check_arguments(num_rows, mode, padding_idx, vocabulary, settings)
        settings = {"init_std": 1.0, "name": f"bag {next(NUMBERS)}", **settings}
        self.name, world = settings["name"], world or default_world()
        self.vocabularies: Vocabularies | None = None
        if vocabulary is None:
            self.table = EmbeddingTable(world, num_rows, dim, optimizer, **settings)
        else:
            rows = OpenRows(num_rows, min_count, expire_steps, evict)
            check_open_rows("EmbeddingBag", rows, maintain_steps)
            world.check_same("EmbeddingBag", {**vars(rows), "maintain_steps": maintain_steps})
            self.table = EmbeddingTable(world, rows.num_rows, dim, optimizer, first_rows=FIRST_KEY, **settings)
            own = Vocabulary(self.table, rows, settings.get("seed", 0), settings["init_std"], maintain_steps)
            self.vocabularies = Vocabularies(world, {self.name: own}, maintain_steps)
        self.mode, self.include_last_offset, self.padding_idx = mode, include_last_offset, padding_idx
        if padding_idx is not None and vocabulary is None:
            self.padding_idx = padding_idx % num_rows
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self._mark = self.anchor.detach()  # the memory of anchor.grad, also after Horovod has replaced it
        self._has_stepped = self._has_warned = False
        self._discard()

    def forward(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """input (B, N), or (N,) with offsets (B,), the first positions of the bags, or (B + 1,) with
        include_last_offset; all int64 or int32. per_sample_weights float32 of input's shape, for mode sum -> (B, dim),
        on a GPU if input or the table is.

        Under no_grad it reads the owners' rows; at staleness >= 1 call flush() before, and let all ranks meet before
        the next step(). Otherwise gradients are summed over all backward() calls until step() or zero_grad(); it warns
        once after 100 batches without either. Raises UserError for another dtype or ids out of range, and as torch does
        for shapes that do not match."""
        if input.dtype not in (torch.int64, torch.int32):
            raise UserError(f"EmbeddingBag: input must be int64 or int32, got {kind_of(input)}")
        keys, index = _C.unique(input.detach().to("cpu", torch.int64).reshape(-1).contiguous().numpy())
        padding = None if self.padding_idx is None else (keys == self.padding_idx).nonzero()[0].tolist()
        if self.vocabularies is not None:
            keys, index, padding = self._translated(keys, index, padding)
        keys, index, device = torch.from_numpy(keys), torch.from_numpy(index).view(input.shape), self.table.device
        rows = self._trained(keys) if torch.is_grad_enabled() else self.table.peek(keys)
        if self.vocabularies is not None and padding:
            rows = torch.cat([rows, rows.new_zeros(1, self.table.dim)])
        bags = functional.embedding_bag(
            index.to(device), rows, None if offsets is None else offsets.to(device, torch.int64), mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(device),
            include_last_offset=self.include_last_offset, padding_idx=padding[0] if padding else None,
        )  # fmt: skip
        return bags if input.is_cpu else bags.to(input.device)

    def _translated(
        self, ids: np.ndarray, index: np.ndarray, padding: list[int] | None
    ) -> tuple[np.ndarray, np.ndarray, list[int] | None]:
        """Keys (U,), places among them in place of index (n,) into ids, and the place behind them of the padding.
        Collective."""
        is_id = np.ones(len(ids), bool)
        is_id[padding or []] = False
        found = {self.name: np.ascontiguousarray(ids[is_id])}
        if torch.is_grad_enabled():
            counts = np.bincount(index, minlength=len(ids))[is_id]
            keys = self.vocabularies.translate(found, {self.name: counts}, self.table.step)[self.name]
        else:
            keys = self.vocabularies.look_up(found)[self.name]
        keys, places = _C.unique(keys)
        of_ids = np.full(len(ids), len(keys))
        of_ids[is_id] = places
        return keys, of_ids[index], [len(keys)] if padding else padding

    def step(self):
        """Pushes the gradients since the last step to the owners, as means over the ranks, like Horovod's gradients of
        the dense layers. At staleness 0 collective: a rank without gradients must call it too.

        Raises NotFinite for gradients that are NaN or infinite, before any is sent; they are kept until zero_grad().
        Warns if zero_grad() has discarded those of the first step."""
        if self._discard_if_zeroed() and not self._has_stepped:
            text = "zero_grad() came between backward() and step(), which discards the gradients of the rows"
            self._warn(f"{text}: call step() before zero_grad()", 3)
        if not self.anchor.requires_grad:
            self._discard()
        keys, grads = self._summed()
        self._check_finite(keys, grads)
        self.table.write(keys, grads / self.table.world.size)
        self._has_stepped = self._has_stepped or bool(self._kept)
        self._discard()
        self.table.settle()  # now, because the caller may wait for other ranks before its next read
        if self.vocabularies is not None and self.vocabularies.is_due(self.table.step):
            self.table.flush()
            self.vocabularies.maintain(self.table.step)

    def zero_grad(self, set_to_none: bool = True):
        """Discards the gradients since the last step."""
        super().zero_grad(set_to_none)
        self._discard()

    def _trained(self, keys: torch.Tensor) -> torch.Tensor:
        """The rows (U, dim) of unique keys (U,), with gradients unless they are frozen."""
        self._discard_if_zeroed()
        self._is_called = True
        if self._num_batches >= MANY_BATCHES:
            text = (
                f"gradients of {self._num_batches} batches wait for step(): call bag.step() after each "
                "optimizer.step(), and zero_grad() for a batch that is left out; ignore this if you accumulate so many"
            )
            self._warn(text, TO_CALLER)
        rows = self.table.read(keys)
        return Rows.apply(self.anchor, rows, keys, self) if self.anchor.requires_grad else rows

    def _keep(self, keys: torch.Tensor, grads: torch.Tensor):
        """Adds gradients (U, dim) of unique keys (U,) to those since the last step, and marks the anchor."""
        self._discard_if_zeroed()
        if not self.anchor.requires_grad:
            return
        self._num_batches, self._is_called = self._num_batches + self._is_called, False
        self._kept.append((keys, grads))
        if sum(len(keys) for keys, _ in self._kept) > 2 * len(self._kept[0][0]):  # entry 0 sums all earlier ones
            self._kept = [self._summed()]
        if self.anchor.grad is None:
            self.anchor.grad = torch.full_like(self.anchor, MARK)
        else:
            self.anchor.grad += MARK
        self._mark = self.anchor.grad.detach()

    def _summed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the kept gradients: unique keys (U,), gradients (U, dim)."""
        if len(self._kept) == 1:
            return self._kept[0]
        keys = torch.cat([torch.empty(0, dtype=torch.int64), *(keys for keys, _ in self._kept)])
        keys, place = map(torch.from_numpy, _C.unique(keys.numpy()))
        total = torch.zeros(len(keys), self.table.dim, device=self.table.device)
        if self._kept:
            total.index_add_(0, place.to(total.device), torch.cat([grads for _, grads in self._kept]))
        return keys, total

    def _check_finite(self, keys: torch.Tensor, grads: torch.Tensor):
        """Raises NotFinite if a gradient is NaN or infinite."""
        if torch.isfinite(grads.sum()):
            return
        wrong = keys[(~torch.isfinite(grads)).any(1).cpu()]
        if len(wrong):
            raise NotFinite(
                f"EmbeddingBag.step: {self._who()}: gradients must be finite, those of {len(wrong):,} of {len(keys):,} "
                f"keys are not (key {wrong[0]}), and none was sent: call zero_grad() to leave the batch out, then "
                "step() if other ranks do, or lower the learning rates"
            )

    def _discard_if_zeroed(self) -> bool:
        """Whether zero_grad() has been called since gradients were kept."""
        is_zeroed = bool(self._kept) and (self.anchor.grad is None or not self._mark.any())
        if is_zeroed:
            self._discard()
        return is_zeroed

    def _discard(self):
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # unique keys and gradients since the last step
        self._num_batches, self._is_called = 0, False

    def _warn(self, text: str, level: int):
        """Warns once. level: stacklevel of warnings.warn."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{self._who()}: {text}", stacklevel=level)

    def _who(self) -> str:
        return f"{self.name} of {self.table.num_rows:,} rows of dim {self.table.dim}"

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda tensor: fn(tensor).float(), recurse)  # MARK would be zero in 16 bits

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        """Saves nothing: the anchor's value has no meaning."""

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        missing.remove(f"{prefix}anchor")

    def flush(self):
        """Applies all updates at their owners, before an evaluation at staleness >= 1, which must end on all ranks
        before one of them calls step(). Collective."""
        self.table.flush()

    def fill(self, rows: torch.Tensor):
        """Replaces the initial rows by rows (num_rows, dim), for example the weight of a torch.nn.EmbeddingBag.
        REQUIRES: no other call yet. Collective. Raises UserError for another shape."""
        if self.vocabularies is not None:
            raise UserError("EmbeddingBag.fill: ids of an open vocabulary have no rows yet")
        if tuple(rows.shape) != (self.table.num_rows, self.table.dim):
            raise UserError(
                f"EmbeddingBag.fill: rows must be of shape ({self.table.num_rows}, {self.table.dim}), got "
                f"{tuple(rows.shape)}"
            )
        self.table.shard.assign(slice(None), rows.detach().to("cpu", torch.float32)[self.table.keys()].numpy())
        self.table.resume_at(self.table.step)

    def extra_repr(self) -> str:
        """The arguments that repr() shows."""
        return (
            f"{self.table.num_rows}, {self.table.dim}, mode={self.mode}, padding_idx={self.padding_idx}, "
            f"ranks={self.table.world.size}"
        )

    def __reduce_ex__(self, protocol):
        what = "its rows are spread over the ranks, it cannot be copied or pickled: save them by hetmpi.Checkpoints"
        raise TypeError(f"EmbeddingBag: {what}")


def check_arguments(num_rows: int, mode: str, padding_idx: int | None, vocabulary: str | None, settings: dict):
    """Raises ValueError as the constructor does."""
    if mode not in MODES:
        raise ValueError(f"EmbeddingBag: mode must be one of {', '.join(MODES)}, got {mode}")
    if vocabulary not in (None, "open"):
        raise ValueError(f'EmbeddingBag: vocabulary must be None or "open", got {vocabulary}')
    if vocabulary is None and padding_idx is not None and not -num_rows <= padding_idx < num_rows:
        raise ValueError(f"EmbeddingBag: padding_idx must lie in [-{num_rows:,}, {num_rows:,}), got {padding_idx}")
    for name in set(UNSUPPORTED) & set(settings):
        raise ValueError(
            f"EmbeddingBag: leave out {name}: rows are float32, and optimizer=RowOptimizer(...) says how their "
            "gradients are applied"
        )
