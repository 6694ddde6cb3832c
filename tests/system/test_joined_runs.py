"""Runs with features of several values and several tables: checkpoints, resumption, export."""

import sys

import numpy as np
import pytest
import torch
from click_features import Clicks
from launch import losses, summary, train
from test_refusals import refusal

from hetmpi import export
from hetmpi.checkpoint.manifest import read_manifest
from hetmpi.data.batch import FeatureBatches
from hetmpi.errors import UserError
from hetmpi.trained.saved_model import dense_layers, dense_state

pytestmark = pytest.mark.long

SETTINGS = [
    "data._target_=click_features.Clicks", "~data.scale", "~data.zipf", "~data.num_train", "~data.num_valid",
    "table.dim=8", "batch_size=16", "log.every_steps=1", "checkpoint.every_steps=5", "model.hidden=[8]",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two ranks and 10 steps."""
    folder = tmp_path_factory.mktemp("joined")
    outcome = train(2, *SETTINGS, "steps=10", f"run.dir={folder}")
    assert outcome.code == 0, outcome.text
    assert "60 rows of 4 numbers and 124 rows of 8 numbers and 60 rows of 12 numbers" in outcome.text
    return folder


def test_a_resumed_run_continues_bit_for_bit(trained, tmp_path):
    for steps in (5, 10):
        outcome = train(2, *SETTINGS, f"steps={steps}", f"run.dir={tmp_path}", "resume=auto")
        assert outcome.code == 0, outcome.text
    assert losses(tmp_path) == losses(trained) and summary(tmp_path)["auc"] == summary(trained)["auc"]


def test_rows_of_each_table_and_the_dense_layers_are_exported(trained, tmp_path):
    checkpoint, source = trained / "checkpoints/step-00000010", Clicks()
    manifest = read_manifest(checkpoint)
    model, _ = dense_layers(checkpoint, manifest, dense_state(checkpoint, manifest))
    batch = FeatureBatches(source.features, list(source.tables))(source.valid(0, 30))
    rows = {}
    for name, table in source.tables.items():
        export.export(checkpoint, tmp_path / name, dense="none", table=name)
        whole = np.load(tmp_path / name / "rows.npy")
        assert len(whole) == table.num_rows
        rows[name] = torch.from_numpy(whole)[batch.keys[name]]
    export.export(checkpoint, tmp_path, rows="none")
    exported = torch.jit.load(tmp_path / "dense.torchscript")
    inputs = *rows.values(), batch.index, batch.dense, *sum(batch.bags, ())
    assert torch.allclose(exported(*inputs), model(rows, batch), atol=1e-6)


def test_what_cannot_be_exported_is_named(trained, tmp_path):
    pytest.importorskip("onnxscript")
    with pytest.raises(UserError, match="dense=onnx supports models of one table and features of one value"):
        export.export(trained / "checkpoints/step-00000010", tmp_path, rows="none", dense="onnx")


@pytest.mark.parametrize(
    "own, message",
    [
        ("optim={'rows': 'sdg'}", "table dim4: optim.rows must be one of sgd, adagrad"),
        ("optim={'row': 'sgd'}", "table dim4: there is no optim.row of its own, only rows, rows_lr"),
        ("cache={'capacity_fraction': 2}", "table dim4: table.cache.capacity_fraction must be"),
    ],
)
def test_invalid_settings_of_one_table_are_refused(own, message, tmp_path, monkeypatch):
    (tmp_path / "wrong.py").write_text(
        "import dataclasses, click_features\n"
        "from hetmpi.data.features import arrange\n"
        "class Wrong(click_features.Clicks):\n"
        "    def __init__(self, **_):\n"
        "        super().__init__()\n"
        f"        own = [dataclasses.replace(w, {own}) if w.dim == 4 else w for w in click_features.WANTED]\n"
        "        self.features, self.tables = arrange(own)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong", raising=False)
    told = refusal(*SETTINGS, "data._target_=wrong.Wrong", "steps=2", f"run.dir={tmp_path}/run")
    assert told.count(message) == 1
