"""Tables that start from the rows of Parquet files. Run at 1, 2 and 3 ranks."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from launch import SMALL, train
from saved_files import by_key

from hetmpi import export
from hetmpi.data.tabular import Tabular
from hetmpi.errors import UserError
from hetmpi.run import pretrained
from hetmpi.run.pretrained import fill_from
from hetmpi.table.cache import CacheSettings
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.table.table import EmbeddingTable

NUM_ROWS, DIM = 211, 3
KINDS = {"fixed": pa.list_(pa.float32(), DIM), "list": pa.list_(pa.float32()), "large": pa.large_list(pa.float32())}


@pytest.fixture
def folder(world, tmp_path_factory):
    return Path(world.comm.bcast(str(tmp_path_factory.mktemp("rows"))))


def make_table(world, **settings):
    return EmbeddingTable(world, NUM_ROWS, DIM, RowOptimizer("adagrad", 0.1), seed=4, **settings)


def write(world, path, keys, rows, kind="fixed"):
    """A file of rows (n, DIM) by keys (n,), written by rank 0."""
    if world.rank == 0:
        columns = {"extra": pa.array(["x"] * len(keys)), "weight": pa.array(list(rows), KINDS[kind]), "key": keys}
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), path, row_group_size=70)
    world.comm.Barrier()


def random_rows(keys, seed=1):
    """A row per key, (n, DIM) float32, with the bits of -0.0 and of a subnormal number."""
    rows = np.random.default_rng(seed).normal(size=(NUM_ROWS, DIM)).astype(np.float32)
    rows[:, 0], rows[3, 0], rows[4, 0] = rows[:, 0] * 100, -0.0, 1e-41
    return rows[keys]


def bits(rows):
    return np.ascontiguousarray(rows).view(np.uint32)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [
    {}, {"partition": "hash"}, {"staleness": Staleness(3), "cache": CacheSettings(50, admit="all")},
], ids=["s 0", "s 0 hash", "s 3"])  # fmt: skip
def test_rows_of_the_files_come_bit_by_bit_and_all_others_stay(placed, folder, monkeypatch, kind, settings):
    monkeypatch.setattr(pretrained, "BATCH_BYTES", 4 * DIM * 16)  # several parts per row group
    keys = np.random.default_rng(0).permutation(NUM_ROWS)[:150]
    for number, some in enumerate((keys[:110], keys[110:])):
        write(placed, folder / "rows" / f"{number}.parquet", some, random_rows(some), kind)
    every, plain = torch.arange(NUM_ROWS), make_table(placed, **settings)
    expected = plain.peek(every).numpy().copy()
    expected[keys] = random_rows(keys)
    placed.comm.Barrier()
    plain.shard.assign(slice(None), weight=expected[plain.keys().numpy()])
    plain.resume_at(0)
    after = trained(plain, placed)
    plain.close()
    table = make_table(placed, **settings)
    assert fill_from({"table": table}, folder / "rows", {}) == len(keys)
    assert np.array_equal(bits(table.peek(every).numpy()), bits(expected))
    assert np.array_equal(bits(table.read(every).numpy()), bits(expected))
    assert not table.shard.state.any() and not table.shard.mean_square.any() and not table.shard.clock.any()
    assert np.allclose(trained(table, placed), after, rtol=0, atol=1e-4) and not np.allclose(after, expected, atol=1e-2)
    table.close()


def trained(table, world):
    """All rows (NUM_ROWS, DIM) after a few steps, each row trained by one rank: at s >= 1 the order of several ranks'
    gradients may vary."""
    world.comm.Barrier()  # otherwise a rank could change rows that others still compare
    mine = torch.arange(world.rank, NUM_ROWS, world.size)
    for step in range(4):
        table.read(mine)
        table.write(mine, torch.full((len(mine), DIM), step + 1.0))
    table.flush()
    rows = table.peek(torch.arange(NUM_ROWS)).numpy().copy()
    world.comm.Barrier()
    return rows


def table_of(**columns):
    return pa.table(columns)


ROW = [1.0, 2.0, 3.0]
LIST = pa.list_(pa.float32())
WRONG = {
    "no key": (lambda: table_of(id=[1], weight=pa.array([ROW], LIST)), "must have one column key, got .* id, weight"),
    "no weight": (lambda: table_of(key=[1]), "must have one column weight, got the columns key: rename or add it"),
    "key type": (
        lambda: table_of(key=pa.array([1], pa.int32()), weight=pa.array([ROW], LIST)),
        "column key must be int64, got int32: cast it",
    ),
    "weight type": (
        lambda: table_of(key=[1], weight=pa.array([ROW], pa.list_(pa.float64()))),
        "column weight must be lists of float32, got list<.*double>: cast it",
    ),
    "no list": (
        lambda: table_of(key=[1], weight=pa.array([1.0], pa.float32())),
        "column weight must be lists of float32, got float: cast it",
    ),
    "fixed width": (
        lambda: table_of(key=[1], weight=pa.array([ROW[:2]], pa.list_(pa.float32(), 2))),
        "rows must have 3 numbers, as those of the table, got 2",
    ),
    "a width": (
        lambda: table_of(key=[1, 2], weight=pa.array([ROW, [*ROW, 4.0]], LIST)),
        "rows must have 3 numbers, as those of the table, got 4",
    ),
    "above": (
        lambda: table_of(key=[1, NUM_ROWS], weight=pa.array([ROW, ROW], LIST)),
        r"keys must lie in \[0, 211\), got 211",
    ),
    "below": (lambda: table_of(key=[-1], weight=pa.array([ROW], LIST)), r"keys must lie in \[0, 211\), got -1"),
    "twice": (
        lambda: table_of(key=[5, 1, 5], weight=pa.array([ROW] * 3, LIST)),
        "each must occur once in all files, got 5 twice: remove one of them",
    ),
    "twice in two parts": (
        lambda: table_of(key=[*range(40), 7], weight=pa.array([ROW] * 41, LIST)),
        "each must occur once in all files, got 7 twice: remove one of them",
    ),
    "nan": (
        lambda: table_of(key=[0, 2, 6], weight=pa.array([ROW, ROW, [1.0, np.nan, 0.0]], LIST)),
        "rows must be finite, that of 6 is not: replace it or leave it out",
    ),
    "null row": (lambda: table_of(key=[0, 1], weight=pa.array([ROW, None], LIST)), "got null: leave such rows out"),
    "null number": (
        lambda: table_of(key=[0], weight=pa.array([[1.0, None, 2.0]], LIST)),
        "must have a value in every row, got null",
    ),
    "null key": (lambda: table_of(key=[0, None], weight=pa.array([ROW] * 2, LIST)), "got null: leave such rows out"),
}


@pytest.mark.mpi
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rows_are_refused_on_every_rank(world, folder, monkeypatch, wrong):
    monkeypatch.setattr(pretrained, "BATCH_BYTES", 4 * DIM * 16)
    make, said = WRONG[wrong]
    if world.rank == 0:
        pq.write_table(make(), folder / "rows.parquet")
    world.comm.Barrier()
    table = make_table(world)
    with pytest.raises(UserError, match=said):
        fill_from({"table": table}, folder / "rows.parquet", {})
    table.close()


@pytest.mark.mpi
def test_files_that_are_not_there_or_no_parquet_are_refused_on_every_rank(world, folder):
    table = make_table(world)
    for place, said in (
        (folder / "none.parquet", "there is no such file or folder: name a Parquet file, or a folder of them"),
        (folder, r"this folder holds no \*.parquet file"),
        (folder / "text", "text cannot be read: "),
    ):
        if world.rank == 0 and place.name == "text":
            place.write_text("key,weight\n1,2\n" * 9)
        world.comm.Barrier()
        with pytest.raises(UserError, match=said):
            fill_from({"table": table}, place, {})
    table.close()


COLUMNS = [
    {"name": "size", "rows": 10, "hash": False, "dim": 2}, {"name": "city", "dim": 2}, {"name": "shop", "rows": 3},
    {"name": "bought", "share": "shop"},
]  # fmt: skip


@pytest.fixture
def source(world, folder):
    """A CSV with four id columns: integers, a vocabulary, and two that share hashed rows."""
    if world.rank == 0:
        lines = [f"{i % 2},{i % 9},town {i % 5},s{i % 4},s{i % 3}" for i in range(60)]
        (folder / "a.csv").write_text("\n".join(["click,size,city,shop,bought", *lines]))
    world.comm.Barrier()
    found = Tabular(str(folder / "a.csv"), 0, "click", columns=COLUMNS, cache=str(folder / "prepared"))
    found.prepare(world.rank, world.size, world.comm.Barrier, lambda line: None)
    return found


def tables_of(world, source):
    return {
        name: EmbeddingTable(world, table.num_rows, table.dim or DIM, RowOptimizer("sgd", 0.1), name=name)
        for name, table in source.tables.items()
    }


@pytest.mark.mpi
def test_rows_come_by_the_values_of_columns(world, folder, source):
    files = {
        "city": (["town 3", "nowhere", "town 1"], [[1.0, 2], [3, 4], [5, 6]]),
        "size": (pa.array([7, 0], pa.int32()), [[7.0, 8], [9, 10]]),
        "bought": (["a", "b", "c", "d", "e"], [[float(i)] * DIM for i in range(5)]),  # of 3 rows: some share one
    }
    if world.rank == 0:
        for name, (values, rows) in files.items():
            pq.write_table(table_of(**{name: values, "weight": pa.array(rows, LIST)}), folder / f"{name}.parquet")
        (folder / "rows").mkdir()
        for name in files:
            (folder / f"{name}.parquet").rename(folder / f"rows/{name}.parquet")
    world.comm.Barrier()
    tables, by_value = tables_of(world, source), source.encoder.by_value()
    before = {name: table.peek(torch.arange(table.num_rows)).numpy().copy() for name, table in tables.items()}
    world.comm.Barrier()
    num = fill_from(tables, folder / "rows", by_value)
    expected = {name: rows.copy() for name, rows in before.items()}
    for name, (values, rows) in files.items():
        keys = by_value[name].keys(pa.array(values))
        for key, row in reversed(list(zip(keys, rows))):  # the first value of a row gives it
            if key >= 0:
                expected[by_value[name].table][key] = row
    for name, table in tables.items():
        assert np.array_equal(table.peek(torch.arange(table.num_rows)).numpy(), expected[name])
    hashed = len(set(by_value["bought"].keys(pa.array(files["bought"][0]))))
    assert num == 2 + 2 + hashed and by_value["city"].keys(pa.array(["nowhere"]))[0] == -1
    world.comm.Barrier()
    for table in tables.values():
        table.close()


OF_VALUES = {
    "twice": (lambda: table_of(city=["town 1", "town 1"], weight=pa.array([ROW[:2]] * 2, LIST)), "got town 1 twice"),
    "width": (lambda: table_of(city=["town 1"], weight=pa.array([ROW], LIST)), "must have 2 numbers, .* got 3"),
    "below 0": (lambda: table_of(size=[-3], weight=pa.array([ROW[:2]], LIST)), "column size: integers .*, got -3"),
    "beyond": (lambda: table_of(size=[10], weight=pa.array([ROW[:2]], LIST)), "column size: 10 has no row"),
    "lists": (lambda: table_of(city=[["a"]], weight=pa.array([ROW[:2]], LIST)), "column city: it holds list"),
    "two": (lambda: table_of(city=["a"], key=[1], weight=pa.array([ROW[:2]], LIST)), "key and city, .* leave one out"),
    "none": (lambda: table_of(town=["a"], weight=pa.array([ROW[:2]], LIST)), "column key or size or city or shop"),
    "by key": (lambda: table_of(key=[1], weight=pa.array([ROW], LIST)), "put the file into a folder of its table's"),
}


@pytest.mark.mpi
@pytest.mark.parametrize("wrong", OF_VALUES)
def test_wrong_values_are_refused_on_every_rank(world, folder, source, wrong):
    make, said = OF_VALUES[wrong]
    if world.rank == 0:
        pq.write_table(make(), folder / "rows.parquet")
    world.comm.Barrier()
    tables = tables_of(world, source)
    with pytest.raises(UserError, match=said):
        fill_from(tables, folder / "rows.parquet", source.encoder.by_value())
    for table in tables.values():
        table.close()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A Parquet file with the rows of a short run."""
    folder = tmp_path_factory.mktemp("exported")
    outcome = train(2, *SMALL, f"run.dir={folder}/run")
    assert outcome.code == 0, outcome.text
    export.main([f"{folder}/run/checkpoints/step-00000006", str(folder), "rows=parquet", "dense=none"])
    return folder / "rows.parquet"


