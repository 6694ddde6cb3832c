"""Columns without a vocabulary in whole runs: predictions are those of the training, changes add up to the export, what
cannot be is refused in one line."""

import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from launch import SMALL, run, summary, train
from open_runs import SETTINGS, columns, written

from hetmpi.data.tabular.rules import INTEGER, STRING, read_rules, resolve
from hetmpi.errors import UserError
from hetmpi.metrics import auc
from hetmpi.run.id_rows import read_rows
from hetmpi.trained.id_rows import ids_of

COLUMNS = columns("rows: open, max_rows: 40, min_count: 2, expire_steps: 8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of 60 steps on two ranks, and checkpoints after every 20."""
    folder = tmp_path_factory.mktemp("open")
    written(folder / "samples.parquet")
    own = [f"data.path={folder}/samples.parquet", f"data.cache={folder}/prepared", f"run.dir={folder}/run"]
    saving = ["checkpoint.every_steps=20", "checkpoint.keep=9", "checkpoint.export_deltas=true"]
    outcome = train(2, *SETTINGS, *own, COLUMNS, *saving, "batch_size=24", "steps=60")
    assert outcome.code == 0, outcome.text
    return folder


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """A checkpoint of a run whose columns have fixed vocabularies."""
    folder = tmp_path_factory.mktemp("closed")
    assert train(1, "data=synthetic", *SMALL, f"run.dir={folder}").code == 0
    return folder / "checkpoints/step-00000006"


def checkpoint(folder, step):
    return folder / f"run/checkpoints/step-{step:08d}"


def hetmpi(*arguments):
    outcome = run([sys.executable, "-m", "hetmpi", *map(str, arguments)])
    assert "Traceback" not in outcome.text, outcome.text
    return outcome


def test_predictions_have_the_auc_of_the_training(trained, tmp_path):
    outcome = hetmpi("predict", checkpoint(trained, 60), f"data.path={trained}/samples.parquet", "split=valid",
                     f"data.cache={trained}/prepared", f"out={tmp_path}/valid.parquet")  # fmt: skip
    assert outcome.code == 0, outcome.text
    of_files = hetmpi("predict", checkpoint(trained, 60), f"data.path={trained}/samples.parquet",
                      "predict.keep=[click]", f"out={tmp_path}/all.parquet")  # fmt: skip
    assert of_files.code == 0, of_files.text
    valid, whole = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("valid", "all"))
    scores, of_valid = (np.sort(one["probability"].to_numpy()) for one in (whole, valid))
    assert (
        0 < len(of_valid) < len(scores)
        and np.abs(scores[np.searchsorted(scores[:-1], of_valid)] - of_valid).max() < 1e-5
    )
    found = summary(trained / "run")
    assert found["ids_admitted"] > 10 and found["ids_evicted"] > 0 and found["ids_expired"] > 0
    assert auc(whole["click"].to_numpy(), whole["probability"].to_numpy()) > found["auc"] - 0.05


def test_changes_add_up_to_the_export(trained, tmp_path):
    for step in (20, 40, 60):
        assert hetmpi("export", checkpoint(trained, step), tmp_path / f"full{step}", "ids=parquet").code == 0
    for step in (40, 60):
        out, since = tmp_path / f"delta{step}", f"since={checkpoint(trained, step - 20)}"
        outcome = hetmpi("export", checkpoint(trained, step), out, since)
        assert outcome.code == 0 and "ids that have lost theirs" in outcome.text, outcome.text
    deltas = f"deltas={tmp_path}/delta40,{tmp_path}/delta60"
    assert hetmpi("export", tmp_path / "full20", tmp_path / "sum", deltas).code == 0
    assert (tmp_path / "sum/ids.parquet").read_bytes() == (tmp_path / "full60/ids.parquet").read_bytes()
    written_beside = [trained / f"run/deltas/step-000000{step}/ids.parquet" for step in (20, 40, 60)]
    exported = [tmp_path / name / "ids.parquet" for name in ("full20", "delta40", "delta60")]
    assert [path.read_bytes() for path in written_beside] == [path.read_bytes() for path in exported]
    skipped = hetmpi("export", tmp_path / "full20", tmp_path / "no", f"deltas={tmp_path}/delta60")
    assert skipped.code == 1 and "of step 20, the next changes are since 40" in skipped.text, skipped.text
    removed = pq.read_table(tmp_path / "delta60/removed.parquet").to_pylist()
    [user, tags], _ = read_rows(tmp_path / "full60")
    assert (user.column, tags.column) == ("user", "tags") and any(one["column"] == "user" for one in removed)
    assert set(ids_of(checkpoint(trained, 60), "tags", pa.array([f"t{i}" for i in range(12)]))) <= set(tags.ids)
    assert len(tags.shared) == 1 and tags.weight.shape == (len(tags.ids), 4) and (tags.count > 0).all()


