"""Tables of nodes and edges: the same graph, however its columns are named, typed and written, or a refusal."""

import csv
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from hetmpi.data.graph.files import GraphFiles
from hetmpi.data.graph.samples import Block, check_samples
from hetmpi.errors import UserError
from hetmpi.tasks.inference import Inference
from hetmpi.tasks.node import ClassLoss, NodeClassification
from hetmpi.world.world import World

ROOT = Path(__file__).resolve().parents[2]

IDS = [7, 3, 11, 2, 5, 13]
EDGES = [(7, 3), (3, 11), (11, 7), (2, 5), (13, 7)]
SPLIT = ["train", "train", "valid", "test", "test", "train"]
LABEL = ["a", "b", "a", "b", "a", None]


def nodes_of(order=range(6), **others):
    """A table of nodes; None leaves a column out."""
    found = {"id": IDS, "label": LABEL, "split": SPLIT, "size": [0.5, 1, 1.5, 2, 2.5, 3]} | others
    return {name: [values[i] for i in order] for name, values in found.items() if values is not None}


def edges_of(edges=EDGES, **others):
    return {"src": [s for s, _ in edges], "dst": [d for _, d in edges], **others}


def text_of(table, **how):
    file = io.StringIO()
    csv.writer(file, lineterminator="\n", **how).writerows([list(table), *zip(*table.values())])
    return file.getvalue()


def opened(folder, nodes, edges=None, form="csv", **settings):
    """A prepared source of tables, columns by name, or texts."""
    folder.mkdir(exist_ok=True)
    for name, table in (("nodes", nodes), ("edges", edges_of() if edges is None else edges)):
        if form == "csv":
            (folder / f"{name}.csv").write_text(table if isinstance(table, str) else text_of(table))
        else:
            pq.write_table(pa.table(table), folder / f"{name}.parquet")
    source = GraphFiles(str(folder), **{"seed": 1, "cache": str(folder / "prepared"), "fanout": [2, 2], **settings})
    source.lines = []
    source.prepare(0, 1, lambda: None, source.lines.append)
    return source


def told(source):
    """Each node by its name: its class, part, numbers, and the names and weights of its neighbours."""
    names = [str(name) for name in source.names(np.arange(source.num_nodes)).tolist()]
    offsets, near = source.neighbours(0, source.num_nodes)
    weights = source.edge_weights(0, source.num_nodes)
    weights = np.ones(len(near)) if weights is None else weights
    found = {}
    for v, name in enumerate(names):
        label = source.labels[v]
        shown = source.class_names[label] if label >= 0 else None
        edges = slice(offsets[v], offsets[v + 1])
        of_edges = sorted(zip([names[u] for u in near[edges]], weights[edges].tolist()))
        found[name] = shown, int(source.split[v]), source.inputs(np.array([v]))[1][0].tolist(), of_edges
    return found


@pytest.fixture
def right(tmp_path):
    return told(opened(tmp_path / "right", nodes_of()))


SHUFFLED = [4, 2, 0, 5, 1, 3]


@pytest.mark.parametrize("name", ["node_id", "nodeId", "Node ID", "Unnamed: 0", ""])
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_evident_column_of_ids_has_them_and_a_line_says_so(tmp_path, right, name, form):
    table = nodes_of(SHUFFLED)
    nodes = {name: table.pop("id"), **table}
    source = opened(tmp_path / "kg", nodes, form=form)
    assert told(source) == right
    assert any(f"has no column id: its column {name!r} has the ids" in line for line in source.lines)


@pytest.mark.parametrize("form, index", [("csv", ""), ("csv", "Unnamed: 0"), ("parquet", "__index_level_0__")])
def test_an_index_of_pandas_has_the_ids_or_is_not_read(tmp_path, right, form, index):
    nodes = nodes_of(SHUFFLED)
    beside = opened(tmp_path / "beside", {index: list(range(6)), **nodes}, form=form)
    assert told(beside) == right and beside.num_dense == 1
    assert any("is an index of pandas: it is not read" in line for line in beside.lines)
    assert told(opened(tmp_path / "kg", {index: nodes.pop("id"), **nodes}, form=form)) == right


