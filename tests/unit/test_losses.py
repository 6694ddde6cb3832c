"""Losses: each takes what some tasks give, and any other is refused before training."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate
from launch import ROOT
from omegaconf import OmegaConf
from pairs import Pairs
from small_graph import SmallGraph

from hetmpi.data.tabular.reading import LABEL_KINDS
from hetmpi.data.triples.synthetic import SyntheticTriples
from hetmpi.errors import UserError
from hetmpi.run import build
from hetmpi.tasks.ctr import ClickThroughRate
from hetmpi.tasks.link import LinkPrediction
from hetmpi.tasks.losses import (
    CANDIDATES,
    CLASSES,
    CLICK,
    FITTING,
    LABELS,
    NUMBER,
    PROBABILITY,
    BinaryLoss,
    SquaredLoss,
    taken_by,
)
from hetmpi.tasks.node import NodeClassification
from hetmpi.tasks.retrieval import Retrieval

LOSSES = sorted(path.stem for path in (ROOT / "conf/loss").glob("*.yaml"))
TASKS = sorted(path.stem for path in (ROOT / "conf/task").glob("*.yaml"))
NOT_FOR_CTR = {"none"}  # of label_kind


def loss_of(name, **settings):
    return instantiate(OmegaConf.merge(OmegaConf.load(ROOT / f"conf/loss/{name}.yaml"), settings))


def clicks(label_kind):
    classes = ("a", "b", "c", "d") if label_kind == "classes" else ()
    return SimpleNamespace(
        name="clicks", num_fields=2, num_dense=1, num_rows=10, label_kind=label_kind, classes=classes
    )


def pairs(label_kind):
    source = Pairs()
    source.label_kind = label_kind
    return source


@cache
def triples():
    source = SyntheticTriples(0, 30, 3, 200)
    source.prepare(0, 1, lambda: None)
    return source


def makers():
    """Name -> the task's constructor on small data, and the input that it gives a loss; None if data are refused."""
    found = {
        "link": (lambda loss: LinkPrediction(triples(), loss), CANDIDATES),
        "node": (lambda loss: NodeClassification(SmallGraph(0), loss), CLASSES),
        "node, several labels": (lambda loss: NodeClassification(SmallGraph(0, is_multilabel=True), loss), LABELS),
    }
    for kind in LABEL_KINDS:
        given = None if kind in NOT_FOR_CTR else kind
        found[f"ctr, {kind}"] = (lambda loss, kind=kind: ClickThroughRate(clicks(kind), loss), given)
        given = CANDIDATES if kind == "none" else None
        found[f"retrieval, {kind}"] = (lambda loss, kind=kind: Retrieval(pairs(kind), loss), given)
    return found


def inputs_of(given):
    """Logits and labels of three samples as a task gives them."""
    label = torch.tensor([0.0, 1.0, 1.0])
    return {
        CLICK: (torch.zeros(3), label),
        NUMBER: (torch.zeros(3), label),
        PROBABILITY: (torch.zeros(3), label / 2),
        CLASSES: (torch.zeros(3, 4), torch.tensor([0, 3, 1])),
        LABELS: (torch.zeros(3, 4), torch.ones(3, 4)),
        CANDIDATES: (torch.zeros(3), torch.zeros(3, 5)),
    }[given]


def test_every_task_of_the_settings_is_tried():
    assert {name.split(",")[0] for name in makers()} == set(TASKS)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", makers())
def test_a_loss_fits_a_task_and_its_labels_or_is_refused_in_one_line(name, loss):
    make, given = makers()[name]
    if given is not None and loss in FITTING[given]:
        task = make(loss_of(loss))
        assert task.criterion(*inputs_of(given)).shape == ()
        return
    with pytest.raises(UserError) as refusal:
        make(loss_of(loss))
    words = str(refusal.value)
    assert "\n" not in words
    assert given is None or all(f"loss={fitting}" in words for fitting in FITTING[given]), words


def test_the_losses_that_are_listed_are_those_of_the_settings_that_take_it():
    assert sorted({name for names in FITTING.values() for name in names}) == LOSSES
    for given, names in FITTING.items():
        assert set(names) == {name for name in LOSSES if given in taken_by(loss_of(name))}


class Own(torch.nn.Module):
    def forward(self, logits, labels):
        return (logits - labels).square().mean()


class OwnOfNumbers(Own):
    takes = "number"


class OfUnknown(Own):
    takes = ("clicks",)


def test_a_loss_of_ones_own_fits_unless_it_declares_other_inputs():
    ClickThroughRate(clicks("click"), Own())
    ClickThroughRate(clicks("click"), lambda logits, labels: (logits - labels).square().mean())
    ClickThroughRate(clicks("number"), OwnOfNumbers())
    with pytest.raises(UserError, match="OwnOfNumbers takes predictions .* choose loss=bce, or a loss of your own"):
        ClickThroughRate(clicks("click"), OwnOfNumbers())
    with pytest.raises(UserError, match="OfUnknown: takes must be of click, number, .* got .'clicks'"):
        ClickThroughRate(clicks("click"), OfUnknown())


@pytest.mark.parametrize("kind", [torch.nn.BCELoss, torch.nn.NLLLoss, torch.nn.CrossEntropyLoss, torch.nn.HuberLoss])
def test_losses_of_torch_that_take_no_logits_of_clicks_are_refused(kind):
    with pytest.raises(UserError, match=f"{kind.__name__} takes .*choose loss=bce"):
        ClickThroughRate(clicks("click"), kind())


def test_the_binary_loss_is_that_of_torch_with_weights_of_label_1_and_of_samples():
    rng = torch.Generator().manual_seed(0)
    logits, label, weights = torch.randn(9, generator=rng), torch.rand(9, generator=rng), torch.rand(9, generator=rng)
    assert torch.equal(BinaryLoss()(logits, label), torch.nn.BCEWithLogitsLoss()(logits, label))
    of_torch = torch.nn.BCEWithLogitsLoss(weight=weights, pos_weight=torch.tensor(3.0))
    assert torch.allclose(BinaryLoss(pos_weight=3)(logits, label, weights), of_torch(logits, label))
    assert torch.equal(SquaredLoss()(logits, label), torch.nn.MSELoss()(logits, label))
    expected = (weights * (logits - label) ** 2).mean()
    assert torch.allclose(SquaredLoss()(logits, label, weights), expected)


@pytest.mark.parametrize("pos_weight", [-1, float("nan"), float("inf"), "3", True])
def test_a_weight_of_label_1_that_is_no_number_of_at_least_0_is_refused(pos_weight):
    with pytest.raises(UserError, match="loss.pos_weight must be a number of at least 0"):
        BinaryLoss(pos_weight)


def test_weighted_samples_need_a_loss_that_takes_weights():
    source = clicks("click")
    source.sample_weight = "w"
    ClickThroughRate(source, BinaryLoss())
    ClickThroughRate(source, lambda logits, labels, weights: (weights * (logits - labels) ** 2).mean())
    with pytest.raises(UserError, match="data.sample_weight needs a loss that takes weights.* Own does not"):
        ClickThroughRate(source, Own())


def test_a_setting_that_a_loss_of_torch_cannot_take_is_refused_in_one_line():
    config = OmegaConf.create({"_target_": "torch.nn.BCEWithLogitsLoss", "pos_weight": 3})
    with pytest.raises(UserError, match="torch.nn.BCEWithLogitsLoss: cannot assign 'int' object to buffer"):
        build.make(config)
