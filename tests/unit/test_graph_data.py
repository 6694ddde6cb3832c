"""data=graph: readers of each layout, preparation, samples, refusals."""

import os
from pathlib import Path

import graph_files
import numpy as np
import pytest
from graph_files import EDGES, LABELS, SPLIT, WORDS, csr, npz
from mutations import each_flipped_bit

from hetmpi.data import checked
from hetmpi.data.graph.files import GraphFiles
from hetmpi.data.graph.samples import check_samples
from hetmpi.errors import UserError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def opened(path, tmp_path, **settings):
    source = GraphFiles(str(path), **{"seed": 1, "cache": str(tmp_path / "prepared"), **settings})
    lines = []
    source.prepare(0, 1, lambda: None, lines.append)
    source.lines = lines
    return source


def neighbours_of(source):
    offsets, index = source.neighbours(0, source.num_nodes)
    assert offsets.dtype == index.dtype == np.int64 and offsets[0] == 0 and offsets[-1] == len(index)
    return [sorted(index[a:b].tolist()) for a, b in zip(offsets, offsets[1:])]


def ids_of(source):
    bag, _ = source.inputs(np.arange(source.num_nodes))
    return [bag.values[a:b].tolist() for a, b in zip(bag.offsets, bag.offsets[1:])]


DIRECTED = [[2], [0, 0], [1], [], [3, 4], []]  # sources of the edges of each node
UNDIRECTED = [[1, 2], [0, 2], [0, 1], [4], [3, 4], []]


@pytest.mark.parametrize("layout", ["npz", "ogb", "ogb_mag", "parquet", "csv"])
@pytest.mark.parametrize("undirected", [True, False])
def test_every_layout_gives_the_same_graph(layout, undirected, tmp_path):
    source = opened(getattr(graph_files, layout)(tmp_path / layout if layout != "npz" else tmp_path), tmp_path,
                    undirected=undirected)  # fmt: skip
    assert neighbours_of(source) == (UNDIRECTED if undirected else DIRECTED)
    assert source.labels.tolist() == LABELS and source.labels.dtype == np.int64
    assert source.split.tolist() == [*SPLIT[:5], -1]  # node 5 has no label
    assert (source.num_train, source.num_valid, source.num_nodes, source.num_classes) == (2, 1, 6, 2)
    assert source.num_rows == sum(source.field_rows) and source.field_rows[0] == 6
    assert source.max_ids == max(map(len, ids_of(source)))
    if layout in ("npz", "parquet", "csv"):  # in tables, words are numbered as they come
        number = {0: 0, 1: 1, 2: 2} if layout == "npz" else {0: 0, 2: 1, 1: 2}
        assert ids_of(source) == [[v, *(6 + number[word] for word in words)] for v, words in enumerate(WORDS)]


def test_of_several_kinds_the_first_ten_of_each_other_kind_are_ids(tmp_path):
    source = opened(graph_files.ogb_mag(tmp_path / "mag"), tmp_path)
    assert source.field_rows == [6, 20, 3]
    assert ids_of(source)[0] == [0, *range(6, 16), 26, 28] and ids_of(source)[3] == [3, 6 + 19, 28]
    assert source.num_dense == 2 and source.inputs(np.array([4, 0]))[1].tolist() == [[0.5, 4], [0.5, 0]]
    assert opened(graph_files.ogb_mag(tmp_path / "mag"), tmp_path, dense=False).num_dense == 0


@pytest.mark.parametrize(
    "layout, names",
    [
        ("parquet", ["node 4", "node 0"]),
        ("csv", [5, 7]),
        ("ogb", [4, 0]),
    ],
)
def test_the_users_own_ids_are_kept(layout, names, tmp_path):
    source = opened(getattr(graph_files, layout)(tmp_path / layout), tmp_path)
    assert source.names(np.array([4, 0])).tolist() == names
    assert source.class_names == {"parquet": ["a", "b"], "csv": ["0", "1"], "ogb": []}[layout]