def test_a_table_of_one_column_lacks_the_others(tmp_path):
    with pytest.raises(UserError, match="there is no column label, it has id"):
        opened(tmp_path, "id\n7\n3\n")


def test_values_divided_by_two_characters_are_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match="divided by '::', write a comma between them"):
        opened(tmp_path, nodes_of(), edges="src::dst\n7::3\n")


def test_rows_are_numbered_only_where_src_and_dst_can_be_their_numbers(tmp_path):
    edges = edges_of([(0, 1), (5, 2)])
    source = opened(tmp_path / "numbers", nodes_of(id=None), edges)
    assert source.names(np.arange(6)).tolist() == list(range(6))
    assert any("src and dst number its 6 rows from 0, in their order" in line for line in source.lines)
    for bad in ([(0, 6)], [(-1, 2)]):
        with pytest.raises(UserError, match="has no column id, and (src|dst) of .* does not number its 6 rows from 0"):
            opened(tmp_path / "bad", nodes_of(id=None), edges_of(bad))


def test_files_whose_order_is_not_evident_need_a_column_of_ids(tmp_path):
    def written(folder, names, **columns):
        folder.mkdir()
        for number, name in enumerate(names):
            rows = {"label": ["ab"[number % 2]], "split": ["train"]} | {key: [number] for key in columns}
            (folder / f"nodes-{name}.csv").write_text(text_of(rows))
        (folder / "edges.csv").write_text(text_of(edges_of([(0, 10)])))
        source = GraphFiles(str(folder), 1, cache=str(folder / "prepared"))
        source.prepare(0, 1, lambda: None, lambda line: None)
        return {int(name): source.labels[number] for number, name in enumerate(source.names(np.arange(11)).tolist())}

    right = {number: number % 2 for number in range(11)}
    with pytest.raises(UserError, match="11 files is not evident: by name nodes-10.csv comes before nodes-2.csv: add"):
        written(tmp_path / "short", range(11))
    assert written(tmp_path / "long", [f"{number:02}" for number in range(11)]) == right
    assert written(tmp_path / "ids", range(11), id=True) == right


@pytest.mark.parametrize(
    "others, said",
    [
        ({"node_id": IDS, "Node": IDS[::-1]}, "its ids may be those of 'node_id', 'Node': set data.id=COLUMN"),
        ({"node_id": [1, 2, 4, 6, 8, 9]}, "may be those of 'node_id', but src and dst name others: set data.id=COLUMN"),
        ({"paper": IDS}, "src and dst have values of 'paper': set data.id=paper"),
    ],
)
def test_columns_that_may_be_ids_are_named_and_can_be_chosen(tmp_path, right, others, said):
    nodes = nodes_of(id=None, **others)
    with pytest.raises(UserError, match=said):
        opened(tmp_path / "kg", nodes)
    if IDS in others.values():
        name = next(name for name, values in others.items() if values == IDS)
        drop = [other for other in others if other != name]
        assert told(opened(tmp_path / "kg", nodes, id=name, drop=drop)) == right


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_ids_are_texts_unless_all_are_canonical_integers(tmp_path, form):
    nodes, edges = nodes_of(id=["00030", "30", "7", "a", "b", "c"]), edges_of([("00030", "30"), ("7", "30")])
    source = opened(tmp_path / "kg", nodes, edges, form=form)
    assert source.names(np.arange(6)).tolist() == ["00030", "30", "7", "a", "b", "c"]
    assert [name for name, _ in told(source)["30"][3]] == ["00030", "7"]
    padded = nodes_of(id=[f"{i:05}" for i in IDS])
    with pytest.raises(UserError, match="src names nodes that are not in the table of nodes"):
        opened(tmp_path / "padded", padded, form=form)


def test_ids_of_other_types_in_the_other_table_are_the_same(tmp_path, right):
    assert told(opened(tmp_path / "a", nodes_of(id=list(map(str, IDS))), form="parquet")) == right
    floats = {name: list(map(float, values)) for name, values in edges_of().items()}
    assert told(opened(tmp_path / "b", nodes_of(), floats, form="parquet")) == right
    assert told(opened(tmp_path / "c", nodes_of(), floats)) == right


