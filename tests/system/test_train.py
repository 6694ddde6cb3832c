"""The whole program: the same loss curve with any launcher, and the contents of the run folder."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, SMALL, losses, mpiexec, run, summary, train

from hetmpi.spans import PARTS, WAITS

NEWER = ["lr", "fm", "dnn", "widedeep", "dcnv2", "finalmlp"]
SHORT = ["data.scale=0.0005", "table.dim=8", "steps=30", "log.every_steps=1", "eval.max_samples=2000", "seed=3"]
# Adam and Adagrad divide by the gradient's size, which amplifies the rounding of a gradient near zero; SGD does not.
CURVE = [*SHORT, "optim.rows=sgd", "optim.dense=sgd"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The loss curve of 2 ranks under mpiexec."""
    folder = tmp_path_factory.mktemp("two")
    outcome = train(2, *CURVE, "batch_size=48", f"run.dir={folder}")
    assert outcome.code == 0, outcome.text
    return folder


def check_same_curve(folder, other, tolerance=1e-6):
    ours, theirs = losses(folder), losses(other)
    assert list(ours) == list(theirs) == list(range(1, 31))
    assert np.abs(np.array([*ours.values()]) - np.array([*theirs.values()])).max() <= tolerance


def test_a_run_folder_holds_settings_metrics_events_and_summary(two_ranks):
    names = {path.name.split(".")[0] for path in two_ranks.iterdir()}
    assert {"config", "metrics", "summary", "events"} <= names
    found = summary(two_ranks)
    expected = {"model": "wdl", "data": "synthetic", "world_size": 2, "steps": 30}
    assert {key: found[key] for key in expected} == expected
    for key in ("samples_per_s", "auc", "log_loss", "teacher_auc", "pulled_bytes", "pushed_bytes", "seconds"):
        assert np.isfinite(found[key]) and found[key] > 0, key


