"""Rows exported by the values of id columns: they are those of the values' keys, and start another run."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from launch import train

from hetmpi import export as command_line

COLUMNS = 'data.columns=[{name: tags, separator: " "}, {name: city, rows: 7}, {name: shop, rows: 9, hash: false}]'


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """A file of clicks, and a checkpoint of a run on it."""
    folder, draw = tmp_path_factory.mktemp("clicks"), np.random.default_rng(0)
    n = 400
    table = {
        "click": draw.integers(0, 2, n), "user": [f"u{i}" if i else "" for i in draw.integers(0, 30, n)],
        "city": [f"c{i}" for i in draw.integers(0, 20, n)], "shop": draw.integers(0, 9, n),
        "tags": [" ".join(draw.choice(list("abcd"), 2)) for _ in range(n)], "price": draw.random(n),
    }  # fmt: skip
    pa.csv.write_csv(pa.table(table), folder / "clicks.csv")
    outcome = train(1, *settings(folder), "steps=3", f"run.dir={folder}/run")
    assert outcome.code == 0, outcome.text
    return folder


def settings(folder) -> list[str]:
    return ["data=tabular", f"data.path={folder}/clicks.csv", "data.label=click", COLUMNS, "table.dim=4"]


def export(folder, out, *arguments):
    command_line.main([f"{folder}/run/checkpoints/step-00000003", f"{out}", *arguments])


def test_each_value_of_an_id_column_has_its_row_and_a_run_starts_with_them(clicks, tmp_path, capsys):
    export(clicks, tmp_path / "out", "values=parquet", f"data.path={clicks}/clicks.csv")
    assert "user.parquet (29 values with rows of 4 numbers" in capsys.readouterr().out
    found = {name: pq.read_table(tmp_path / f"out/{name}.parquet") for name in ("user", "city", "shop", "tags")}
    assert sorted(found["user"]["user"].to_pylist()) == sorted(f"u{i}" for i in range(1, 30))
    assert sorted(map(str, found["shop"]["shop"].to_pylist())) == list("012345678")
    assert sorted(found["tags"]["tags"].to_pylist()) == list("abcd")
    assert len(found["city"]) == 20 and len(np.unique(found["city"]["weight"].to_pylist(), axis=0)) <= 7
    again = train(
        1, *settings(clicks), "steps=1", "optim.rows=sgd", "optim.rows_lr=0", "table.init_std=1",
        f"table.init_from={tmp_path}/out", f"run.dir={tmp_path}/run",
    )  # fmt: skip
    assert again.code == 0, again.text
    rows = []
    for folder, step in ((clicks, 3), (tmp_path, 1)):
        checkpoint = f"{folder}/run/checkpoints/step-{step:08}"
        command_line.export(Path(checkpoint), folder / "rows", dense="none")
        rows.append(np.load(folder / "rows/rows.npy"))
    differing = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    # those of missing and unseen users and tags, of missing shops, and hashed rows without a value
    assert len(differing) == 2 + 2 + 1 + 7 - len(np.unique(found["city"]["weight"].to_pylist(), axis=0))


def test_missing_values_and_unknown_ones_are_left_out(clicks, tmp_path):
    pq.write_table(
        pa.table({"user": ["u7", "new", None, ""], "city": [None] * 4, "shop": [3, 3, None, 4], "tags": ["a z"] * 4})
        .set_column(1, "city", pa.array([None] * 4, pa.string())),
        tmp_path / "few.parquet",
    )  # fmt: skip
    export(clicks, tmp_path / "out", "values=parquet", f"data.path={tmp_path}/few.parquet")
    found = {path.stem: pq.read_table(path)[path.stem].to_pylist() for path in (tmp_path / "out").iterdir()}
    assert found == {"user": ["u7"], "city": [], "shop": [3, 4], "tags": ["a"]}


def test_what_cannot_be_exported_by_value_is_named(clicks, tmp_path):
    for arguments, words in (
        (["values=parquet"], "give data.path=FILES"),
        (["values=parquet", "data.path=gone.csv"], "gone.csv"),
        (["values=parquet", "rows=npy", "data.path=x.csv"], "values=parquet is exported alone, without rows"),
        (["values=npy", "data.path=x.csv"], "unknown argument values=npy"),
        (["values=parquet", "allow=mine", "data.path=x.csv"], "leave out allow"),
    ):
        with pytest.raises(SystemExit) as ended:
            export(clicks, tmp_path / "out", *arguments)
        assert words in str(ended.value)
    assert not (tmp_path / "out").exists()
