"""Graphs in a .npz file.

indptr, indices                    neighbours of each node, see hetmpi/data/graph/graph.py
label                              (N,) integers, below 0 for none, or whole numbers and NaN for none; of several labels
                                   (N, C) of 0 and 1, or NaN for none
feature_indptr, feature_indices    optional: words of each node, 0 <= word < num_features
split                              optional: (N,) integers: 0 train, 1 valid, 2 test, -1 none
dense                              optional: (N, num_dense) numbers
weight                             optional: (E,) numbers above 0 of the edges of indices
train_mask, val_mask, test_mask    in place of split: (N,) booleans
name                               optional: (N,) integers or texts, the user's ids of nodes

Memory is taken for an array only after its header has been compared with the size of its entry in the file, and that
with the bytes it is compressed to: a short file cannot claim more than it can hold.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from hetmpi.bounded_file import open_regular, shown
from hetmpi.data.batch import Bag
from hetmpi.data.files import DataError
from hetmpi.data.graph.columns import Remark
from hetmpi.data.graph.graph import (
    RawGraph,
    check_adjacency,
    check_nodes,
    check_weights,
    classes_below,
    from_weighted_edges,
    made_undirected,
    whole_labels,
)
from hetmpi.data.graph.labels import MASKS, split_of_masks
from hetmpi.errors import UserError, one_line
from hetmpi.memory import check_fits

INTEGERS, NUMBERS, TEXTS = "iub", "iubf", "iuU"  # kinds of dtypes
NAMES = (
    *MASKS,
    "indptr",
    "indices",
    "label",
    "feature_indptr",
    "feature_indices",
    "num_features",
    "split",
    "dense",
    "name",
    "weight",
)
MOST_RATIO = 1032  # of deflate, the compression of numpy's files
MOST_WORDS = 1 << 40
COPIES = 3  # bytes that reading a graph takes, per byte of its arrays


def read_npz(path: str, undirected: bool, remark: Remark) -> RawGraph:
    """remark: takes a line about arrays that are not read. Raises DataError for a file that is damaged or lacks an
    array."""
    what = f"data.path={shown(path)}"
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            arrays = read_arrays(archive, what)
            others = [name for info in archive.infolist() if (name := array_name(info)) not in NAMES]
    except UserError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise many kinds for a crafted file
        raise DataError(f"{what} is no complete .npz file: {one_line(error)}") from error
    if others:
        remark(f"{what}: arrays that are not read: {one_line(', '.join(others))}")
    return raw_of(arrays, what, undirected)


def read_arrays(archive: zipfile.ZipFile, what: str) -> dict[str, np.ndarray]:
    """The arrays of a graph by name. Raises UserError if their sizes are impossible or larger than the free memory, and
    any exception for a damaged file."""
    entries = {name: info for info in archive.infolist() if (name := array_name(info)) in NAMES}
    for name, info in entries.items():
        kind = info.compress_type
        if (
            kind not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            or info.file_size > MOST_RATIO * info.compress_size + 64
        ):
            raise DataError(
                f"{what}: {name} cannot have {info.file_size:,} bytes, its entry has {info.compress_size:,}"
            )
    needed = COPIES * sum(info.file_size for info in entries.values())
    check_fits(needed, f"{what}: a graph of these arrays", "use a machine with more, or a smaller graph")
    return {name: read_array(archive, info, f"{what}: {name}") for name, info in entries.items()}


def array_name(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, what: str) -> np.ndarray:
    """An array of numbers or texts, after its header has been compared with the size of its entry."""
    with archive.open(info) as file:
        shape, dtype = header_of(file)
        begin = file.tell()
    expected = begin + math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape, default=0) < 0 or expected != info.file_size:
        raise DataError(
            f"{what} of {one_line(dtype, 80)} and shape {one_line(shape, 80)} must have {expected:,} "
            f"bytes, its entry has {info.file_size:,}"
        )
    with archive.open(info) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def header_of(file) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype in the header of an array in numpy's format. Raises any exception for another."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an array in version {version} of numpy's format")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype


def raw_of(arrays: Mapping[str, np.ndarray], what: str, undirected: bool) -> RawGraph:
    indptr, indices = (integers_of(arrays, name, what) for name in ("indptr", "indices"))
    check_adjacency(indptr, indices, what)
    num_nodes = len(indptr) - 1
    labels, num_classes = labels_of(array_of(arrays, "label", what, NUMBERS, num_nodes, axes=(1, 2)), what)
    split = split_in(arrays, num_nodes, what)
    dense = array_of(arrays, "dense", what, NUMBERS, num_nodes, axes=(2,)) if "dense" in arrays else None
    names = array_of(arrays, "name", what, TEXTS, num_nodes) if "name" in arrays else None
    if names is not None:
        names = checked_texts(names, what) if names.dtype.kind == "U" else integers_of(arrays, "name", what)
    adjacency, weights = adjacency_of(arrays, indptr, indices, what, undirected)
    words = words_of(arrays, num_nodes, what)
    return RawGraph(adjacency, words, labels, num_classes, split, dense, names, weights=weights)


def adjacency_of(
    arrays: Mapping[str, np.ndarray], indptr: np.ndarray, indices: np.ndarray, what: str, undirected: bool
):
    """indptr and indices, and the weights of edges, None if all are 1."""
    weights = None if "weight" not in arrays else array_of(arrays, "weight", what, NUMBERS, len(indices), noun="edges")
    if weights is not None:
        weights = weights.astype(np.float64)
        check_weights(weights, f"{what}: weight")
    if weights is None or (weights == 1).all():
        return made_undirected(indptr, indices) if undirected else (indptr, indices), None
    if not undirected:
        return (indptr, indices), weights.astype(np.float32)
    num_nodes = len(indptr) - 1
    targets = np.repeat(np.arange(num_nodes), np.diff(indptr))
    indptr, indices, weights = from_weighted_edges(indices, targets, weights, num_nodes, undirected)
    return (indptr, indices), weights


def split_in(arrays: Mapping[str, np.ndarray], num_nodes: int, what: str) -> np.ndarray | None:
    """(N,) integers of the array split, or of masks; None without."""
    masks = {name: arrays[name] for name in MASKS if name in arrays}
    if masks and "split" in arrays:
        raise DataError(f"{what} has both split and {', '.join(masks)}: remove those of one")
    if masks:
        for name in masks:
            array_of(arrays, name, what, INTEGERS, num_nodes)
        return split_of_masks({name: pa.array(mask.astype(np.int64)) for name, mask in masks.items()}, what)
    split = array_of(arrays, "split", what, INTEGERS, num_nodes) if "split" in arrays else None
    if split is not None and not np.isin(split, (-1, 0, 1, 2)).all():
        raise DataError(f"{what}: split must be 0 for train, 1 for valid, 2 for test or -1 for none")
    return split


def labels_of(found: np.ndarray, what: str) -> tuple[np.ndarray, int]:
    """Labels as in Graph, and their number of classes."""
    if found.ndim == 2:
        return found.astype(np.float32), classes_below(found.shape[1], what)
    labels = whole_labels(found, f"{what}: label")
    return labels, classes_below(int(labels.max()) + 1, what)


def words_of(arrays: Mapping[str, np.ndarray], num_nodes: int, what: str) -> list[tuple[Bag, int]]:
    if "feature_indptr" not in arrays:
        return []
    offsets, words = (integers_of(arrays, name, what) for name in ("feature_indptr", "feature_indices"))
    num_words = int(array_of(arrays, "num_features", what, INTEGERS, axes=(0,)))
    if not 0 <= num_words <= MOST_WORDS:
        raise DataError(f"{what}: num_features must be from 0 to {MOST_WORDS:,}, got {num_words:,}")
    if len(offsets) != num_nodes + 1 or offsets[0] != 0 or offsets[-1] != len(words) or (np.diff(offsets) < 0).any():
        raise DataError(
            f"{what}: feature_indptr must have {num_nodes + 1:,} offsets that rise from 0 to {len(words):,}, the "
            "number of feature_indices"
        )
    check_nodes(words, num_words, f"{what}: feature_indices", "words")
    return [(Bag(words, offsets), num_words)]


def integers_of(arrays: Mapping[str, np.ndarray], name: str, what: str) -> np.ndarray:
    """The integers of a name as (n,) int64. Raises DataError as array_of, and for those that int64 cannot hold."""
    found = array_of(arrays, name, what, INTEGERS)
    if found.dtype == np.uint64 and len(found) and found.max() > np.iinfo(np.int64).max:
        raise DataError(f"{what}: {name} must be below 2^63, the highest is {found.max():,}")
    return found.astype(np.int64)


def checked_texts(names: np.ndarray, what: str) -> np.ndarray:
    """Texts as they came. Raises DataError for code points that Unicode does not have, and for halves of a pair."""
    codes = np.frombuffer(names.astype(names.dtype.newbyteorder("=")).tobytes(), np.uint32)
    wrong = codes[(codes > 0x10FFFF) | ((codes >= 0xD800) & (codes < 0xE000))]
    if len(wrong):
        raise DataError(f"{what}: name must hold texts, {len(wrong):,} of its characters are none, first {wrong[0]:#x}")
    return names


def array_of(
    arrays, name: str, what: str, kinds: str, length: int | None = None, axes=(1,), noun="nodes"
) -> np.ndarray:
    """The array of a name. Raises DataError if it is missing, or has another kind of dtype, number of axes or
    length."""
    if name not in arrays:
        raise DataError(f"{what}: the array {name} is missing, there are {', '.join(arrays) or 'none of a graph'}")
    found = arrays[name]
    if found.dtype.kind not in kinds or found.ndim not in axes or (length is not None and length != len(found)):
        kind = "integers" if kinds == INTEGERS else "numbers" if kinds == NUMBERS else "integers or texts"
        shape = "" if length is None else f" with one for each of the {length:,} {noun}"
        raise DataError(f"{what}: {name} must be {kind}{shape}, got {found.dtype} of shape {found.shape}")
    return found
