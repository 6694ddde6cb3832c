"""data.sample_weight and labels between 0 and 1: read as they are in the file, in loss and metrics, or refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hetmpi.data.tabular import DataError, Tabular
from hetmpi.errors import UserError
from hetmpi.run.config import resolved
from hetmpi.tasks.ctr import ClickThroughRate
from hetmpi.tasks.losses import BinaryLoss, SquaredLoss

CPU = torch.device("cpu")
NUM = 400


def columns_of(weights=None):
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 4, NUM) / 1.0 if weights is None else weights
    labels = {"click": rng.integers(0, 2, NUM), "share": rng.integers(0, 5, NUM) / 4, "price": rng.normal(size=NUM)}
    return {"user": [f"u{i % 9}" for i in range(NUM)], "row": np.arange(NUM) / 1.0, "w": weights, **labels}


def written(folder, form, columns):
    path = folder / f"log.{form}"
    if form == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        names, values = list(columns), zip(*columns.values())
        path.write_text("\n".join([",".join(names), *(",".join(map(str, row)) for row in values)]) + "\n")
    return path


def source_of(path, label="click", kind="click", weight="w", **settings):
    drop = [name for name in ("click", "share", "price", "w") if name not in (label, weight)]
    rules = [{"name": "row", "transform": "none"}, *({"name": name, "kind": "drop"} for name in drop)]
    source = Tabular(
        str(path), 0, label, 0.5, rules, label_kind=kind, sample_weight=weight, cache=str(path.parent / "c"), **settings
    )
    source.prepare(0, 1, lambda: None, lambda line: None)
    return source


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_weights_are_those_of_the_rows_and_no_feature(tmp_path, form):
    columns = columns_of()
    source = source_of(written(tmp_path, form, columns))
    assert [feature.name for feature in source.features] == ["user"] and source.dense_names == ["row"]
    for samples in (source.train(0, source.num_train), source.valid(0, source.num_valid)):
        assert np.array_equal(samples.weight, columns["w"][samples.dense[:, 0].astype(int)])
    again = Tabular(source.folder, 0, columns=[{"name": "row", "transform": "none"}])
    again.rules = source.rules
    again.prepare(0, 1, lambda: None, lambda line: None)
    assert again.sample_weight == "w" and again.valid(0, 3).weight.shape == (3,)


@pytest.mark.parametrize("label, kind, loss", [("click", "click", BinaryLoss()), ("price", "number", SquaredLoss()),
                                               ("share", "probability", BinaryLoss())])  # fmt: skip
def test_a_weight_of_3_is_as_three_rows(tmp_path, label, kind, loss):
    columns = columns_of()
    source = source_of(written(tmp_path, "parquet", columns), label, kind)
    task, plain = ClickThroughRate(source, loss), source_of(written(tmp_path, "csv", columns), label, kind, None)
    samples = source.valid(0, source.num_valid)
    copies = samples[np.repeat(np.arange(len(samples)), samples.weight.astype(int))]
    copies.weight = None
    scores = torch.from_numpy(np.sin(np.arange(NUM)).astype(np.float32))
    found = []
    for of_task, part in ((task, samples), (ClickThroughRate(plain, loss), copies)):
        batch = of_task.batches(CPU)(part)
        logits = scores[part.dense[:, 0].astype(int)]
        value = of_task.loss(lambda rows, batch, logits=logits: logits, {"table": None}, batch).item() * len(part)
        columns = of_task.predict(lambda rows, batch, logits=logits: logits, {"table": None}, batch)
        found.append({"loss": value, **of_task.figures(list(columns))})
    assert found[0].pop("teacher_auc", None) is None and found[1].pop("teacher_auc", None) is None
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_parts_of_a_batch_have_the_weights_of_their_samples(tmp_path):
    source = source_of(written(tmp_path, "parquet", columns_of()))
    task = ClickThroughRate(source, BinaryLoss())
    batch = task.batches(CPU)(source.train(0, 64))
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0))
    whole = task.loss(lambda rows, batch: logits, {"table": None}, batch)
    parts, begin = [], 0
    for part, share in task.split(batch, 3):
        own = logits[begin : begin + len(part.label)]
        parts.append(task.loss(lambda rows, batch, own=own: own, {"table": None}, part) * share)
        begin += len(own)
    assert torch.allclose(torch.stack(parts).sum(), whole)


BAD = {"negative": -0.5, "infinite": np.inf, "missing": np.nan}


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_weights_that_are_negative_missing_or_not_finite_are_refused_with_their_row(tmp_path, form, value):
    weights = np.ones(NUM)
    weights[7] = value
    place = "line 9" if form == "csv" else "row 8"
    with pytest.raises(DataError, match=f"(?s)bad weight 1.*{place}, column w: .* is no weight"):
        source_of(written(tmp_path, form, columns_of(weights)))


def test_a_weight_that_is_no_column_or_a_label_is_refused(tmp_path):
    path = written(tmp_path, "csv", columns_of())
    with pytest.raises(DataError, match="data.sample_weight=weight: .* has no such column"):
        source_of(path, weight="weight")
    with pytest.raises(UserError, match="data.sample_weight=click: it is a label"):
        source_of(path, weight="click")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_labels_between_0_and_1_are_read_and_others_refused(tmp_path, form):
    columns = columns_of()
    source = source_of(written(tmp_path, form, columns), "share", "probability", None)
    samples = source.train(0, source.num_train)
    assert np.array_equal(samples.label, columns["share"][samples.dense[:, 0].astype(int)].astype(np.float32))
    columns["share"][3] = 1.5
    with pytest.raises(DataError, match="(?s)column share: '?1.5'? is no number from 0 to 1"):
        source_of(written(tmp_path, form, columns), "share", "probability", None)


def test_clicks_between_0_and_1_are_told_of_the_kind_that_takes_them(tmp_path):
    with pytest.raises(DataError, match="or data.label_kind=probability"):
        source_of(written(tmp_path, "csv", columns_of()), "share", weight=None)


def test_the_setting_that_users_write_for_weights_is_known():
    config = resolved(["data=tabular", "data.path=x", "data.label=y", "data.sample_weight=w", "loss.pos_weight=3"])
    assert (config.data.sample_weight, config.loss.pos_weight) == ("w", 3)
    with pytest.raises(UserError, match="did you mean data.sample_weight?"):
        resolved(["data=tabular", "data.path=x", "data.label=y", "data.sample_weights=w"])


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_weight_of_0_is_a_weight_where_0_is_a_missing_value(tmp_path, form):
    columns = columns_of()
    source = source_of(written(tmp_path, form, columns), missing=["0"])
    assert source.num_train + source.num_valid == NUM and (columns["w"] == 0).any()
    weights = np.concatenate([source.train(0, source.num_train).weight, source.valid(0, source.num_valid).weight])
    assert np.array_equal(np.sort(weights), np.sort(columns["w"]))
