"""Graphs that cannot be read, few nodes on many ranks, and METIS's order, in whole runs."""

import sys

import graph_files
import numpy as np
import pyarrow.parquet as pq
import pytest
from launch import launcher_of, run, summary, train
from test_refusals import refusal

from hetmpi.data.graph.graph import TEST
from hetmpi.data.graph.synthetic import SyntheticGraph

SETTINGS = ["data.fanout=[3,3]", "model.hidden=16", "batch_size=32", "table.dim=8", "log.every_steps=10"]


def test_a_damaged_graph_ends_all_ranks_with_one_message(tmp_path):
    path = graph_files.npz(tmp_path, indptr=np.array([0, 1, 3, 2, 4, 6, 6]))
    outcome = train(3, "data=graph", f"data.path={path}", f"data.cache={tmp_path}/prepared", f"run.dir={tmp_path}/run")
    assert outcome.code == 1 and outcome.text.count("hetmpi:") == 1, outcome.text
    assert "indptr must rise, after 3 of node 2 it is 2" in outcome.text, outcome.text
    assert "Traceback" not in outcome.text and not outcome.survivors


def test_a_graph_without_a_split_is_refused(tmp_path):
    path = [f"data.path={graph_files.npz(tmp_path, split=None)}", f"data.cache={tmp_path}/prepared"]
    told = refusal("data=graph", *path, f"run.dir={tmp_path}/run")
    assert told.count("give data.train_per_class and data.valid_per_class") == 1


@pytest.mark.rare
def test_more_ranks_than_training_nodes(tmp_path):
    """Six nodes, of which two are trained on."""
    path = [f"data.path={graph_files.npz(tmp_path)}", f"data.cache={tmp_path}/prepared"]
    outcome = train(3, "data=graph", *path, *SETTINGS, "steps=5", f"run.dir={tmp_path}/run")
    assert outcome.code == 0 and "2 training samples, fewer than the 96 of a step" in outcome.text, outcome.text
    metis = ["data.partition=metis", "table.partition=range", f"run.dir={tmp_path}/metis"]
    outcome = train(3, "data=graph", *path, *SETTINGS, *metis)
    assert outcome.code == 1 and "metis needs" in outcome.text and "Traceback" not in outcome.text, outcome.text


def test_metis_moves_fewer_bytes_and_any_number_of_ranks_goes_on(tmp_path):
    pytest.importorskip("pymetis")
    data = ["data=graph_synthetic", "data.nodes=4000", "data.edges=16000", "data.mixing=0.1", "data.id_mixing=0.2",
            "data.lists=[[2000,5]]", f"data.cache={tmp_path}/prepared"]  # fmt: skip
    how = [*data, *SETTINGS, "table.ranks_per_node=1", "table.exchange=windows"]
    metis = ["data.partition=metis", "table.partition=range"]
    for name, order in {"plain": [], "metis": metis}.items():
        outcome = train(2, *how, *order, "steps=30", f"run.dir={tmp_path}/{name}")
        assert outcome.code == 0, outcome.text
    plain, arranged = (summary(tmp_path / name)["pulled_bytes"] for name in ("plain", "metis"))
    assert arranged < 0.7 * plain
    outcome = train(3, *how, *metis, "steps=60", f"run.dir={tmp_path}/metis", "resume=auto")
    assert outcome.code == 0 and "resumed from" in outcome.text, outcome.text
    accuracy = summary(tmp_path / "metis")["test_accuracy"]
    checkpoint = tmp_path / "metis/checkpoints/step-00000060"
    command = [sys.executable, "-m", "hetmpi.predict", str(checkpoint), f"out={tmp_path}/p.parquet"]
    outcome = run([*launcher_of(1), *command])
    assert outcome.code == 0, outcome.text
    found = pq.read_table(tmp_path / "p.parquet")
    graph = SyntheticGraph(0, nodes=4000, edges=16000, mixing=0.1, id_mixing=0.2, lists=[[2000, 5]]).read()
    node, prediction = (found[name].to_numpy() for name in ("node", "prediction"))
    assert np.array_equal(np.sort(node), np.arange(4000))
    is_right = (graph.labels[node] == prediction)[graph.split[node] == TEST]
    assert is_right.mean() == pytest.approx(accuracy, abs=1e-9) and accuracy > 0.3
