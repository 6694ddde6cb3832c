"""Labels of several classes: read alike in any type, with the metrics of their definition, or refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from launch import CLICK_MODELS, SEQUENCE_MODELS
from omegaconf import OmegaConf

from hetmpi.data.tabular import DataError, Encoder, Tabular
from hetmpi.data.tabular.saved import encoder_from
from hetmpi.errors import UserError
from hetmpi.inspect import inspected
from hetmpi.metrics import class_log_loss, macro_auc
from hetmpi.run import build
from hetmpi.tasks.ctr import ClickThroughRate
from hetmpi.tasks.losses import ClassLoss

NUM = 300
RNG = np.random.default_rng(0)
GRADES = RNG.choice([2, 10, -1], NUM)
COLOURS = [("red", "green", " dark blue")[i % 3] for i in range(NUM)]


def written(folder, form, label):
    path = folder / f"log.{form}"
    columns = {"user": [f"u{i % 7}" for i in range(NUM)], "row": np.arange(NUM) / 1.0, "y": label}
    if form == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        lines = [",".join(map(str, row)) for row in zip(*columns.values())]
        path.write_text("\n".join(["user,row,y", *lines]) + "\n")
    return path


def source_of(path, valid=0.3, report=lambda line: None, **settings):
    rules = [{"name": "row", "transform": "none"}]
    cache = str(path.parent / "cache")
    source = Tabular(str(path), 0, "y", valid, rules, label_kind="classes", cache=cache, **settings)
    source.prepare(0, 1, lambda: None, report)
    return source


def names_of(source, samples):
    return [source.classes[int(number)] for number in samples.label]


@pytest.mark.parametrize("form, label, expected", [
    ("csv", GRADES, ("-1", "2", "10")), ("parquet", GRADES, ("-1", "2", "10")),
    ("parquet", GRADES / 1.0, ("-1", "2", "10")), ("csv", GRADES / 1.0, ("-1", "2", "10")),
    ("csv", COLOURS, ("dark blue", "green", "red")), ("parquet", COLOURS, ("dark blue", "green", "red")),
    ("parquet", pa.array(COLOURS).dictionary_encode(), ("dark blue", "green", "red")),
    ("parquet", GRADES > 1, ("false", "true")), ("csv", GRADES > 1, ("false", "true")),
    ("csv", [("TRUE", "true", "False")[i % 3] for i in range(NUM)], ("false", "true")),
])  # fmt: skip
def test_classes_are_the_distinct_labels_in_their_order(tmp_path, form, label, expected):
    told = []
    source = source_of(written(tmp_path, form, label), report=told.append)
    assert source.classes == expected and any(f"{len(expected)} classes of y: {expected[0]} (" in line for line in told)
    texts = [str(value).strip().lower().removesuffix(".0") for value in (
        label.to_pylist() if isinstance(label, pa.Array) else label)]  # fmt: skip
    for samples in (source.train(0, source.num_train), source.valid(0, source.num_valid)):
        assert names_of(source, samples) == [texts[int(row)] for row in samples.dense[:, 0]]
    assert encoder_from(source.encoder.to_arrays()).classes == expected


def test_held_out_classes_that_no_training_row_has_are_said_and_left_out_of_metrics(tmp_path):
    label, told = list(GRADES), []
    label[-5:] = [77] * 5
    path = written(tmp_path, "csv", label)
    source = source_of(path, {"column": "row", "last": 50}, report=told.append)
    assert any("5 held-out rows have classes that no training row has, such as 77" in line for line in told)
    samples = source.valid(0, source.num_valid)
    assert np.isnan(samples.label).sum() == 5 and source.classes == ("-1", "2", "10")
    task = ClickThroughRate(source, ClassLoss())
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    columns = task.predict(lambda rows, batch: logits, {"table": None}, task.batches(torch.device("cpu"))(samples))
    has = ~np.isnan(samples.label)
    expected = np.mean(logits.numpy()[has].argmax(1) == samples.label[has])
    figures = task.figures(list(columns))
    assert figures["accuracy"] == pytest.approx(expected)
    assert list(figures) == list(task.figures([])) == ["accuracy", "log_loss", "auc"]
    assert task.model_arguments(4)["num_classes"] == 3 and task.without_figures(list(columns)) is None


def test_metrics_that_lack_because_of_predictions_say_so(tmp_path):
    task = ClickThroughRate(source_of(written(tmp_path, "csv", list(GRADES))), ClassLoss())
    logits = np.full((4, len(task.classes)), np.nan, np.float32)
    expected = f"no AUC: {logits.size} of {logits.size} predictions are NaN"
    assert task.without_figures([np.array([0, 1, 1, 0], np.float32), logits]) == expected


def test_the_metrics_of_classes_are_those_of_their_definition():
    label, logits = RNG.integers(0, 4, 60), RNG.normal(size=(60, 5))  # no sample has the last class
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert class_log_loss(label, logits) == pytest.approx(-np.log(probability[np.arange(60), label]).mean())
    aucs = []
    for one in range(4):
        own, other = probability[label == one, one], probability[label != one, one]
        aucs.append(np.mean([(p > n) + (p == n) / 2 for p in own for n in other]))
    assert macro_auc(label, logits) == pytest.approx(np.mean(aucs))
    weight = RNG.integers(0, 3, 60) / 1.0
    copies = np.repeat(np.arange(60), weight.astype(int))
    for metric in (class_log_loss, macro_auc):
        assert metric(label, logits, weight) == pytest.approx(metric(label[copies], logits[copies]))
    assert np.isnan(macro_auc(np.zeros(3, int), logits[:3])) and np.isnan(class_log_loss(label[:0], logits[:0]))


def test_the_loss_of_classes_is_the_cross_entropy_with_weights_of_classes_and_samples():
    logits, label = torch.from_numpy(RNG.normal(size=(9, 3))), torch.from_numpy(RNG.integers(0, 3, 9))
    weights, factors = torch.from_numpy(RNG.random(9)), torch.tensor([1.0, 5.0, 1.0])
    loss = ClassLoss()
    assert torch.equal(loss(logits, label), torch.nn.functional.cross_entropy(logits, label))
    loss = ClassLoss({"rare": 5})
    loss.name_classes(["a", "rare", "b"])
    each = -torch.log_softmax(logits, 1)[torch.arange(9), label]
    assert torch.allclose(loss(logits, label), (factors[label] * each).mean())
    assert torch.allclose(loss(logits, label, weights), (weights * factors[label] * each).mean())


@pytest.mark.parametrize(
    "given, words",
    [
        ([1, 2], "a number for each of the 3 classes"),
        ({"c": 1}, "c is no class"),
        ([1, -1, 0], "must be a number of at least 0"),
        ("12", "a number for each"),
    ],
)
def test_weights_of_classes_that_do_not_fit_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        ClassLoss(given).name_classes(["a", "rare", "b"])


def test_labels_that_are_no_classes_are_refused(tmp_path):
    with pytest.raises(DataError, match="all training rows have the label 1, at least two"):
        source_of(written(tmp_path, "csv", [1] * NUM))
    with pytest.raises(DataError, match="(?s)missing label 1.*line 5, column y"):
        source_of(written(tmp_path, "csv", ["a", "b", "a", "NA"] + ["b"] * (NUM - 4)))
    with pytest.raises(UserError, match="label_kind=classes needs one label"):
        Tabular(str(tmp_path / "log.csv"), 0, ["y", "user"], label_kind="classes")
    with pytest.raises(UserError, match="eval.group=user is for labels 0 or 1, data.label_kind is classes"):
        ClickThroughRate(source_of(written(tmp_path, "csv", COLOURS)), ClassLoss(), group="user")


@pytest.mark.parametrize("name", [*CLICK_MODELS, *SEQUENCE_MODELS])
def test_models_of_clicks_have_a_logit_per_class_or_are_refused(name):
    config = OmegaConf.create({"model": {"_target_": ""}, "model_name": name, "task": {"_target_": "ctr"}})
    config.model = OmegaConf.load(build.Path(build.__file__).parents[1] / f"conf/model/{name}.yaml")
    arguments = {"num_fields": 3, "num_dense": 2, "dim": 4}
    build.check_takes(config, arguments)
    if name in build.OF_CLASSES:
        build.check_takes(config, {**arguments, "num_classes": 5})
        settings = {"target": ["a"], "history": ["b"]} if name == "din" else {}
        model = build.make(OmegaConf.merge(config.model, settings), **arguments, num_classes=5)
        assert model.logits(torch.zeros(2, 5)).shape == (2, 5) and model.num_outputs == 5
    else:
        with pytest.raises(UserError, match=f"model={name} has one logit per label.* model=wdl, dnn, dcn, dcnv2"):
            build.check_takes(config, {**arguments, "num_classes": 5})


def test_labels_beyond_clicks_are_told_of_the_kinds_that_take_them(tmp_path):
    with pytest.raises(DataError, match="or data.label_kind=number or classes"):
        Tabular(str(written(tmp_path, "csv", GRADES)), 0, "y", cache=str(tmp_path)).prepare(0, 1, lambda: None)
    with pytest.raises(DataError, match="or data.label_kind=classes"):
        Tabular(str(written(tmp_path, "csv", COLOURS)), 0, "y", cache=str(tmp_path)).prepare(0, 1, lambda: None)


def test_inspect_proposes_classes_for_texts_of_several_values(tmp_path):
    assert "label_kind: classes" in inspected(str(written(tmp_path, "csv", COLOURS)), "y")


def test_a_checkpoint_of_other_classes_is_told_apart(tmp_path):
    encoder = source_of(written(tmp_path, "csv", COLOURS)).encoder
    other = Encoder(encoder.reading, encoder.columns, encoder.coders, encoder.moments, encoder.scalings, ("a", "b"))
    assert encoder.difference(other) == "its classes were dark blue, green, red, now they are a, b"
    with pytest.raises(UserError, match="2 to 10,000 different classes"):
        encoder_from(Encoder(encoder.reading, encoder.columns, encoder.coders, encoder.moments, encoder.scalings,
                             ("a", "a")).to_arrays())  # fmt: skip
