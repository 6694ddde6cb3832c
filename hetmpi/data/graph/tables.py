"""Graphs in tables of edges and of nodes, Parquet or CSV, in one folder.

edges.*    columns src and dst: dst reads from src
nodes.*    id        integers or texts, as in src and dst; without it the rows are numbered from 0
           label     a class, integer or text; missing or below 0 for none; a list column: several labels
           split     train, valid, test, or 0, 1, 2; missing for none
           others    a list of integers or texts: ids; texts: ids with spaces between; numbers: dense

The file may be cut into several, as edges-0.csv.gz and edges-1.csv.gz.
"""

from __future__ import annotations

import os
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.bounded_file import shown
from hetmpi.data.batch import Bag
from hetmpi.data.files import DataError, first_line
from hetmpi.data.graph.graph import (
    NO_PART,
    TEST,
    TRAIN,
    VALID,
    RawGraph,
    check_labels_fit,
    classes_below,
    classes_of,
    from_edges,
    offsets_of,
)
from hetmpi.data.graph.reading import read_file
from hetmpi.data.tabular.rules import near
from hetmpi.errors import one_line
from hetmpi.memory import check_fits

FILE = re.compile(r"(edges|nodes)\b.*\.(parquet|parq|pq|csv|csv\.gz|csv\.zst)")
OWN_COLUMNS = ("id", "label", "split")
SPLITS = {"train": TRAIN, "valid": VALID, "val": VALID, "test": TEST, "0": TRAIN, "1": VALID, "2": TEST, "-1": NO_PART}


def list_tables(folder: str) -> tuple[list[str], list[str]]:
    """Paths of the files with edges and with nodes. Raises DataError if there is none of a kind."""
    found = {"edges": [], "nodes": []}
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(f"data.path={shown(folder)}: the folder cannot be read: {error.strerror}") from error
    for name in names:
        match = FILE.fullmatch(name)
        if match:
            found[match[1]].append(os.path.join(folder, name))
    for kind, paths in found.items():
        if not paths:
            raise DataError(
                f"data.path={shown(folder)}: there is no {kind}.parquet or {kind}.csv, and no folder raw/ of the Open "
                "Graph Benchmark"
            )
    return found["edges"], found["nodes"]


def read_tables(folder: str, undirected: bool) -> RawGraph:
    """Raises DataError for files that cannot be read, lack a column or name unknown nodes."""
    edge_files, node_files = list_tables(folder)
    nodes, edges = read(node_files), read(edge_files, ["src", "dst"])
    node_file, edge_file = shown(node_files[0]), shown(edge_files[0])
    if not len(nodes):
        raise DataError(f"{node_file}: there are no nodes")
    ids = column(nodes, "id") if "id" in nodes.column_names else pa.array(np.arange(len(nodes)))
    check_distinct(ids, node_file)
    src, dst = (places_of(column(edges, name), ids, f"{edge_file}: {name}") for name in ("src", "dst"))
    if "label" not in nodes.column_names:
        raise DataError(f"{node_file}: there is no column label, it has {one_line(', '.join(nodes.column_names), 400)}")
    labels, class_names = labels_of(column(nodes, "label"), node_file)
    others = [name for name in nodes.column_names if name not in OWN_COLUMNS]
    is_number = {name: is_dense(nodes.schema.field(name).type) for name in others}
    return RawGraph(
        from_edges(src, dst, len(nodes), undirected),
        [list_of(column(nodes, name), f"{node_file}: {one_line(name)}") for name in others if not is_number[name]],
        labels,
        labels.shape[1] if labels.ndim == 2 else len(class_names),
        split_of(column(nodes, "split"), node_file) if "split" in nodes.column_names else None,
        dense_of(nodes, [name for name in others if is_number[name]]),
        names_of(ids, node_file) if "id" in nodes.column_names else None,
        class_names,
    )


def read(paths: list[str], wanted: list[str] | None = None) -> pa.Table:
    """The rows of all files; wanted: columns, None for all."""
    tables = []
    for path in paths:
        found = read_file(path)
        what, names = f"data.path: {shown(path)}", found.column_names
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise DataError(f"{what} has several columns with the name {one_line(twice)!r}")
        for name in wanted or ():
            if name not in names:
                raise DataError(f"{what} has no column {name}: {one_line(near(name, names))}")
        tables.append(found.select(wanted) if wanted else found)
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        why = one_line(first_line(error))
        raise DataError(f"data.path: the columns of {shown(paths[0])} and further files differ: {why}") from error


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
        raise DataError(f"{path}: id must hold integers or texts, it holds {type_text(ids)}")
    if ids.null_count:
        raise DataError(f"{path}: id is missing in {ids.null_count:,} rows")
    counts = pc.value_counts(ids)
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        raise DataError(
            f"{path}: id must be unique, {len(twice):,} occur several times, first {value_text(twice[0]['values'])}"
        )


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def places_of(found: pa.Array, ids: pa.Array, what: str) -> np.ndarray:
    """Numbers (n,) int64 of the nodes with these ids."""
    try:
        places = pc.index_in(found.cast(ids.type), value_set=ids)
    except pa.ArrowException as error:
        raise DataError(f"{what} must hold {ids.type} as the nodes' id, it holds {type_text(found)}") from error
    if places.null_count:
        unknown = found.filter(places.is_null())
        first = value_text(unknown[0])
        raise DataError(f"{what} names nodes that are not in the table of nodes: {len(unknown):,}, first {first}")
    return places.to_numpy().astype(np.int64)


