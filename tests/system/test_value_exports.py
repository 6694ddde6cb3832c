"""Rows exported by the values of id columns: they are those of the values' keys, and start another run."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from launch import train

from hetmpi import export as command_line
from hetmpi.checkpoint.manifest import read_manifest, tables_of
from hetmpi.trained.value_files import Distinct, is_unfit

COLUMNS = (
    'data.columns=[{name: tags, separator: " "}, {name: city, rows: 7}, {name: shop, rows: 9, hash: false},'
    "{name: friend, share: user}, {name: brand, dim: 3}]"
)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """A file of clicks, and a checkpoint of a run on it."""
    folder, draw = tmp_path_factory.mktemp("clicks"), np.random.default_rng(0)
    n = 400
    table = {
        "click": draw.integers(0, 2, n), "user": [f"u{i}" if i else "" for i in draw.integers(0, 30, n)],
        "city": [f"c{i}" for i in draw.integers(0, 20, n)], "shop": draw.integers(0, 9, n),
        "friend": [f"u{i}" for i in draw.integers(20, 35, n)], "brand": [f"b{i}" for i in draw.integers(0, 5, n)],
        "tags": [" ".join(draw.choice(list("abcd"), 2)) for _ in range(n)], "price": draw.random(n),
    }  # fmt: skip
    pa.csv.write_csv(pa.table(table), folder / "clicks.csv")
    outcome = train(1, *settings(folder), "steps=8", f"run.dir={folder}/run")
    assert outcome.code == 0, outcome.text
    return folder


def settings(folder) -> list[str]:
    return ["data=tabular", f"data.path={folder}/clicks.csv", "data.label=click", COLUMNS, "table.dim=4"]


def export(folder, out, *arguments):
    command_line.main([f"{folder}/run/checkpoints/step-00000008", f"{out}", *arguments])


def test_each_value_of_an_id_column_has_its_row_and_a_run_starts_with_them(clicks, tmp_path, capsys):
    export(clicks, tmp_path / "out", "values=parquet", f"data.path={clicks}/clicks.csv")
    assert "user.parquet (34 values with rows of 4 numbers" in capsys.readouterr().out
    found = {path.stem: pq.read_table(path) for path in (tmp_path / "out").iterdir()}
    assert sorted(found) == ["brand", "city", "shop", "tags", "user"]  # friends are users
    assert sorted(found["user"]["user"].to_pylist()) == sorted(f"u{i}" for i in range(1, 35))
    assert sorted(map(str, found["shop"]["shop"].to_pylist())) == list("012345678")
    assert sorted(found["tags"]["tags"].to_pylist()) == list("abcd")
    assert len(found["city"]) == 20 and len(np.unique(found["city"]["weight"].to_pylist(), axis=0)) <= 7
    again = train(
        1, *settings(clicks), "steps=1", "optim.rows=sgd", "optim.rows_lr=0", "table.init_std=1",
        f"table.init_from={tmp_path}/out", f"run.dir={tmp_path}/run",
    )  # fmt: skip
    assert again.code == 0, again.text
    num_cities = len(np.unique(found["city"]["weight"].to_pylist(), axis=0))
    # that of missing shops, those of missing and unseen users, tags and brands, and hashed rows without a value
    assert num_differing(clicks, tmp_path) == [2, 1 + 2 + 2 + 7 - num_cities]


def num_differing(before, after) -> list[int]:
    """Rows of each table of the last checkpoints of two runs that are not the same, least first."""
    num = []
    for table in ("", "dim3"):
        rows = []
        for folder in (before, after):
            [checkpoint] = (folder / "run/checkpoints").glob("step-*")
            [name] = [name for name in tables_of(read_manifest(checkpoint)) if (name == "dim3") == bool(table)]
            command_line.export(checkpoint, folder / "rows", dense="none", table=name)
            rows.append(np.load(folder / "rows/rows.npy"))
        num.append(int((rows[0] != rows[1]).any(axis=1).sum()))
    return sorted(num)


def test_missing_values_and_unknown_ones_are_left_out(clicks, tmp_path, capsys):
    pq.write_table(
        pa.table({
            "user": pa.array(["u7", "new", None, ""]).dictionary_encode(), "friend": ["u7", "u8", " ", "u8"],
            "city": pa.array([None] * 4, pa.string()), "shop": [3, 3, None, 4], "brand": ["b1", None, "no", "b1"],
            "tags": pa.array(["a z", "a", "b", None], pa.large_string()),
        }),
        tmp_path / "few.parquet",
    )  # fmt: skip
    assert values_of(clicks, tmp_path / "few.parquet", tmp_path / "out") == {
        "user": ["u7", "u8"], "city": [], "shop": [3, 4], "tags": ["a", "b"], "brand": ["b1"],
    }  # fmt: skip
    text = "user,friend,city,shop,brand,tags\nu1,u2,K\xf6ln,1,b1,a\nu2,u3,c1,1,b2,b a\n"
    (tmp_path / "latin.csv").write_bytes(text.encode("latin-1"))
    assert values_of(clicks, tmp_path / "latin.csv", tmp_path / "other") == {
        "user": ["u1", "u2", "u3"], "city": ["c1"], "shop": [1], "tags": ["a", "b"], "brand": ["b1", "b2"],
    }  # fmt: skip
    assert "1 values are not UTF-8" in capsys.readouterr().out


def values_of(clicks, path, out) -> dict[str, list]:
    export(clicks, out, "values=parquet", f"data.path={path}")
    return {path.stem: pq.read_table(path)[path.stem].to_pylist() for path in out.iterdir()}


def test_distinct_values_are_those_of_a_dictionary():
    draw, distinct, first = np.random.default_rng(1), Distinct(), {}
    for _ in range(40):
        codes = draw.integers(0, 300, draw.integers(1, 60))
        distinct.add(pa.array(codes), codes)
        first.update(dict.fromkeys(codes.tolist()))
    assert distinct.values().to_pylist() == list(first)


def test_names_that_would_be_taken_for_something_else_are_no_files():
    assert all(map(is_unfit, ("key", "Weight", "rows", "ids", "a/b", "..", ".hidden", "a\0b", "n" * 300)))
    assert not any(map(is_unfit, ("user", "C1", "user id", "größe")))


def test_what_cannot_be_exported_by_value_is_named(clicks, tmp_path):
    unknown, wrong, head = tmp_path / "unknown.csv", tmp_path / "wrong.csv", "user,friend,city,shop,brand,tags\n"
    unknown.write_text(f"{head}new,new,,,new,z\n")
    wrong.write_text(f"{head}u1,u1,c1,12,b1,a\n")
    for arguments, words in (
        (["values=parquet"], "give data.path=FILES"),
        (["values=parquet", "data.path=gone.csv"], "gone.csv"),
        (["values=parquet", "rows=npy", "data.path=x.csv"], "values=parquet is exported alone, without rows"),
        (["values=npy", "data.path=x.csv"], "unknown argument values=npy"),
        (["values=parquet", f"data.path={unknown}"], "no row has a value that the model knows"),
        (["values=parquet", f"data.path={wrong}"], "12 has no row"),
        (["values=parquet", "allow=mine", "data.path=x.csv"], "leave out allow"),
    ):
        with pytest.raises(SystemExit) as ended:
            export(clicks, tmp_path / "out", *arguments)
        assert words in str(ended.value)
    assert not (tmp_path / "out").exists()
