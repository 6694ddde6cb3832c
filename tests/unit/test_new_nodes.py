"""Nodes that came after the training: predicted by the names of nodes, words and numbers."""

import csv

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from crafted import change_manifest

from hetmpi import predict
from hetmpi.errors import UserError
from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training
from hetmpi.world.world import World

SETTINGS = [
    "data=graph", "data.fanout=[3,3]", "model.hidden=8", "table.dim=4", "table.init_std=0.5", "batch_size=8",
    "steps=30", "log.every_steps=30", "device=cpu",
]  # fmt: skip


def written(folder, num, seed, words=True, numbers=True, reverse=False):
    """A graph of `num` nodes whose first ones are the same for every num, in tables of any order."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    nodes = []
    for v in range(num):
        kind = int(rng.integers(2))
        row = {"id": f"n{v}", "label": "ab"[kind] if v < 40 else "", "split": "train" if v < 30 else "test"}
        row |= {"words": f"w{kind} w{2 + int(rng.integers(3))}"} if words else {}
        row |= {"size": float(kind + rng.normal()), "age": float(rng.normal())} if numbers else {}
        nodes.append(row if not reverse else dict(reversed(row.items())))
    edges = [{"src": f"n{rng.integers(v + 1)}", "dst": f"n{v}"} for v in range(num) for _ in range(2)]
    for name, rows in (("nodes", nodes[::-1] if reverse else nodes), ("edges", edges[::-1] if reverse else edges)):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            csv.DictWriter(file, list(rows[0])).writeheader()
            csv.DictWriter(file, list(rows[0])).writerows(rows)
    return [f"data.path={folder}", f"data.cache={folder.parent}/prepared"]


def trained(folder, *overrides):
    world = World()
    training = Training(
        world, compose(world, [*SETTINGS, f"run.dir={folder}/run", *overrides]), torch.device("cpu"), Spans()
    )
    training.run()
    training.log.close()
    training.close()
    return next((folder / "run/checkpoints").glob("step-*"))


def predicted(checkpoint, out, *arguments):
    predict.main(World(), [str(checkpoint), f"out={out}", "hidden=true", *arguments])
    return {row["node"]: row for row in pq.read_table(out).to_pylist()}


@pytest.mark.parametrize("node_ids", [True, False])
def test_old_nodes_are_found_by_name_in_tables_of_another_order(tmp_path, node_ids):
    data, own = written(tmp_path / "first", 40, 0), f"data.node_ids={str(node_ids).lower()}"
    checkpoint = trained(tmp_path, *data, own)
    expected = predicted(checkpoint, tmp_path / "a.parquet", *data)
    turned = written(tmp_path / "turned", 40, 0, reverse=True)
    with pytest.raises(UserError, match="hetmpi predict takes other tables of nodes by new_nodes=true"):
        predicted(checkpoint, tmp_path / "b.parquet", *turned)
    found = predicted(checkpoint, tmp_path / "b.parquet", *turned, "new_nodes=true")
    assert set(found) == set(expected)
    for name, row in expected.items():
        assert found[name]["prediction"] == row["prediction"]
        assert np.allclose(found[name]["hidden"], row["hidden"], atol=1e-5)


def test_new_nodes_are_predicted_from_their_words_and_numbers(tmp_path, capsys):
    data = written(tmp_path / "first", 40, 0)
    checkpoint = trained(tmp_path, *data, "steps=150", "data.node_ids=false")
    found = predicted(checkpoint, tmp_path / "p.parquet", *written(tmp_path / "later", 120, 0), "new_nodes=true")
    assert len(found) == 120 and "0 ids of nodes and words came after the training" in capsys.readouterr().out
    with open(tmp_path / "later/nodes.csv") as file:
        kinds = {row["id"]: "ab"[int(row["words"][1])] for row in csv.DictReader(file)}
    new = [f"n{v}" for v in range(40, 120)]
    assert np.mean([found[name]["prediction"] == kinds[name] for name in new]) > 0.9


def test_a_model_of_own_rows_alone_cannot_know_new_nodes(tmp_path):
    data = written(tmp_path / "first", 40, 0, words=False, numbers=False)
    checkpoint = trained(tmp_path, *data)
    later = written(tmp_path / "later", 60, 0, words=False, numbers=False)
    with pytest.raises(UserError, match="knows a node by its own row alone, which 20 nodes lack: train with words or"):
        predicted(checkpoint, tmp_path / "p.parquet", *later, "new_nodes=true")
    numbers = written(tmp_path / "numbers", 60, 0, words=False)
    with pytest.raises(
        UserError, match="the model was trained with the numbers none, the nodes have age, size|size, age"
    ):
        predicted(checkpoint, tmp_path / "p.parquet", *numbers, "new_nodes=true")


def test_new_nodes_with_labels_of_another_kind_are_refused(tmp_path):
    checkpoint = trained(tmp_path, *written(tmp_path / "first", 40, 0))
    later = [*written(tmp_path / "later", 60, 0), "data.label_separator=' '"]
    with pytest.raises(UserError, match="was trained with one class per node, the nodes have several labels"):
        predicted(checkpoint, tmp_path / "p.parquet", *later, "new_nodes=true")


def test_a_checkpoint_of_a_version_that_saved_fewer_digests_of_its_graph_is_read(tmp_path):
    data = written(tmp_path / "first", 40, 0)
    checkpoint = trained(tmp_path, *data)
    change_manifest(checkpoint, lambda manifest: manifest["graph"].pop("names of numbers"))
    assert len(predicted(checkpoint, tmp_path / "p.parquet", *data)) == 40
