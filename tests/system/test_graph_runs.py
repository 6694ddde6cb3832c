"""Graphs from files to predictions: train, predict, export, on real graphs too."""

import shutil
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from launch import NODE_MODELS, ROOT, launcher_of, losses, run, summary, train

pytestmark = pytest.mark.long

REAL = ROOT.parent / "shared/data"
CORA, COMPUTERS = REAL / "cora/cora.npz", REAL / "amazon_computers/amazon_computers.npz"
SETTINGS = ["data=graph", "data.fanout=[5,5]", "model.hidden=16", "batch_size=64", "table.dim=16", "log.every_steps=20"]


def command(name, ranks, *arguments, **extra):
    return run([*launcher_of(ranks), sys.executable, "-m", f"hetmpi.{name}", *map(str, arguments)], **extra)


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    """A folder with a generated graph, and a run of two ranks on it."""
    folder = tmp_path_factory.mktemp("papers")
    assert run([sys.executable, "examples/make_graph.py", str(folder / "papers"), "1500"]).code == 0
    outcome = train(2, *SETTINGS, *data(folder), "steps=40", f"run.dir={folder}/run")
    assert outcome.code == 0, outcome.text
    assert "graphsage on graph" in outcome.text and "test accuracy" in outcome.text
    return folder


def data(folder):
    return [f"data.path={folder}/papers", f"data.cache={folder}/prepared"]


def checkpoint_of(folder):
    [checkpoint] = (folder / "checkpoints").glob("step-*")
    return checkpoint


def test_predictions_of_all_nodes_have_the_accuracy_that_the_run_found(papers):
    checkpoint = checkpoint_of(papers / "run")
    for ranks in (1, 3):
        out = papers / f"p{ranks}.parquet"
        outcome = command("predict", ranks, checkpoint, f"out={out}", "hidden=true", *data(papers))
        assert outcome.code == 0 and "1,500 nodes" in outcome.text, outcome.text
    found, nodes = pq.read_table(papers / "p1.parquet"), pq.read_table(papers / "papers/nodes.parquet")
    assert found.equals(pq.read_table(papers / "p3.parquet"))
    assert found["node"].to_pylist() == nodes["id"].to_pylist()
    columns = found["prediction"], nodes["label"], nodes["split"]
    tested = [
        predicted == label
        for predicted, label, part in zip(*(column.to_pylist() for column in columns))
        if part == "test" and label is not None
    ]
    accuracy = summary(papers / "run")["test_accuracy"]
    assert accuracy == pytest.approx(np.mean(tested), abs=1e-9) and accuracy > 0.7


def test_export_writes_activations_by_the_ids_of_the_data_and_a_model_of_tensors(papers):
    checkpoint, out = checkpoint_of(papers / "run"), papers / "out"
    outcome = command("export", 0, checkpoint, out, "nodes=parquet", *data(papers))
    assert outcome.code == 0 and "Warning" not in outcome.text, outcome.text
    predicted = command("predict", 2, checkpoint, f"out={papers}/h.parquet", "hidden=true", *data(papers))
    assert predicted.code == 0, predicted.text
    found, hidden = pq.read_table(out / "nodes.parquet"), pq.read_table(papers / "h.parquet")
    assert found["hidden"].equals(hidden["hidden"]) and found["node"].equals(hidden["node"])
    model = torch.jit.load(out / "dense.torchscript")
    edges = [torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 3])] * 2  # more destinations than in the example
    edges[2:] = [torch.tensor([0, 1, 1, 2, 4]), torch.tensor([4, 0, 0, 1])]
    assert model(torch.randn(5, 17), *edges).shape == (3, 6)


@pytest.mark.rare
def test_wrong_commands_are_told_in_one_line(papers):
    checkpoint = checkpoint_of(papers / "run")
    for wrong, said in {
        "out=p.npy": "takes out=FILE.parquet",
        "out=p.parquet split=train": "not split",
        "out=p.parquet": "give data.path=...",
        " ".join(["out=p.parquet data.fanout=[3]", *data(papers)]): "trained on data with num_layers=2, here it is 1",
        "out=p.parquet data=synthetic": "synthetic is no graph",
    }.items():
        outcome = command("predict", 2, checkpoint, *wrong.split())
        assert outcome.code == 1 and said in outcome.text and "Traceback" not in outcome.text, outcome.text
    outcome = train(2, *SETTINGS, *data(papers), "task=ctr", "model=wdl", "model.hidden=[8]")
    assert outcome.code == 1 and "for a graph task=node" in outcome.text, outcome.text
    outcome = train(2, *SETTINGS, *data(papers), "model=wdl", "model.hidden=[8]")
    assert outcome.code == 1 and "model=wdl is not for" in outcome.text and "Traceback" not in outcome.text, (
        outcome.text
    )


