"""Graphs in a .npz file.

indptr, indices                    neighbours of each node, see hetmpi/data/graph/graph.py
label                              (N,) integers, below 0 for none; of several labels (N, C) of 0 and 1, or NaN for none
feature_indptr, feature_indices    optional: words of each node, 0 <= word < num_features
split                              optional: (N,) integers: 0 train, 1 valid, 2 test, -1 none
dense                              optional: (N, num_dense) numbers
name                               optional: (N,) integers or texts, the user's ids of nodes
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping

import numpy as np

from hetmpi.data.batch import Bag
from hetmpi.data.graph.graph import Raw, check_adjacency, check_nodes, made_undirected
from hetmpi.data.tabular.files import DataError, first_line

INTEGERS, NUMBERS, TEXTS = "iub", "iubf", "iuU"  # kinds of dtypes


def read_npz(path: str, undirected: bool) -> Raw:
    """Raises DataError for a file that is damaged or lacks an array."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return raw_of({name: file[name] for name in file.files}, f"data.path={path}", undirected)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"data.path={path} is no complete .npz file: {first_line(error)}") from error


def raw_of(arrays: Mapping[str, np.ndarray], what: str, undirected: bool) -> Raw:
    indptr, indices = (array_of(arrays, name, what, INTEGERS).astype(np.int64) for name in ("indptr", "indices"))
    check_adjacency(indptr, indices, what)
    num_nodes = len(indptr) - 1
    labels = array_of(arrays, "label", what, NUMBERS, num_nodes, axes=(1, 2))
    labels = labels.astype(np.float32) if labels.ndim == 2 else integers_of(labels)
    num_classes = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    split = array_of(arrays, "split", what, INTEGERS, num_nodes) if "split" in arrays else None
    if split is not None and not np.isin(split, (-1, 0, 1, 2)).all():
        raise DataError(f"{what}: split must be 0 for train, 1 for valid, 2 for test or -1 for none")
    dense = array_of(arrays, "dense", what, NUMBERS, num_nodes, axes=(2,)) if "dense" in arrays else None
    names = array_of(arrays, "name", what, TEXTS, num_nodes) if "name" in arrays else None
    if names is not None and names.dtype.kind != "U":
        names = names.astype(np.int64)
    adjacency = made_undirected(indptr, indices) if undirected else (indptr, indices)
    return Raw(adjacency, words_of(arrays, num_nodes, what), labels, num_classes, split, dense, names)


def words_of(arrays: Mapping[str, np.ndarray], num_nodes: int, what: str) -> list[tuple[Bag, int]]:
    if "feature_indptr" not in arrays:
        return []
    offsets, words = (
        array_of(arrays, name, what, INTEGERS).astype(np.int64) for name in ("feature_indptr", "feature_indices")
    )
    num_words = int(array_of(arrays, "num_features", what, INTEGERS, axes=(0,)))
    if len(offsets) != num_nodes + 1 or offsets[0] != 0 or offsets[-1] != len(words) or (np.diff(offsets) < 0).any():
        raise DataError(
            f"{what}: feature_indptr must have {num_nodes + 1:,} offsets that rise from 0 to {len(words):,}, the "
            "number of feature_indices"
        )
    check_nodes(words, num_words, f"{what}: feature_indices", "words")
    return [(Bag(words, offsets), num_words)]


def integers_of(labels: np.ndarray) -> np.ndarray:
    """Labels (N,) of integers, or of floats with NaN for none -> (N,) int64."""
    return (np.where(np.isnan(labels), -1, labels) if labels.dtype.kind == "f" else labels).astype(np.int64)


def array_of(arrays, name: str, what: str, kinds: str, length: int | None = None, axes=(1,)) -> np.ndarray:
    """The array of a name. Raises DataError if it is missing, or has another kind of dtype, number of axes or
    length."""
    if name not in arrays:
        raise DataError(f"{what}: the array {name} is missing, there are {', '.join(arrays)}")
    found = arrays[name]
    if found.dtype.kind not in kinds or found.ndim not in axes or (length is not None and length != len(found)):
        kind = "integers" if kinds == INTEGERS else "numbers" if kinds == NUMBERS else "integers or texts"
        shape = "" if length is None else f" with one for each of the {length:,} nodes"
        raise DataError(f"{what}: {name} must be {kind}{shape}, got {found.dtype} of shape {found.shape}")
    return found