@pytest.mark.parametrize("text", ["nan", "NA", "", "-", " NA "])
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_texts_for_no_label_are_none(tmp_path, right, text, form):
    nodes = nodes_of(label=[*LABEL[:5], text])
    settings = {"missing": ["-"]} if text == "-" else {}
    assert told(opened(tmp_path / "kg", nodes, form=form, **settings)) == right


def test_a_class_that_may_stand_for_no_label_is_mentioned(tmp_path):
    source = opened(tmp_path / "kg", nodes_of(label=[*LABEL[:5], "-"]))
    assert source.num_classes == 3
    assert any(
        "label: - is a class: if it stands for no label, add it to data.missing" in line for line in source.lines
    )


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(
    "label, names",
    [
        ([0.0, 1.0, 0.0, 1.0, 0.0, None], ["0", "1"]),
        ([False, True, False, True, False, None], ["false", "true"]),
        ([0, 1, 0, 1, 0, -1], ["0", "1"]),
        (["10", "9", "10", "9", "10", None], ["9", "10"]),
    ],
)
def test_labels_of_every_type_are_classes(tmp_path, label, names, form):
    source = opened(tmp_path / "kg", nodes_of(label=label), form=form)
    first, second = source.labels[0], source.labels[1]
    assert source.labels.tolist() == [first, second, first, second, first, -1]
    assert source.class_names == names and first == names.index(str(label[0]).lower().removesuffix(".0"))


def test_several_labels_in_a_text_are_refused_or_divided(tmp_path):
    nodes = nodes_of(label=["c0 c1", "c1", "c0", "c1 c2", "c2", None])
    with pytest.raises(UserError, match=r"label: 'c0 c1' may be several labels: set data.label_separator=' '"):
        opened(tmp_path / "kg", nodes)
    source = opened(tmp_path / "kg", nodes, label_separator=" ")
    assert source.is_multilabel and source.class_names == ["c0", "c1", "c2"]
    assert source.labels[:5].tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert np.isnan(source.labels[5]).all()
    assert opened(tmp_path / "kg", nodes, label_separator="").num_classes == 5
    titles = ["machine learning", "deep learning", "physics", "machine learning", "deep learning", None]
    assert opened(tmp_path / "kg", nodes_of(label=titles)).num_classes == 3


@pytest.mark.parametrize("written", [repr, lambda value: value.replace("'", "").replace(",", "")])
def test_lists_in_texts_are_lists(tmp_path, written):
    words = [["w1", "w2"], ["w1"], [], ["w3"], ["w2", "w3"], ["w1"]]
    texts = [written(str(value)) if written is not repr else str(value) for value in words]
    source, expected = (
        opened(tmp_path / form, nodes_of(words=values), form=form)
        for form, values in (("csv", texts), ("parquet", words))
    )
    assert source.digests == expected.digests and source.field_rows == [6, 3]


@pytest.mark.parametrize(
    "written", [" ".join, lambda values: f"[{', '.join(values)}]", lambda values: f"[{' '.join(values)}]"]
)
def test_a_vector_in_a_cell_is_as_many_numbers(tmp_path, written):
    vectors = [[0.25, 1.0, -2.0], [1.0, 2.0, 3.0], [0.0, 0.5, 0.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 0.0, 1.0]]
    texts = [written(map(str, vector)) for vector in vectors]
    for form, values in (("csv", texts), ("parquet", vectors)):
        source = opened(tmp_path / form, nodes_of(size=values), form=form)
        assert source.num_dense == 3 and source.inputs(np.arange(6))[1].tolist() == vectors
    with pytest.raises(UserError, match="holds 3 values 0 or 1 in every row, which would be two ids"):
        opened(tmp_path / "bits", nodes_of(size=["0 1 1", "1 0 0", "0 0 1", "1 1 1", "0 0 0", "1 1 0"]))


def test_numbers_with_zeros_in_front_are_ids(tmp_path):
    source = opened(tmp_path / "kg", nodes_of(size=["00030", "30", "7", "8", "9", "10"]))
    assert source.num_dense == 0 and source.field_rows == [6, 6]


