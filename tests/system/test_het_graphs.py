"""HET's experiments on graphs, small, and the benchmarks on their shapes."""

import json
import sys

import pytest
from launch import ROOT, run, summary, train

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name, rows", [("reddit", 466), ("amazon", 5_574), ("mag", 3_862)])
def test_an_experiment_trains_with_hets_settings(name, rows, tmp_path):
    small = ["data.scale=0.002", f"data.cache={tmp_path}/prepared", "table.dim=16", "eval.max_samples=200"]
    outcome = train(2, f"experiment=het_{name}", *small, "steps=8", f"run.dir={tmp_path}/run")
    assert outcome.code == 0 and "gcn on graph_synthetic" in outcome.text, outcome.text
    assert f"{rows:,} table rows" in outcome.text, outcome.text
    assert summary(tmp_path / "run")["accuracy"] is not None


def test_bench_traffic_counts_the_bytes_of_sampled_graphs(tmp_path):
    small = ["ranks=2", "scale=0.002", "batch=32", "dim=4", "steps=8", "warmup=2", "staleness=10,100", "caches=10"]
    command = [sys.executable, str(ROOT / "bench/traffic.py"), "workload=mag", *small, "policies=lfu,lru"]
    outcome = run(command, cwd=tmp_path)
    assert outcome.code == 0, outcome.text
    last = outcome.text.strip().splitlines()[-1]
    assert last.startswith("{"), outcome.text
    found = json.loads(last)
    assert found["reduction"]["100"] > 0 and 0 < found["miss_rate"]["lfu"]["10"] < 1
    outcome = run([*command, "workload=papers"])
    assert outcome.code == 1 and "reddit, amazon, mag, got papers" in outcome.text
