"""Graphs in tables of edges and of nodes, Parquet or CSV, in one folder.

edges.*    columns src and dst: dst reads from src
nodes.*    id        integers or texts, as in src and dst; without it the rows are numbered from 0
           label     a class, integer or text; missing or below 0 for none; a list column: several labels
           split     train, valid, test, or 0, 1, 2; missing for none
           others    a list column: ids; texts: ids with spaces between; numbers: dense

The file may be cut into several, as edges-0.csv.gz and edges-1.csv.gz.
"""

from __future__ import annotations

import os
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from hetmpi.data.batch import Bag
from hetmpi.data.graph.graph import NO_PART, TEST, TRAIN, VALID, Raw, classes_of, from_edges, offsets_of
from hetmpi.data.tabular.files import PARQUET, DataError, first_line, form_of, open_parquet
from hetmpi.data.tabular.rules import near

FILE = re.compile(r"(edges|nodes)\b.*\.(parquet|parq|pq|csv|csv\.gz|csv\.zst)")
OWN_COLUMNS = ("id", "label", "split")
SPLITS = {"train": TRAIN, "valid": VALID, "val": VALID, "test": TEST, "0": TRAIN, "1": VALID, "2": TEST, "-1": NO_PART}


def list_tables(folder: str) -> tuple[list[str], list[str]]:
    """Paths of the files with edges and with nodes. Raises DataError if there is none of a kind."""
    found = {"edges": [], "nodes": []}
    for name in sorted(os.listdir(folder)):
        match = FILE.fullmatch(name)
        if match:
            found[match[1]].append(os.path.join(folder, name))
    for kind, paths in found.items():
        if not paths:
            raise DataError(
                f"data.path={folder}: there is no {kind}.parquet or {kind}.csv, and no folder raw/ of the Open Graph "
                "Benchmark"
            )
    return found["edges"], found["nodes"]


def read_tables(folder: str, undirected: bool) -> Raw:
    """Raises DataError for files that cannot be read, lack a column or name unknown nodes."""
    edge_files, node_files = list_tables(folder)
    nodes, edges = read(node_files), read(edge_files, ["src", "dst"])
    if not len(nodes):
        raise DataError(f"{node_files[0]}: there are no nodes")
    ids = column(nodes, "id") if "id" in nodes.column_names else pa.array(np.arange(len(nodes)))
    check_distinct(ids, node_files[0])
    src, dst = (places_of(column(edges, name), ids, f"{edge_files[0]}: {name}") for name in ("src", "dst"))
    if "label" not in nodes.column_names:
        raise DataError(f"{node_files[0]}: there is no column label, it has {', '.join(nodes.column_names)[:1000]}")
    labels, class_names = labels_of(column(nodes, "label"), node_files[0])
    others = [name for name in nodes.column_names if name not in OWN_COLUMNS]
    is_number = {name: is_dense(nodes.schema.field(name).type) for name in others}
    return Raw(
        from_edges(src, dst, len(nodes), undirected),
        [list_of(column(nodes, name), f"{node_files[0]}: {name}") for name in others if not is_number[name]],
        labels,
        labels.shape[1] if labels.ndim == 2 else len(class_names),
        split_of(column(nodes, "split"), node_files[0]) if "split" in nodes.column_names else None,
        dense_of(nodes, [name for name in others if is_number[name]]),
        names_of(ids) if "id" in nodes.column_names else None,
        class_names,
    )


def read(paths: list[str], wanted: list[str] | None = None) -> pa.Table:
    """The rows of all files; wanted: columns, None for all."""
    tables = []
    for path in paths:
        try:
            found = open_parquet(path).read() if form_of(path) == PARQUET else csv.read_csv(path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"data.path: {path} cannot be read: {first_line(error)}") from error
        for name in wanted or ():
            if name not in found.column_names:
                raise DataError(f"data.path: {path} has no column {name}: {near(name, found.column_names)}")
        tables.append(found.select(wanted) if wanted else found)
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"data.path: the columns of {paths[0]} and further files differ: {first_line(error)}"
        ) from error