@pytest.mark.parametrize(
    "values, num, said",
    [
        ([1999, 2001, "?", 2003, 2004, 2005], "5 of 6", "as '?' is none"),
        (["0.5 1.5", None, "1 2.5", "0 0", "3 .5", "2 2"], "8 of 8", "as these are not as many in every row"),
        (["[0.5, 1]", "[1, 2, 3]", "[1, 2]", "[0, 2]", "[2, 2]", "[3, 1]"], "5 of 5", "as these are not as many in"),
        (["0,5", "2,25", "1", "7", "3,5", "4"], "6 of 6", "as '0,5' is none"),
        (["10%", "2.5%", "3%", "4%", "5%", "6%"], "6 of 6", "as '10%' is none"),
    ],
)
def test_a_line_says_that_numbers_of_a_csv_file_become_ids(tmp_path, values, num, said):
    [line] = [line for line in opened(tmp_path / "kg", nodes_of(size=values)).lines if "seem to be" in line]
    assert f"size: {num} distinct values seem to be numbers, but all are ids, with a row each, {said}" in line


@pytest.mark.parametrize("values", [[f"{i} {i + 7}" for i in range(6)], ["[3]", "[4]", "[5]", "[]", "[6]", "[7]"],
                                    ["a 1", "b 2", "c 3.5", "d", "e", "f"], [f"00{i}" for i in range(6)]])  # fmt: skip
def test_ids_of_a_csv_file_are_no_numbers(tmp_path, values):
    source = opened(tmp_path / "kg", nodes_of(size=values))
    assert source.num_dense == 0 and not [line for line in source.lines if "seem to be" in line]


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("values", [(True, False), (1, 0), (1.0, 0.0), ("True", "False")])
def test_masks_are_the_split(tmp_path, right, form, values):
    masks = {
        name: [values[0] if part == split else values[1] for split in SPLIT]
        for name, part in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test"))
    }
    assert told(opened(tmp_path / "kg", nodes_of(split=None, **masks), form=form)) == right
    with pytest.raises(UserError, match="has both split and train_mask, val_mask, test_mask: set data.drop"):
        opened(tmp_path / "kg", nodes_of(**masks), form=form)
    with pytest.raises(UserError, match="val_mask is true for 3 nodes of another mask, first row 1"):
        opened(tmp_path / "kg", nodes_of(split=None, **masks | {"val_mask": masks["train_mask"]}), form=form)


@pytest.mark.parametrize("value", [[0], {"part": 0}])
def test_parts_and_masks_that_are_lists_or_structs_are_refused(tmp_path, value):
    with pytest.raises(UserError, match="split must be train, valid or test.*got (list|struct)<"):
        opened(tmp_path / "kg", nodes_of(split=[value] * 6), form="parquet")
    with pytest.raises(UserError, match="train_mask must be true or false for each node, got (list|struct)<"):
        opened(tmp_path / "kg", nodes_of(split=None, train_mask=[value] * 6), form="parquet")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_kinds_of_edges_are_refused_or_left_out(tmp_path, right, form):
    edges = edges_of(type=["cites"] * 5)
    with pytest.raises(UserError, match=r"has a column type: edges have no types.*set data.drop=\[type\]"):
        opened(tmp_path / "kg", nodes_of(), edges, form=form)
    assert told(opened(tmp_path / "kg", nodes_of(), edges, form=form, drop=["type"])) == right
    with pytest.raises(UserError, match="data.drop: no table has a column kind"):
        opened(tmp_path / "kg", nodes_of(), edges, form=form, drop=["type", "kind"])
    source = opened(tmp_path / "year", nodes_of(), edges_of(year=[1999] * 5), form=form)
    assert told(source) == right and any("columns that are not read: year" in line for line in source.lines)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_weights_of_edges_are_read(tmp_path, form):
    edges = edges_of([*EDGES, (3, 7), (7, 3)], weight=[1, 2, 3, 4, 5, 6, 8])
    found = told(opened(tmp_path / "kg", nodes_of(), edges, form=form, undirected=False))
    assert found["3"][3] == [("7", 9.0)] and found["7"][3] == [("11", 3.0), ("13", 5.0), ("3", 6.0)]
    both = told(opened(tmp_path / "kg", nodes_of(), edges, form=form))
    assert both["3"][3] == [("11", 2.0), ("7", 5.0)]  # the mean of 1, 6 and 8
    of_one = opened(tmp_path / "ones", nodes_of(), edges_of(weight=[1.0] * 5), form=form)
    assert of_one.edge_weights(0, 6) is None


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "x"])
def test_a_weight_must_be_a_number_above_0(tmp_path, weight):
    with pytest.raises(UserError, match="weight must (be|hold) numbers"):
        opened(tmp_path / "kg", nodes_of(), edges_of(weight=[1, 1, 1, 1, weight]))


