"""Layers between the rows of a table and a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from hetmpi import _C
from hetmpi.gpu import gpu_with, order_of

LEAST_SQUARE = 1e-38  # a smaller squared modulus is 0
WEIGHTED = "weighted "  # before the pool of a feature whose values have weights
BLOCK_NUMBERS = 1 << 24  # of differences made at a time on a GPU: 64 MB


def look_up(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The row of each occurrence: rows (U, dim), index (...) int64 into them -> (..., dim).

    The gradient of a row is the sum over its occurrences, added in an order that does not depend on timing: bitwise
    reproducible, and of float32 with the same bits on the CPU and on a GPU. Equal to rows.index_select(0,
    index.flatten()), which takes longer on the CPU (docs/results.md, "Parts of a step"), but supports first derivatives
    only. Raises ValueError for another shape, dtype or device, on the CPU IndexError for an index beyond the rows."""
    if rows.dim() != 2 or index.dtype != torch.int64:
        raise ValueError(
            f"look_up: rows must be of shape (U, dim) and index int64, got {tuple(rows.shape)} and {index.dtype}"
        )
    if rows.device != index.device:
        raise ValueError(f"look_up: rows on {rows.device}, index on {index.device}: they must be on one device")
    if torch.is_grad_enabled():
        return LookUp.apply(rows, index.contiguous(), order_of(index, len(rows)))
    return rows.index_select(0, index.reshape(-1)).view(*index.shape, rows.shape[1])


class LookUp(torch.autograd.Function):
    """look_up() of a contiguous index."""

    @staticmethod
    def forward(ctx, rows, index, order):
        ctx.save_for_backward(index, order)
        ctx.shape, ctx.gpu = rows.shape, gpu_with(rows)
        found = rows.new_empty(*index.shape, rows.shape[1])
        flat, out = index.view(-1), found.view(index.numel(), rows.shape[1])
        if rows.is_cpu and rows.dtype == torch.float32 and torch.get_num_threads() == 1:
            _C.gather(rows.contiguous().numpy(), flat.numpy(), out.numpy())
        else:
            torch.index_select(rows, 0, flat, out=out)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grads):
        index, order = ctx.saved_tensors
        if grads.dtype != torch.float32 or (ctx.gpu is not None and not _C.has_cuda):
            no_padding = -1  # embedding's backward sorts; index_add_ on a GPU adds in any order
            sums = torch.ops.aten.embedding_dense_backward(grads, index, ctx.shape[0], no_padding, False)
            return sums, None, None
        values, index = in_stretches(grads), index.view(-1)
        if ctx.gpu is not None:
            return ctx.gpu.sum_by_row(values, index, ctx.shape, order), None, None
        sums = grads.new_empty(ctx.shape)
        _C.sum_by_row(values.numpy(), index.numpy(), sums.numpy())
        return sums, None, None


def in_stretches(grads: torch.Tensor) -> torch.Tensor:
    """grads (..., dim) as a matrix whose rows are contiguous: a view where each grads[i] is, as where the network
    concatenates the rows of a sample, (F, dim), with its other features; otherwise one row, of a copy if need be."""
    if grads.dim() == 2 and grads.stride(1) == 1:
        return grads
    if grads.dim() == 3 and grads.stride()[1:] == (grads.shape[2], 1):
        return grads.as_strided((len(grads), grads.shape[1] * grads.shape[2]), (grads.stride(0), 1))
    return grads.contiguous().view(1, -1)