def test_several_labels(tmp_path):
    labels = [[0, 1], [1, 1], [0, 0], [np.nan, np.nan], [1, 0], [0, 1]]
    lists = [["y"], ["x", "y"], [], None, ["x"], ["y"]]
    of_npz = opened(npz(tmp_path, label=np.array(labels)), tmp_path)
    of_ogb = opened(graph_files.ogb(tmp_path / "ogb", labels), tmp_path)
    of_table = opened(graph_files.parquet(tmp_path / "tables", label=lists), tmp_path)
    for source in (of_npz, of_ogb, of_table):
        assert source.is_multilabel and source.num_classes == 2 and source.labels.dtype == np.float32
        assert source.split.tolist() == [0, 0, 1, -1, 2, 0]
        samples = source.train(0, 5)
        assert samples.label.shape == (5, 2)
        check_samples(samples, 2, source.num_dense, 2, True)
    assert np.array_equal(of_npz.labels, of_ogb.labels, equal_nan=True)
    assert np.array_equal(of_table.labels[:, ::-1], of_npz.labels, equal_nan=True)  # columns in order of appearance
    assert of_table.class_names == ["y", "x"]


def test_samples_have_the_heads_inputs_and_labels(tmp_path):
    source = opened(graph_files.parquet(tmp_path / "tables"), tmp_path, fanout=[3, 2])
    samples = source.train(0, 7)
    check_samples(samples, 2, 1, 2, False)
    heads = samples.nodes[:7]
    assert set(heads.tolist()) == {0, 1} and np.array_equal(samples.label, source.labels[heads])
    bag, dense = source.inputs(samples.nodes)
    assert np.array_equal(bag.values, samples.ids.values) and np.array_equal(dense, samples.dense)
    assert dense[:, 0].tolist() == (1.5 * samples.nodes).tolist() and dense.dtype == np.float32
    near = neighbours_of(source)
    block = samples.blocks[0]
    for i, head in enumerate(heads):
        assert {int(v) for v in samples.nodes[block.index[block.offsets[i] : block.offsets[i + 1]]]} <= set(near[head])


def test_samples_depend_on_their_positions_alone(tmp_path):
    source = opened(npz(tmp_path), tmp_path)
    whole = source.train(4090, 4102).nodes[:12].tolist()  # over the end of a window
    assert whole == source.train(4090, 4095).nodes[:5].tolist() + source.train(4095, 4102).nodes[:7].tolist()
    for epoch in range(3):
        assert sorted(source.train(2 * epoch, 2 * epoch + 2).nodes[:2].tolist()) == [0, 1]
    orders = {tuple(source.train(2 * epoch, 2 * epoch + 2).nodes[:2].tolist()) for epoch in range(20)}
    assert len(orders) == 2  # each epoch has an order of its own
    assert len(source.train(5, 5)) == 0
    with pytest.raises(IndexError):
        source.valid(0, 2)


def test_without_valid_nodes_the_test_nodes_are_held_out(tmp_path):
    source = opened(npz(tmp_path, split=np.array([0, 0, 0, 2, 2, 0])), tmp_path)
    assert source.num_valid == 2 and sorted(source.valid(0, 2).nodes[:2].tolist()) == [3, 4]


def test_held_out_heads_have_one_order_and_one_sample(tmp_path):
    source = opened(SHARED / "cora" / "cora.npz", tmp_path) if (SHARED / "cora").exists() else None
    if source is None:
        pytest.skip("no shared/data/cora beside the checkout")
    first, again = source.valid(0, 100), opened(SHARED / "cora" / "cora.npz", tmp_path, seed=5).valid(0, 100)
    assert np.array_equal(first.nodes[:100], again.nodes[:100])
    assert not np.array_equal(first.nodes[:100], np.sort(first.nodes[:100]))
    assert np.array_equal(first.nodes, source.valid(0, 100).nodes)
    assert len(np.unique(source.valid(0, 500).nodes[:500])) == 500


def test_a_split_by_class_is_drawn_by_the_seed(tmp_path):
    labels = np.repeat([0, 1, 2, -1], [30, 20, 4, 6])
    graph = {"indptr": np.zeros(61, np.int64), "indices": np.empty(0, np.int64), "label": labels, "split": None,
             "feature_indptr": None}  # fmt: skip
    path = npz(tmp_path, **graph)
    splits = [opened(path, tmp_path, seed=seed, train_per_class=5, valid_per_class=7).split for seed in (1, 1, 2)]
    assert np.array_equal(splits[0], splits[1]) and not np.array_equal(splits[0], splits[2])
    for split in splits:
        counts = [[int((split[labels == c] == part).sum()) for part in (-1, 0, 1, 2)] for c in (0, 1, 2, -1)]
        assert counts == [[0, 5, 7, 18], [0, 5, 7, 8], [0, 4, 0, 0], [6, 0, 0, 0]]


