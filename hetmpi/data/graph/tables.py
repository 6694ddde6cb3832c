"""Graphs in tables of edges and of nodes, Parquet or CSV, in one folder.

edges.*    columns src and dst: dst reads from src
           weight    numbers above 0: how much of a neighbour is read
nodes.*    id        integers or texts, as in src and dst; without it another column, or the rows' numbers from 0
           label     a class, integer or text; missing or below 0 for none; a list column: several labels
           split     train, valid, test, or 0, 1, 2; missing for none; or train_mask, val_mask and test_mask
           others    a list of integers or texts: ids; texts: ids with spaces between; numbers, and lists of as many
                     fractions in all rows: dense

The file may be cut into several, as edges-0.csv.gz and edges-1.csv.gz. docs/graphs.md has all types.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from hetmpi.bounded_file import shown
from hetmpi.data.batch import Bag
from hetmpi.data.files import DataError, first_line
from hetmpi.data.graph.columns import (
    Remark,
    check_distinct,
    ids_in,
    is_text,
    names_of,
    numbers_in,
    plain,
    remark_numbers,
    same_ids,
    value_text,
    whole,
)
from hetmpi.data.graph.graph import NO_LABEL, NO_PART, RawGraph, check_weights, from_edges, from_weighted_edges
from hetmpi.data.graph.labels import MASKS, labels_of, split_of, split_of_masks
from hetmpi.data.graph.reading import is_parquet, read_file
from hetmpi.data.tabular.convert import hashes
from hetmpi.data.tabular.rules import near
from hetmpi.errors import one_line

FILE = re.compile(r"(edges|nodes)\b.*\.(parquet|parq|pq|(csv|tsv)(\.gz|\.zst)?)")
OWN_COLUMNS = {"id", "label", "split", *MASKS}
ENDS, WEIGHT = ("src", "dst"), "weight"
TYPES = {"type", "edge_type", "etype", "rel", "relation", "label", "kind"}  # names of columns of kinds of edges
WEIGHTS = {"weights", "edge_weight", "edge_weights", "w"}
IDS = {"id", "nodeid", "node", "idx", "index", "key", "name"}  # names of columns of ids, as in is_named
INDEX = re.compile(r"(Unnamed: \d+|__index_level_\d+__|)")  # columns of pandas' index


@dataclass(frozen=True)
class TableRules:
    """Settings of data=graph for tables (hetmpi/data/graph/files.py, GraphFiles)."""

    undirected: bool = True
    missing: tuple[str, ...] = ()
    id: str | None = None
    drop: tuple[str, ...] = ()
    label_separator: str | None = None
    add_nodes: bool = False


class Table:
    """The rows of several files. what: the first one, for messages."""

    def __init__(self, paths: Sequence[str], rules: TableRules):
        self.paths, self.what, self.rules = paths, shown(paths[0]), rules
        self.table = read(paths, rules.drop)
        self.is_typed = is_parquet(paths[0])
        self.names = [name for name in self.table.column_names if name not in rules.drop]

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def column(self, name: str) -> pa.Array:
        return plain(self.table.column(name), self.rules.missing, self.is_typed)

    def place(self, name: str) -> str:
        """A column in a message."""
        return f"{self.what}: {one_line(name)}"


def list_tables(folder: str) -> tuple[list[str], list[str]]:
    """Paths of the files with edges and with nodes. Raises DataError if there is none of a kind, or of both formats."""
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
        forms = {is_text_name(path): os.path.basename(path) for path in paths}
        if len(forms) > 1:
            both = one_line(" and ".join(forms.values()))
            raise DataError(f"data.path={shown(folder)} has {both}, in two formats: remove those of one")
    return found["edges"], found["nodes"]


def is_text_name(path: str) -> bool:
    return not path.endswith((".parquet", ".parq", ".pq"))


def read_tables(folder: str, rules: TableRules, remark: Remark) -> RawGraph:
    """remark: takes lines about choices that were made. Raises DataError for files that cannot be read, lack a column
    or name unknown nodes."""
    edge_files, node_files = list_tables(folder)
    nodes, edges = Table(node_files, rules), Table(edge_files, rules)
    check_dropped(nodes, edges)
    if not len(nodes):
        raise DataError(f"{nodes.what}: there are no nodes")
    if "label" not in nodes:
        raise DataError(f"{nodes.what}: there is no column label, it has {one_line(', '.join(nodes.names), 400)}")
    for name in ENDS:
        if name not in edges:
            raise DataError(f"data.path: {edges.what} has no column {name}: {one_line(near(name, edges.names))}")
    check_edge_columns(edges, remark)
    id_name = id_column(nodes, edges, remark)
    ids, ends = numbered(nodes, edges, id_name)
    num_rows, num_nodes = len(nodes), len(ids)
    added = num_nodes - num_rows
    if added:
        remark(f"{edges.what}: {added:,} nodes that {nodes.what} lacks are added, without label, part and features")
    labels, class_names = labels_of(nodes.column("label"), nodes.place("label"), rules.label_separator, remark)
    lists, value_hashes, dense, dense_names = features_of(nodes, id_name, remark)
    adjacency, weights = adjacency_of(edges, ends, num_nodes, rules.undirected)
    return RawGraph(
        adjacency,
        [(with_empty(bag, added), num) for bag, num in lists],
        with_rows(labels, added, NO_LABEL if labels.ndim == 1 else np.nan),
        labels.shape[1] if labels.ndim == 2 else len(class_names),
        parts_of(nodes, added),
        None if dense is None else with_rows(dense, added, 0),
        None if id_name is None and not added else names_of(ids, nodes.place(id_name or "id")),
        class_names,
        weights,
        dense_names,
        hashed("", ids),
        value_hashes,
    )


def read(paths: Sequence[str], drop: Sequence[str]) -> pa.Table:
    """The rows of all files. drop: columns that only some of them may have."""
    tables = []
    for path in paths:
        found = read_file(path)
        names = found.column_names
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise DataError(f"data.path: {shown(path)} has several columns with the name {one_line(twice)!r}")
        first = tables[0].column_names if tables else None
        differ = sorted(set(names).symmetric_difference(first or names) - set(drop))
        if differ:
            raise DataError(
                f"data.path: {shown(paths[0])} and {shown(path)} differ: only one of them has the column "
                f"{one_line(differ[0])!r}"
            )
        tables.append(found)
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        why = one_line(first_line(error))
        raise DataError(f"data.path: the columns of {shown(paths[0])} and further files differ: {why}") from error


def check_dropped(nodes: Table, edges: Table):
    """Raises DataError for a column to leave out that neither table has."""
    names = [*nodes.table.column_names, *edges.table.column_names]
    for name in nodes.rules.drop:
        if name not in names:
            raise DataError(f"data.drop: no table has a column {one_line(name)}: {near(name, names)}")


def check_edge_columns(edges: Table, remark: Remark):
    """Says which columns of edges are not read. Raises DataError for kinds of edges."""
    others = [name for name in edges.names if name not in (*ENDS, WEIGHT) and not INDEX.fullmatch(name)]
    for name in others:
        if name.lower() in TYPES:
            raise DataError(
                f"{edges.what} has a column {one_line(name)}: edges have no types in task=node: set "
                f"data.drop=[{one_line(name)}] to treat all alike, or train their links by data=triples"
            )
        if name.lower() in WEIGHTS or name.lower() == WEIGHT:
            raise DataError(
                f"{edges.what} has a column {one_line(name)}: name it {WEIGHT} if it holds the edges' weights, or set "
                f"data.drop=[{one_line(name)}]"
            )
    if others:
        remark(f"{edges.what}: columns that are not read: {one_line(', '.join(others))}")


# Ids.


def id_column(nodes: Table, edges: Table, remark: Remark) -> str | None:
    """The column of nodes that src and dst name; None if they number its rows from 0. Raises DataError unless there is
    one evident choice."""
    given = nodes.rules.id
    if given is not None:
        if given not in nodes:
            raise DataError(f"data.id={one_line(given)}: {nodes.what} has no such column: {near(given, nodes.names)}")
        return given
    if "id" in nodes:
        return "id"
    evident = [name for name in nodes.names if is_named(name) or INDEX.fullmatch(name)]
    fitting = [name for name in evident if holds_ends(nodes, edges, name)]
    distinct = [
        name for i, name in enumerate(fitting) if not any(are_equal(nodes, name, other) for other in fitting[:i])
    ]
    if len(distinct) > 1 or (evident and not fitting):
        named = one_line(", ".join(map(repr, distinct or evident)))
        why = "" if distinct else ", but src and dst name others"
        raise DataError(
            f"{nodes.what} has no column id: its ids may be those of {named}{why}: set data.id=COLUMN, or data.drop "
            "for a column that has none"
        )
    if distinct:
        remark(f"{nodes.what} has no column id: its column {one_line(repr(distinct[0]))} has the ids")
        return distinct[0]
    others = [name for name in nodes.names if name not in OWN_COLUMNS and holds_ends(nodes, edges, name)]
    if others:
        raise DataError(
            f"{nodes.what} has no column id: src and dst have values of {one_line(', '.join(map(repr, others)))}: set "
            f"data.id={one_line(others[0])} if these are the ids, else name the rows' numbers id"
        )
    check_numbers(nodes, edges)
    check_order(nodes)
    remark(f"{nodes.what} has no column id: src and dst number its {len(nodes):,} rows from 0, in their order")
    return None


def are_equal(nodes: Table, first: str, second: str) -> bool:
    return nodes.column(first).equals(nodes.column(second))


def is_named(name: str) -> bool:
    """Whether a column of nodes has a usual name of ids, as node_id, nodeId or Index."""
    return re.sub(r"[^a-z0-9]", "", name.lower()) in IDS


def holds_ends(nodes: Table, edges: Table, name: str) -> bool:
    """Whether the values of a column of nodes differ, and all values of src and dst are among them."""
    values = nodes.column(name)
    if not (pa.types.is_integer(values.type) or is_text(values.type) or pa.types.is_floating(values.type)):
        return False
    if values.null_count or len(pc.unique(values)) < len(values):
        return False
    try:
        ids, *ends = same_ids([values, *map(edges.column, ENDS)], [nodes.place(name), *ENDS])
    except DataError:
        return False
    return all(pc.all(pc.is_in(end, value_set=ids)).as_py() is not False for end in ends)


def check_numbers(nodes: Table, edges: Table):
    """Raises DataError unless src and dst are numbers of the rows of nodes."""
    for name in ENDS:
        values = edges.column(name)
        numbers = whole(values) if len(values) else None
        is_wrong = numbers is None or numbers.null_count
        if len(values) and (is_wrong or pc.min(numbers).as_py() < 0 or pc.max(numbers).as_py() >= len(nodes)):
            example = value_text(values[0] if is_wrong else pc.max(numbers))
            raise DataError(
                f"{nodes.what} has no column id, and {name} of {edges.what} does not number its {len(nodes):,} rows "
                f"from 0, as {example}: name the column of ids id, or set data.id; there are "
                f"{one_line(', '.join(map(repr, nodes.names)), 200)}"
            )


def check_order(nodes: Table):
    """Raises DataError if the files of nodes have another order by the numbers in their names than by their texts."""
    names = [os.path.basename(path) for path in nodes.paths]
    by_number = sorted(names, key=lambda name: [(len(part), part) for part in re.split(r"(\d+)", name)])
    if by_number != names:
        place = next(i for i, (name, other) in enumerate(zip(names, by_number)) if name != other)
        raise DataError(
            f"{nodes.what} has no column id, and the order of its {len(names):,} files is not evident: by name "
            f"{one_line(names[place])} comes before {one_line(by_number[place])}: add a column id, or write the "
            "numbers of the files with as many digits"
        )


def numbered(nodes: Table, edges: Table, id_name: str | None) -> tuple[pa.Array, list[np.ndarray]]:
    """The ids of all nodes, those of the table first, and the numbers (n,) int64 of both ends of the edges. Raises
    DataError for ids that repeat, and for unknown nodes unless data.add_nodes is set."""
    own = pa.array(np.arange(len(nodes))) if id_name is None else nodes.column(id_name)
    what = nodes.place(id_name or "id")
    ids, *ends = same_ids([own, *map(edges.column, ENDS)], [what, *map(edges.place, ENDS)])
    check_distinct(ids, what)
    places = [pc.index_in(end, value_set=ids) for end in ends]
    unknown = [end.filter(place.is_null()) for end, place in zip(ends, places)]
    if nodes.rules.add_nodes:
        ids = pa.concat_arrays([ids, pc.unique(pa.concat_arrays(unknown))])
        places = [pc.index_in(end, value_set=ids) for end in ends]
        unknown = []
    for name, values in zip(ENDS, unknown):
        if len(values):
            raise DataError(
                f"{edges.place(name)} names nodes that are not in the table of nodes: {len(values):,}, first "
                f"{value_text(values[0])}: remove these edges, or set data.add_nodes=true"
            )
    return ids, [place.to_numpy().astype(np.int64) for place in places]


def adjacency_of(edges: Table, ends: list[np.ndarray], num_nodes: int, undirected: bool):
    """indptr and indices, and the weights of edges, None if all are 1. Raises DataError."""
    if WEIGHT not in edges or not len(edges):
        return from_edges(*ends, num_nodes, undirected), None
    weights = numbers_in(edges.column(WEIGHT), edges.is_typed)
    if weights is None or weights.shape[1] != 1:
        raise DataError(f"{edges.place(WEIGHT)} must hold numbers")
    weights = weights[:, 0].astype(np.float64)
    check_weights(weights, edges.place(WEIGHT))
    if (weights == 1).all():
        return from_edges(*ends, num_nodes, undirected), None
    indptr, indices, weights = from_weighted_edges(*ends, weights, num_nodes, undirected)
    return (indptr, indices), weights


# Features and parts.


def features_of(nodes: Table, id_name: str | None, remark: Remark):
    """Lists of ids with their numbers of rows, the hashes of their values, numbers (N, num_dense) float32 or None, and
    the names of these numbers."""
    lists, value_hashes, dense, dense_names = [], [], [], []
    for name in nodes.names:
        if name in OWN_COLUMNS or name == id_name:
            continue
        values = nodes.column(name)
        if INDEX.fullmatch(name):
            remark(f"{nodes.what}: column {name!r} is an index of pandas: it is not read")
        elif values.null_count == len(values):
            remark(f"{nodes.what}: column {one_line(name)} has no value: it is not read")
        elif (numbers := numbers_in(values, nodes.is_typed)) is not None:
            dense.append(numbers)
            width = numbers.shape[1]
            dense_names += [name] if width == 1 else [f"{name}[{i}]" for i in range(width)]
        else:
            bag, distinct = ids_in(values, nodes.place(name))
            if not nodes.is_typed:
                remark_numbers(values, distinct, nodes.place(name), remark)
            lists.append((bag, len(distinct)))
            value_hashes.append(hashed(name, distinct))
    return lists, value_hashes, np.concatenate(dense, axis=1) if dense else None, dense_names


def hashed(name: str, values: pa.Array) -> np.ndarray:
    """(n,) int64 of the values of a list, or of ids, whose name is empty; equal for equal values in any type."""
    return hashes(values, xxhash.xxh3_64_intdigest(name.encode()), ())


def parts_of(nodes: Table, added: int) -> np.ndarray | None:
    """(N,) int8, None without a split. added: nodes without a row."""
    masks = {name: nodes.column(name) for name in nodes.names if name in MASKS}
    if masks and "split" in nodes:
        raise DataError(f"{nodes.what} has both split and {', '.join(masks)}: set data.drop for one of them")
    if not masks and "split" not in nodes:
        return None
    split = split_of_masks(masks, nodes.what) if masks else split_of(nodes.column("split"), nodes.place("split"))
    return with_rows(split, added, NO_PART)


def with_rows(values: np.ndarray, num: int, value: float) -> np.ndarray:
    """values (N, ...) and `num` further rows of a value."""
    return np.concatenate([values, np.full((num, *values.shape[1:]), value, values.dtype)]) if num else values


def with_empty(bag: Bag, num: int) -> Bag:
    """With `num` further nodes without ids."""
    return Bag(bag.values, np.concatenate([bag.offsets, np.full(num, bag.offsets[-1])]))
