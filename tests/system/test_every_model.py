"""Whole programs with every model: training on ranks, resuming, prediction, export; dropout and batch normalisation."""

import re
import shutil
import sys

import numpy as np
import pytest
from launch import CLICK_MODELS, ROOT, SMALL, losses, summary, train
from saved_files import assert_same_bits, contents

from hetmpi.data.synthetic import Synthetic
from hetmpi.metrics import auc
from hetmpi.predict import Prediction
from hetmpi.world.world import World

sys.path.insert(0, str(ROOT / "tests/support"))
from ids_only import IdsOnly  # noqa: E402

pytestmark = pytest.mark.long

MODELS = CLICK_MODELS
BOTH = ["model.dropout=0.2", "model.batch_norm=true"]
UNEVEN = ["data.num_valid=401", "eval.batch_size=200"]  # rank 0 evaluates one batch, rank 1 two


def trained(folder, *settings, ranks=2):
    """Trains 6 steps and returns the last checkpoint."""
    outcome = train(ranks, *SMALL, *UNEVEN, f"run.dir={folder}", *settings)
    assert outcome.code == 0, outcome.text
    return folder / "checkpoints/step-00000006"


def check_predictions(folder, checkpoint, source, *settings):
    """Predictions from the checkpoint have the AUC that the run found."""
    Prediction(World(), checkpoint, list(settings), stop=401).write(folder / "p.npy")
    assert auc(source.valid(0, 401).label, np.load(folder / "p.npy")) == pytest.approx(summary(folder)["auc"], abs=1e-9)


@pytest.mark.parametrize(
    "model, settings",
    [
        ("lr", []),
        pytest.param("dcnv2", ["model.stacked=true", *BOTH], marks=pytest.mark.rare),
        ("finalmlp", ["model.first_context=[0,3]", *BOTH, "table.staleness=10", "table.ranks_per_node=1"]),
        *(pytest.param(model, [], marks=pytest.mark.rare) for model in MODELS if model != "lr"),
        *(pytest.param(model, BOTH, marks=pytest.mark.rare) for model in MODELS if model not in ("lr", "fm")),
    ],
)
def test_a_model_trains_on_two_ranks_and_predicts(model, settings, tmp_path):
    checkpoint = trained(tmp_path, f"model={model}", *settings)
    check_predictions(tmp_path, checkpoint, Synthetic(seed=0, scale=0.0005))


OTHERS = [model for model in MODELS if model != "wdl"]


@pytest.mark.parametrize("model", ["wdl", *(pytest.param(model, marks=pytest.mark.rare) for model in OTHERS)])
def test_a_model_trains_and_predicts_without_dense_features(model, tmp_path):
    data = "data._target_=ids_only.IdsOnly"
    checkpoint = trained(tmp_path, f"model={model}", data)
    check_predictions(tmp_path, checkpoint, IdsOnly(seed=0, scale=0.0005), data)


@pytest.mark.rare
def test_a_resumed_run_draws_the_masks_of_a_run_without_a_stop(tmp_path):
    settings = ["model=dnn", *BOTH, "checkpoint.every_steps=2", "checkpoint.keep=9", "log.every_steps=1"]
    whole = trained(tmp_path / "whole", *settings)
    shutil.copytree(whole.parent / "step-00000004", tmp_path / "again/checkpoints/step-00000004")
    assert_same_bits(whole, trained(tmp_path / "again", *settings, "resume=auto"))
    assert {step: losses(tmp_path / "whole")[step] for step in (5, 6)} == losses(tmp_path / "again")
    names = set(contents(whole))
    assert {"deep.1.0.running_mean", "deep.1.0.running_var", "deep.1.0.num_batches_tracked"} <= names


def test_every_rank_and_step_has_a_mask_of_its_own(tmp_path):
    outcome = train(2, *SMALL, "model=lr", "model._target_=odd_models.TellsItsMask", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    masks = re.findall(r"rank (\d) drops ([01]{32})", outcome.text)
    assert len(masks) == 12 and len({mask for _, mask in masks}) == 12 and {rank for rank, _ in masks} == {"0", "1"}
