"""data=graph of files of every layout with random damage."""

import gzip
import io
import itertools
import os
import zipfile

import graph_files
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzz import fuzz
from mutations import replace_by_no_file

from hetmpi.data.graph.files import GraphFiles
from hetmpi.data.graph.samples import check_samples

NUMBERS = [0, 1, -1, 5, 6, 7, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), 0.5, 1e30, -0.0]
SPECIAL = [float("nan"), float("inf"), -float("inf")]
DTYPES = ["?", "i1", "u1", "<i4", ">i4", "i8", ">i8", "u8", "f2", "f4", "f8", ">f8", "c8", "U3", "S3", "M8[s]", "f4,i4"]
SHAPES = [(), (0,), (1,), (5,), (6,), (7,), (6, 1), (6, 2), (2, 6), (6, 0), (0, 6), (6, 2, 1)]
CELLS = ["", "0", "1", "-1", "5", "6", "0.5", "1e30", "nan", "inf", "x", "a b", '"', '"a\nb"', "\0", "\u2028", "9" * 30]
VALUES = [
    None,
    0,
    1,
    -1,
    7,
    1 << 63,
    0.5,
    1e300,
    float("nan"),
    float("inf"),
    True,
    "",
    "x",
    "a b",
    "\u2028\n",
    "y" * 3000,
    b"\xff",
    [],
    [0],
    [1, None],
    ["x"],
    ["x", "", None],
    [0.5],
    [[1]],
    [[]],
    [None],
    {"a": 1},
    [{"a": 1}],
    [True],
]


def case(rng, folder):
    layout = rng.choice(["npz", "npz", "ogb", "ogb_mag", "parquet", "csv"])
    place = folder / layout
    place.mkdir()
    path = {"npz": npz, "parquet": parquet}.get(layout, text)(rng, place, layout)
    if rng.random() < 0.4:
        damage(rng, place)
    settings = {"undirected": rng.random() < 0.5, "node_ids": rng.random() < 0.8, "dense": rng.random() < 0.8}
    if rng.random() < 0.3:
        settings |= {"train_per_class": rng.choice([1, 2, 100]), "valid_per_class": rng.choice([0, 1])}
    source = GraphFiles(str(path), seed=1, cache=str(folder / "prepared"), fanout=[2, 2], **settings)
    source.prepare(0, 1, lambda: None, lambda line: None)
    check(source)


def check(source):
    """What every reader of a graph relies on."""
    samples = source.train(0, 5)
    check_samples(samples, 2, source.num_dense, source.num_classes, source.is_multilabel)
    num = source.num_nodes
    bag, dense = source.inputs(np.arange(num))
    assert len(bag.offsets) == num + 1 and np.isfinite(dense).all() and 2 <= source.num_classes <= 1 << 20
    assert not len(bag.values) or 0 <= bag.values.min() <= bag.values.max() < source.num_rows
    _, near = source.neighbours(0, num)
    assert not len(near) or 0 <= near.min() <= near.max() < num
    assert len(source.names(np.arange(num))) == num and (source.split == 0).sum() == source.num_train > 0
    if not source.is_multilabel:
        assert source.labels.max() < source.num_classes


def npz(rng, place, layout):
    arrays = graph_files.arrays()
    if rng.random() < 0.5:
        arrays |= {"dense": np.ones((6, 2)), "name": np.array(list("abcdef"))}
    for _ in range(rng.choice([0, 1, 1, 2])):
        name = rng.choice(list(arrays))
        arrays[name] = changed(rng, np.asarray(arrays[name]))
    path = place / "graph.npz"
    kind = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, array in arrays.items():
            file = io.BytesIO()
            np.lib.format.write_array(file, np.asarray(array))
            data = file.getvalue()
            if rng.random() < 0.05:
                data = with_header(rng, data)
            archive.writestr(f"{name}{rng.choice(['.npy'] * 30 + ['', '.NPY'])}", data)
    return path


