"""A run that begins with a checkpoint on new data (init_from): known values keep their rows, new ones get their own."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from resumed import whole_and_resumed

from hetmpi.data.tabular.encoder import FIRST_KEY, MISSING_KEY, UNSEEN_KEY
from hetmpi.errors import UserError
from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training
from hetmpi.trained.value_files import export_values
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi
STEPS, GLOBAL = 12, 48
SETTINGS = [
    "data=tabular", "data.label=click", "table.dim=4", "seed=3", f"steps={STEPS}", "device=cpu", "model=wdl",
    "model.hidden=[8]", "optim.rows=adagrad", "optim.rows_lr=0.1", "optim.dense=adam", "table.maintain_steps=10",
]  # fmt: skip
COLUMNS = (
    "{name: viewed, share: item}, {name: hour, rows: 24, hash: false}, {name: city, rows: 7}, "
    "{name: user, min_count: 2}"
)
OPEN = COLUMNS.replace("{name: user, min_count: 2}", "{name: user, rows: open, max_rows: 500}")


def log_of(day, num=600):
    """Samples of a day, on which some users and items are new, and the prices are others."""
    rng = np.random.default_rng(day)
    users, items = rng.integers(0, 40, num) + 15 * day, rng.integers(0, 20, num) + 8 * day
    return pa.table({
        "user": [None if user % 13 == 0 else f"u{user}" for user in users],
        "item": [f"i{item}" for item in items],
        "viewed": [[f"i{item}" for item in rng.integers(0, 20, rng.integers(0, 4)) + 8 * day] for _ in range(num)],
        "hour": rng.integers(0, 24, num),
        "city": [f"c{city}" for city in rng.integers(0, 30, num)],
        "price": rng.normal(3 * day + 1, 1, num),
        "click": (rng.random(num) < 1 / (1 + np.exp(-np.sin(users)))).astype(int),
    })  # fmt: skip


def made(folder, *overrides, day=None, columns=COLUMNS):
    """A training on the samples of a day, of any number of ranks."""
    world = World()
    day = 2 if "cut" in str(folder) or "whole" in str(folder) else day
    path = folder.parent / f"day{day}.parquet"
    if world.rank == 0 and not path.exists():
        folder.mkdir(exist_ok=True, parents=True)
        pq.write_table(log_of(day), path)
    world.comm.Barrier()
    own = [f"data.path={path}", f"data.cache={folder.parent}/prepared", f"run.dir={folder}"]
    own += [f"data.columns=[{columns}]", f"batch_size={GLOBAL // world.size}"]
    return Training(world, compose(world, [*SETTINGS, *own, *overrides]), torch.device("cpu"), Spans())


def closed(training):
    """Ends a training; returns its rows."""
    rows = {name: table.peek(torch.arange(table.num_used)).clone() for name, table in training.tables.items()}
    if training.log is not None:
        training.log.close()
    training.close()
    return rows


def row_states(training):
    """Table -> the optimizer's state of its rows by key, of all ranks."""
    found = {}
    for name, table in training.tables.items():
        own = table.shard.snapshot("state", slice(0, len(table.shard)))
        parts = table.world.comm.allgather((table.keys().numpy(), np.array(own)))
        keys, states = (np.concatenate(part) for part in zip(*parts))
        found[name] = states[np.argsort(keys)]
    return found


def keys_by_value(encoder):
    """(column, value) -> key in its table, of vocabularies and hashed columns."""
    firsts = {feature.name: feature.first for feature in encoder.features}
    found = {
        (name, f"row {i}"): firsts[name] + i for name in ("hour", "city") for i in range(encoder.coders[name].rows)
    }
    for name in ("user", "item"):
        found |= {(name, "missing"): firsts[name] + MISSING_KEY, (name, "unseen"): firsts[name] + UNSEEN_KEY}
        values = encoder.coders[name].values
        found |= {(name, int(value)): firsts[name] + int(key)
                  for value, key in zip(values, encoder.coders[name].keys_of_values)}  # fmt: skip
    return found


