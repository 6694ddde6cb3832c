"""From a file to predictions: data=tabular, inspect, train, predict."""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import torch
from launch import ROOT, launcher_of, losses, run, summary, train

from hetmpi.data.tabular import Tabular
from hetmpi.errors import UserError
from hetmpi.metrics import auc
from hetmpi.predict import main
from hetmpi.world.world import World

COLUMNS = [{"name": "tags", "separator": " ", "pool": "mean", "dim": 4}]
TAGS = "data.columns=[{name: tags, separator: ' ', pool: mean, dim: 4}]"
SETTINGS = ["data=tabular", "data.label=click", TAGS, "batch_size=64", "log.every_steps=20", "model.hidden=[16]"]
ADULT = ROOT.parent / "shared/data/adult"
ADULT_NAMES = (
    "data.names=[age,workclass,fnlwgt,education,education_num,marital,occupation,relationship,race,sex,capital_gain,"
    "capital_loss,hours,country,income]"
)


def predict(ranks, *arguments, **extra):
    return run([*launcher_of(ranks), sys.executable, "-m", "hetmpi.predict", *map(str, arguments)], **extra)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A folder with a generated log of clicks as CSV and Parquet, and rows to predict, without labels."""
    folder = tmp_path_factory.mktemp("log")
    assert run([sys.executable, "examples/make_clicks.py", str(folder / "clicks.csv"), "6000"]).code == 0
    table = csv.read_csv(folder / "clicks.csv")
    pq.write_table(table, folder / "clicks.parquet", row_group_size=1000)
    csv.write_csv(table.drop(["click"]).slice(0, 1500), folder / "new.csv")
    (folder / "parts").mkdir()
    for number in range(4):  # of unequal sizes, one of them empty
        begin, end = [0, 700, 700, 900, 1500][number : number + 2]
        csv.write_csv(table.drop(["click"]).slice(begin, end - begin), folder / f"parts/{number}.csv")
    return folder


@pytest.fixture(scope="module")
def trained(log):
    """The checkpoint of a run of two ranks on the CSV."""
    cache = f"data.cache={log}/prepared"
    outcome = train(2, *SETTINGS, f"data.path={log}/clicks.csv", cache, "epochs=6", f"run.dir={log}/run")
    assert outcome.code == 0, outcome.text
    assert "tags     id, mean of several" in outcome.text and "12 rows of 4 numbers" in outcome.text, outcome.text
    [checkpoint] = (log / "run/checkpoints").glob("step-*")
    return checkpoint


@pytest.mark.rare
def test_a_csv_and_its_parquet_train_alike(log, trained):
    cache = f"data.cache={log}/prepared2"
    outcome = train(2, *SETTINGS, f"data.path={log}/clicks.parquet", cache, "epochs=6", f"run.dir={log}/parquet")
    assert outcome.code == 0, outcome.text
    assert summary(log / "run")["auc"] > 0.65
    assert losses(log / "parquet") == losses(log / "run")
    assert summary(log / "parquet")["auc"] == summary(log / "run")["auc"]


@pytest.mark.rare
def test_a_file_of_clicks_and_one_of_others_train_as_the_mixed_rows_do(tmp_path):
    rng, num = np.random.default_rng(0), 40_000
    user = rng.integers(0, 30, num)
    click = (rng.random(num) < 1 / (1 + np.exp(1.5 - rng.normal(0, 1, 30)[user]))).astype(int)
    table = pa.table({"user": [f"u{i}" for i in user], "click": click})
    (tmp_path / "d").mkdir()
    for name, label in (("a", 1), ("b", 0)):
        csv.write_csv(table.filter(pa.array(click == label)), tmp_path / f"d/{name}.csv")
    data = ["data=tabular", f"data.path={tmp_path}/d", "data.label=click", f"data.cache={tmp_path}/prepared"]
    settings = ["model=lr", "batch_size=32", "optim.rows_lr=0.1", "epochs=1", f"run.dir={tmp_path}/run"]
    outcome = train(2, *data, *settings)
    assert outcome.code == 0, outcome.text
    found = summary(tmp_path / "run")
    assert 0.9 < found["calibration"] < 1.1 and found["normalised_entropy"] < 0.9, found


def test_predictions_are_the_same_bytes_on_any_number_of_ranks_in_the_order_of_the_rows(log, trained):
    found = []
    for ranks in (0, 2, 3):
        out = log / f"p{ranks}.parquet"
        outcome = predict(ranks, trained, f"data.path={log}/parts", f"out={out}", "predict.keep=[user,price]")
        assert outcome.code == 0 and "1,500 predictions" in outcome.text, outcome.text
        found.append(out.read_bytes())
    assert found[0] == found[1] == found[2]
    table, source = pq.read_table(log / "p0.parquet"), csv.read_csv(log / "clicks.csv").slice(0, 1500)
    assert table.column_names == ["user", "price", "probability"]
    assert table["user"].to_pylist() == source["user"].to_pylist()
    assert np.allclose([float(text) for text in table["price"].to_pylist()], source["price"].to_numpy())  # as written
    assert auc(source["click"].to_numpy().astype(np.float32), table["probability"].to_numpy()) > 0.7  # seen in training
    outcome = predict(2, trained, f"data.path={log}/new.csv", f"out={log}/p.npy")
    assert outcome.code == 0 and np.allclose(np.load(log / "p.npy"), table["probability"].to_numpy(), atol=1e-6)


def test_predictions_of_the_held_out_rows_have_the_auc_of_the_run(log, trained):
    data = [f"data.path={log}/clicks.csv", f"data.cache={log}/prepared"]
    outcome = predict(2, trained, "split=valid", *data, f"out={log}/valid.npy")
    assert outcome.code == 0, outcome.text
    source = Tabular(f"{log}/clicks.csv", 0, "click", cache=f"{log}/prepared", columns=COLUMNS)
    source.prepare(0, 1, lambda: None, lambda line: None)
    label = source.valid(0, source.num_valid).label
    assert auc(label, np.load(log / "valid.npy")) == pytest.approx(summary(log / "run")["auc"], abs=1e-9)


def test_other_data_are_refused_where_values_would_get_other_rows(log, trained):
    table = csv.read_csv(log / "clicks.csv").slice(0, 5990)
    csv.write_csv(table.slice(1000), log / "fewer.csv")
    data = [f"data.path={log}/fewer.csv", f"data.cache={log}/prepared3"]
    outcome = train(2, *SETTINGS, *data, "epochs=7", f"run.dir={log}/run", "resume=auto")
    assert outcome.code != 0 and "was saved with other data: column user had" in outcome.text, outcome.text
    assert f"go on with new data in a new run.dir by init_from={log}/run/checkpoints/step-" in outcome.text
    outcome = predict(2, trained, "split=valid", *data, f"out={log}/valid2.npy")
    assert outcome.code != 0 and "was trained on" in outcome.text, outcome.text


@pytest.mark.long
@pytest.mark.parametrize(
    "rule",
    [
        "dim: 8",
        pytest.param("optim: {rows_lr: 0.05}", marks=pytest.mark.rare),
        pytest.param("cache: {capacity_rows: 100}", marks=pytest.mark.rare),
    ],
)
def test_one_table_with_settings_of_its_own_trains_and_predicts(log, rule, tmp_path):
    columns = f"data.columns=[{{name: tags, kind: drop}}, {{name: [user, item, city, device, weekday], {rule}}}]"
    data = ["data=tabular", "data.label=click", columns, f"data.path={log}/clicks.csv", f"data.cache={log}/prepared"]
    outcome = train(2, *data, "steps=10", "table.staleness=5", "table.ranks_per_node=1", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    [checkpoint] = (tmp_path / "checkpoints").glob("step-*")
    outcome = predict(2, checkpoint, f"data.path={log}/new.csv", f"out={tmp_path}/p.npy")
    assert outcome.code == 0 and "1,500 predictions" in outcome.text, outcome.text


@pytest.mark.long
def test_a_model_of_sequences_trains_predicts_and_is_exported(log, tmp_path):
    columns = "data.columns=[{name: tags, pool: none, separator: ' ', max_len: 5}]"
    data = ["data=tabular", "data.label=click", columns, f"data.path={log}/clicks.csv", f"data.cache={log}/prepared"]
    model = ["model=din", "model.target=[item]", "model.history=[tags]", "table.staleness=5", "table.ranks_per_node=1"]
    outcome = train(2, *data, *model, "steps=10", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    [checkpoint] = (tmp_path / "checkpoints").glob("step-*")
    for ranks in (1, 2):
        outcome = predict(ranks, checkpoint, f"data.path={log}/new.csv", f"out={tmp_path}/{ranks}.npy")
        assert outcome.code == 0 and "1,500 predictions" in outcome.text, outcome.text
    assert np.array_equal(np.load(tmp_path / "1.npy"), np.load(tmp_path / "2.npy"))
    outcome = run([sys.executable, "-m", "hetmpi.export", str(checkpoint), str(tmp_path / "out"), "rows=none"])
    assert outcome.code == 0 and (tmp_path / "out/dense.torchscript").is_file(), outcome.text


@pytest.mark.long
def test_a_model_of_classes_trains_predicts_a_column_for_each_and_is_exported(tmp_path):
    rng = np.random.default_rng(0)
    user, colours = rng.integers(30, size=3000), np.array(["red", "green", "dark blue"])
    kind = np.where(rng.random(3000) < 0.9, user % 3, rng.integers(3, size=3000))
    columns = {"user": [f"u{i}" for i in user], "x": rng.normal(size=3000), "colour": colours[kind]}
    pq.write_table(pa.table({**columns, "w": rng.random(3000)}), tmp_path / "log.parquet")
    data = ["data=tabular", f"data.path={tmp_path}/log.parquet", "data.label=colour", f"data.cache={tmp_path}/c"]
    data += ["data.label_kind=classes", "data.sample_weight=w", "loss=classes", "loss.class_weights={red: 2}"]
    outcome = train(2, *data, "model=dnn", "epochs=4", "checkpoint.best=accuracy", f"run.dir={tmp_path}/run")
    assert outcome.code == 0 and "3 classes of colour: dark blue (" in outcome.text, outcome.text
    figures = summary(tmp_path / "run")
    assert figures["accuracy"] > 0.85 and figures["auc"] > 0.9 and figures["best_metric"] == "accuracy"
    best = tmp_path / "run/checkpoints/best"
    outcome = predict(
        2, best, f"data.path={tmp_path}/log.parquet", f"out={tmp_path}/p.parquet", "predict.keep=[colour]"
    )
    assert outcome.code == 0 and "3,000 predictions" in outcome.text, outcome.text
    found = pq.read_table(tmp_path / "p.parquet")
    names = ["dark blue", "green", "red"]
    assert found.column_names == ["colour", "class", *(f"probability_{name}" for name in names)]
    probability = np.stack([column.to_numpy() for column in found.columns[2:]], 1)
    assert np.allclose(probability.sum(1), 1, atol=1e-6)
    assert found["class"].to_pylist() == [names[i] for i in probability.argmax(1)]
    assert np.mean(found["class"].to_numpy() == found["colour"].to_numpy()) > 0.85
    outcome = run([sys.executable, "-m", "hetmpi.export", str(best), str(tmp_path / "out"), "rows=none"])
    layers = torch.jit.load(tmp_path / "out/dense.torchscript")
    assert layers(torch.zeros(2, 16), torch.tensor([[0], [1]]), torch.zeros(2, 1)).shape == (2, 3), outcome.text
    outcome = run([sys.executable, "-m", "hetmpi.report", str(tmp_path / "run")])
    assert outcome.code == 0, outcome.text


def test_a_model_of_several_labels_trains_and_predicts_a_column_for_each(tmp_path):
    assert run([sys.executable, "examples/make_shop.py", str(tmp_path / "visits.parquet"), "4000"]).code == 0
    data = [
        "data=tabular",
        "data.label=[click,buy]",
        f"data.path={tmp_path}/visits.parquet",
        f"data.cache={tmp_path}/c",
    ]
    outcome = train(2, *data, "model=mmoe", "table.dim=4", "epochs=2", "batch_size=32", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    figures = summary(tmp_path)
    assert figures["auc"] == pytest.approx((figures["auc_click"] + figures["auc_buy"]) / 2)
    assert min(figures["auc_click"], figures["auc_buy"]) > 0.6
    [checkpoint] = (tmp_path / "checkpoints").glob("step-*")
    for ranks, out in ((1, "p.parquet"), (2, "p.npy")):
        outcome = predict(ranks, checkpoint, f"data.path={tmp_path}/visits.parquet", f"out={tmp_path / out}")
        assert outcome.code == 0 and "4,000 predictions" in outcome.text, outcome.text
    found = pq.read_table(tmp_path / "p.parquet")
    assert found.column_names == ["probability_click", "probability_buy"]
    assert np.array_equal(np.load(tmp_path / "p.npy"), np.stack([column.to_numpy() for column in found.columns], 1))
    labels = pq.read_table(tmp_path / "visits.parquet")
    known = labels["buy"].is_valid().to_numpy()
    assert auc(labels["buy"].to_numpy()[known].astype(np.float32), found["probability_buy"].to_numpy()[known]) > 0.6


@pytest.mark.rare
def test_text_without_a_header_is_predicted_with_and_without_its_label(log, tmp_path):
    lines = (log / "clicks.csv").read_text().splitlines()[1:2001]
    (tmp_path / "bare.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "unlabelled.csv").write_text("\n".join(line.split(",", 1)[1] for line in lines) + "\n")
    names = "data.names=[click,user,item,city,device,weekday,price,age,seconds,tags]"
    data = [*SETTINGS, names, f"data.path={tmp_path}/bare.csv", f"data.cache={tmp_path}", "steps=5"]
    assert train(2, *data, f"run.dir={tmp_path}/run").code == 0
    [checkpoint] = (tmp_path / "run/checkpoints").glob("step-*")
    for name in ("bare", "unlabelled"):
        outcome = predict(2, checkpoint, f"data.path={tmp_path}/{name}.csv", f"out={tmp_path}/{name}.npy")
        assert outcome.code == 0 and "2,000 predictions" in outcome.text, outcome.text
    assert np.array_equal(np.load(tmp_path / "bare.npy"), np.load(tmp_path / "unlabelled.npy"))


@pytest.mark.long
def test_dropped_rows_are_counted_over_all_files_and_told(log, trained, tmp_path):
    lines = (log / "new.csv").read_text().splitlines()
    for number in range(3):
        (tmp_path / f"{number}.csv").write_text("\n".join([*lines[:10], "too,few"]) + "\n")
    out = f"out={tmp_path}/p.parquet"
    outcome = predict(2, trained, f"data.path={tmp_path}/*.csv", out, "data.max_bad_rows=2")
    assert outcome.code != 0 and "more bad rows than data.max_bad_rows=2" in outcome.text, outcome.text
    outcome = predict(2, trained, f"data.path={tmp_path}/*.csv", out, "data.max_bad_rows=3")
    assert outcome.code == 0 and "3 bad rows dropped" in outcome.text and "27 predictions" in outcome.text, outcome.text


@pytest.fixture(scope="module")
def wrong_rows(log):
    """The folder, with files of rows that cannot be predicted."""
    lines = (log / "new.csv").read_text().splitlines()[:3]
    price = lines[0].replace('"', "").split(",").index("price")
    values = lines[2].split(",")
    values[price] = "cheap"
    (log / "header.csv").write_text(lines[0] + "\n")
    (log / "bad.csv").write_text("\n".join([*lines[:2], ",".join(values)]) + "\n")
    return log


def test_bad_rows_of_all_ranks_count_before_anything_is_written(wrong_rows, trained):
    lines, folder = (wrong_rows / "bad.csv").read_text(), wrong_rows / "bad"
    folder.mkdir()
    for number in range(2):  # a file and a bad row for each rank
        (folder / f"{number}.csv").write_text(lines)
    arguments = [trained, "data.path=bad", "out=bad.parquet"]
    outcome = predict(2, *arguments, "data.max_bad_rows=1", cwd=wrong_rows)
    assert outcome.code == 1 and outcome.text.count("more bad rows than data.max_bad_rows=1") == 1, outcome.text
    assert not [*wrong_rows.glob("*bad.parquet*")]
    outcome = predict(2, *arguments, "data.max_bad_rows=2", cwd=wrong_rows)
    assert outcome.code == 0 and "2 bad rows dropped" in outcome.text, outcome.text
    assert len(pq.read_table(wrong_rows / "bad.parquet")) == 2


TOLD_ONCE = [  # before the checkpoint is read, of settings, files, columns and rows
    ([], "give out=FILE.parquet or out=FILE.npy, got out="),
    (["out=p.npy", "data.path=none.csv"], "there is no file"),
    (["out=p.parquet", "data.path=new.csv", "predict.keep=[nobody]"], "has no column nobody"),
    (["out=p.npy", "data=synthetic"], "was trained on data with"),
    (["out=p.npy", "data.path=bad.csv"], "bad.csv, line 3, column price: 'cheap' is no finite number"),
]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.rare), 2])
@pytest.mark.parametrize("arguments, message", TOLD_ONCE)
def test_what_cannot_be_predicted_is_told_once(wrong_rows, trained, arguments, message, ranks):
    outcome = predict(ranks, trained, *arguments, cwd=wrong_rows)
    assert outcome.code != 0 and outcome.text.count(message) == 1, outcome.text
    assert "Traceback" not in outcome.text and not outcome.survivors


@pytest.mark.parametrize(
    "arguments, message",
    [
        *TOLD_ONCE,
        (["out=p.csv"], "give out=FILE.parquet or out=FILE.npy, got out=p.csv"),
        (["out=p.npy", "data.path=new.csv", "data.columns=null"], "data.columns cannot be given"),
        (["out=p.npy", "data.path=new.csv", "predict.keep=[user]"], "predict.keep needs out=FILE.parquet"),
        (["out=p.parquet", "data.path=new.csv", "predict.keep=[user,user]"], "user would be in the result twice"),
        (["out=p.npy", "data.path=header.csv"], "data.path has no rows to predict"),
        (["out=p.npy", "data.path=prepared"], "there is no file"),
        (["out=p.npy", "predict.keep=[user]", "data=synthetic"], "predict.keep needs data.path=FILES"),
        (["out=p.npy", "split=valid"], "give data.path="),
        (["out=p.npy", "split=valid", "data.path=new.csv"], "data.label=click: "),
    ],
)
def test_what_cannot_be_predicted_is_refused(wrong_rows, trained, monkeypatch, arguments, message):
    """In this process; test_what_cannot_be_predicted_is_told_once checks the output of the program."""
    monkeypatch.chdir(wrong_rows)
    with pytest.raises(UserError) as problem:
        main(World(), [str(trained), *arguments])
    assert str(problem.value).count(message) == 1


def test_columns_that_the_model_does_not_know_are_said_by_predict(log, trained, tmp_path, capsys):
    table = csv.read_csv(log / "new.csv").slice(0, 100)
    table = table.set_column(table.column_names.index("user"), "user", [[f"new {i}" for i in range(100)]])
    csv.write_csv(table.set_column(table.column_names.index("price"), "price", pa.nulls(100)), tmp_path / "a.csv")
    main(World(), [str(trained), f"data.path={tmp_path}/a.csv", f"out={tmp_path}/p.npy"])
    out = capsys.readouterr().out
    assert f"hetmpi: warning: {tmp_path}/a.csv, column user: 100 % of the values were not seen in training" in out
    assert "column price has no value in any row" in out and out.count("warning") == 2


@pytest.mark.long
def test_a_run_of_other_columns_is_not_resumed(log, trained):
    other = TAGS.replace("mean", "sum")
    settings = [*SETTINGS, other, f"data.path={log}/clicks.csv", f"data.cache={log}/prepared"]
    outcome = train(2, *settings, "epochs=7", f"run.dir={log}/run", "resume=auto")
    assert outcome.code != 0 and "was saved with data.columns=[{" in outcome.text, outcome.text


@pytest.mark.rare
def test_labels_that_are_numbers_are_predicted_as_such(tmp_path):
    rng = np.random.default_rng(0)
    city, size = rng.integers(20, size=4000), rng.random(4000)
    price = 3.0 + 0.1 * city + 2.0 * size
    pq.write_table(
        pa.table({"city": [f"c{i}" for i in city], "size": size, "price": price}), tmp_path / "flats.parquet"
    )
    data = ["data=tabular", f"data.path={tmp_path}/flats.parquet", "data.label=price", f"data.cache={tmp_path}"]
    outcome = train(2, *data, "data.label_kind=number", "model=dnn", "epochs=1", f"run.dir={tmp_path}/a")
    assert outcome.code != 0 and "data.label_kind=number gives the loss predictions" in outcome.text, outcome.text
    outcome = train(2, *data, "data.label_kind=number", "loss=mse", "model=dnn", "epochs=20", f"run.dir={tmp_path}/b")
    assert outcome.code == 0 and summary(tmp_path / "b")["rmse"] < 0.2, outcome.text
    [checkpoint] = (tmp_path / "b/checkpoints").glob("step-*")
    outcome = predict(2, checkpoint, f"data.path={tmp_path}/flats.parquet", f"out={tmp_path}/p.parquet")
    assert outcome.code == 0, outcome.text
    found = pq.read_table(tmp_path / "p.parquet")["prediction"].to_numpy()
    assert np.sqrt(np.mean((found - price) ** 2)) < 0.2


def test_a_skewed_number_needs_no_rule_to_train_and_predict_well(tmp_path):
    rng = np.random.default_rng(0)
    income, city = rng.lognormal(10, 1, 6000), rng.integers(0, 20, 6000)
    chance = 1 / (1 + np.exp(-1.2 * (np.log(income) - 10) - rng.normal(0, 0.5, 20)[city]))
    click = (rng.random(6000) < chance).astype(int)
    pq.write_table(pa.table({"city": city, "income": income, "click": click}), tmp_path / "a.parquet")
    data = ["data=tabular", f"data.path={tmp_path}/a.parquet", "data.label=click", f"data.cache={tmp_path}/prepared"]
    outcome = train(0, *data, "model=widedeep", "batch_size=64", "model.hidden=[16]", f"run.dir={tmp_path}/run")
    assert outcome.code == 0 and "as it is skewed" in outcome.text, outcome.text
    found = summary(tmp_path / "run")
    assert found["auc"] > 0.8 and found["log_loss"] < 0.6, found  # without the logarithm .79 and 6.2
    [checkpoint] = (tmp_path / "run/checkpoints").glob("step-*")
    outcome = predict(0, checkpoint, f"data.path={tmp_path}/a.parquet", f"out={tmp_path}/p.npy")
    assert outcome.code == 0, outcome.text
    right = np.where(click, np.load(tmp_path / "p.npy"), 1 - np.load(tmp_path / "p.npy"))
    assert -np.log(right).mean() < 0.6


@pytest.mark.long
@pytest.mark.skipif(not ADULT.is_dir(), reason="there is no ../shared/data/adult")
def test_widedeep_reaches_the_auc_of_others_on_adult(tmp_path):
    missing, positive = 'data.missing=["?"]', 'data.positive=[">50K",">50K."]'
    files = [f"data.path={ADULT}/adult.data", f"data.valid={ADULT}/adult.test", "data.max_bad_rows=1"]
    outcome = train(
        2, "data=tabular", *files, ADULT_NAMES, "data.label=income", missing, positive, f"data.cache={tmp_path}",
        "model=widedeep", f"run.dir={tmp_path}/run",
    )  # fmt: skip
    assert outcome.code == 0 and summary(tmp_path / "run")["auc"] >= 0.905, outcome.text
