"""GraphFiles: a graph from the user's files: .npz, OGB's raw layout, or tables of edges and nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from hetmpi.bounded_file import shown
from hetmpi.data.files import DataError, absolute
from hetmpi.data.graph.graph import Graph, RawGraph, joined_ids, smallest_integers, split_per_class
from hetmpi.data.graph.npz import read_npz
from hetmpi.data.graph.ogb import is_ogb, read_ogb
from hetmpi.data.graph.source import GraphData, check_flag, check_path
from hetmpi.data.graph.tables import TableRules, list_tables, read_tables
from hetmpi.data.tabular.reading import MISSING
from hetmpi.errors import UserError, check_integer, one_line


class GraphFiles(GraphData):
    """A graph from files; see GraphData.

    A path ending in .npz is one file (hetmpi/data/graph/npz.py). A folder with raw/ is a data set of the Open Graph
    Benchmark (hetmpi/data/graph/ogb.py). Any other folder has tables, edges.* and nodes.*, as Parquet or CSV
    (hetmpi/data/graph/tables.py)."""

    def __init__(
        self,
        path: str,
        seed: int,
        undirected: bool = True,
        node_ids: bool = True,
        dense: bool = True,
        id: str | None = None,
        drop: Sequence[str] | None = None,
        missing: Sequence[str] = MISSING,
        label_separator: str | None = None,
        add_nodes: bool = False,
        train_per_class: int | None = None,
        valid_per_class: int | None = None,
        fanout: Sequence[int] = (10, 10),
        replace: bool = True,
        partition: str | None = None,
        batch_size: int = 1,
        table_partition: str = "range",
        cache: str | None = None,
    ):
        """undirected: each edge counts in both directions, and once however often it is given. node_ids: each node has
        a row of its own. dense: numbers of nodes are inputs too. Of tables alone: id: the column of nodes that src and
        dst name, None to find it; drop: columns to leave out; missing: texts that mean a missing value, besides the
        empty one; label_separator: between the labels of a text, "" for one label; add_nodes: nodes that only edges
        name are added. train_per_class, valid_per_class: nodes of each class
        to train on and to hold out, drawn by the seed, in place of the files' split. Others as GraphData."""
        super().__init__(seed, fanout, replace, partition, batch_size, table_partition, cache)
        check_path(path)
        flags = {"undirected": undirected, "node_ids": node_ids, "dense": dense, "add_nodes": add_nodes}
        for name, value in flags.items():
            check_flag(name, value)
        for name, value in (("id", id), ("label_separator", label_separator)):
            if value is not None and not isinstance(value, str):
                raise UserError(f"data.{name} must be a text, got {one_line(value)}")
        if (train_per_class is None) != (valid_per_class is None):
            raise UserError("give both data.train_per_class and data.valid_per_class, or neither")
        if train_per_class is not None:
            check_integer("data.train_per_class", train_per_class, 1)
            check_integer("data.valid_per_class", valid_per_class, 0)
        self.path, self.undirected, self.node_ids, self.dense = path, undirected, node_ids, dense
        rules = texts_of("missing", missing), id, texts_of("drop", drop), label_separator, add_nodes
        self.of_tables = TableRules(undirected, *rules)
        self.per_class = None if train_per_class is None else (train_per_class, valid_per_class)

    def identity(self) -> tuple:
        try:
            files = [(path, status.st_size, status.st_mtime_ns) for path, status in self._files()]
        except OSError as error:  # a link to nowhere
            raise DataError(f"data.path: {shown(error.filename)} cannot be read: {error.strerror}") from error
        split = self.per_class and (*self.per_class, self.seed)
        return absolute(self.path), files, self.node_ids, self.dense, split, astuple(self.of_tables)

    def read(self) -> Graph:
        path = absolute(self.path)
        raw = self._raw(path)
        num_nodes = len(raw.adjacency[0]) - 1
        indptr, indices = raw.adjacency
        id_offsets, ids, field_rows = joined_ids(num_nodes, self.node_ids, raw.lists)
        dense = raw.dense if self.dense and raw.dense is not None else np.empty((num_nodes, 0))
        with np.errstate(over="ignore"):  # infinite numbers are refused in check_graph
            dense = np.ascontiguousarray(dense, np.float32)
        return Graph(
            indptr, indices.astype(smallest_integers(num_nodes)), id_offsets, ids, field_rows, raw.labels,
            raw.num_classes, self._split(raw), dense, raw.names, raw.class_names, raw.weights,
            raw.dense_names if self.dense else [], self._key_hashes(raw),
        )  # fmt: skip

    def _key_hashes(self, raw: RawGraph) -> np.ndarray | None:
        if raw.node_hashes is None:
            return None
        return np.concatenate([raw.node_hashes if self.node_ids else raw.node_hashes[:0], *raw.value_hashes])

    def _raw(self, path: str) -> RawGraph:
        if os.path.isfile(path):
            return read_npz(path, self.undirected, self.remarks.append)
        if is_ogb(path):
            return read_ogb(path, self.undirected, self.remarks.append)
        return read_tables(path, self.of_tables, self.remarks.append)

    def _split(self, raw: RawGraph) -> np.ndarray:
        if self.per_class is None:
            if raw.split is None:
                raise DataError(
                    f"data.path={shown(self.path)} has no split: give data.train_per_class and "
                    "data.valid_per_class, as in data.train_per_class=20 data.valid_per_class=30"
                )
            return raw.split
        if raw.labels.ndim == 2:
            raise DataError(
                f"data.path={shown(self.path)}: data.train_per_class is for one class per node, these have several "
                "labels: give the files a split"
            )
        return split_per_class(raw.labels, *self.per_class, self.seed)

    def _files(self):
        """Path and status of the files that are read, sorted. Raises DataError if there is none."""
        path = absolute(self.path)
        if not os.path.exists(path):
            raise DataError(f"data.path={shown(self.path)}: there is no such file or folder")
        if not os.path.isdir(path):
            if not path.endswith(".npz") or not os.path.isfile(path):
                raise DataError(
                    f"data.path={shown(self.path)} must be an .npz file, a folder of the Open Graph Benchmark or a "
                    "folder of tables edges.* and nodes.*, Parquet or CSV"
                )
            return [(path, os.stat(path))]
        if not is_ogb(path):
            return [(file, os.stat(file)) for file in sum(list_tables(path), [])]
        found = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        return [(file, os.stat(file)) for file in sorted(found) if file.endswith(".csv.gz")]


def texts_of(name: str, values) -> tuple[str, ...]:
    """The texts of a setting data.NAME that is a list. Raises UserError for anything else."""
    if values is None:
        return ()
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise UserError(f"data.{name} must be a list, as in data.{name}=[a,b], got {one_line(values)}")
    return tuple(map(str, values))