@pytest.mark.rare
def test_predictions_and_trainings_read_an_export_with_its_changes(trained, tmp_path):
    deltas = [trained / f"run/deltas/step-{step:08d}" for step in (20, 40, 60)]
    files = [f"data.path={trained}/samples.parquet", "predict.keep=[click]"]
    found = {}
    for name, place, more in (
        ("whole", 60, []),
        ("same", 60, [f"ids={','.join(map(str, deltas))}"]),
        ("old", 20, []),
        ("older ids", 60, [f"ids={deltas[0]}"]),
    ):
        outcome = hetmpi("predict", checkpoint(trained, place), *files, f"out={tmp_path}/out.parquet", *more)
        assert outcome.code == 0, outcome.text
        found[name] = pq.read_table(tmp_path / "out.parquet")["probability"].to_numpy()
    assert np.array_equal(found["same"], found["whole"])
    assert not np.array_equal(found["older ids"], found["whole"])
    assert not np.array_equal(found["older ids"], found["old"])
    own = [f"data.path={trained}/samples.parquet", f"data.cache={trained}/prepared", f"run.dir={tmp_path}/run"]
    start = f"table.init_from='{','.join(map(str, deltas))}'"
    outcome = train(2, *SETTINGS, *own, COLUMNS, start, "steps=0", "batch_size=24")
    assert outcome.code == 0, outcome.text
    assert hetmpi("export", checkpoint(trained, 60), tmp_path / "full", "ids=parquet").code == 0
    num = sum(len(one.ids) for one in read_rows(tmp_path / "full")[0])
    assert f"{num} of " in outcome.text.split("table.init_from=")[1].splitlines()[0], outcome.text
    for texts, said in (
        ([f"ids={deltas[1]}"], "has only the changes since step 20"),
        ([f"ids={deltas[0]},{deltas[2]}"], "the next changes are since 40"),
        ([f"ids={tmp_path}/none"], "ids.parquet cannot be read"),
    ):
        outcome = hetmpi("predict", checkpoint(trained, 60), *files, f"out={tmp_path}/x.parquet", *texts)
        assert outcome.code == 1 and said in outcome.text, outcome.text