def changed(rng, array):
    kind = rng.randint(0, 4)
    if kind == 0 and array.size:
        array = array.astype(rng.choice([array.dtype, "f8", "i8"])) if array.dtype.kind not in "SU" else array.copy()
        value = rng.choice(NUMBERS + (SPECIAL if array.dtype.kind == "f" else []))
        with np.errstate(all="ignore"):
            array.flat[rng.randrange(array.size)] = np.array([value]).astype(array.dtype)[0]
        return array
    if kind == 1:
        return np.zeros(rng.choice(SHAPES), rng.choice(DTYPES))
    if kind == 2:
        with np.errstate(all="ignore"):
            return (array if array.dtype.kind in "iuf" else np.arange(len(array))).astype(rng.choice(DTYPES[:12]))
    if kind == 3 and array.ndim:
        return array[: rng.randint(0, len(array))]
    return rng.choice([array.repeat(2, 0), array.T]) if array.ndim else np.array(rng.choice(NUMBERS))


def with_header(rng, data):
    """Another shape or type in the header of an array."""
    shape = rng.choice(
        ["(6,)", "(10**9,)", "(1000000000,)", "(1000000000000000000,)", "(-1,)", "(True,)", "6", "((((", "()"]
    )
    text = f"{{'descr': {rng.choice(['<i8', '|O', '<U9', '|V0', 'x'])!r}, 'fortran_order': False, 'shape': {shape}}}"
    header = text.encode().ljust(118) + b"\n"
    return (
        b"\x93NUMPY" + rng.choice([b"\1\0", b"\2\0", b"\3\0"]) + len(header).to_bytes(2, "little") + header + data[128:]
    )


def parquet(rng, place, layout):
    graph_files.parquet(place)
    for _ in range(rng.choice([0, 1, 1, 2])):
        path = place / rng.choice(["nodes.parquet", "nodes.parquet", "edges.parquet"])
        table = pq.ParquetFile(path).read()  # also of two columns with one name
        name = rng.choice([*table.column_names, "new", "", "\u2028\n", "size"])
        values = list(itertools.islice(itertools.cycle(rng.sample(VALUES, rng.choice([1, 1, 2, 6]))), len(table)))
        try:
            column = pa.array(values)
        except (pa.ArrowException, TypeError, OverflowError):
            continue
        if rng.random() < 0.2 and not pa.types.is_nested(column.type):
            column = column.dictionary_encode()
        if name in table.column_names and rng.random() < 0.9:
            table = table.set_column(table.column_names.index(name), name, column)
        else:
            table = table.append_column(name, column)
        try:
            pq.write_table(table, path)
        except pa.ArrowException:
            graph_files.parquet(place)
    return place


def text(rng, place, layout):
    """A change of lines and cells in one of the files of a layout of CSV."""
    getattr(graph_files, layout)(place)
    for _ in range(rng.choice([0, 1, 1, 2])):
        path = rng.choice(sorted(path for path in place.rglob("*") if path.is_file()))
        opening = gzip.open if path.suffix == ".gz" else open
        with opening(path, "rt") as file:
            lines = [line.rstrip("\n").split(",") for line in file]
        for _ in range(rng.randint(0, 2)):
            line = rng.choice(lines)
            line[rng.randrange(len(line))] = rng.choice(CELLS)
        if rng.random() < 0.3:
            del lines[rng.randrange(len(lines))]
        if rng.random() < 0.2:
            lines.append(rng.choices(CELLS, k=rng.randint(0, 4)))
        if rng.random() < 0.1:
            lines = [[*line, rng.choice(CELLS)] for line in lines]
        with opening(path, "wt") as file:
            file.writelines(",".join(line) + "\n" for line in lines)
    return place


def damage(rng, place):
    """Other bytes in a file, or something else in its place."""
    path = rng.choice(sorted(path for path in place.rglob("*") if path.is_file()))
    data = bytearray(path.read_bytes())
    kind = rng.randint(0, 5)
    if kind < 3:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 3:
        data = data[: rng.randint(0, len(data))]
    elif kind == 4:
        data = rng.choice([b"", b"\n", b"PAR1", b"PK\5\6" + bytes(18), b"\x1f\x8b", os.urandom(100), data + data])
    else:
        return replace_by_no_file(rng, path)
    path.write_bytes(data)


def test_any_graph_is_right_or_refused_in_one_line(tmp_path):
    fuzz(__file__, tmp_path)