@pytest.mark.long
@pytest.mark.parametrize("ranks, how", [
    pytest.param(1, [], marks=pytest.mark.rare),
    pytest.param(2, ["table.staleness=10", "table.ranks_per_node=1"], marks=pytest.mark.rare),
    (3, ["table.staleness=10", "table.cache.admit=all", "table.partition=hash"]),
])  # fmt: skip
def test_a_run_starts_from_the_rows_of_another(tmp_path, exported, ranks, how):
    """At a learning rate of 0 they stay as they are."""
    still = ["optim.rows=adagrad", "optim.rows_lr=0", f"table.init_from={exported}", f"run.dir={tmp_path}"]
    outcome = train(ranks, *SMALL, *how, *still, "seed=5", "steps=3")
    assert outcome.code == 0, outcome.text
    expected = np.stack(pq.read_table(exported)["weight"].to_numpy())
    assert f"table.init_from={exported}: {len(expected):,} of {len(expected):,} rows\n" in outcome.text
    assert np.array_equal(bits(by_key(tmp_path / "checkpoints/step-00000003")["weight"]), bits(expected))


@pytest.mark.rare
def test_a_resumed_run_keeps_the_rows_of_its_checkpoint(tmp_path, exported):
    start = [*SMALL, f"run.dir={tmp_path}", "resume=auto"]
    assert train(2, *start, "steps=2", f"table.init_from={exported}").code == 0
    outcome = train(2, *start, "steps=4", "table.init_from=gone.parquet", "optim.rows_lr=0")
    assert outcome.code == 0, outcome.text
    assert "step-00000002, with its rows; table.init_from=gone.parquet is not read\n" in outcome.text
    before, after = (by_key(tmp_path / f"checkpoints/step-0000000{step}")["weight"] for step in (2, 4))
    assert np.array_equal(before, after)