def test_an_export_starts_another_training(trained, tmp_path):
    assert hetmpi("export", checkpoint(trained, 60), tmp_path / "full", "ids=parquet").code == 0
    own = [f"data.path={trained}/samples.parquet", f"data.cache={trained}/prepared", f"run.dir={tmp_path}/run"]
    still = ["optim.rows=sgd", "optim.rows_lr=1e-12", f"table.init_from={tmp_path}/full"]
    outcome = train(3, *SETTINGS, *own, columns("rows: open, max_rows: 60"), *still, "batch_size=16", "steps=1")
    assert outcome.code == 0, outcome.text
    end = tmp_path / "run/checkpoints/step-00000001"
    assert hetmpi("export", end, tmp_path / "again", "ids=parquet").code == 0
    for before, after in zip(read_rows(tmp_path / "full")[0], read_rows(tmp_path / "again")[0]):
        places = np.searchsorted(after.ids, before.ids)
        assert np.array_equal(after.ids[places], before.ids) and before.column == after.column
        assert np.allclose(after.weight[places], before.weight, atol=1e-6)
        assert np.allclose(after.shared, before.shared, atol=1e-6)
    few = [columns("rows: open, max_rows: 9"), f"run.dir={tmp_path}/few"]
    outcome = train(2, *SETTINGS, *own[:2], *few, *still, "steps=1", "batch_size=24")
    assert outcome.code == 1 and "ids have rows, the table takes max_rows: 9" in outcome.text, outcome.text
    assert "Traceback" not in outcome.text


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["{}", "out", "since={other}"], "has no columns with rows: open"),
        (["{}", "out", "ids=parquet", "deltas=x"], "deltas are applied to an export, without ids and since"),
        (["{}", "out", "ids=npy"], "takes ids=parquet, since=CHECKPOINT or deltas="),
        (["{}", "out", "ids=parquet", "rows=npy"], "takes ids=parquet, since=CHECKPOINT or deltas="),
        (["{}", "out", "deltas=x"], "ids.parquet cannot be read"),
        (["{}", "out", "since={}/none"], "is not a complete checkpoint"),
    ],
)
def test_exports_that_cannot_be_are_refused(trained, closed, tmp_path, arguments, said):
    first = checkpoint(trained, 60)
    texts = [text.replace("{other}", str(closed)).replace("{}", str(first)) for text in arguments]
    texts[1] = str(tmp_path / "out")
    outcome = hetmpi("export", *texts)
    assert outcome.code == 1 and said in outcome.text, outcome.text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "user, said",
    [
        ("rows: open", "column user: rows: open needs max_rows"),
        ("rows: open, max_rows: 0", "max_rows must be an integer of at least 1, got 0"),
        ("rows: open, max_rows: 9, hash: true", "column user: rows: open hashes all values, remove hash"),
        ("rows: open, max_rows: 9, evict: fifo", "evict must be one of lfu, lru, never, got fifo"),
        ("rows: 50, max_rows: 9", "a column without rows: open has no max_rows"),
        ("rows: open, max_rows: 9, expire_steps: 0", "expire_steps must be an integer of at least 1"),
        ("rows: opened", "rows (a number, auto or open) must be an integer"),
    ],
)
def test_rules_that_cannot_be_are_refused(user, said):
    rule = yaml.safe_load(f"{{name: user, {user}}}")
    with pytest.raises(UserError, match=re.escape(said)):
        resolve(read_rules([rule]), {"user": STRING, "click": INTEGER}, "click", None)


def test_changes_need_columns_with_ids(tmp_path):
    outcome = train(2, "data=synthetic", *SMALL, "checkpoint.export_deltas=true", f"run.dir={tmp_path}/run")
    assert outcome.code == 1 and "needs columns with rows: open" in outcome.text, outcome.text


def test_a_full_table_that_evicts_nothing_ends_all_ranks(trained, tmp_path):
    own = [f"data.path={trained}/samples.parquet", f"data.cache={trained}/prepared", f"run.dir={tmp_path}/run"]
    outcome = train(2, *SETTINGS, *own, columns("rows: open, max_rows: 9, evict: never"), "batch_size=24", "steps=3")
    assert outcome.code == 1 and "the table of user is full: in step 1 " in outcome.text, outcome.text
    assert "Traceback" not in outcome.text and not outcome.survivors


def test_a_run_with_another_rule_does_not_go_on(trained):
    own = [f"data.path={trained}/samples.parquet", f"data.cache={trained}/prepared", "run.dir=" + str(trained / "run")]
    other = columns("rows: open, max_rows: 50, min_count: 2, expire_steps: 8")
    outcome = train(2, *SETTINGS, *own, other, "batch_size=24", "steps=70", "resume=auto")
    assert outcome.code == 1 and "data.columns" in outcome.text and "Traceback" not in outcome.text, outcome.text
    assert Path(checkpoint(trained, 60)).exists()