def test_weights_of_an_npz_are_those_of_tables(tmp_path):
    edges = edges_of(weight=[1.5, 2, 3, 4, 5])
    expected = opened(tmp_path / "kg", nodes_of(), edges, undirected=False)
    offsets, near = expected.neighbours(0, 6)
    np.savez(tmp_path / "graph.npz", indptr=offsets, indices=near, label=np.arange(6) % 2, train_mask=np.ones(6, bool),
             weight=expected.edge_weights(0, 6))  # fmt: skip
    for undirected in (False, True):
        found = GraphFiles(str(tmp_path / "graph.npz"), 1, undirected, cache=str(tmp_path))
        found.prepare(0, 1, lambda: None, lambda line: None)
        of_tables = opened(tmp_path / "kg", nodes_of(), edges, undirected=undirected)
        assert found.edge_weights(0, 6).tolist() == of_tables.edge_weights(0, 6).tolist()
        assert found.num_train == 6


def test_samples_of_edges_with_weights_draw_by_them(tmp_path):
    star = edges_of([(3, 7), (11, 7), (2, 7)], weight=[1, 2, 5])
    nodes = nodes_of(split=["train", "valid", "test", "test", "test", "test"])
    source = opened(tmp_path / "kg", nodes, star, undirected=False, fanout=[4])
    counts, num = {3: 0, 11: 0, 2: 0}, 5000
    samples = source.train(0, num)
    check_samples(samples, 1, 1, 2, False)
    [block] = samples.blocks
    for name in source.names(samples.nodes[block.index]).tolist():
        counts[name] += 1
    shares = np.array([counts[3], counts[11], counts[2]]) / (4 * num)
    assert np.abs(shares - np.array([1, 2, 5]) / 8).max() < 0.02
    assert np.allclose(block.weights, 2)  # of 8 in 4 draws
    without = opened(tmp_path / "kg", nodes, star, undirected=False, fanout=[2], replace=False).train(0, num)
    [block] = without.blocks
    drawn = source.names(without.nodes[block.index]).reshape(-1, 2)
    assert (drawn[:, 0] != drawn[:, 1]).all() and all(abs((drawn == one).mean() - 1 / 3) < 0.02 for one in counts)
    assert set(zip(drawn.reshape(-1).tolist(), block.weights.tolist())) == {(3, 1.5), (11, 3.0), (2, 7.5)}


@pytest.mark.parametrize("replace", [True, False])
def test_samples_with_weights_depend_on_their_positions_alone(tmp_path, replace):
    rng = np.random.default_rng(0)
    edges = edges_of([tuple(pair) for pair in rng.choice(IDS, (40, 2)).tolist()], weight=rng.random(40) + 0.1)
    source = opened(tmp_path / "kg", nodes_of(), edges, replace=replace, fanout=[3, 2])
    whole = trees_of(source.train(4090, 4102), 12)
    assert whole == trees_of(source.train(4090, 4095), 5) + trees_of(source.train(4095, 4102), 7)