def test_nodes_need_no_row_of_their_own_if_they_have_ids(tmp_path):
    source = opened(npz(tmp_path), tmp_path, node_ids=False)
    assert source.field_rows == [3] and ids_of(source) == WORDS
    assert len(source.train(0, 4)) == 4


def test_a_prepared_graph_is_opened_again_until_its_file_changes(tmp_path):
    path = npz(tmp_path)
    first, again = opened(path, tmp_path), opened(path, tmp_path)
    assert len(first.lines) == 1 and "6 nodes, 9 edges, 2 classes, 9 table rows" in first.lines[0]
    assert again.lines == [] and len(os.listdir(tmp_path / "prepared")) == 1
    npz(tmp_path, label=np.array([1, 1, 0, 1, 0, -1]))
    assert opened(path, tmp_path).labels[0] == 1
    assert opened(path, tmp_path, fanout=[1]).lines == []  # fan-outs need no other graph


def test_digests_say_which_part_of_a_graph_differs(tmp_path):
    def digests(path=None, **changed):
        return opened(path or npz(tmp_path, **changed), tmp_path).digests

    first = digests()
    assert digests(label=np.array([1, 1, 0, 1, 0, -1]), split=np.array([0, 1, 0, 2, 2, 0])) == first
    indptr, indices = csr([*EDGES[:5], (1, 4)], 6)
    words = np.array(sum(WORDS[::-1], []))
    changed = {"edges": {"indptr": indptr, "indices": indices}, "ids": {"feature_indices": words}}
    for part, others in {part: digests(**arrays) for part, arrays in changed.items()}.items():
        assert [name for name in first if others[name] != first[name]] == [part]
    named = digests(graph_files.parquet(tmp_path / "tables"))
    assert named["edges"] == first["edges"] and named["names of nodes"] != first["names of nodes"]


def test_a_line_names_arrays_of_an_npz_that_are_not_read(tmp_path):
    [line] = opened(npz(tmp_path, edge_weight=np.ones(6), x=np.ones((6, 2))), tmp_path).lines[1:]
    assert line.endswith("graph.npz: arrays that are not read: edge_weight, x")


