"""Models of several labels equal plain torch, sample by sample, exact at s = 0, also where labels are missing."""

import json

import numpy as np
import pytest
import torch
from click_features import Labels
from torch.nn.functional import binary_cross_entropy_with_logits, embedding

from hetmpi.checkpoint.manifest import read_manifest
from hetmpi.data.batch import concatenate
from hetmpi.errors import UserError
from hetmpi.export import write_torchscript
from hetmpi.metrics import auc
from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training
from hetmpi.trained.saved_model import dense_layers, dense_state, of_tensors
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi
BATCH, STEPS, LR = 16, 30, 0.05
SETTINGS = [
    "data._target_=click_features.Labels", "~data.scale", "~data.zipf", "~data.num_train", "~data.num_valid",
    "table.dim=4", "table.init_std=0.3", f"batch_size={BATCH}", f"steps={STEPS}", f"log.every_steps={STEPS}",
    "optim.rows=sgd", f"optim.rows_lr={LR}", "optim.dense=sgd", f"optim.dense_lr={LR}", "device=cpu", "seed=3",
]  # fmt: skip
MODELS = {
    "sharedbottom": ["model.hidden=[8]", "model.tower=[6]"],
    "mmoe": ["model.num_experts=3", "model.expert=[8]", "model.gate=[5]", "model.tower=[6]"],
    "ple": ["model.num_levels=2", "model.num_own=2", "model.num_shared=1", "model.expert=[8]", "model.tower=[]"],
}


def made(folder, *overrides):
    world = World()
    config = compose(world, [*SETTINGS, f"run.dir={folder}", *overrides])
    return Training(world, config, torch.device("cpu"), Spans())


@pytest.fixture
def folder(world, tmp_path):
    return world.comm.bcast(tmp_path)


def layers(dense, part, x, relu_at_end=False):
    """An MLP written out."""
    numbers = sorted({int(name[len(part) + 1 :].split(".")[0]) for name in dense if name.startswith(f"{part}.")})
    for number in numbers:
        x = x @ dense[f"{part}.{number}.weight"].T + dense[f"{part}.{number}.bias"]
        x = torch.relu(x) if relu_at_end or number < numbers[-1] else x
    return x


def mixed(dense, gate, x, outputs):
    weights = torch.softmax(layers(dense, f"{gate}.mlp", x), 1)
    return sum(weights[:, i : i + 1] * output for i, output in enumerate(outputs))


def of_sharedbottom(dense, x):
    return [layers(dense, "bottom", x, True)] * 2


def of_mmoe(dense, x):
    outputs = [layers(dense, f"experts.{i}", x, True) for i in range(3)]
    return [mixed(dense, f"gates.{label}", x, outputs) for label in range(2)]


def of_ple(dense, x):
    inputs = [x, x, x]
    for level in range(2):
        place = f"levels.{level}"
        outputs = [
            [layers(dense, f"{place}.experts.{part}.{i}", inputs[part], True) for i in range(num)]
            for part, num in enumerate([2, 2, 1])
        ]
        seen = [outputs[0] + outputs[2], outputs[1] + outputs[2], sum(outputs, [])]
        inputs = [mixed(dense, f"{place}.gates.{i}", inputs[i], seen[i]) for i in range(2 if level else 3)]
    return inputs


def logits_of(model, rows, dense, samples):
    fields = embedding(torch.from_numpy(samples.ids), rows).flatten(1)
    shared = globals()[f"of_{model}"](dense, torch.cat([fields, torch.from_numpy(samples.dense)], 1))
    return torch.cat([layers(dense, f"towers.towers.{label}", x) for label, x in enumerate(shared)], 1)


def loss_of(logits, label, weights):
    """Over the samples that have a label, divided by all."""
    label = torch.from_numpy(label)
    losses = binary_cross_entropy_with_logits(logits, label.nan_to_num(0.0), reduction="none")
    return (losses * ~label.isnan()).mean(0) @ torch.tensor(weights)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("more", [[], ["train.accumulate=3", "table.ranks_per_node=1", "+data.label_weights=[1,0.25]"]])