def trees_of(samples, num):
    def tree(place, hop):
        if hop == len(samples.blocks):
            return int(samples.nodes[place])
        block = samples.blocks[hop]
        edges = range(block.offsets[place], block.offsets[place + 1])
        return int(samples.nodes[place]), [(float(block.weights[e]), tree(block.index[e], hop + 1)) for e in edges]

    return [tree(place, 0) for place in range(num)]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_nodes_that_only_edges_name_are_added_if_that_is_set(tmp_path, right, form):
    edges = edges_of([*EDGES, (99, 7), (7, 98)])
    with pytest.raises(UserError, match="src names nodes that are not in.*: 1, first 99: .*set data.add_nodes=true"):
        opened(tmp_path / "kg", nodes_of(), edges, form=form)
    source = opened(tmp_path / "kg", nodes_of(), edges, form=form, add_nodes=True)
    found = told(source)
    assert found["99"] == found["98"] == (None, -1, [0.0], [("7", 1.0)])
    assert source.num_rows == 8 and any("2 nodes that" in line and "are added" in line for line in source.lines)
    assert {name: value[:3] for name, value in found.items() if name in right} == {k: v[:3] for k, v in right.items()}


def test_tables_in_two_formats_and_columns_of_some_files_are_refused(tmp_path):
    opened(tmp_path / "kg", nodes_of())
    pq.write_table(pa.table(edges_of()), tmp_path / "kg/edges.parquet")
    with pytest.raises(UserError, match=r"has edges.csv and edges.parquet, in two formats"):
        opened(tmp_path / "kg", nodes_of())
    opened(tmp_path / "parts", nodes_of())
    (tmp_path / "parts/nodes-1.csv").write_text(text_of(nodes_of(more=IDS)))
    with pytest.raises(UserError, match="differ: only one of them has the column 'more'"):
        opened(tmp_path / "parts", nodes_of())


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_other_delimiters_blanks_and_quotes_give_the_same_graph(tmp_path, right, delimiter):
    def text(table):
        padded = {f" {name} ": [f" {'' if value is None else value} " for value in table[name]] for name in table}
        return "\ufeff" + text_of(padded, delimiter=delimiter, quoting=csv.QUOTE_ALL)

    assert told(opened(tmp_path / "kg", text(nodes_of()), text(edges_of()))) == right


@pytest.mark.parametrize("name", ["gcn", "graphsage", "gat"])
def test_samples_of_all_neighbours_are_inference_over_them_with_weights(tmp_path, name):
    rng = np.random.default_rng(0)
    edges = edges_of([tuple(pair) for pair in rng.choice(IDS, (20, 2)).tolist()], weight=rng.random(20) + 0.1)
    source = opened(tmp_path / "kg", nodes_of(), edges, replace=False, fanout=[9, 9])
    task = NodeClassification(source, ClassLoss())
    model = instantiate(OmegaConf.load(ROOT / f"conf/model/{name}.yaml"), **task.model_arguments(4)).eval()
    x = torch.randn(6, 5)
    whole = Block(*map(torch.from_numpy, (*source.neighbours(0, 6), source.edge_weights(0, 6).copy())))
    expected = model.layer(1, model.layer(0, x, whole), whole)
    samples = source.train(0, 12)
    batch = task.batches(torch.device("cpu"))(samples)
    assert torch.allclose(model(x[samples.nodes], batch.blocks), expected[samples.nodes[:12]], atol=1e-5)


@pytest.mark.filterwarnings("error")
def test_inference_with_weights_of_a_mapped_file_warns_of_nothing(tmp_path):
    source = opened(tmp_path / "kg", nodes_of(), edges_of(weight=[0.5, 1, 1.5, 2, 2.5]))
    task = NodeClassification(source, ClassLoss())
    model = instantiate(OmegaConf.load(ROOT / "conf/model/gcn.yaml"), **task.model_arguments(4)).eval()
    torch.set_warn_always(True)  # not once in a process
    try:
        inference = Inference(World(), source, model, 4, torch.device("cpu"))
        [_, logits] = zip(*inference.logits(lambda keys: torch.ones(len(keys), model.row_dim)))
    finally:
        torch.set_warn_always(False)
    assert sum(map(len, logits)) == 6


