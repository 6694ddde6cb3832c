"""eval.group: the AUC of a column's values is that of the rows of the files, however the values become keys."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hetmpi.data.tabular import Tabular
from hetmpi.tasks.ctr import ClickThroughRate

NUM = 1200
RULES = {
    "a vocabulary, with users of the last day alone": {},
    "users seen once are left out": {"min_count": 4},
    "three rows for all users": {"rows": 3},
    "open": {"rows": "open", "max_rows": 5},
}


def table_of(kind):
    """Users of the last day are others than before; some rows have none."""
    rng = np.random.default_rng(0)
    day = np.arange(NUM) // (NUM // 4)
    user = rng.integers(0, 30, NUM) + np.where(day == 3, 25, 0)
    missing = rng.random(NUM) < 0.1
    columns = {"day": day, "row": np.arange(NUM) / 1.0, "click": rng.integers(0, 2, NUM)}
    users = pa.array(user, mask=missing) if kind == "integers" else pa.array([f"u{u}" for u in user], mask=missing)
    return pa.table({"user": users, **columns})


def pairs_auc(label, score):
    """By all pairs; None without any."""
    better = [(s > t) + (s == t) / 2 for s in score[label == 1] for t in score[label == 0]]
    return np.mean(better) if better else None


def gauc_of(rows):
    """By the rows of the file: the mean over users of both labels, weighted by their rows."""
    found = []
    for user in {row["user"] for row in rows} - {None}:
        own = [row for row in rows if row["user"] == user]
        auc = pairs_auc(np.array([row["click"] for row in own]), np.array([row["score"] for row in own]))
        found += [(auc, len(own))] if auc is not None else []
    return np.average([auc for auc, _ in found], weights=[size for _, size in found])


@pytest.mark.parametrize("kind", ["texts", "integers"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_auc_by_group_is_that_of_the_values_in_the_file(tmp_path, rule, kind):
    table = table_of(kind)
    pq.write_table(table, tmp_path / "log.parquet")
    rules = [{"name": "user", **rule}, {"name": "row", "transform": "none"}] if rule else None
    rules = rules or [{"name": "row", "transform": "none"}]
    source = Tabular(
        str(tmp_path / "log.parquet"), 0, "click", {"column": "day", "last": 1}, rules, cache=str(tmp_path)
    )
    source.prepare(0, 1, lambda: None, lambda line: None)
    task = ClickThroughRate(source, torch.nn.BCEWithLogitsLoss(), group="user")
    samples = source.valid(0, source.num_valid)
    numbers = samples.dense[:, 0].astype(int)
    scores = np.sin(np.arange(NUM)).astype(np.float32)
    batch = task.batches(torch.device("cpu"))(samples)
    columns = task.predict(lambda rows, batch: torch.from_numpy(scores[numbers]), {"table": None}, batch)
    rows = [row | {"score": scores[int(row["row"])]} for row in table.to_pylist() if row["day"] == 3]
    assert sorted(numbers) == [int(row["row"]) for row in rows]
    assert task.figures(list(columns))["gauc"] == pytest.approx(gauc_of(rows), abs=1e-9)


def test_groups_of_training_rows_are_those_of_their_values_as_well(tmp_path):
    pq.write_table(table_of("integers"), tmp_path / "log.parquet")
    rules = [{"name": "user", "rows": 2}, {"name": "row", "transform": "none"}]
    source = Tabular(str(tmp_path / "log.parquet"), 0, "click", columns=rules, cache=str(tmp_path))
    source.prepare(0, 1, lambda: None, lambda line: None)
    assert source.train(0, 5).group is None  # and cached without groups
    source.group_by("user")
    samples = source.train(0, source.num_train)
    users = table_of("integers")["user"].to_pylist()
    found = {}
    for number, group in zip(samples.dense[:, 0].astype(int), samples.group):
        assert found.setdefault(users[number], group) == group
    assert found[None] == -1 and len(set(found.values())) == len(found)
