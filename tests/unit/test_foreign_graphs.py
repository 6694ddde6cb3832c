"""data=graph of files that are damaged, or that somebody made to do harm."""

import gzip
import io
import os
import resource
import zipfile
from pathlib import Path

import graph_files
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hetmpi.data.graph.files import GraphFiles
from hetmpi.data.graph.graph import MOST_CLASSES
from hetmpi.errors import UserError


@pytest.fixture
def little_memory():
    """This process may map 400 MB more than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 400_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def opened(path, tmp_path, **settings):
    source = GraphFiles(str(path), **{"seed": 1, "cache": str(tmp_path / "prepared"), **settings})
    source.prepare(0, 1, lambda: None, lambda line: None)
    return source


def refusal(path, tmp_path, **settings):
    """The message with which a graph is refused."""
    with pytest.raises(UserError) as error:
        opened(path, tmp_path, **settings)
    text = str(error.value)
    assert len(text.splitlines()) == 1 and text.isprintable() and len(text) < 1000
    return text


def header(shape, dtype="<i8"):
    """The header of an array, without its numbers."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def crafted(folder, **entries):
    """A .npz file with these bytes in place of some arrays."""
    path = folder / "graph.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in (graph_files.arrays() | entries).items():
            if isinstance(array, bytes):
                archive.writestr(f"{name}.npy", array)
            else:
                with archive.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array(file, np.asarray(array))
    return path