def cells(page, heading):
    """The first cells of the first table after a heading of a page."""
    lines = (ROOT / "docs" / page).read_text().split(heading)[1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|---")) + 1
    rows = [line for line in lines[first:] if line.startswith("|")]
    return [
        row.split("|")[1].strip() for row in rows[: next((i for i, line in enumerate(lines[first:]) if not line), None)]
    ]


# A first cell of the table in docs/graphs.md -> columns of nodes and of edges, settings, and what must be true.
STATED = {
    "`id`, `src`, `dst`": ({}, {}, {}, lambda source: source.names(np.arange(2)).tolist() == [7, 3]),
    "no `id`": ({"id": None, "node_id": IDS}, {}, {}, lambda source: source.names(np.arange(2)).tolist() == [7, 3]),
    "`label`: integers, whole numbers, booleans, texts": (
        {"label": [1.0, 0.0, 1.0, 0.0, 1.0, None]}, {}, {}, lambda source: source.labels.tolist() == [1, 0, 1, 0, 1, -1]
    ),
    '`label`: lists, or texts with `data.label_separator=" "`': (
        {"label": ["a b", "b", "a", "b", "a", None]}, {}, {"label_separator": " "}, lambda source: source.is_multilabel
    ),
    "`split`; or `train_mask`, `val_mask`, `test_mask`": (
        {"split": None, "train_mask": [True] * 5 + [None]}, {}, {}, lambda source: source.num_train == 5
    ),
    "numbers, booleans; in a CSV file texts that all are such": (
        {"size": ["True", "false"] * 3}, {}, {}, lambda source: source.num_dense == 1
    ),
    "lists of as many fractions in all rows, `0.5 1.5` or `[0.5, 1.5]` in a CSV file": (
        {"size": ["0.5 1.5"] * 6}, {}, {}, lambda source: source.num_dense == 2
    ),
    "texts; `007`": ({"size": ["007", "b c"] * 3}, {}, {}, lambda source: source.field_rows == [6, 3]),
    "lists of integers or texts, `['a', 'b']` in a CSV file": (
        {"size": ["['a', 'b']", "[]"] * 3}, {}, {}, lambda source: source.field_rows == [6, 2]
    ),
    "`weight` of edges": ({}, {"weight": [0.5] * 5}, {}, lambda source: (source.edge_weights(0, 6) == 0.5).all()),
    "`type` of edges, structs, dates in Parquet": ({}, {"type": [1] * 5}, {}, "set data.drop="),
    "other columns of edges, pandas' index, columns without a value": (
        {"Unnamed: 0": range(6), "nothing": [None] * 6}, {"year": range(5)}, {},
        lambda source: source.num_dense == 1 and sum("not read" in line for line in source.lines) == 3,
    ),
}  # fmt: skip


def test_the_table_of_columns_has_a_case_for_each_row():
    assert cells("graphs.md", "## Columns") == list(STATED)


@pytest.mark.parametrize("stated", STATED)
def test_columns_become_what_the_page_states(tmp_path, stated):
    nodes, edges, settings, holds = STATED[stated]
    if isinstance(holds, str):
        with pytest.raises(UserError, match=holds):
            opened(tmp_path / "kg", nodes_of(**nodes), edges_of(**edges), **settings)
    else:
        assert holds(opened(tmp_path / "kg", nodes_of(**nodes), edges_of(**edges), **settings))


def test_nodes_are_visited_as_the_page_states(tmp_path):
    assert cells("graphs.md", "are refused else.") == [
        "training nodes", "neighbours", "held-out nodes", "parts without a split", "files, rows and columns"
    ]  # fmt: skip
    nodes = nodes_of(split=["train"] * 4 + ["valid"] * 2, label=list("ababab"))
    first, second = (opened(tmp_path / "kg", nodes, seed=seed) for seed in (1, 2))
    orders = [[source.train(4 * e, 4 * e + 4).nodes[:4].tolist() for e in range(6)] for source in (first, second)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in sum(orders, [])) and orders[0] != orders[1]
    assert len(set(map(tuple, orders[0]))) > 1
    of_valid = [source.valid(0, 2).nodes[:2].tolist() for source in (first, second)]
    assert of_valid[0] == of_valid[1] and sorted(of_valid[0]) == [4, 5]
    drawn = [
        opened(
            tmp_path / "drawn",
            nodes_of(split=None, label=list("ababab")),
            seed=seed,
            train_per_class=1,
            valid_per_class=1,
        )
        for seed in range(8)
    ]
    assert len({tuple(source.split.tolist()) for source in drawn}) > 1
