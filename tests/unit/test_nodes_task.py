"""Classes of nodes without MPI's tables: layers against matrices, losses, metrics, checks of a source's samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from launch import NODE_MODELS, ROOT
from node_runs import mean_of
from omegaconf import OmegaConf
from small_graph import SmallGraph

from hetmpi.data.batch import Bag, SamplesError
from hetmpi.data.features import TABLE
from hetmpi.data.graph.samples import Block
from hetmpi.errors import UserError
from hetmpi.layers import segment_mean
from hetmpi.metrics import accuracy, macro_f1, micro_f1
from hetmpi.models.gat import GAT
from hetmpi.models.gcn import GCN
from hetmpi.models.graphsage import GraphSAGE
from hetmpi.tasks.node import ClassLoss, NodeClassification

CPU = torch.device("cpu")


def task_of(**settings):
    return NodeClassification(SmallGraph(0, **settings), ClassLoss())


def build(name, task, dim=4, **settings):
    """A model built from conf/model/<name>.yaml."""
    torch.manual_seed(0)
    config = OmegaConf.merge(OmegaConf.load(ROOT / f"conf/model/{name}.yaml"), {"hidden": 8, **settings})
    return instantiate(config, **task.model_arguments(dim))


def block_of(adjacency):
    """The block of a matrix (n_dst, n_src) of edge counts."""
    lists = [np.repeat(np.arange(len(row)), row) for row in adjacency]
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in lists])])
    return Block(torch.from_numpy(offsets), torch.from_numpy(np.concatenate([np.empty(0, np.int64), *lists])))


def weighted_block(weights):
    """The block of a matrix (n_dst, n_src) of weights, 0 for no edge."""
    block = block_of((weights > 0).astype(int))
    return Block(block.offsets, block.index, torch.from_numpy(weights[weights > 0]).float())


def random_edges(num_destinations=6, num_sources=10):
    """Edge counts, with a repeated edge, and a destination without any."""
    edges = np.random.default_rng(0).integers(0, 3, (num_destinations, num_sources))
    edges[2] = 0
    return edges


def normalised(edges):
    return torch.from_numpy(edges / np.maximum(1, edges.sum(1, keepdims=True))).float()


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_segment_mean_is_that_of_an_embedding_bag_and_so_is_its_gradient(needs_grad):
    block, x = block_of(random_edges()), torch.randn(10, 5, requires_grad=needs_grad)
    found = segment_mean(x, block.index, block.offsets)
    assert torch.allclose(found, mean_of(x, block.offsets, block.index), atol=1e-6)
    if needs_grad:
        factors = torch.randn(6, 5)
        (grad,) = torch.autograd.grad((found * factors).sum(), x)
        assert torch.allclose(grad, normalised(random_edges()).T @ factors, atol=1e-6)


def test_segments_without_rows_have_means_of_zeros():
    x = torch.empty(0, 3, requires_grad=True)
    found = segment_mean(x, torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    found.sum().backward()
    assert found.tolist() == [[0, 0, 0], [0, 0, 0]] and x.grad.shape == (0, 3)


def test_a_layer_of_graphsage_is_that_of_matrices():
    edges, x, model = random_edges(), torch.randn(10, 4), GraphSAGE(4, 0, 3, 1, hidden=1)
    both = torch.cat([model.own[0].weight, model.neighbours[0].weight], 1)
    expected = torch.cat([x[:6], normalised(edges) @ x], 1) @ both.T + model.own[0].bias
    assert torch.allclose(model(x, (block_of(edges),)), expected, atol=1e-6)


def test_a_layer_of_gcn_is_the_product_of_adjacency_features_and_weights():
    edges, x, model = random_edges(), torch.randn(10, 4), GCN(4, 0, 3, 1, hidden=1)
    torch.nn.init.normal_(model.linear[0].bias)
    expected = normalised(edges + np.eye(6, 10, dtype=int)) @ model.linear[0](x)
    assert torch.allclose(model(x, (block_of(edges),)), expected, atol=1e-6)


def test_a_layer_of_gat_is_a_softmax_over_edges():
    edges, x, model = random_edges(), torch.randn(10, 4), GAT(4, 0, 3, 1, hidden=4, heads=2)
    counts, value = edges + np.eye(6, 10, dtype=int), model.linear[0](x).view(10, 2, 3)
    of_source, of_destination = ((value * a[0]).sum(-1) for a in (model.of_source, model.of_destination))
    score = torch.nn.functional.leaky_relu(of_destination[:6, None] + of_source[None], 0.2)  # (6, 10, 2)
    weight = torch.from_numpy(counts)[:, :, None] * score.exp()
    weight = weight / weight.sum(1, keepdim=True)
    expected = torch.einsum("dsh,shw->dhw", weight, value).mean(1)
    assert torch.allclose(model(x, (block_of(edges),)), expected, atol=1e-6)


@pytest.mark.parametrize("name", NODE_MODELS)
def test_an_edge_of_weight_w_is_as_w_edges(name):
    edges, x = random_edges(), torch.randn(10, 4)
    model = build(name, task_of()).eval()
    counted, weighted = (model.layer(0, x, make(edges)) for make in (block_of, weighted_block))
    assert torch.allclose(counted, weighted, atol=1e-6)
    assert not torch.allclose(counted, model.layer(0, x, block_of((edges > 0).astype(int))), atol=1e-2)


def test_weights_of_edges_are_those_of_a_matrix():
    weights = random_edges() * np.random.default_rng(1).random((6, 10))
    x = torch.randn(10, 4, requires_grad=True)
    matrix = torch.from_numpy(weights).float()
    sage, gcn = GraphSAGE(4, 0, 3, 1, hidden=1), GCN(4, 0, 3, 1, hidden=1)
    means = matrix @ x / matrix.sum(1, keepdim=True).clamp(min=1e-9)
    of_sage = sage.own[0](x[:6]) + sage.neighbours[0](means)
    of_gcn = gcn.linear[0]((matrix @ x + x[:6]) / (1 + matrix.sum(1, keepdim=True)))
    for model, expected in ((sage, of_sage), (gcn, of_gcn)):
        found = model(x, (weighted_block(weights),))
        assert torch.allclose(found, expected, atol=1e-6)
        grads = [torch.autograd.grad(logits.square().sum(), x, retain_graph=True)[0] for logits in (found, expected)]
        assert torch.allclose(*grads, atol=1e-5)


@pytest.mark.parametrize("name", NODE_MODELS)
def test_fan_outs_beyond_all_degrees_without_replacement_are_inference_over_all_neighbours(name):
    task = task_of(fanout=(50, 50), replace=False, num_dense=2)
    source, model = task.source, build(name, task).eval()
    x = torch.randn(source.num_nodes, 6)
    whole = Block(*map(torch.from_numpy, source.neighbours(0, source.num_nodes)))
    expected = model.layer(1, model.layer(0, x, whole), whole)
    samples = source.train(0, 40)
    batch = task.batches(CPU)(samples)
    assert torch.allclose(model(x[samples.nodes], batch.blocks), expected[samples.nodes[:40]], atol=1e-5)


@pytest.mark.parametrize("name", NODE_MODELS)
@pytest.mark.parametrize("settings", [{}, {"num_dense": 2}, {"is_multilabel": True}, {"fanout": (3, 2, 2)}])
def test_every_model_learns_the_classes(name, settings):
    task = task_of(**settings)
    model, rows = build(name, task, dropout=0.1, input_dropout=0.1), torch.nn.Parameter(torch.randn(160, 4))
    optimizer = torch.optim.Adam([rows, *model.parameters()], 0.02)
    losses = []
    for step in range(40):
        batch = task.batches(CPU)(task.source.train(32 * step, 32 * step + 32))
        loss = task.loss(model, {TABLE: rows[batch.keys[TABLE]]}, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    least = 0.8 if task.source.is_multilabel else 0.6  # label 0 is drawn at random
    assert np.mean(losses[-5:]) < least * losses[0], losses


def test_heads_without_a_label_count_in_the_mean_and_have_no_loss_themselves():
    task = task_of()
    model, samples = build("graphsage", task), task.source.train(0, 16)
    batch = task.batches(CPU)(samples)
    rows = {TABLE: torch.randn(len(batch.keys[TABLE]), 4, requires_grad=True)}
    logits = model(segment_mean(rows[TABLE], batch.index, batch.offsets), batch.blocks)
    batch.label[3:] = -1
    expected = torch.nn.functional.cross_entropy(logits[:3], batch.label[:3], reduction="sum") / 16
    assert task.loss(model, rows, batch).item() == pytest.approx(expected.item(), rel=1e-5)
    batch.label[:] = -1
    loss = task.loss(model, rows, batch)
    loss.backward()
    assert loss.item() == 0 and not rows[TABLE].grad.any()


def test_metrics_are_those_of_their_definitions():
    label, predicted = np.array([0, 0, 1, 1, 4]), np.array([0, 1, 1, 1, 5])
    assert accuracy(label, predicted) == 0.6
    assert macro_f1(label, predicted) == pytest.approx((2 / 3 + 4 / 5 + 0 + 0) / 4)
    label, predicted = np.array([[1, 1, 0], [0, 1, 0]], bool), np.array([[1, 0, 0], [0, 1, 0]], bool)
    assert micro_f1(label, predicted) == pytest.approx(2 * 2 / (2 * 2 + 1))
    assert macro_f1(label, predicted) == pytest.approx((1 + 2 / 3) / 2)


@pytest.mark.parametrize("is_multilabel", [False, True])
def test_without_held_out_nodes_metrics_are_undefined(is_multilabel):
    task = task_of(is_multilabel=is_multilabel)
    assert set(task.figures([]).values()) == {None}
    assert "no held-out nodes" in task.without_figures([])


def changed(samples, block=None, **arrays):
    """The samples with other arrays; block: (hop, name, array)."""
    if block is not None:
        hop, name, array = block
        blocks = list(samples.blocks)
        blocks[hop] = replace(blocks[hop], **{name: array})
        arrays["blocks"] = tuple(blocks)
    return replace(samples, **arrays)


GOOD = SmallGraph(0, num_dense=2).train(0, 8)
WRONG = {
    "no samples": (lambda: [1, 2], "must be NodeSamples, got list"),
    "nodes of 32 bits": (lambda: changed(GOOD, nodes=GOOD.nodes.astype(np.int32)), "nodes must be int64"),
    "numbers of another width": (lambda: changed(GOOD, dense=GOOD.dense[:, :1]), "dense must be float32 of shape"),
    "labels beyond the classes": (lambda: changed(GOOD, label=GOOD.label + 9), r"label must lie in \[-1, 3\)"),
    "labels as numbers": (lambda: changed(GOOD, label=GOOD.label.astype(np.float32)), "label must be int64"),
    "a missing block": (lambda: changed(GOOD, blocks=GOOD.blocks[:1]), "must be 2 blocks"),
    "places beyond the sources": (
        lambda: changed(GOOD, block=(0, "index", GOOD.blocks[0].index + 10**6)), r"blocks\[0\].index must lie in"
    ),
    "offsets that fall": (
        lambda: changed(GOOD, block=(1, "offsets", GOOD.blocks[1].offsets[::-1].copy())), "must rise from 0 to"
    ),
    "heads that are not the first destinations": (
        lambda: changed(GOOD, label=np.append(GOOD.label, 0)), r"blocks\[0\].offsets must be int64 of shape \(10,\)"
    ),
    "ids of fewer nodes": (
        lambda: changed(GOOD, ids=Bag(GOOD.ids.values, GOOD.ids.offsets[:-1])), "ids.offsets must be int64 of shape"
    ),
}  # fmt: skip


@pytest.mark.parametrize("make, message", WRONG.values(), ids=WRONG)
def test_wrong_samples_of_a_source_are_refused(make, message):
    with pytest.raises(SamplesError, match=message):
        task_of(num_dense=2).batches(CPU)(make())


def test_data_and_losses_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="one class per node gives the loss .* choose loss=classes"):
        NodeClassification(SmallGraph(0), torch.nn.BCEWithLogitsLoss())
    NodeClassification(SmallGraph(0, is_multilabel=True), torch.nn.BCEWithLogitsLoss())
    with pytest.raises(UserError, match="task.exact must be true or false"):
        NodeClassification(SmallGraph(0), ClassLoss(), exact=1)
    with pytest.raises(ValueError, match="multiple of heads"):
        GAT(4, 0, 3, 2, hidden=8, heads=3)
    with pytest.raises(ValueError, match=r"x must be \(N, 4\) with 2 blocks"):
        build("gcn", task_of())(torch.zeros(3, 5), ())


def test_dense_numbers_that_are_not_finite_are_named():
    task = task_of(num_dense=2)
    samples = task.source.train(0, 4)
    samples.dense[1, 1] = np.nan
    assert "number 1 = nan" in task.not_finite(task.batches(CPU)(samples))
