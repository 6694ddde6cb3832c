"""User-defined parts in the trainer: those shown in README.md and CONTRIBUTING.md, and a task with two tables."""

import os
import re

import numpy as np
import pytest
import torch
from launch import ROOT, SMALL, losses, summary, train
from ratings import ROWS, Factors, Rating, Ratings

from hetmpi import RowOptimizer, Staleness
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.world import World

pytestmark = pytest.mark.long

SHOWN = re.compile(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", re.DOTALL)
RATING = [
    "data._target_=ratings.Ratings", "~data.scale", "~data.zipf", "~data.num_train", "~data.num_valid",
    "task._target_=ratings.Rating", "model._target_=ratings.Factors", "model=lr", "loss._target_=torch.nn.MSELoss",
    "table.dim=4", "table.init_std=0.5", "batch_size=24", "log.every_steps=1", "eval.max_samples=null",
    "optim.rows=sgd", "optim.rows_lr=1.0", "optim.dense=sgd", "optim.dense_lr=0.1",
]  # fmt: skip


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with the files that README.md and CONTRIBUTING.md show, each at the path in its first line."""
    folder = tmp_path_factory.mktemp("own")
    for path, text in SHOWN.findall("".join((ROOT / page).read_text() for page in ("README.md", "CONTRIBUTING.md"))):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.mark.parametrize("chosen", [
    ["model=mine"], ["loss=focal"],
    pytest.param(["table.exchange=toy_wire.Pickled"], marks=pytest.mark.rare),
])  # fmt: skip
def test_the_parts_shown_in_readme_and_contributing_train(own, tmp_path, chosen):
    settings = [f"hydra.searchpath=[file://{own}/conf]", f"run.dir={tmp_path}", "table.ranks_per_node=1"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), str(own)])
    outcome = train(2, *SMALL, *settings, *chosen, "table.staleness=10", "steps=30", PYTHONPATH=path)
    assert outcome.code == 0, outcome.text
    loss = losses(tmp_path)
    assert loss[30] < loss[2], loss
    assert ("focal" in chosen[0]) == (loss[2] < 0.3)  # a quarter of the other loss at first


def expected(size, steps):
    """Result of torch on the same samples in one process: losses, rows of both tables."""
    world, source, torch_rows = World(), Ratings(), {}
    for name, num_rows in ROWS.items():
        table = EmbeddingTable(world, num_rows, 4, RowOptimizer("sgd"), name=name, init_std=0.5, staleness=Staleness(0))
        torch_rows[name] = table.peek(torch.arange(num_rows)).clone().requires_grad_()
        table.close()
    model, task = Factors(4), Rating(source, torch.nn.MSELoss())
    found = {}
    for step in range(steps):
        batch = task._batch(source.train(24 * size * step, 24 * size * (step + 1)))
        rows = {name: torch_rows[name][batch.keys[name]] for name in ROWS}
        loss = task.loss(model, rows, batch)
        loss.backward()
        with torch.no_grad():
            for rate, tensor in [(0.1, model.bias), *((1.0, weight) for weight in torch_rows.values())]:
                tensor -= rate * tensor.grad
                tensor.grad = None
        found[step + 1] = loss.item()
    return found


@pytest.mark.parametrize("ranks, how", [(1, []), (2, ["table.ranks_per_node=1", "table.exchange=messages"]), (3, [])])
def test_two_tables_at_s_0_are_as_two_embeddings_of_torch(tmp_path, ranks, how):
    assert train(ranks, *RATING, *how, "steps=30", f"run.dir={tmp_path}").code == 0
    found = losses(tmp_path)
    assert found == pytest.approx(expected(ranks, 30), abs=1e-5)
    assert found[30] < 0.9 * found[1] and np.isfinite(summary(tmp_path)["rmse"])


@pytest.mark.rare
def test_two_tables_are_saved_as_one_and_go_on_where_they_were(tmp_path):
    settings = [*RATING, "checkpoint.every_steps=5"]
    assert train(2, *settings, "steps=20", f"run.dir={tmp_path}/whole").code == 0
    assert train(2, *settings, "steps=10", f"run.dir={tmp_path}/cut").code == 0
    outcome = train(2, *settings, "steps=20", f"run.dir={tmp_path}/cut", "resume=auto")
    assert outcome.code == 0 and "resumed from" in outcome.text
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_task_that_cannot_be_made_is_told():
    outcome = train(1, *RATING, "+task.depth=3", "steps=3")
    assert outcome.code != 0 and "hetmpi: ratings.Rating: " in outcome.text and "depth" in outcome.text, outcome.text
    assert "Traceback" not in outcome.text


def test_two_tables_under_staleness_learn(tmp_path):
    how = ["table.staleness=10", "table.ranks_per_node=1", "table.cache.capacity_fraction=0.5"]
    assert train(2, *RATING, *how, "steps=60", f"run.dir={tmp_path}").code == 0
    found = losses(tmp_path)
    assert found[60] < 0.9 * found[1]