def column(table: pa.Table, name: str) -> pa.Array:
    found = table.column(name).combine_chunks()
    found = found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)
    return found.dictionary_decode() if pa.types.is_dictionary(found.type) else found


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_dense(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def check_distinct(ids: pa.Array, path: str):
    if not (pa.types.is_integer(ids.type) or is_text(ids.type)):
        raise DataError(f"{path}: id must hold integers or texts, it holds {ids.type}")
    if ids.null_count:
        raise DataError(f"{path}: id is missing in {ids.null_count:,} rows")
    counts = pc.value_counts(ids)
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        raise DataError(f"{path}: id must be unique, {len(twice):,} occur several times, first {twice[0]['values']}")


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def places_of(found: pa.Array, ids: pa.Array, what: str) -> np.ndarray:
    """Numbers (n,) int64 of the nodes with these ids."""
    try:
        places = pc.index_in(found.cast(ids.type), value_set=ids)
    except pa.ArrowException as error:
        raise DataError(f"{what} must hold {ids.type} as the nodes' id, it holds {found.type}") from error
    if places.null_count:
        unknown = found.filter(places.is_null())
        raise DataError(f"{what} names nodes that are not in the table of nodes: {len(unknown):,}, first {unknown[0]}")
    return places.to_numpy().astype(np.int64)


def labels_of(found: pa.Array, path: str) -> tuple[np.ndarray, list[str]]:
    """Labels as in Graph, and the names of classes."""
    if is_list(found.type):
        return several_labels(found)
    if not (pa.types.is_integer(found.type) or is_text(found.type) or pa.types.is_null(found.type)):
        raise DataError(f"{path}: label must hold integers, texts or lists, it holds {found.type}")
    values = found.to_pylist()
    return classes_of([None if value == "" or (value.__class__ is int and value < 0) else value for value in values])


def several_labels(found: pa.Array) -> tuple[np.ndarray, list[str]]:
    bag, num = list_of(found, "label")
    known = pc.unique(found.flatten().drop_null()).to_pylist()
    labels = np.zeros((len(found), num), np.float32)
    labels[np.repeat(np.arange(len(found)), np.diff(bag.offsets)), bag.values] = 1
    labels[np.asarray(found.is_null())] = np.nan
    return labels, [str(value) for value in known]


def split_of(found: pa.Array, path: str) -> np.ndarray:
    texts = [str(value).strip().lower() if value not in (None, "") else "-1" for value in found.to_pylist()]
    wrong = sorted(set(texts) - set(SPLITS))
    if wrong:
        raise DataError(f"{path}: split must be train, valid or test, or 0, 1 or 2, or missing, got {wrong[0]}")
    return np.array([SPLITS[text] for text in texts], np.int8)


def list_of(found: pa.Array, what: str) -> tuple[Bag, int]:
    """The ids of a column of lists, or of texts with spaces between, and their number of rows: one per distinct
    value."""
    if is_text(found.type):
        found = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(found))
    if not is_list(found.type):
        raise DataError(f"{what} must hold lists, texts or numbers, it holds {found.type}")
    sizes = pc.list_value_length(found).fill_null(0).to_numpy(zero_copy_only=False)
    flat = found.flatten()
    keep = np.asarray(flat.is_valid()) & np.asarray(pc.not_equal(flat.cast(pa.string()), "").fill_null(False))
    owners = np.repeat(np.arange(len(found)), sizes)[keep]
    coded = flat.filter(pa.array(keep)).dictionary_encode()
    codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return Bag(codes, offsets_of(np.bincount(owners, minlength=len(found)))), len(coded.dictionary)


def dense_of(nodes: pa.Table, names: list[str]) -> np.ndarray | None:
    """(N, num_dense) float32 of the columns of numbers; a missing number is NaN."""
    if not names:
        return None
    values = [column(nodes, name).cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False) for name in names]
    return np.stack(values, axis=1)


def names_of(ids: pa.Array) -> np.ndarray:
    return np.array(ids.to_pylist(), np.str_) if is_text(ids.type) else ids.to_numpy().astype(np.int64)