def segment_mean(x: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The mean of the rows of each segment: x (N, dim) float32, segment d has the rows x[index[offsets[d] : offsets[d +
    1]]] -> (n, dim), zeros for an empty segment. index (e,) int64, offsets (n + 1,) int64, from 0 to e.

    The gradient of a row is added in the order of `index`: bitwise reproducible. Equal to torch's embedding_bag, whose
    backward takes longer on the CPU, but supports first derivatives only."""
    x = x.float() if x.dtype == torch.bfloat16 else x
    if x.is_cpu and x.dtype == torch.float32 and torch.is_grad_enabled() and x.requires_grad:
        return SegmentMean.apply(x, index, offsets)
    return bag_mean(x, index, offsets)


def weighted_mean(x: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As segment_mean, of rows with weights (e,) float32 above 0."""
    x = x.float() if x.dtype == torch.bfloat16 else x
    totals = torch.segment_reduce(weights, "sum", offsets=offsets)
    shares = weights / torch.repeat_interleave(totals, offsets.diff())
    return torch.nn.functional.embedding_bag(
        index, x, offsets, mode="sum", include_last_offset=True, per_sample_weights=shares.to(x.dtype)
    )


def bag_mean(x, index, offsets):
    return torch.nn.functional.embedding_bag(index, x, offsets, mode="mean", include_last_offset=True)


class SegmentMean(torch.autograd.Function):
    """segment_mean on the CPU."""

    @staticmethod
    def forward(ctx, x, index, offsets):
        ctx.save_for_backward(index, offsets)
        ctx.shape = x.shape
        return bag_mean(x, index, offsets)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grads):
        index, offsets = ctx.saved_tensors
        shares, sums = grads / offsets.diff().clamp(min=1)[:, None], grads.new_zeros(ctx.shape)
        _C.spread_add(shares.numpy(), offsets.numpy(), index.numpy(), sums.numpy())
        return sums, None, None