def test_arrays_are_mapped_read_only(tmp_path):
    source = opened(npz(tmp_path), tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        source.labels[0] = 1
    with open("/proc/self/maps") as maps:
        assert any(str(tmp_path / "prepared") in line and line.split()[1].startswith("r--") for line in maps)


def test_an_unfinished_folder_is_never_opened(tmp_path):
    path = npz(tmp_path)
    source = opened(path, tmp_path)
    [folder] = (tmp_path / "prepared").iterdir()
    (folder / "graph.json").unlink()
    for file in list(folder.iterdir())[:3]:
        file.unlink()
    folder.rename(f"{folder}.part-elsewhere-1")
    again = opened(path, tmp_path)
    assert again.lines and neighbours_of(again) == neighbours_of(source)


def arrays_of(source):
    """All that a graph's folder holds."""
    graph = source._graph
    arrays = [getattr(graph, name) for name in ("indptr", "indices", "id_offsets", "ids", "labels", "split", "dense")]
    return [*(array.tolist() for array in arrays), source.names(np.arange(6)).tolist(), graph.field_rows, graph.digests]


def test_a_flipped_bit_in_a_prepared_graph_is_refused_or_changes_nothing(tmp_path):
    path = graph_files.parquet(tmp_path / "tables")
    arrays = arrays_of(opened(path, tmp_path))
    [folder] = (tmp_path / "prepared").iterdir()
    refused = 0
    for seed, file in enumerate(sorted(folder.iterdir())):
        for _ in each_flipped_bit(file, seed, 10):
            try:
                assert arrays_of(opened(path, tmp_path)) == arrays
            except UserError as refusal:
                assert f"the prepared graph {folder} is damaged" in str(refusal) and "remove the folder" in str(refusal)
                refused += 1
    assert refused > 80


def test_every_rank_verifies_a_part_of_a_large_array(tmp_path, monkeypatch):
    monkeypatch.setattr(checked, "BLOCK_BYTES", 64)
    path = str(tmp_path / "a.npy")
    checked.save_array(path, np.arange(100))
    whole = bytearray((tmp_path / "a.npy").read_bytes())
    whole[300] ^= 1
    (tmp_path / "a.npy").write_bytes(whole)
    assert [is_damaged(path, rank, 3) for rank in range(3)] == [False, True, False]  # the fifth block
    assert is_damaged(path, 0, 1)


def is_damaged(path, rank, size):
    try:
        checked.check_array(path, rank, size)
    except checked.Damaged:
        return True
    return False


@pytest.mark.parametrize("name", ["graph.json", "indices.npy", "name_bytes.npy", "labels.npy"])
@pytest.mark.parametrize("damage", ["emptied", "removed"])
def test_a_prepared_graph_that_has_lost_a_file_is_refused_or_prepared_again(tmp_path, name, damage):
    path = graph_files.parquet(tmp_path / "tables")
    source = opened(path, tmp_path)
    [folder] = (tmp_path / "prepared").iterdir()
    (folder / name).unlink() if damage == "removed" else (folder / name).write_bytes(b"")
    if (damage, name) == ("removed", "graph.json"):
        assert arrays_of(opened(path, tmp_path)) == arrays_of(source)
        return
    with pytest.raises(UserError, match=f"the prepared graph {folder} .*remove the folder"):
        opened(path, tmp_path)


BAD_ARRAYS = [
    ({"indptr": None}, "the array indptr is missing, there are indices, label"),
    ({"label": None}, "the array label is missing"),
    ({"indptr": np.array([0, 1, 3, 2, 4, 6, 6])}, "indptr must rise, after 3 of node 2 it is 2"),
    ({"indptr": np.array([0, 1, 3, 4, 4, 9, 9])}, "indptr must rise from 0 to 6, the number of indices, it is 0 to 9"),
    ({"indices": np.array([2, 0, 0, 1, 3, 6])}, "indices must be nodes, from 0 to 5; 1 of 6 are not, the first is 6"),
    ({"indices": np.array([2, 0, 0, 1, 3, -1])}, "the first is -1"),
    ({"indices": np.array([2, 0, 0, 1, 3, 4.0])}, "indices must be integers, got float64"),
    ({"label": np.array([0, 1])}, "label must be numbers with one for each of the 6 nodes"),
    ({"label": np.array([-1] * 6)}, "labels of at least two classes are needed, there are 0"),
    ({"label": np.zeros(6, int)}, "labels of at least two classes are needed, there are 1"),
    ({"label": np.full((6, 2), 2.0)}, "several labels per node must be 0 or 1"),
    ({"split": np.array([1] * 6)}, "no node has both a label and the split 0 or train"),
    ({"split": np.array([3] * 6)}, "split must be 0 for train"),
    ({"split": None}, "has no split: give data.train_per_class and data.valid_per_class"),
    ({"dense": np.full((6, 2), np.inf)}, "6 nodes have numbers that are NaN or infinite, first node 0"),
    ({"dense": np.zeros(6)}, "dense must be numbers"),
    ({"feature_indices": np.array([0, 2, 1, 2, 0, 1, 3, 1])}, "feature_indices must be words, from 0 to 2; 1 of 8"),
    ({"feature_indptr": np.array([0, 1])}, "feature_indptr must have 7 offsets that rise from 0 to 8"),
]


@pytest.mark.parametrize("wrong, message", BAD_ARRAYS, ids=[message[:40] for _, message in BAD_ARRAYS])
def test_a_damaged_file_is_refused_in_one_message(wrong, message, tmp_path):
    with pytest.raises(UserError, match=message.replace("[", r"\[")) as error:
        opened(npz(tmp_path, **wrong), tmp_path)
    assert "\n" not in str(error.value) and not (tmp_path / "prepared").exists()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"id": [1, 1, 2, 3, 4, 5]}, "id must be unique, 1 occur several times, first 1"),
        ({"id": [1, None, 2, 3, 4, 5]}, "id is missing in 1 rows"),
        ({"id": [1.5, 1, 2, 3, 4, 5]}, "id must hold integers or texts"),
        ({"label": None}, "there is no column label, it has id"),
        ({"label": [0.5] * 6}, "label must hold integers, texts or lists"),
        ({"split": ["train", "dev", "", None, "test", "test"]}, "split must be train, valid or test.*got dev"),
        ({"size": [1.0, None, 1.0, 1.0, 1.0, 1.0]}, "1 nodes have numbers that are NaN"),
        ({"size": [{"a": 1}] * 6}, "size must hold lists, texts or numbers"),
    ],
)
def test_bad_tables_are_refused(wrong, message, tmp_path):
    with pytest.raises(UserError, match=message):
        opened(graph_files.parquet(tmp_path / "tables", **wrong), tmp_path)