def test_rows_and_dense_layers_are_those_of_torch_after_30_steps(world, folder, model, more):
    training = made(folder, f"model={model}", *MODELS[model], *more, "checkpoint.at_end=false")
    [table] = training.tables.values()
    rows = table.peek(torch.arange(table.num_rows)).clone().requires_grad_()
    dense = {name: value.detach().clone().requires_grad_() for name, value in training.model.named_parameters()}
    optimizer = torch.optim.SGD([rows, *dense.values()], LR)
    training.run()
    found, of_run = table.peek(torch.arange(table.num_rows)), dict(training.model.named_parameters())
    source, weights = Labels(3), [1, 0.25] if more else [1.0, 1.0]
    for step in range(STEPS if world.rank == 0 else 0):
        begin = step * BATCH * world.size
        samples = concatenate([source.train(begin + r * BATCH, begin + (r + 1) * BATCH) for r in range(world.size)])
        optimizer.zero_grad()
        loss_of(logits_of(model, rows, dense, samples), samples.label, weights).backward()
        optimizer.step()
    if world.rank == 0:
        assert (found - rows).abs().max() < 1e-5
        assert all((of_run[name] - dense[name]).abs().max() < 1e-5 for name in dense)
    world.comm.Barrier()
    training.log and training.log.close()
    training.close()


def test_metrics_are_those_of_the_samples_that_have_a_label(world, folder):
    training = made(
        folder,
        "model=mmoe",
        *MODELS["mmoe"],
        "eval.every_steps=10",
        "eval.metric=auc_buy",
        "checkpoint.best=calibration_buy",
    )
    training.run()
    [table] = training.tables.values()
    samples = Labels(3).valid(0, Labels.num_valid)
    batch = training.task.batches(torch.device("cpu"))(samples)
    training.model.eval()
    with torch.no_grad():
        logits = training.model(table.peek(*batch.keys.values()), batch).numpy()
    training.log and training.log.close()
    training.close()
    if world.rank == 0:
        summary = json.loads((folder / "summary.json").read_text())
        each = []
        for i, name in enumerate(Labels.labels):
            has = ~np.isnan(samples.label[:, i])
            assert 0 < has.sum() < len(has)
            each.append(auc(samples.label[has, i], logits[has, i]))
            assert summary[f"auc_{name}"] == pytest.approx(each[-1], abs=1e-9)
        assert summary["auc"] == pytest.approx(np.mean(each), abs=1e-9)


def test_an_export_has_a_logit_for_each_label(world, folder):
    training = made(folder, "model=ple", *MODELS["ple"])
    training.run()
    training.log and training.log.close()
    training.close()
    if world.rank == 0:
        [path] = (folder / "checkpoints").glob("step-*")
        manifest = read_manifest(path)
        model, inputs = dense_layers(path, manifest, dense_state(path, manifest))  # inputs of two samples
        write_torchscript(folder / "dense", of_tensors(model), inputs)
        assert torch.jit.load(folder / "dense")(*inputs).shape == (2, 2)


WRONG = {
    "model=wdl: sharedbottom, mmoe and ple are for several labels": ["model=wdl"],
    "model=mmoe: sharedbottom, mmoe and ple are for several labels": [
        "model=mmoe", "data._target_=click_features.OneLabel",
    ],
    "model=two_tower is not for hetmpi.tasks.ctr.ClickThroughRate": ["model=two_tower", "model.item=[item]"],
    "model=graphsage is not for hetmpi.tasks.ctr.ClickThroughRate": ["model=graphsage"],
    "eval.metric=auc_bought must be a metric of the task": ["model=mmoe", "eval.metric=auc_bought"],
    "MMoE: model.num_experts must be at least 1, got 0": ["model=mmoe", "model.num_experts=0"],
    "eval.metric=auc_gone": ["model=mmoe", "eval.metric=auc_gone", "eval.every_steps=10", "eval.patience=1"],
}  # fmt: skip


@pytest.mark.parametrize("said", WRONG)
def test_what_does_not_fit_is_refused(world, folder, said):
    with pytest.raises(UserError, match=said):
        made(folder, *WRONG[said])