def labels_of(found: pa.Array, path: str) -> tuple[np.ndarray, list[str]]:
    """Labels as in Graph, and the names of classes."""
    if is_list(found.type):
        return several_labels(found, f"{path}: label")
    if not (pa.types.is_integer(found.type) or is_text(found.type) or pa.types.is_null(found.type)):
        raise DataError(f"{path}: label must hold integers, texts or lists, it holds {type_text(found)}")
    values = [None if value == "" or (type(value) is int and value < 0) else value for value in found.to_pylist()]
    labels, names = classes_of(values)
    classes_below(len(names), f"{path}: label")
    return labels, names


def several_labels(found: pa.Array, what: str) -> tuple[np.ndarray, list[str]]:
    bag, num = list_of(found, what)
    check_labels_fit(len(found), num, what)
    known = values_in(found)
    labels = np.zeros((len(found), num), np.float32)
    labels[np.repeat(np.arange(len(found)), np.diff(bag.offsets)), bag.values] = 1
    labels[np.asarray(found.is_null())] = np.nan
    return labels, [str(value) for value in pc.unique(known.filter(is_given(known))).to_pylist()]


def split_of(found: pa.Array, path: str) -> np.ndarray:
    texts = [str(value).strip().lower() if value not in (None, "") else "-1" for value in found.to_pylist()]
    wrong = sorted(set(texts) - set(SPLITS))
    if wrong:
        raise DataError(
            f"{path}: split must be train, valid or test, or 0, 1 or 2, or missing, got {one_line(wrong[0])}"
        )
    return np.array([SPLITS[text] for text in texts], np.int8)


def list_of(found: pa.Array, what: str) -> tuple[Bag, int]:
    """The ids of a column of lists, or of texts with spaces between, and their number of rows: one per distinct
    value."""
    if is_text(found.type):
        found = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(found))
    if not is_list(found.type):
        raise DataError(f"{what} must hold lists, texts or numbers, it holds {type_text(found)}")
    flat = values_in(found)
    if not (pa.types.is_integer(flat.type) or is_text(flat.type) or pa.types.is_null(flat.type)):
        raise DataError(
            f"{what} must hold lists of integers or of texts, which are ids, it holds {type_text(found)}: give numbers "
            "a column each"
        )
    sizes = pc.list_value_length(found).fill_null(0).to_numpy(zero_copy_only=False)
    keep = is_given(flat)
    owners = np.repeat(np.arange(len(found)), sizes)[np.asarray(keep)]
    coded = flat.filter(keep).dictionary_encode()
    codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return Bag(codes, offsets_of(np.bincount(owners, minlength=len(found)))), len(coded.dictionary)


def values_in(lists: pa.Array) -> pa.Array:
    """The values of all lists."""
    flat = lists.flatten()
    return flat.dictionary_decode() if pa.types.is_dictionary(flat.type) else flat


def is_given(values: pa.Array) -> pa.Array:
    """Which values are neither missing nor an empty text."""
    return pc.not_equal(values, "").fill_null(False) if is_text(values.type) else values.is_valid()


def type_text(values: pa.Array) -> str:
    return one_line(" ".join(str(values.type).split()), 100)


def value_text(value: pa.Scalar) -> str:
    return one_line(str(value), 100)


def dense_of(nodes: pa.Table, names: list[str]) -> np.ndarray | None:
    """(N, num_dense) float32 of the columns of numbers; a missing number is NaN."""
    if not names:
        return None
    values = [column(nodes, name).cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False) for name in names]
    return np.stack(values, axis=1)


def names_of(ids: pa.Array, what: str) -> np.ndarray:
    if not is_text(ids.type):
        if pa.types.is_uint64(ids.type) and pc.max(ids).as_py() > np.iinfo(np.int64).max:
            raise DataError(f"{what}: id must be below 2^63, the highest is {pc.max(ids)}")
        return ids.to_numpy().astype(np.int64)
    longest = pc.max(pc.utf8_length(ids)).as_py()
    check_fits(
        4 * longest * len(ids), f"{what}: id with up to {longest:,} characters", "use shorter texts, or integers"
    )
    return np.array(ids.to_pylist(), np.str_)