def test_a_wrong_file_ends_the_run_with_one_message(tmp_path):
    outcome = train(2, *SMALL, f"run.dir={tmp_path}", "table.init_from=gone.parquet")
    assert outcome.code != 0 and not outcome.survivors
    assert outcome.text.count("table.init_from=gone.parquet: there is no such file or folder") == 1, outcome.text


@pytest.mark.rare
def test_several_tables_are_filled_from_folders_of_their_names(tmp_path):
    """And a file beside the folders is refused, as it names no table."""
    of_ratings = ["data._target_=ratings.Ratings", "task._target_=ratings.Rating", "model._target_=ratings.Factors"]
    of_ratings += ["~data.scale", "~data.zipf", "~data.num_train", "~data.num_valid", "~model.hidden"]
    of_ratings += ["loss._target_=torch.nn.MSELoss", f"table.init_from={tmp_path}/rows", "optim.rows_lr=0", "steps=1"]
    for name in ("users", "items"):
        (tmp_path / "rows" / name).mkdir(parents=True)
        some = table_of(key=[2, 1], weight=pa.array([[1.0] * 4, [2.0] * 4], LIST))
        pq.write_table(some, tmp_path / "rows" / name / "a.parquet")
    outcome = train(2, *SMALL[1:], *of_ratings, f"run.dir={tmp_path}/run")
    assert outcome.code == 0 and "rows: 4 of " in outcome.text, outcome.text
    pq.write_table(some, tmp_path / "rows" / "b.parquet")
    outcome = train(2, *SMALL[1:], *of_ratings, f"run.dir={tmp_path}/run2")
    assert outcome.code != 0 and not outcome.survivors
    said = "b.parquet: the tables are users, items: put the file into a folder of its table's name, as "
    said += f"{tmp_path}/rows/users"
    assert outcome.text.count(said) == 1, outcome.text
