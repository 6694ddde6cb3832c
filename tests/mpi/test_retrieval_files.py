"""Retrieval from files: rows without a label, vectors of items with their values, and the best items of queries."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hetmpi import export, predict
from hetmpi.errors import UserError
from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training
from hetmpi.trained.item_files import read_items
from hetmpi.trained.saved_pairs import SavedPairs
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi
SETTINGS = [
    "data=tabular", "data.label_kind=none", "task=retrieval", "table.dim=8", "table.init_std=0.3", "batch_size=16",
    "steps=12", "log.every_steps=12", "device=cpu",
    "data.columns=[{name: viewed, share: item, pool: none}, {name: kind, dim: 4}]",
]  # fmt: skip
TWO_TOWER = ["model=two_tower", "task.negatives=4", "model.item=[item,kind]", "model.query=[user,age]"]
SASREC = ["model=sasrec", "model.item=[item]", "model.history=[viewed]", "model.max_len=3"]


def log(num, seed, num_items):
    """Some rows have no item, or an empty history."""
    rng = np.random.default_rng(seed)
    items = rng.integers(num_items, size=num)
    views = [[f"i{n}" for n in rng.integers(num_items + 4, size=rng.integers(6))] for _ in range(num)]
    return pa.table({
        "user": [f"u{n}" for n in rng.integers(20, size=num)],
        "age": rng.normal(size=num),
        "item": [None if rng.random() < 0.1 else f"i{n}" for n in items],
        "kind": [f"k{n % 5}" for n in items],
        "viewed": pa.array(views, pa.list_(pa.string())),
    })  # fmt: skip


@pytest.fixture
def folder(world, tmp_path):
    """With a log to train on, and one of further items that is held out."""
    found = world.comm.bcast(tmp_path)
    if world.rank == 0:
        pq.write_table(log(300, 0, 40), found / "train.parquet")
        pq.write_table(log(90, 1, 50), found / "valid.parquet")
    world.comm.Barrier()
    return found


def made(folder, *overrides):
    world = World()
    data = [f"data.path={folder}/train.parquet", f"data.valid={folder}/valid.parquet", f"data.cache={folder}/prepared"]
    config = compose(world, [*SETTINGS, *data, f"run.dir={folder}/run", *overrides])
    return Training(world, config, torch.device("cpu"), Spans())


def trained(folder, *overrides):
    """The held-out metrics of a run, and its checkpoint."""
    training = made(folder, *overrides)
    training.run()
    found = training.world.comm.bcast(training.evaluated)["figures"]
    training.log and training.log.close()
    training.close()
    return found, next((folder / "run/checkpoints").glob("step-*"))


VARYING = {  # columns of items, five of which recur in turns
    "kind": [f"k{n % 5}" for n in range(60)],
    "of_rows": [f"k{n % 7}" for n in range(60)],
    "price": [float(n % 11) for n in range(60)],
    "tags": [["a", "b"] if n % 2 else ["a"] for n in range(60)],
}


@pytest.mark.parametrize("column, num_varying", [("kind", 0), ("of_rows", 5), ("price", 5), ("tags", 5)])
def test_a_line_says_how_many_items_have_further_columns_that_vary(world, folder, column, num_varying, capfd):
    if world.rank == 0:  # each of five items once in five rows, so each rank reads it with several values
        items = {"user": [f"u{n % 9}" for n in range(60)], "item": [f"i{n % 5}" for n in range(60)], **VARYING}
        pq.write_table(pa.table(items), folder / "train.parquet")
    world.comm.Barrier()
    rules = "data.columns=[{name: tags, pool: mean}, {name: price, kind: number}]"
    columns = ["model=two_tower", "model.query=[user]", f"model.item=[item,{column}]"]
    training = made(folder, "data.valid=0.1", rules, *columns)
    assert training.task.catalogue.num_varying == num_varying
    training.close()
    line = f"further columns of model.item differ between the rows of {num_varying:,} items at least"
    assert (line in capfd.readouterr().out) == (num_varying > 0 and world.rank == 0)


@pytest.mark.parametrize("model", [TWO_TOWER, SASREC], ids=["two_tower", "sasrec"])
def test_predict_finds_what_the_evaluation_has_found(world, folder, model):
    figures, checkpoint = trained(folder, *model)
    if world.rank == 0:
        needed = ["item", "kind"] if model is TWO_TOWER else ["item", "viewed"]
        pq.write_table(log(300, 0, 40).select(needed), folder / "items.parquet")
        pq.write_table(log(90, 1, 50).drop_columns(["item", "kind"]), folder / "queries.parquet")
        export.main([str(checkpoint), str(folder / "out"), "items=parquet", f"data.path={folder}/items.parquet"])
        export.main([str(checkpoint), str(folder / "out"), "items=npy", f"data.path={folder}/items.parquet"])
    world.comm.Barrier()
    items = folder / "out/items.parquet"
    paths = [f"data.path={folder}/queries.parquet", f"items={items}", f"out={folder}/best.parquet"]
    predict.main(world, [str(checkpoint), *paths, "top=10", "predict.keep=[user]"])
    if world.rank > 0:
        return
    table, held_out, best = pq.read_table(items), log(90, 1, 50), pq.read_table(folder / "best.parquet")
    vectors = np.load(folder / "out/items.npy")
    values = [text for text in dict.fromkeys(log(300, 0, 40)["item"].to_pylist()) if text is not None]
    if model is SASREC:  # also the items of histories
        values = list(dict.fromkeys([*values, *log(300, 0, 40)["viewed"].combine_chunks().flatten().to_pylist()]))
        assert len(values) == 44
    assert table["item"].to_pylist() == values == (folder / "out/items.names.txt").read_text().split()
    assert table["vector"].combine_chunks().flatten().to_numpy().tolist() == vectors.reshape(-1).tolist()
    assert best["user"].to_pylist() == held_out["user"].to_pylist()
    both = zip(held_out["item"].to_pylist(), best["items"].to_pylist())
    pairs = [(item, found) for item, found in both if item is not None]
    assert figures["recall_at_10"] == pytest.approx(np.mean([item in found for item, found in pairs]))
    assert figures["unseen"] == sum(item not in values for item, _ in pairs) > 0
    scores = np.array(best["scores"].to_pylist())
    assert scores.shape == (90, 10) and (np.diff(scores, axis=1) <= 0).all()


def test_a_run_goes_on_with_the_same_columns_alone(world, folder):
    _, checkpoint = trained(folder, *TWO_TOWER)
    for changed in ("model.item=[kind,item]", "model.query=[age,user]"):
        key, value = changed.split("=")
        with pytest.raises(UserError, match=rf"was saved with {key}=.*, now it is \['{value[1:].split(',')[0]}'"):
            made(folder, *TWO_TOWER, changed, f"resume={checkpoint}", "steps=20")


def test_an_items_file_that_was_changed_is_refused(world, folder):
    _, checkpoint = trained(folder, *TWO_TOWER)
    items = folder / "out/items.parquet"
    if world.rank == 0:
        export.main([str(checkpoint), str(folder / "out"), "items=parquet", f"data.path={folder}/train.parquet"])
        written = pq.read_table(items)
        changed = written["vector"].combine_chunks().flatten().to_numpy().copy()
        unchanged = changed.reshape(len(written), -1).copy()
        changed[3] += 1e-3
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(changed), len(changed) // len(written))
        for name, table, said in (
            ("other", written.set_column(1, "vector", vectors), "is not as it was written: write it by"),
            ("less", written.drop_columns(["vector"]), "must have the columns .*write it by"),
            ("fewer", written.slice(1), "is not as it was written"),
        ):
            pq.write_table(table.replace_schema_metadata(written.schema.metadata), folder / f"{name}.parquet")
            with pytest.raises(UserError, match=said):
                read_items(folder / f"{name}.parquet", SavedPairs(checkpoint))
        for place in range(40, items.stat().st_size, 97):
            bits = bytearray(items.read_bytes())
            bits[place] ^= 4
            (folder / "flipped.parquet").write_bytes(bits)
            try:
                values, vectors = read_items(folder / "flipped.parquet", SavedPairs(checkpoint))
            except UserError:
                continue  # the others are of bytes that say nothing of items, such as a version
            assert values.equals(written["item"].combine_chunks()) and np.array_equal(vectors, unchanged)


def test_other_forms_of_predict_and_export_are_refused(world, folder):
    _, checkpoint = trained(folder, *TWO_TOWER)
    out, path = [f"out={folder}/p.parquet"], f"data.path={folder}/valid.parquet"
    with pytest.raises(UserError, match="is of task=retrieval: hetmpi predict takes data.path=QUERIES, items="):
        predict.main(world, [str(checkpoint), path, *out])
    with pytest.raises(UserError, match="is not of this checkpoint: write it by"):
        predict.main(world, [str(checkpoint), path, f"items={folder}/valid.parquet", *out])
    with pytest.raises(UserError, match="cannot be given, only data.path"):
        predict.main(world, [str(checkpoint), path, "data.valid=0.1", f"items={folder}/valid.parquet", *out, "top=3"])
    if world.rank == 0:
        with pytest.raises(SystemExit, match="give data.path=FILES"):
            export.main([str(checkpoint), str(folder / "out"), "items=npy"])
        with pytest.raises(SystemExit, match="dense=torchscript: .* is of task=retrieval"):
            export.main([str(checkpoint), str(folder / "out"), "rows=none", "dense=torchscript"])


@pytest.mark.parametrize(
    "said, overrides",
    [
        ("rows without a label are for task=retrieval", ["task=ctr", "model=din", "loss=bce"]),
        ("column item: each of its values needs a row", [*TWO_TOWER, "data.columns=[{name: item, rows: 20}]"]),
        (
            "rows: open cannot be used with it",
            [*TWO_TOWER, "data.columns=[{name: user, rows: open, max_rows: 30}, {name: viewed, kind: drop}]"],
        ),
        (
            "viewed must have share: item in data.columns",
            [*SASREC, "data.columns=[{name: viewed, pool: none}]"],
        ),
        ("data.label=kind: data.label_kind=none is for rows without one", [*TWO_TOWER, "data.label=kind"]),
        ("give data.label=COLUMN, or for task=retrieval", [*TWO_TOWER, "data.label_kind=click"]),
        (
            "without a label: give data.label_kind=none in place of data.label",
            [*TWO_TOWER, "data.label_kind=number", "data.label=age", "model.query=[user]", "loss=softmax"],
        ),
        ("data.label_weights=.*data.label is None", [*TWO_TOWER, "+data.label_weights=[1,2]"]),
        (
            "column age: buckets of a number cannot identify",
            [*TWO_TOWER, "model.item=[age]", "model.query=[user]", "data.columns=[{name: age, transform: [0, 1]}]"],
        ),
    ],
)  # fmt: skip
def test_data_that_do_not_fit_are_refused_on_every_rank(world, folder, said, overrides):
    with pytest.raises(UserError, match=said):
        made(folder, *overrides)