@pytest.fixture
def folder(world, tmp_path):
    """A folder for all ranks."""
    return world.comm.bcast(tmp_path)


@pytest.fixture
def first(world, folder):
    """The checkpoint of day 1, in a training that is closed: its path, encoder, rows, their states, and dense state."""
    training = made(folder / "day1", day=1)
    training.run()
    states = row_states(training)
    dense = {name: value.clone() for name, value in training.model.state_dict().items()}
    moments = training.dense.optimizer.state_dict()["state"]
    return (
        folder / f"day1/checkpoints/step-{STEPS:08d}",
        training.source.encoder,
        closed(training),
        states,
        dense,
        moments,
    )


def test_known_values_keep_rows_and_state_and_new_ones_begin_anew(world, folder, first):
    path, before, rows, states, dense, moments = first
    training = made(folder / "day2", f"init_from={path}", day=2)
    encoder, now_states = training.source.encoder, row_states(training)
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, dense[name]), name
    found = training.dense.optimizer.state_dict()["state"]
    assert all(torch.equal(found[i]["exp_avg_sq"], moments[i]["exp_avg_sq"]) for i in moments)
    assert encoder.scalings == before.scalings and training.steps == 0
    now = closed(training)
    old, new = keys_by_value(before), keys_by_value(encoder)
    assert set(old) < set(new)
    for name, value in old:
        key, other = old[name, value], new[name, value]
        assert torch.equal(now["table"][other], rows["table"][key]), (name, value)
        assert np.array_equal(now_states["table"][other], states["table"][key]), (name, value)
    fresh = [key for value, key in new.items() if value not in old]
    users = {f"u{user}" for user in range(15, 55)} - {f"u{user}" for user in range(0, 60, 13)}
    assert 20 < len(fresh) < len(users) + 20 and np.array_equal(np.sort([*new.values()]), np.arange(len(now["table"])))
    assert 0 < now["table"][fresh].abs().max() < 0.1 and not now_states["table"][fresh].any()


def test_day_after_day_a_value_keeps_its_row(world, folder, first):
    path, before, *_ = first
    second = made(folder / "day2", f"init_from={path}", "optim.schedule=linear", day=2)
    second.run()
    closed(second)
    path = folder / f"day2/checkpoints/step-{STEPS:08d}"
    third = made(folder / "day3", f"init_from={path}", day=3)
    encoders = [before, second.source.encoder, third.source.encoder]
    closed(third)
    keys = [keys_by_value(encoder) for encoder in encoders]
    assert set(keys[0]) < set(keys[1]) < set(keys[2]) and FIRST_KEY == 2
    offsets = [{feature.name: feature.first for feature in encoder.features} for encoder in encoders]
    for earlier, later, old, new in zip(keys, keys[1:], offsets, offsets[1:]):
        assert all(later[value] - new[value[0]] == key - old[value[0]] for value, key in earlier.items())


