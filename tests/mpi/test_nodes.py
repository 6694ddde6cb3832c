"""Classes of nodes: equal to one process of torch at s = 0; inference over all neighbours; resumed runs."""

import json

import numpy as np
import pytest
import torch
from node_runs import BATCH, STEPS, Twin, all_logits, closed, losses, made
from resumed import whole_and_resumed
from small_graph import SmallGraph

from hetmpi.models.graphsage import GraphSAGE
from hetmpi.tasks.inference import Inference, activation_bytes
from hetmpi.tasks.node_array import NodeArray

pytestmark = pytest.mark.mpi
KINDS = {
    "one class": [],
    "numbers and three layers": ["+data.num_dense=2", "+data.fanout=[3,2,2]"],
    "several labels": ["+data.is_multilabel=true"],
    "without replacement": ["+data.replace=false"],
}


@pytest.fixture
def folder(world, tmp_path):
    """A folder for all ranks."""
    return world.comm.bcast(tmp_path)


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_s_0_is_as_an_embedding_bag_of_torch_on_the_same_samples(world, folder, how):
    training = made(folder, *how, "checkpoint.at_end=false")
    twin = Twin(training)
    training.run()
    expected = [twin.step(step) for step in range(STEPS)]
    rows, dense = closed(training)
    assert torch.allclose(rows, twin.bag.weight, rtol=0, atol=1e-5)
    for name, value in dense.items():
        assert torch.allclose(value, twin.dense[name], rtol=0, atol=1e-5), name
    if world.rank == 0:
        assert losses(folder) == pytest.approx(expected, abs=1e-5)
        assert expected[-1] < expected[0]


def test_the_run_ends_with_the_metrics_of_the_test_nodes_over_all_neighbours(world, folder):
    training = made(folder, "checkpoint.at_end=false", "eval.batch_size=7", "table.ranks_per_node=1")
    source = training.source
    training.run()
    rows, dense = closed(training)
    if world.rank == 0:
        predicted, is_test = all_logits(source, rows, dense).argmax(1).numpy(), source.split == 2
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["test_accuracy"] == np.mean(predicted[is_test] == source.labels[is_test])
        assert summary["accuracy"] > 0.5


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("num_nodes", [2, 120])
def test_each_node_has_the_activations_of_all_its_neighbours(placed, num_nodes, chunk):
    source = SmallGraph(0, num_nodes=num_nodes, num_dense=2, fanout=(1, 1, 1))
    torch.manual_seed(0)
    model = GraphSAGE(dim=4, num_dense=2, num_classes=3, num_layers=3, hidden=5, dropout=0.5, input_dropout=0.5)
    rows = torch.randn(source.num_rows, 4)
    found = list(Inference(placed, source, model, chunk, torch.device("cpu")).logits(rows.__getitem__))
    of_all = [chunk for of_rank in placed.comm.allgather(found) for chunk in of_rank]
    of_all.sort(key=lambda chunk: chunk[0][0])
    assert np.concatenate([nodes for nodes, _ in of_all]).tolist() == list(range(num_nodes))
    expected = all_logits(source, rows, dict(model.named_parameters()))
    assert torch.allclose(torch.cat([logits for _, logits in of_all]), expected, atol=1e-6)
    assert model.training


def test_a_model_of_one_layer_needs_one_array(placed):
    source = SmallGraph(0, fanout=(4,))
    model = GraphSAGE(dim=4, num_dense=0, num_classes=3, num_layers=1, hidden=5)
    inference = Inference(placed, source, model, 50, torch.device("cpu"))
    assert activation_bytes(source, inference.sizes) == 4 * source.num_nodes * 4
    rows = torch.randn(source.num_rows, 4)
    for nodes, hidden, logits in inference.outputs(rows.__getitem__):
        assert hidden.shape == (len(nodes), 4) and logits.shape == (len(nodes), 3)


@pytest.mark.parametrize("num", [0, 1, 10])
def test_an_array_is_filled_by_all_ranks_and_read_by_all(placed, num):
    array = NodeArray(placed, num, 3)
    begin, end = array.share
    array.array[begin:end] = np.arange(begin, end)[:, None]
    array.exchange()
    assert array.array[:, 0].tolist() == list(range(num))
    assert end - begin <= array.largest_share
    array.free()


def test_a_resumed_run_has_the_bits_of_one_without_a_stop(world, folder):
    settings = ["model.dropout=0.5", "model.input_dropout=0.3", "+data.num_dense=1"]
    whole, second = whole_and_resumed(made, closed, folder, settings, STEPS)
    (rows, dense), (expected_rows, expected) = closed(second), closed(whole)
    assert torch.equal(rows, expected_rows)
    assert all(torch.equal(value, expected[name]) for name, value in dense.items())
    if world.rank == 0:
        assert losses(folder / "cut") == losses(folder / "whole")


@pytest.mark.parametrize("input_norm", [False, True])
def test_a_batch_without_heads_changes_nothing(world, folder, input_norm):
    """The batches of all ranks in the first step, then rank 0's in the second."""
    how = f"+data.heads_left_out={BATCH * world.size + 1}", f"model.input_norm={input_norm}", "checkpoint.at_end=false"
    training = made(folder, *how, "steps=1", "task.exact=false")
    [table] = training.tables.values()
    before = table.peek(torch.arange(table.num_rows)).clone()
    dense_before = {name: value.detach().clone() for name, value in training.model.named_parameters()}
    training.run()
    rows, dense = closed(training)
    assert torch.equal(rows, before)
    assert all(torch.equal(value, dense_before[name]) for name, value in dense.items())
    training = made(folder / "on", *how, "steps=3")
    training.run()
    rows, _ = closed(training)
    assert not torch.equal(rows, before) and torch.isfinite(rows).all()


def test_at_s_10_a_run_learns_and_ends(world, folder):
    how = ["table.staleness=10", "table.cache.admit=all", "table.cache.capacity_fraction=0.5", "table.ranks_per_node=1"]
    training = made(folder, *how, "checkpoint.at_end=false", "steps=60")
    training.run()
    closed(training)
    if world.rank == 0:
        assert losses(folder)[-1] < 0.7 * losses(folder)[0]
