"""dry_run=true: the memory that it predicts, compared with what tables take in a fresh process; its text."""

import json
import sys

import pytest
from launch import SMALL, launcher_of, run, train


@pytest.mark.rare
@pytest.mark.parametrize("ranks, rule", [(2, "sgd"), (1, "adagrad"), (2, "adam")])
def test_memory_is_what_rows_states_caches_and_mailboxes_take(ranks, rule):
    bound = ["table.staleness=5", "table.cache.capacity_fraction=0.3", "table.cache.admit=all"]
    large = ["device=cpu", "data.scale=0.06", "table.dim=32", f"optim.rows={rule}"]
    outcome = run([*launcher_of(ranks), sys.executable, "tests/support/table_memory.py", *bound, *large])
    assert outcome.code == 0, outcome.text
    found = json.loads(outcome.text.splitlines()[-1])
    assert found["grown"] == pytest.approx(found["predicted"], rel=0.05)


def test_a_dry_run_trains_nothing_and_says_whether_it_fits(tmp_path):
    outcome = train(2, *SMALL, "dry_run=true", "table.staleness=10", "table.cache.admit=all", f"run.dir={tmp_path}/run")
    assert outcome.code == 0 and not (tmp_path / "run").exists(), outcome.text
    told = [
        "dry run of wdl on synthetic: 16,9",
        "memory of a rank, at most: ",
        ": fits",
        "first 6 were tried",
        "hit rate",
    ]
    for words in told:
        assert words in outcome.text, outcome.text
    huge = train(2, *SMALL, "dry_run=true", "data.scale=100", "table.dim=512", "steps=2", f"run.dir={tmp_path}/run")
    assert huge.code == 0 and "DOES NOT FIT: use more nodes" in huge.text, huge.text
    assert "not tried, as here rows of 1 and of 2 numbers do not fit either" in huge.text