@pytest.mark.rare
def test_another_graph_of_equal_sizes_is_refused(papers, tmp_path):
    """Two nodes have changed their ids, so edges lead to others."""
    shutil.copytree(papers / "papers", tmp_path / "papers")
    nodes = pq.read_table(tmp_path / "papers/nodes.parquet")
    ids = nodes["id"].to_pylist()
    ids[:2] = ids[1], ids[0]
    pq.write_table(nodes.set_column(nodes.column_names.index("id"), "id", [ids]), tmp_path / "papers/nodes.parquet")
    checkpoint, said = checkpoint_of(papers / "run"), "saved with another graph, its edges and names of nodes differ"
    for outcome in (
        command("predict", 2, checkpoint, f"out={tmp_path}/p.parquet", *data(tmp_path)),
        command("export", 0, checkpoint, tmp_path / "out", "nodes=parquet", *data(tmp_path)),
        train(2, *SETTINGS, *data(tmp_path), "steps=60", f"run.dir={tmp_path}/run", f"resume={checkpoint}"),
    ):
        assert outcome.code == 1 and outcome.text.count(said) == 1 and "Traceback" not in outcome.text, outcome.text


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.rare if name != "graphsage" else ()) for name in NODE_MODELS]
)
def test_a_model_trains_with_a_cache_and_resumes(papers, tmp_path, model):
    how = [*SETTINGS, *data(papers), f"model={model}", "table.staleness=10", "table.ranks_per_node=1"]
    assert train(2, *how, "steps=20", f"run.dir={tmp_path}").code == 0
    outcome = train(2, *how, "steps=40", f"run.dir={tmp_path}", "resume=auto")
    assert outcome.code == 0 and "resumed from" in outcome.text, outcome.text
    assert losses(tmp_path)[40] < losses(tmp_path)[20]


def test_a_run_can_follow_accuracy_and_keep_the_best(papers, tmp_path):
    how = ["eval.every_steps=5", "eval.patience=2", "checkpoint.best=accuracy", "checkpoint.at_end=false"]
    outcome = train(2, *SETTINGS, *data(papers), *how, "steps=400", f"run.dir={tmp_path}")
    assert outcome.code == 0 and "ended_early" in summary(tmp_path), outcome.text
    assert summary(tmp_path)["best_accuracy"] >= summary(tmp_path)["accuracy"]


def test_a_dry_run_says_what_the_last_evaluation_needs(papers):
    outcome = train(2, *SETTINGS, *data(papers), "dry_run=true")
    [line] = [line for line in outcome.text.splitlines() if line.startswith("memory of a rank")]
    assert outcome.code == 0 and "final" in line, outcome.text


@pytest.mark.skipif(not CORA.exists(), reason=f"needs {CORA}")
def test_cora_is_classified_from_its_words(tmp_path):
    how = [f"data.path={CORA}", f"data.cache={tmp_path}/prepared", f"run.dir={tmp_path}"]
    outcome = train(2, "experiment=cora", *how)
    assert outcome.code == 0, outcome.text
    assert summary(tmp_path)["test_accuracy"] > 0.75  # of one seed; the mean: docs/results.md, "Graphs"


@pytest.mark.long
@pytest.mark.skipif(not COMPUTERS.exists(), reason=f"needs {COMPUTERS}")
@pytest.mark.parametrize("how", [
    [], pytest.param(["table.staleness=100", "table.ranks_per_node=1"], marks=pytest.mark.rare),
])  # fmt: skip
def test_amazon_computers_is_classified_from_its_words(tmp_path, how):
    path = [f"data.path={COMPUTERS}", f"data.cache={tmp_path}/prepared", f"run.dir={tmp_path}"]
    outcome = train(2, "experiment=computers", *path, *how, timeout_s=600)
    assert outcome.code == 0, outcome.text
    assert summary(tmp_path)["test_accuracy"] > 0.77
