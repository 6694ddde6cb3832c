"""Locality: nodes and keys in an order that keeps a rank's neighbours and rows on its side.

METIS (Karypis and Kumar, "A fast and high quality multilevel scheme for partitioning irregular graphs", SIAM Journal on
Scientific Computing 20(1), 1998) cuts the graph into parts with few edges between them; its recursive bisection numbers
neighbouring parts side by side. Nodes are renumbered by their part. Each key goes to the part that uses it most, as far
as there is room: all parts get equal ranges of keys. So with table.partition=range every rank owns the keys that the
nodes of its part use most, however many ranks there are: the order does not depend on their number, and a checkpoint
may be read by another one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetmpi.data.batch import Bag
from hetmpi.data.graph.graph import TRAIN, Graph, made_undirected
from hetmpi.errors import UserError
from hetmpi.memory import check_fits

MOST_PARTS, LEAST_NODES = 256, 64  # of a part
COPIES = 4  # arrays of all keys at a time


def renumbered(graph: Graph) -> Graph:
    """The graph in the order of METIS. Raises UserError without pymetis."""
    num_parts = num_parts_of(graph.num_nodes)
    part = parts_of(graph, num_parts)
    order = np.argsort(part, kind="stable")
    number = np.empty(graph.num_nodes, np.int64)
    number[order] = np.arange(graph.num_nodes)
    near = Bag(graph.indices, graph.indptr)[order]
    ids = Bag(graph.ids, graph.id_offsets)[order]
    key = keys_of(ids, part[order], num_parts, graph.num_rows)
    hashes = graph.key_hashes
    if hashes is not None:
        hashes = np.empty_like(hashes)
        hashes[key] = graph.key_hashes
    return replace(
        graph,
        indptr=near.offsets,
        indices=number[near.values].astype(graph.indices.dtype),
        id_offsets=ids.offsets,
        ids=key[ids.values].astype(graph.ids.dtype),
        field_rows=[graph.num_rows],
        labels=graph.labels[order],
        split=graph.split[order],
        dense=graph.dense[order],
        weights=None if graph.weights is None else Bag(graph.weights, graph.indptr)[order].values,
        key_hashes=hashes,
        names=order if graph.names is None else graph.names[order],
    )


def num_parts_of(num_nodes: int) -> int:
    """A power of two, since most numbers of ranks are."""
    return 1 << max(0, min(MOST_PARTS, num_nodes // LEAST_NODES).bit_length() - 1)


def parts_of(graph: Graph, num_parts: int) -> np.ndarray:
    """The part of each node, (N,) int64. Parts have about equal numbers of nodes, and of nodes to train on: all of the
    latter together weigh as much as all nodes."""
    try:
        import pymetis
    except ImportError as error:
        raise UserError("data.partition=metis needs METIS: pip install pymetis, or leave data.partition out") from error
    indptr, indices = made_undirected(graph.indptr, graph.indices)
    targets = np.repeat(np.arange(graph.num_nodes), np.diff(indptr))
    differ = indices != targets
    indptr = np.concatenate([[0], np.cumsum(np.bincount(targets[differ], minlength=graph.num_nodes))])
    is_train = graph.split == TRAIN
    weights = 1 + is_train * max(1, round(graph.num_nodes / is_train.sum()))
    found = pymetis.part_graph(
        num_parts, pymetis.CSRAdjacency(indptr, indices[differ]), vweights=weights, recursive=True,
        options=pymetis.Options(seed=0),
    )  # fmt: skip
    return np.asarray(found.vertex_part, np.int64)


def keys_of(ids: Bag, part: np.ndarray, num_parts: int, num_rows: int) -> np.ndarray:
    """The new key of each key, (num_rows,) int64. ids: of nodes in the order of their parts (N,)."""
    of_node = np.repeat(part, np.diff(ids.offsets))
    uses, counts = np.unique(ids.values * np.int64(num_parts) + of_node, return_counts=True)
    keys, parts = np.divmod(uses, num_parts)
    room = np.diff(np.arange(num_parts + 1) * num_rows // num_parts)
    by_use = np.argsort(-counts, kind="stable")
    check_fits(COPIES * 8 * num_rows, f"data.partition=metis: an order of {num_rows:,} keys", "leave it out")
    key = np.empty(num_rows, np.int64)
    key[np.argsort(placed(keys[by_use], parts[by_use], room, num_rows), kind="stable")] = np.arange(num_rows)
    return key


def placed(keys: np.ndarray, parts: np.ndarray, room: np.ndarray, num_rows: int) -> np.ndarray:
    """The part of each key, (num_rows,) int64. Each key asks the part that uses it most, and a part keeps those that it
    uses most; keys that it gives up ask their next part (Gale and Shapley, "College admissions and the stability of
    marriage", 1962). Keys that no part keeps fill what room is left. keys, parts (n,): uses, the most frequent first.
    room: keys of each part, all keys together."""
    place, left = np.full(num_rows, -1), np.arange(len(keys))  # uses that are not given up
    while True:
        asking = left[np.sort(np.unique(keys[left], return_index=True)[1])]
        by_part = asking[np.argsort(parts[asking], kind="stable")]
        sizes = np.bincount(parts[asking], minlength=len(room))
        is_full, last = (sizes >= room) & (room > 0), np.cumsum(sizes) - sizes + room - 1
        worst = np.where(room > 0, len(keys), -1)  # of the uses that each part keeps
        worst[is_full] = by_part[last[is_full]]
        kept = left[left <= worst[parts[left]]]
        if len(kept) == len(left):
            break
        left = kept
    place[keys[asking]] = parts[asking]
    room = room - sizes
    place[place < 0] = np.repeat(np.arange(len(room)), room)
    return place