def test_a_run_that_began_with_another_is_resumed_with_the_same_bits(world, folder, first):
    whole, resumed = whole_and_resumed(made, closed, folder, [f"init_from={first[0]}"], STEPS)
    one, other = closed(whole), closed(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    again = made(folder / "cut", "resume=auto")  # without init_from
    assert closed(again)["table"].shape == one["table"].shape


def test_a_run_is_not_resumed_on_another_number_of_samples_whose_columns_read_alike(world, folder):
    hashed = "{name: [viewed, item, user], rows: 50}, {name: [hour, city, price], kind: drop}"
    training = made(folder / "day1", day=1, columns=hashed)
    training.run()
    closed(training)
    if world.rank == 0:
        pq.write_table(log_of(1, 700), folder / "more.parquet")
    world.comm.Barrier()
    resumed = ["resume=auto", f"data.path={folder}/more.parquet"]
    with pytest.raises(
        UserError, match=r"with 5\d\d training samples of data=tabular, now there are 6\d\d: .*init_from="
    ):
        made(folder / "day1", *resumed, "steps=20", day=1, columns=hashed)
    closed(made(folder / "day1", *resumed, "steps=0", day=1, columns=hashed))  # evaluates


def test_open_ids_stay_with_their_counts_and_fixed_columns_are_exported_by_value(world, folder):
    training = made(folder / "day1", day=1, columns=OPEN)
    training.run()
    entries, rows = training.vocabularies.of_tables["open1"].state(), closed(training)
    path = folder / f"day1/checkpoints/step-{STEPS:08d}"
    if world.rank == 0:
        written = export_values(path, folder, {"data.path": f"{folder}/day1.parquet"})
        assert sorted(file.stem for file in written) == ["city", "hour", "item"]
    training = made(folder / "day2", f"init_from={path}", day=2, columns=OPEN)
    found = training.vocabularies.of_tables["open1"].state()
    if world.rank == 0:
        assert np.array_equal(found[:, :3], entries[:, :3]) and not found[:, 3].any()
    training.run()
    now = closed(training)
    assert len(now["open1"]) > len(rows["open1"]) > 20


REFUSED = {
    "another rule": (["data.columns=[{name: user, rows: 9}]"], "column user had rows: auto in the run before, data.co"),
    "a column dropped": (["data.columns=[{name: city, kind: drop}]"], "column city had kind: id in the run before"),
    "another column": (["data.path=PATH/other.parquet"], "has no column city, which the run of init_from has read"),
    "another label": (["data.label_kind=number", "loss=mse"], "data.label_kind was click in the run before, now"),
    "another model": (["model=dcnv2"], "is of the model hetmpi.models.wdl.WDL, now it is hetmpi.models.dcn"),
    "another width": (["table.dim=8"], "dim=4, the program's has 8"),
    "other widths of layers": (["model.hidden=[9]"], "dense.pt: model does not fit"),
    "another rule of rows": (["optim.rows=sgd"], "rule=adagrad, the program's has sgd"),
    "another rule of layers": (["optim.dense=sgd"], "was saved with optim.dense=adam, now it is sgd"),
    "rows twice": (["table.init_from=rows.parquet"], "table.init_from=rows.parquet: init_from="),
    "no checkpoint": (["init_from=PATH"], "manifest.json"),
}  # fmt: skip


def test_what_does_not_fit_the_run_before_is_refused_in_one_line(world, folder, first):
    if world.rank == 0:
        pq.write_table(log_of(2).rename_columns(["user", "item", "viewed", "hour", "town", "price", "click"]),
                       folder / "other.parquet")  # fmt: skip
    for name, (overrides, words) in REFUSED.items():
        overrides = [one.replace("PATH", str(folder)) for one in overrides]
        with pytest.raises(UserError) as refusal:
            made(folder / "day2", f"init_from={first[0]}", *overrides, day=2, columns="")
        assert words in str(refusal.value) or world.rank > 0, (name, refusal.value)
        assert len(str(refusal.value).splitlines()) == 1


def test_rules_need_not_be_repeated_and_further_columns_are_not_read(world, folder, first, capfd):
    if world.rank == 0:
        pq.write_table(log_of(2).append_column("new", pa.array(range(600))), folder / "day4.parquet")
    training = made(folder / "again", f"init_from={first[0]}", day=4, columns="")
    assert training.source.encoder.columns == first[1].columns
    closed(training)
    said = capfd.readouterr().out
    assert world.rank > 0 or ("not read, as the run of init_from: new" in said and "are new, with rows of" in said), (
        said
    )


def test_generated_clicks_go_on_with_all_rows(world, folder):
    own = ["device=cpu", "steps=4", "data=synthetic", "data.scale=0.0001", "data.num_valid=100", "model.hidden=[8]"]
    config = compose(world, [*own, f"run.dir={folder}/a"])
    training = Training(world, config, torch.device("cpu"), Spans())
    training.run()
    rows = closed(training)
    config = compose(world, [*own, f"run.dir={folder}/b", f"init_from={folder}/a/checkpoints/step-00000004"])
    now = closed(Training(world, config, torch.device("cpu"), Spans()))
    assert all(torch.equal(now[name], rows[name]) for name in rows)
