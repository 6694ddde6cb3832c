"""Samples of a graph: heads, the nodes sampled around them, and batches of these for table and model.

B heads, N nodes, L layers, C classes, U unique keys of the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hetmpi import _C
from hetmpi.data.batch import Bag, SamplesError, to_device
from hetmpi.data.features import TABLE
from hetmpi.gpu import gpu_of


@dataclass
class Block:
    """The edges of one layer: destination d has the sources index[offsets[d] : offsets[d + 1]]. The destinations are
    the first n_dst sources. Arrays in samples, tensors in batches."""

    offsets: np.ndarray | Tensor  # (n_dst + 1,) int64, from 0 to e
    index: np.ndarray | Tensor  # (e,) int64, places among the sources
    weights: np.ndarray | Tensor | None = None  # (e,) float32 above 0; None: all 1

    @property
    def num_destinations(self) -> int:
        return len(self.offsets) - 1


@dataclass
class NodeSamples:
    """Heads with the nodes sampled around them."""

    nodes: np.ndarray  # (N,) int64: the heads, then the nodes first reached by hop 1, hop 2, ...
    blocks: tuple[Block, ...]  # (L,) from the heads outwards; the sources of one are the destinations of the next
    ids: Bag  # keys of each of the N nodes
    dense: np.ndarray  # (N, num_dense) float32
    label: np.ndarray  # (B,) int64, -1 for none; of several labels (B, C) float32 of 0 and 1, NaN for none

    def __len__(self) -> int:
        return len(self.label)


@dataclass
class NodeBatch:
    """NodeSamples with their keys made unique, as torch tensors."""

    keys: dict[str, Tensor]  # TABLE -> (U,) int64, unique, in order of first appearance
    index: Tensor  # (n,) int64, places in the U rows of the ids of all nodes
    offsets: Tensor  # (N + 1,) int64: node i has the ids index[offsets[i] : offsets[i + 1]]
    blocks: tuple[Block, ...]  # (L,) as in NodeSamples
    dense: Tensor  # (N, num_dense) float32
    label: Tensor  # as in NodeSamples

    def on(self, device: torch.device) -> NodeBatch:
        """The batch with the tensors that a model reads on `device`, for use in its current stream."""
        if gpu_of(device) is None:
            return self

        sent = partial(to_device, device=device)
        index, offsets, dense, label = map(sent, (self.index, self.offsets, self.dense, self.label))
        blocks = tuple(
            Block(*(None if part is None else sent(part) for part in (block.offsets, block.index, block.weights)))
            for block in self.blocks
        )
        return replace(self, index=index, offsets=offsets, blocks=blocks, dense=dense, label=label)


def to_batch(samples: NodeSamples) -> NodeBatch:
    """The batch of samples that check_samples accepts."""
    keys, index = _C.unique(np.ascontiguousarray(samples.ids.values))
    index, offsets, dense, label = map(torch.from_numpy, (index, samples.ids.offsets, samples.dense, samples.label))
    return NodeBatch({TABLE: torch.from_numpy(keys)}, index, offsets, blocks_of(samples), dense, label)


def blocks_of(samples: NodeSamples) -> tuple[Block, ...]:
    """The blocks as tensors."""
    return tuple(
        Block(
            *(None if part is None else torch.from_numpy(part) for part in (block.offsets, block.index, block.weights))
        )
        for block in samples.blocks
    )


def check_samples(samples: NodeSamples, num_layers: int, num_dense: int, num_classes: int, is_multilabel: bool):
    """Raises SamplesError if an array has another dtype or shape than NodeSamples documents, if a place or a label is
    out of range, or if there are not `num_layers` blocks."""
    if not isinstance(samples, NodeSamples):
        raise SamplesError(f"samples of a graph must be NodeSamples, got {type(samples).__name__}")
    num_heads = len(samples.label)
    check_array("nodes", samples.nodes, np.int64, ("N",))
    num_nodes = len(samples.nodes)
    check_array("dense", samples.dense, np.float32, (num_nodes, num_dense))
    shape, dtype = ((num_heads, num_classes), np.float32) if is_multilabel else ((num_heads,), np.int64)
    check_array("label", samples.label, dtype, shape)
    if not is_multilabel:
        check_range("label", samples.label, -1, num_classes)
    check_array("ids.values", samples.ids.values, np.int64, ("n",))
    check_offsets("ids.offsets", samples.ids.offsets, num_nodes, len(samples.ids.values))
    if len(samples.blocks) != num_layers:
        raise SamplesError(
            f"NodeSamples: there must be {num_layers} blocks, one per number of the fan-out, got {len(samples.blocks)}"
        )
    destinations = num_heads
    for hop, block in enumerate(samples.blocks):
        check_array(f"blocks[{hop}].index", block.index, np.int64, ("e",))
        check_offsets(f"blocks[{hop}].offsets", block.offsets, destinations, len(block.index))
        if block.weights is not None:
            check_array(f"blocks[{hop}].weights", block.weights, np.float32, (len(block.index),))
        sources = samples.blocks[hop + 1].num_destinations if hop + 1 < num_layers else num_nodes
        if not destinations <= sources <= num_nodes:
            raise SamplesError(
                f"NodeSamples: blocks[{hop}] has {destinations:,} destinations and {sources:,} sources of "
                f"{num_nodes:,} nodes: the sources must begin with the destinations"
            )
        check_range(f"blocks[{hop}].index", block.index, 0, sources)
        destinations = sources


def check_array(name: str, array: np.ndarray, dtype, shape: tuple):
    """Raises SamplesError for another dtype or shape; an axis given as text may have any length."""
    fits = isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == len(shape)
    if not fits or any(not isinstance(size, str) and size != got for size, got in zip(shape, array.shape)):
        got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        expected = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise SamplesError(f"NodeSamples: {name} must be {np.dtype(dtype).name} of shape ({expected}), got {got}")


def check_offsets(name: str, offsets: np.ndarray, num: int, end: int):
    check_array(name, offsets, np.int64, (num + 1,))
    if offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
        raise SamplesError(f"NodeSamples: {name} must rise from 0 to {end:,}, the number of values")


def check_range(name: str, values: np.ndarray, least: int, most: int):
    """Raises SamplesError unless least <= value < most for all values."""
    if values.size and not least <= values.min() <= values.max() < most:
        wrong = values[(values < least) | (values >= most)]
        raise SamplesError(f"NodeSamples: {name} must lie in [{least}, {most:,}), got {wrong[0]}")