def test_one_process_alone_gives_the_same_curve(two_ranks, tmp_path):
    outcome = train(0, *CURVE, "batch_size=96", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    check_same_curve(two_ranks, tmp_path)


def test_three_ranks_give_the_same_curve(two_ranks, tmp_path):
    outcome = train(3, *CURVE, "batch_size=32", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    check_same_curve(two_ranks, tmp_path)


@pytest.mark.rare
def test_a_limit_of_the_dense_gradients_norm_acts_alike_on_any_number_of_ranks(two_ranks, tmp_path):
    for ranks in (0, 3):
        settings = ["optim.dense_clip_norm=0.1", f"batch_size={96 // max(1, ranks)}", f"run.dir={tmp_path}/{ranks}"]
        outcome = train(ranks, *CURVE, *settings)
        assert outcome.code == 0, outcome.text
    check_same_curve(tmp_path / "0", tmp_path / "3")
    assert abs(losses(tmp_path / "3")[30] - losses(two_ranks)[30]) > 1e-3  # most steps were limited


@pytest.mark.long
def test_horovodrun_gives_the_same_curve(two_ranks, tmp_path):
    horovodrun = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    outcome = train(2, *CURVE, "batch_size=48", f"run.dir={tmp_path}", launcher=horovodrun)
    assert outcome.code == 0, outcome.text
    check_same_curve(two_ranks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("exchange", ["windows", "messages"])
def test_ranks_without_shared_memory_give_the_same_bits(two_ranks, tmp_path, exchange):
    far = ["table.ranks_per_node=1", f"table.exchange={exchange}"]
    outcome = train(2, *CURVE, "batch_size=48", f"run.dir={tmp_path}", *far)
    assert outcome.code == 0, outcome.text
    assert summary(tmp_path)["exchange"] == exchange
    check_same_curve(two_ranks, tmp_path, tolerance=0)


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 10])
def test_ranks_that_exchange_by_messages_may_evaluate_different_numbers_of_batches(tmp_path, staleness):
    uneven = ["eval.every_steps=2", "eval.max_samples=10", "eval.batch_size=2", f"table.staleness={staleness}"]
    far = ["table.ranks_per_node=2", "table.exchange=messages"]
    outcome = train(3, *SMALL, *uneven, *far, f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text


@pytest.mark.long
def test_the_exchange_is_chosen_by_a_trial_and_told_once(tmp_path):
    outcome = train(2, *SMALL, "table.ranks_per_node=1", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    found = summary(tmp_path)
    told = r"table.exchange=(\w+) table.look_ahead=(\w+) table.batches_per_pull=(\d): fetching 2,048 random rows took"
    expected = found["exchange"], str(found["look_ahead"]).lower(), str(found["batches_per_pull"])
    assert re.findall(told, outcome.text) == [expected]


@pytest.mark.rare
def test_three_ranks_twice_give_the_same_bits(tmp_path):
    for name in ("first", "second"):
        outcome = train(3, *SHORT, "batch_size=32", f"run.dir={tmp_path / name}")
        assert outcome.code == 0, outcome.text
    check_same_curve(tmp_path / "first", tmp_path / "second", tolerance=0)
    assert summary(tmp_path / "first")["auc"] == summary(tmp_path / "second")["auc"]


@pytest.mark.rare
@pytest.mark.parametrize("model", ["deepfm", "dcn", "dlrm", *NEWER])
def test_every_model_learns(model, tmp_path):
    outcome = train(2, *SHORT, "steps=150", "batch_size=256", f"model={model}", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    assert summary(tmp_path)["model"] == model
    assert summary(tmp_path)["auc"] > 0.6


def test_the_doctor_examines_every_way_to_fetch_rows():
    outcome = run([mpiexec(), "-n", "2", sys.executable, "-m", "hetmpi.doctor"])
    assert "returned wrong rows" not in outcome.text
    for name in ("shared memory", "windows", "messages"):
        assert re.search(rf"^{name} .* Mrow/s", outcome.text, re.MULTILINE), outcome.text
    assert re.search(r"^get from a busy rank .* ms$", outcome.text, re.MULTILINE), outcome.text
    assert (outcome.code == 0) == outcome.text.rstrip().endswith("OK")
    assert "Slow one-sided MPI" not in outcome.text  # one host, where ranks share memory


def test_the_doctor_of_one_rank_advises_the_line_that_starts_two():
    text = run([sys.executable, "-m", "hetmpi.doctor"]).text
    assert re.search(r"^fetching rows .*: mpirun -np 2 hetmpi doctor$", text, re.MULTILINE), text


@pytest.mark.parametrize(
    "model", ["wdl", *(pytest.param(model, marks=pytest.mark.rare) for model in ("deepfm", "dcn", "dlrm", *NEWER))]
)
def test_every_model_learns_a_real_sample_in_one_epoch(model, tmp_path):
    sample = ROOT.parent / "shared/data/criteo/sample.tsv"
    if not sample.exists():
        pytest.skip(f"{sample} is absent")
    source = [f"data.path={sample}", f"data.cache={tmp_path}/cache"]
    outcome = train(2, f"model={model}", "data=criteo", *source, f"run.dir={tmp_path}/run")
    assert outcome.code == 0, outcome.text
    assert summary(tmp_path / "run")["auc"] > (0.73 if model in ("lr", "fm") else 0.74)


@pytest.mark.long
def test_messages_larger_than_the_inbox_do_not_stop_the_ranks(tmp_path):
    large = ["batch_size=4096", "table.dim=512", "log.every_steps=1", "steps=3"]
    for ranks in (2, 3):
        outcome = train(ranks, *SMALL, *large, f"run.dir={tmp_path}/{ranks}")
        assert outcome.code == 0, outcome.text


def test_steps_are_evaluated_on_the_way(tmp_path):
    outcome = train(2, *SMALL, "eval.every_steps=2", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    lines = (tmp_path / "evaluation.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6]


@pytest.mark.long
def test_a_profiled_run_says_where_its_time_went(tmp_path):
    outcome = train(2, *SHORT, "batch_size=512", "table.staleness=10", "train.profile=true", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    found, trace = summary(tmp_path), json.loads((tmp_path / "trace.json").read_text())
    parts = {part: found[f"{part}_ms"] for part in PARTS}
    assert all(ms > 0 for part, ms in parts.items()), parts
    assert found["wait_ms"] == pytest.approx(sum(parts[part] for part in WAITS))
    assert 0.7 < sum(parts.values()) / (1000 * found["seconds"] / found["steps"]) < 1.3  # rank 1 also waits for rank 0
    for rank in range(2):
        spans = [event for event in trace["traceEvents"] if event["pid"] == rank and event["ph"] == "X"]
        assert {span["name"] for span in spans} == set(PARTS)
        for before, after in zip(spans, spans[1:]):
            assert before["ts"] + before["dur"] <= after["ts"] + 1, (before, after)  # in turn; microseconds


@pytest.mark.long
def test_rows_stay_as_they_are_while_a_slow_rank_evaluates(tmp_path):
    often = ["eval.every_steps=2", "eval.batch_size=50", "table.staleness=100", f"run.dir={tmp_path}"]
    program = [sys.executable, str(ROOT / "tests/support/slow_evaluation.py")]
    outcome = run([mpiexec(), "-n", "2", *program, *SMALL, *often])
    assert outcome.code == 0, outcome.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_learns(ranks):
    outcome = run([mpiexec(), "-n", str(ranks), sys.executable, str(ROOT / "examples/own_loop.py")])
    assert outcome.code == 0, outcome.text
    assert float(re.search(r"loss (\S+) after 200 steps", outcome.text)[1]) < 0.3


@pytest.mark.rare
@pytest.mark.parametrize("exchange, start", [("windows", 1), ("windows", 2), ("messages", 1)])
def test_memory_does_not_grow_with_steps_of_far_ranks(exchange, start):
    outcome = run([mpiexec(), "-n", "2", sys.executable, str(ROOT / "tests/support/far_memory.py"), exchange])
    assert outcome.code == 0, outcome.text


FAR_BY_WINDOWS = ["table.ranks_per_node=1", "table.exchange=windows"]


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, model, where",
    [
        (2, "UsesALayerOnRankZero", []),
        pytest.param(2, "UsesALayerOnRankZero", FAR_BY_WINDOWS, marks=pytest.mark.rare),
        (2, "UsesNoDenseLayerOnRankOne", ["table.ranks_per_node=1", "table.exchange=messages"]),
        (3, "UsesNoDenseLayerOnRankOne", [*FAR_BY_WINDOWS, "table.staleness=10"]),
    ],
)
def test_dense_parameters_without_a_gradient_on_some_ranks(ranks, model, where):
    """No rank waits for a missing gradient."""
    outcome = train(ranks, *SMALL, "steps=30", *where, f"model._target_=odd_models.{model}", "model=lr", timeout_s=60)
    assert outcome.code == 0, outcome.text


@pytest.mark.long
def test_held_out_samples_of_one_class_give_no_auc_and_a_reason(tmp_path):
    outcome = train(2, *SMALL, "data.num_valid=1", "data.num_train=5", f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    assert "hetmpi: data=synthetic has 5 training samples, fewer than the 64 of a step: samples repeat" in outcome.text
    assert (
        outcome.text.count("hetmpi: no AUC: all 1 held-out samples have the label ") == 1 and "nan" not in outcome.text
    )
    assert summary(tmp_path)["auc"] is None and summary(tmp_path)["log_loss"] > 0


@pytest.mark.long
def test_train_warns_of_a_bound_that_costs_accuracy():
    """Which bounds: tests/unit/test_config.py."""
    outcome = train(2, *SMALL, "steps=2", "table.staleness=100", "table.drift=0", "table.cache.admit=all")
    assert outcome.code == 0, outcome.text
    warning = (
        "hetmpi: table.staleness=100 with table.drift=0 may cost more than .002 of AUC (docs/results.md): table.drift"
    )
    assert outcome.text.count(warning) == outcome.text.count("may cost") == 1


@pytest.mark.long
def test_data_that_hold_out_nothing_are_trained_on_and_it_is_told(tmp_path):
    sized = ["data._target_=broken_data.Sized", "data.num_valid=0", "~data.scale", "~data.zipf"]
    outcome = train(2, *SMALL[1:], *sized, f"run.dir={tmp_path}")
    assert outcome.code == 0, outcome.text
    assert outcome.text.count("hetmpi: data=synthetic has no held-out samples: their metrics are not computed") == 1
    assert "hetmpi: no AUC: there are no held-out samples" in outcome.text and "nan" not in outcome.text
    assert summary(tmp_path)["auc"] is None and summary(tmp_path)["log_loss"] is None


@pytest.mark.rare
def test_quick_evaluations_leave_every_bit_of_the_training(tmp_path):
    """With a node per rank, whose rows are requested a step ahead."""
    nodes = ["table.ranks_per_node=1", "table.exchange=messages", "table.look_ahead=true"]
    own = [*nodes, "data.scale=0.0005", "table.dim=4", "steps=120", "log.every_steps=10", "device=cpu"]
    for name, more in (("quick", []), ("none", ["eval.every_steps=0"])):
        outcome = train(2, *own, *more, "batch_size=32", f"run.dir={tmp_path}/{name}")
        assert outcome.code == 0, outcome.text
    lines = [json.loads(line) for line in (tmp_path / "quick/evaluation.jsonl").read_text().splitlines()]
    assert 2 <= len(lines) <= 10 and lines[0]["of_samples"] == 2048 and "of_samples" not in lines[-1]
    steps = [line["step"] for line in lines]
    assert steps[0] == 12 and steps[-1] == 120 and set(steps) <= set(range(12, 121, 12))  # less on a slow machine
    assert losses(tmp_path / "quick") == losses(tmp_path / "none")
    assert summary(tmp_path / "quick")["auc"] == summary(tmp_path / "none")["auc"]