def test_edges_to_unknown_nodes_are_refused(tmp_path):
    path = graph_files.parquet(tmp_path / "tables")
    (tmp_path / "tables/edges.parquet").unlink()
    (tmp_path / "tables/edges.csv").write_text("src,dst\nnode 1,node 2\nnode 1,nobody\n")
    with pytest.raises(UserError, match="dst names nodes that are not in the table of nodes: 1, first nobody"):
        opened(path, tmp_path)
    (tmp_path / "tables/edges.csv").write_text("from,dst\nnode 1,node 2\n")
    with pytest.raises(UserError, match="has no column src"):
        opened(path, tmp_path)


def test_tables_without_edges_or_without_nodes(tmp_path):
    path = graph_files.csv(tmp_path / "tables")
    (tmp_path / "tables/edges.csv.gz").unlink()
    (tmp_path / "tables/edges.csv").write_text("src,dst\n")
    assert neighbours_of(opened(path, tmp_path)) == [[]] * 6
    for file in (tmp_path / "tables").glob("nodes*"):
        file.write_text("id,label,split\n")
    with pytest.raises(UserError, match="there are no nodes"):
        opened(path, tmp_path)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such file or folder"):
        opened(tmp_path / "none.npz", tmp_path)
    with pytest.raises(UserError, match=r"there is no edges.parquet or edges.csv"):
        opened(tmp_path, tmp_path)
    (tmp_path / "graph.npz").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(UserError, match="is no complete .npz file"):
        opened(tmp_path / "graph.npz", tmp_path)
    (tmp_path / "graph.txt").write_text("0 1\n")
    with pytest.raises(UserError, match="must be an .npz file, a folder"):
        opened(tmp_path / "graph.txt", tmp_path)
    path = graph_files.ogb(tmp_path / "ogb")
    (tmp_path / "ogb/raw/node-label.csv.gz").unlink()
    with pytest.raises(UserError, match="node-label.csv.gz cannot be read"):
        opened(path, tmp_path)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"fanout": []}, r"data.fanout must be a list of 1 to 16 integers"),
        ({"fanout": 10}, r"data.fanout must be a list"),
        ({"fanout": [10, 0]}, "each of data.fanout must be an integer of at least 1"),
        ({"fanout": [1 << 20]}, "each of data.fanout must be at most 65,536"),
        ({"replace": "yes"}, "data.replace must be true or false"),
        ({"undirected": 1}, "data.undirected must be true or false"),
        ({"train_per_class": 20}, "give both data.train_per_class and data.valid_per_class"),
        ({"train_per_class": 0, "valid_per_class": 1}, "data.train_per_class must be an integer of at least 1"),
        ({"node_ids": False, "path": "bare"}, "the nodes have no ids, so there is no table: set data.node_ids=true"),
    ],
)
def test_bad_settings_are_refused(settings, message, tmp_path):
    bare = {"feature_indptr": None, "feature_indices": None} if settings.pop("path", None) else {}
    with pytest.raises(UserError, match=message):
        opened(npz(tmp_path, **bare), tmp_path, **settings)


def test_unsorted_adjacency_needs_no_order(tmp_path):
    indptr, indices = csr(EDGES, 6)
    mixed = indices.copy()
    mixed[4:6] = mixed[4:6][::-1]
    assert neighbours_of(opened(npz(tmp_path, indices=mixed), tmp_path, undirected=False)) == DIRECTED


def test_an_array_in_the_place_of_another_is_refused(tmp_path):
    checked.save_array(str(tmp_path / "a.npy"), np.arange(5))
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    with pytest.raises(checked.Damaged, match=r"b\.npy is not as it was written"):
        checked.load_array(str(tmp_path / "b.npy"))