@pytest.mark.parametrize(
    "entries, reason",
    [
        ({"label": header((10**12,))}, "label of int64 and shape (1000000000000,) must have 8,000,000,000,128 bytes"),
        ({"label": header((10**30, 10**30))}, "must have 8,000,000"),
        ({"label": header((-6,)) + bytes(48)}, "label of int64 and shape (-6,) must have"),
        ({"label": header((6,)) + bytes(40)}, "must have 176 bytes, its entry has 168"),
        ({"label": header((6,), "|O") + bytes(48)}, "label of object and shape (6,) must have"),
        ({"label": header((6,), "<U100000000")}, "must have 2,400,000,128 bytes"),
        ({"label": b"no array"}, "is no complete .npz file"),
        ({"label": b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535}, "is no complete .npz file"),
        ({"label": b"\x93NUMPY\x03\x00\x10\x00\x00\x00{'descr': '<i8'}"}, "is no complete .npz file"),
        (
            {"label": np.array([0, 1, 0, 1, 0, 10**9])},
            "at most 1,048,576 classes are possible, there are 1,000,000,001",
        ),
        ({"label": np.array([0, 1, 0, 1, 0, 2**63 - 1])}, "label must be integers that number the classes from 0"),
        ({"label": np.array([0, 1, 0, 1, 0, 2**64 - 1], np.uint64)}, "the first is 18446744073709551615"),
        (
            {"label": np.array([0.5, 1, 0, 1, 0, np.nan])},
            "label must be integers that number the classes from 0; 1 of 6",
        ),
        ({"label": np.array([0, 1, 0, 1, 0, np.inf])}, "the first is inf"),
        ({"label": np.zeros((6, MOST_CLASSES + 1), np.int8)}, "at most 1,048,576 classes are possible"),
        ({"label": np.array([[0, 1]] * 5 + [[np.nan, 1]])}, "node 5 has NaN in some columns of its labels"),
        ({"num_features": 10**15}, "num_features must be from 0 to 1,099,511,627,776, got 1,000,000,000,000,000"),
        ({"num_features": -1}, "num_features must be from 0"),
        ({"num_features": 2.5}, "num_features must be integers"),
        ({"indices": np.array([2, 0, 0, 1, 3, 2**64 - 1], np.uint64)}, "indices must be below 2^63"),
        ({"dense": np.full((6, 1), 1e300)}, "6 nodes have numbers that are NaN or infinite"),
        ({"name": header((6,), "<U1") + b"\xff\xff\xff\x7f" * 6}, "name must hold texts"),
        ({"name": np.array(["a", "b", "c", "d", "e", "\ud800"])}, "name must hold texts"),
        ({"name": np.array([1, 2, 3, 4, 5, 2**63], np.uint64)}, "name must be below 2^63"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("error")
def test_an_npz_that_no_graph_has_is_refused_in_one_line(tmp_path, entries, reason):
    assert reason in refusal(crafted(tmp_path, **entries), tmp_path)


def test_whole_numbers_are_labels_and_nan_is_none(tmp_path):
    source = opened(crafted(tmp_path, label=np.array([0, 1, 0, 1, 0, np.nan])), tmp_path)
    assert source.labels.tolist() == graph_files.LABELS


def test_an_archive_cannot_claim_more_than_it_holds(tmp_path):
    path = crafted(tmp_path)
    data = bytearray(path.read_bytes())
    place = data.rindex(b"label.npy") - 46 + 24  # the unpacked size in the archive's directory
    data[place : place + 4] = (4_000_000_000).to_bytes(4, "little")
    path.write_bytes(data)
    assert "label cannot have 4,000,000,000 bytes, its entry has" in refusal(path, tmp_path)


def test_a_graph_that_unpacks_to_more_than_the_free_memory_is_refused_before_it_is_taken(tmp_path):
    """An array of 4 TB in a sparse file."""
    path = tmp_path / "graph.npz"
    begin, size = header((1 << 39,)), 1 << 42
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("indptr.npy", begin)
    entry = zipfile.ZipInfo("indptr.npy")
    entry.CRC = entry.header_offset = 0
    entry.file_size = entry.compress_size = len(begin) + size
    with open(path, "wb") as file:
        file.write(entry.FileHeader(zip64=True) + begin)
        file.truncate(file.tell() + size)
        archive = zipfile.ZipFile(io.BytesIO(), "w")
        archive.filelist, archive.fp, archive.start_dir = [entry], file, file.seek(0, os.SEEK_END)
        archive._didModify = True
        archive.close()
    assert "a graph of these arrays needs 13,194.1 GB of memory" in refusal(path, tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_only_regular_files_are_read(tmp_path, make):
    make(tmp_path / "graph.npz")
    refusal(tmp_path / "graph.npz", tmp_path)
    for layout, name in (("csv", "edges.csv.gz"), ("parquet", "nodes.parquet"), ("ogb", "raw/edge.csv.gz")):
        path = getattr(graph_files, layout)(tmp_path / layout)
        os.unlink(f"{path}/{name}")
        make(f"{path}/{name}")
        assert "is not a regular file" in refusal(path, tmp_path)


BAD_COLUMNS = [
    ({"words": [[0.5, 1.5]] * 5 + [[1.5]]}, "fractions must be as many in every row"),
    ({"words": [[[1]]] * 6}, "words must hold lists of integers or of texts"),
    ({"words": [[{"a": 1}]] * 6}, "words must hold lists of integers or of texts"),
    ({"label": [[0.5]] * 6}, "label must hold lists of integers or of texts"),
    ({"label": [[["x"]]] * 6}, "label must hold lists of integers or of texts"),
    ({"id": ["x\u2028\n"] * 6}, "id must be unique, 1 occur several times, first x\\u2028\\n"),
    ({"split": ["\x1b"] * 6}, "got \\x1b"),
    ({"x\u2028\n" * 100: [{"a": 1}] * 6}, "must hold lists, texts or numbers, it holds struct<a: int64>"),
    ({"size": [1e300] * 6}, "6 nodes have numbers that are NaN or infinite"),
]


@pytest.mark.parametrize("columns, reason", BAD_COLUMNS, ids=[reason[:40] for _, reason in BAD_COLUMNS])
def test_a_column_that_no_graph_has_is_refused_in_one_line(tmp_path, columns, reason):
    assert reason in refusal(graph_files.parquet(tmp_path / "tables", **columns), tmp_path)


def test_an_id_that_int64_cannot_hold_is_refused(tmp_path):
    path = tmp_path / "tables"
    path.mkdir()
    ids = pa.array([1 << 63 | v for v in range(6)], pa.uint64())
    pq.write_table(pa.table({"src": ids, "dst": ids}), path / "edges.parquet")
    pq.write_table(pa.table({"id": ids, "label": [0, 1] * 3}), path / "nodes.parquet")
    assert "id must be below 2^63, the highest is 9223372036854775813" in refusal(path, tmp_path)


def test_lists_of_numbers_of_words_may_be_coded_by_a_dictionary(tmp_path):
    words = pa.array(graph_files.columns()["words"], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    plain, coded = (
        opened(graph_files.parquet(tmp_path / name, words=values), tmp_path)
        for name, values in (("plain", words.cast(pa.list_(pa.string()))), ("coded", words))
    )
    assert plain.digests == coded.digests


def test_equal_names_and_texts_that_are_no_utf8_are_refused(tmp_path):
    path = graph_files.parquet(tmp_path / "tables")
    table = pq.read_table(f"{path}/nodes.parquet")
    pq.write_table(table.append_column("size", table["size"]), f"{path}/nodes.parquet")
    assert "has several columns with the name 'size'" in refusal(path, tmp_path)
    offsets = pa.array(range(7), pa.int32()).buffers()[1]
    broken = pa.Array.from_buffers(pa.string(), 6, [None, offsets, pa.py_buffer(b"\xff" * 6)])
    pq.write_table(table.append_column("note", broken), f"{path}/nodes.parquet")
    assert "nodes.parquet cannot be read: " in refusal(path, tmp_path)


@pytest.mark.parametrize(
    "file, lines, reason",
    [
        ("num-node-list", ["x"], "num-node-list.csv.gz must hold integers"),
        ("num-node-list", [-6], "must hold numbers of nodes from 1 to 2^31 - 1, it holds -6"),
        ("num-node-list", [10**12], "must hold numbers of nodes from 1 to 2^31 - 1, it holds 1000000000000"),
        ("num-node-list", [2 * 10**9], "must have a line for each of the 2,000,000,000 nodes, it has 6"),
        ("node-label", [0, 1, 0, 1, 0, 0.5], "node-label.csv.gz must be integers that number the classes from 0"),
        ("node-label", [0, 1, 0, 1, 0, 10**9], "at most 1,048,576 classes are possible, there are 1,000,000,001"),
        ("edge", ["0,1", "1,"], "edge.csv.gz must hold integers, some are missing"),
        ("edge", ["0,1", "1,0.5"], "edge.csv.gz must hold integers"),
    ],
)
def test_a_benchmark_that_contradicts_itself_is_refused_in_one_line(tmp_path, file, lines, reason):
    path = graph_files.ogb(tmp_path / "ogb")
    graph_files.text(tmp_path / f"ogb/raw/{file}.csv.gz", [[line] for line in lines])
    assert reason in refusal(path, tmp_path)


@pytest.mark.parametrize(
    "file, lines, reason",
    [
        ("num-node-dict", [["author", "field_of_study", "paper"]], "must have a line of names and a line of values"),
        ("num-node-dict", [["author", "field_of_study", "paper"], [20, 3, "six"]], "it holds six"),
        (
            "num-node-dict",
            [["author", "field_of_study", "paper"], [20, 3, 10**9]],
            "for each of the 1,000,000,000 nodes",
        ),
        ("triplet-type-list", [["paper", "cites"]], "triplet-type-list.csv.gz must have three columns, it has 2"),
        ("triplet-type-list", [["paper", "cites", "book"]], "names book, which is not in num-node-dict.csv.gz"),
        ("triplet-type-list", [["paper", "../x", "paper"]], "the name of a relation has no /, got ../x"),
    ],
)
def test_a_benchmark_of_several_kinds_that_contradicts_itself_is_refused(tmp_path, file, lines, reason):
    path = graph_files.ogb_mag(tmp_path / "ogb")
    graph_files.text(tmp_path / f"ogb/raw/{file}.csv.gz", lines)
    assert reason in refusal(path, tmp_path)


def test_a_compressed_file_is_unpacked_only_if_it_fits_into_memory(tmp_path, little_memory):
    path = graph_files.ogb(tmp_path / "ogb")
    with gzip.open(tmp_path / "ogb/raw/edge.csv.gz", "wb", 1) as file:
        for _ in range(1 << 8):
            file.write(b"0,1\n" * (1 << 18))
    assert (tmp_path / "ogb/raw/edge.csv.gz").stat().st_size < 1 << 21
    assert "edge.csv.gz needs " in refusal(path, tmp_path)


def test_a_parquet_file_of_many_equal_rows_is_read_only_if_it_fits_into_memory(tmp_path, little_memory):
    path = graph_files.parquet(tmp_path / "tables")
    schema = pa.schema({"src": pa.string(), "dst": pa.string()})
    equal = pa.table({name: pa.repeat("x" * 1000, 1 << 16) for name in schema.names})
    with pq.ParquetWriter(f"{path}/edges.parquet", schema) as writer:
        for _ in range(4):
            writer.write_table(equal)
    assert (tmp_path / "tables/edges.parquet").stat().st_size < 1 << 20
    assert "edges.parquet needs " in refusal(path, tmp_path)