class FeatureRows(torch.nn.Module):
    """A model behind the tables of its features. It joins the rows of all tables, projects those of another width to
    the model's (Ginart et al., "Mixed Dimension Embeddings", 2019), and pools the rows of features with several values,
    so that the model reads one row per feature and sample.

    The model reads rows (U, row_dim) and a batch as from one table; its index is (B, F + G): the features of one value,
    then the pooled ones. Features whose values are not pooled are in the batch's `sequences`."""

    def __init__(
        self, model: torch.nn.Module, table_dims: dict[str, int], pools: Sequence[str | None], names: Sequence[str] = ()
    ):
        """table_dims: numbers per row of each table, in the order in which batches join them. pools: of the features
        with several values: sum, mean, weighted sum, weighted mean, or None for one that is not pooled. names: of all
        features, those of one value first; needed if one is not pooled."""
        super().__init__()
        self.model, self.row_dim, self.pools, self.names = model, model.row_dim, list(pools), list(names)
        self.table_dims = dict(table_dims)
        others = {name: dim for name, dim in table_dims.items() if dim != model.row_dim}
        self.project = torch.nn.ModuleDict(
            {name: torch.nn.Linear(dim, model.row_dim, bias=False) for name, dim in others.items()}
        )

    def forward(self, rows: dict[str, torch.Tensor], batch) -> torch.Tensor:
        """rows: table -> (U, dim) float32. Returns the model's output."""
        return self.model(*seen_by_model(self.joined(rows), batch, self.pools, self.names))

    def joined(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """The rows of all tables, projected: (sum of U, row_dim)."""
        return torch.cat(
            [self.project[name](rows[name]) if name in self.project else rows[name] for name in self.table_dims]
        )


class PairRows(FeatureRows):
    """A model of queries and of items behind the tables of their columns, joined as in FeatureRows. Both may read the
    same tables, as a history of items does.

    `model.queries(rows, batch)` and `model.items(rows, batch)` read rows and a batch as a model behind FeatureRows."""

    def __init__(self, model: torch.nn.Module, table_dims: dict[str, int], queries: tuple, items: tuple):
        """queries, items: pools and names of their features, as in FeatureRows."""
        super().__init__(model, table_dims, [])
        self.of_sides = {"queries": queries, "items": items}

    def forward(self, rows: dict[str, torch.Tensor], batch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """batch: hetmpi.data.pairs.PairBatch. Returns the vectors of its queries and of its items, None for those that
        it has not."""
        joined, found = self.joined(rows), []
        for name, (pools, names) in self.of_sides.items():
            part = getattr(batch, name)
            vectors_of = getattr(self.model, name)
            found.append(None if part is None else vectors_of(*seen_by_model(joined, part, pools, names)))
        return tuple(found)


def seen_by_model(joined: torch.Tensor, batch, pools: Sequence[str | None], names: Sequence[str]) -> tuple:
    """The rows and the batch that a model reads, where a pooled feature is one more row of each sample. joined: rows of
    all tables; pools, names: as in FeatureRows."""
    if not pools:
        return joined, batch
    singles, several = names[: len(names) - len(pools)], names[len(names) - len(pools) :]
    weights = batch.bag_weights or [None] * len(batch.bags)
    pooled = [
        pooled_rows(joined, *bag, pool, own) for bag, pool, own in zip(batch.bags, pools, weights) if pool is not None
    ]  # each (B, row_dim)
    num = batch.index.shape[0]
    places = torch.arange(len(pooled) * num, device=joined.device).view(len(pooled), num).T + joined.shape[0]
    fields = [*singles, *(name for name, pool in zip(several, pools) if pool is not None)]
    found = (bag for bag, pool in zip(batch.bags, pools) if pool is None)
    sequences = dict(zip((name for name, pool in zip(several, pools) if pool is None), (padded(*bag) for bag in found)))
    seen = replace(
        batch, index=torch.cat([batch.index, places], dim=1), bags=(), bag_weights=(), sequences=sequences,
        fields={name: place for place, name in enumerate(fields)},
    )  # fmt: skip
    return torch.cat([joined, *pooled]), seen


def pooled_rows(
    rows: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, pool: str, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The sums or means of the rows of each sample: rows (U, dim), sample b has the rows index[offsets[b] : offsets[b +
    1]] -> (B, dim), zeros for a sample without any. weights (n,): factors of the rows, for the pools weighted sum and
    weighted mean, which divides by the number of the rows, not by their weights."""
    kind = pool.removeprefix(WEIGHTED)
    if kind == pool:
        return torch.nn.functional.embedding_bag(index, rows, offsets, mode=pool, include_last_offset=True)
    sums = torch.nn.functional.embedding_bag(
        index, rows, offsets, mode="sum", include_last_offset=True, per_sample_weights=weights.to(rows)
    )
    return sums if kind == "sum" else sums / offsets.diff().clamp(min=1)[:, None]


def padded(index: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of each sample side by side: index (n,) and offsets (B + 1,) int64 -> index (B, L) int64, 0 behind the
    last value of a sample, and which positions have a value, (B, L) bool. L: most values of a sample."""
    lengths = offsets.diff()
    positions = torch.arange(torch.cat([lengths, lengths.new_zeros(1)]).max(), device=index.device)
    has_value = positions < lengths[:, None]
    places = torch.where(has_value, offsets[:-1, None] + positions, len(index))
    return torch.cat([index, index.new_zeros(1)])[places], has_value


def distances(kind: str, queries: torch.Tensor, entities: torch.Tensor) -> torch.Tensor:
    """Distances (B, N) of queries (B, dim) and entities (N, dim) float32. kind: absolute, the sum of absolute
    differences; euclidean; moduli, the sum of moduli of complex differences, of rows whose first half are the
    real parts.

    All differences at once would take B N dim numbers of memory: on a CPU the C++ core makes them one by one."""
    queries, entities = queries.float(), entities.float()  # in 16 bits near entities would be equal
    if queries.is_cpu:
        return Distances.apply(kind, queries, entities)
    if kind != "moduli":
        mode = "donot_use_mm_for_euclid_dist"  # differences of large numbers would decide between near entities
        return torch.cdist(queries, entities, p=1.0 if kind == "absolute" else 2.0, compute_mode=mode)
    num = max(1, BLOCK_NUMBERS // max(1, entities.numel()))
    blocks = [checkpoint(differing_moduli, part, entities, use_reentrant=False) for part in queries.split(num)]
    return torch.cat(blocks)


def differing_moduli(queries: torch.Tensor, entities: torch.Tensor) -> torch.Tensor:
    return sum_of_moduli(queries[:, None] - entities)


def sum_of_moduli(numbers: torch.Tensor) -> torch.Tensor:
    """(..., 2k), first the real parts -> (...). The gradient of 0 is 0."""
    real, imaginary = numbers.chunk(2, dim=-1)
    return (real.square() + imaginary.square()).clamp_min(LEAST_SQUARE).sqrt().sum(-1)


class Distances(torch.autograd.Function):
    """distances() on a CPU."""

    @staticmethod
    def forward(ctx, kind, queries, entities):
        rows = [tensor.detach().contiguous() for tensor in (queries, entities)]
        found = _C.distances(kind, *(tensor.numpy() for tensor in rows), torch.get_num_threads())
        ctx.kind, found = kind, torch.from_numpy(found)
        ctx.save_for_backward(*rows, found)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grads):
        arrays = [tensor.contiguous().numpy() for tensor in (*ctx.saved_tensors, grads)]
        found = _C.distance_gradients(ctx.kind, *arrays, torch.get_num_threads())
        return None, *map(torch.from_numpy, found)
