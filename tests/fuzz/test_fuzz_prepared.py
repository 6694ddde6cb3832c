"""Damaged prepared folders, of tables and of graphs: the data as they were, or one line."""

import shutil

import graph_files
import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
from fuzz import fuzz
from mutations import damage

from hetmpi.data.graph.files import GraphFiles
from hetmpi.data.tabular import Tabular

ROWS = 400


def test_a_damaged_prepared_folder_is_as_it_was_or_refused_in_one_line(tmp_path):
    fuzz(__file__, tmp_path)


def case(rng, folder):
    arrays_of = rng.choice([table_arrays, table_arrays, table_arrays, graph_arrays])
    arrays = [np.array(one) for one in arrays_of(folder, folder)]  # copies of mapped files, which are harmed
    files = sorted(path for path in (folder / "cache").rglob("*") if path.is_file())
    for _ in range(rng.choice([1, 1, 1, 3])):
        harm(rng, rng.choice(files), files)
    again = arrays_of(folder, rng.choice([folder, None]))
    assert all(np.array_equal(one, other) for one, other in zip(arrays, again, strict=True))


def harm(rng, path, files):
    kind = rng.choice(["damage", "damage", "damage", "empty", "remove", "folder", "swap", "link"])
    if kind == "damage" and path.is_file():
        return damage(rng, path)
    if kind == "swap":
        other = rng.choice(files)
        if path.is_file() and other.is_file():
            whole = path.read_bytes()
            path.write_bytes(other.read_bytes())
            other.write_bytes(whole)
        return None
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nowhere")
    return None


def table_arrays(folder, source):
    """All samples of a table. source: None for the prepared folder as data.path."""
    if not (folder / "a.csv").exists():
        columns = {
            "a": [f"v{i % 7}" for i in range(ROWS)],
            "b": [i / 8 for i in range(ROWS)],
            "t": ["x|y", "z"] * (ROWS // 2),
        }
        csv.write_csv(pa.table({**columns, "click": [i % 2 for i in range(ROWS)]}), folder / "a.csv")
    path = folder / "a.csv" if source else next((folder / "cache").iterdir())
    data = Tabular(str(path), 0, "click", cache=str(folder / "cache"), columns=[{"name": "t", "separator": "|"}])
    data.prepare(0, 1, lambda: None, lambda line: None)
    parts = data.train(0, data.num_train), data.valid(0, data.num_valid)
    return [
        array for one in parts for array in (one.ids, one.dense, one.label, one.bags[0].values, one.bags[0].offsets)
    ]


def graph_arrays(folder, _):
    """All arrays of a graph."""
    if not (folder / "tables").exists():
        graph_files.parquet(folder / "tables")
    data = GraphFiles(str(folder / "tables"), seed=1, cache=str(folder / "cache"))
    data.prepare(0, 1, lambda: None, lambda line: None)
    offsets, edges = data.neighbours(0, data.num_nodes)
    bag, dense = data.inputs(np.arange(data.num_nodes))
    names = data.names(np.arange(data.num_nodes))
    return [offsets, edges, bag.values, bag.offsets, dense, names, data.labels, data.split]
