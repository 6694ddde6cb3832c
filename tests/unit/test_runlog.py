"""The run folder and the output of rank 0."""

import json
import math
import resource

import numpy as np
import pytest

from hetmpi.errors import UserError
from hetmpi.run.runlog import RunLog, bytes_text

STEP = {
    "step": 1200, "loss": 0.45123, "step_ms": 18.26, "samples_per_s": 112_000.4,
    "pulled_bytes": 1_234_567, "pushed_bytes": 812_345, "lr": 0.01,
}  # fmt: skip


@pytest.fixture
def log(tmp_path):
    """A run log in tmp_path/run, a folder that does not exist yet."""
    log = RunLog(tmp_path / "run", "seed: 1\n", total_steps=2000)
    yield log
    log.close()


@pytest.fixture
def run_dir(tmp_path):
    """The folder of `log`."""
    return tmp_path / "run"


def lines(path):
    """The objects of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_shown_as_one_line_in_a_fixed_order(log, capsys):
    log.step(dict(reversed(STEP.items())))
    expected = "r0 | step 1200 | loss 0.4512 | 18.3 ms | 112,000 samples/s | pulled 1.2 MB | pushed 812.3 kB\n"
    assert capsys.readouterr().out == expected


def test_an_evaluation_without_a_teacher_does_not_mention_one(log, capsys):
    log.evaluation({"step": 500, "auc": 0.79, "log_loss": 0.45, "teacher_auc": None})
    assert capsys.readouterr().out == "r0 | step 500 | auc 0.7900 | log loss 0.4500\n"


def test_everything_given_is_stored_before_the_run_ends(log, run_dir):
    log.step(STEP)
    log.evaluation({"step": 1200, "auc": 0.79})
    assert (run_dir / "config.yaml").read_text() == "seed: 1\n"
    assert lines(run_dir / "metrics.jsonl") == [STEP]
    assert lines(run_dir / "evaluation.jsonl") == [{"step": 1200, "auc": 0.79}]
    assert not (run_dir / "summary.json").exists()


def test_tensorboard_reads_every_number_under_its_key(log, run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log.step(STEP)
    log.evaluation({"step": 1300, "auc": 0.75, "teacher_auc": None})
    events = EventAccumulator(str(run_dir)).Reload()
    assert set(events.Tags()["scalars"]) == {*STEP, "auc"} - {"step"}
    assert [(event.step, event.value) for event in events.Scalars("auc")] == [(1300, 0.75)]


def test_what_json_cannot_hold_is_null(log, run_dir):
    log.step({"step": np.int64(1), "loss": math.nan, "lr": np.float32(0.5), "x": -math.inf})
    log.finish({"auc": math.nan, "shards": [1.0, math.inf], "exact": True})
    assert lines(run_dir / "metrics.jsonl") == [{"step": 1, "loss": None, "lr": 0.5, "x": None}]
    assert json.loads((run_dir / "summary.json").read_text()) == {"auc": None, "shards": [1.0, None], "exact": True}


def test_the_summary_is_an_aligned_table(log, capsys):
    log.finish({"model": "wdl", "steps": 2000, "auc": 0.79, "teacher_auc": None, "pulled_bytes": 3_200_000_000})
    assert capsys.readouterr().out.splitlines() == [
        "model         wdl",
        "steps         2,000",
        "auc           0.7900",
        "teacher_auc   -",
        "pulled_bytes  3.2 GB",
    ]


def test_a_rerun_replaces_the_earlier_run(log, run_dir):
    log.step(STEP)
    log.evaluation({"step": 1200, "auc": 0.79})
    log.finish({"auc": 0.79})
    RunLog(run_dir, "seed: 2\n", total_steps=1).close()
    assert sorted(path.name.split(".")[0] for path in run_dir.iterdir()) == ["config", "events"]
    assert (run_dir / "config.yaml").read_text() == "seed: 2\n"


def test_a_resumed_run_knows_how_long_what_it_keeps_took(log, run_dir):
    for step, seconds in ((10, 1.5), (20, 3.0), (30, 4.5)):
        log.step({"step": step, "loss": 0.5, "elapsed_s": seconds})
    log.evaluation({"step": 20, "auc": 0.7, "elapsed_s": 3.25})
    resumed = RunLog(run_dir, "", total_steps=40, resumed_at=25)
    resumed.close()
    assert (log.earlier_s, resumed.earlier_s) == (0.0, 3.25)
    assert [values["step"] for values in lines(run_dir / "metrics.jsonl")] == [10, 20]


def test_what_each_rank_spent_is_stored_but_not_shown(log, run_dir, capsys):
    log.finish({"steps": 6, "by_rank": [{"host": "a", "own_ms": 1.0}]})
    assert capsys.readouterr().out == "steps  6\n"
    assert json.loads((run_dir / "summary.json").read_text())["by_rank"] == [{"host": "a", "own_ms": 1.0}]


def test_other_files_in_the_folder_stay(run_dir):
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    RunLog(run_dir, "", total_steps=1).close()
    assert (run_dir / "notes.txt").read_text() == "mine"


def test_a_full_disk_is_told_once_and_the_log_goes_on_when_there_is_room(log, run_dir, capfd):
    (run_dir / "metrics.jsonl").symlink_to("/dev/full")
    log.step(STEP)
    log.step(STEP)
    told = (
        f"hetmpi: run folder: cannot write {run_dir}/metrics.jsonl: No space left on device: training goes on without"
    )
    assert capfd.readouterr().err.count(told) == 1
    (run_dir / "metrics.jsonl").unlink()
    log.step(STEP)
    log.finish({"steps": 2000})
    log.close()
    log.close()
    assert capfd.readouterr().err == f"hetmpi: run folder {run_dir} lacks 2 entries of metrics.jsonl\n"
    assert lines(run_dir / "metrics.jsonl") == [STEP] and (run_dir / "summary.json").exists()


def test_an_entry_that_does_not_fit_leaves_no_part_of_it(log, run_dir, tmp_path):
    """A file size limit allows part of a write, like a disk that is almost full."""
    log.step(STEP)
    sizes = {path: path.stat().st_size for path in run_dir.iterdir()}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (min(sizes[path] for path in sizes if path.suffix != ".yaml") + 9, before[1])
    )
    try:
        log.step({**STEP, "lags": [1] * 30})
        log.finish({"steps": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path: path.stat().st_size for path in run_dir.iterdir()} == sizes


def test_a_folder_that_cannot_be_made_is_named_with_a_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="run folder: cannot write .*file/run: Not a directory: .*another run.dir"):
        RunLog(tmp_path / "file" / "run", "", total_steps=1)


def test_a_terminal_gets_a_bar_and_keeps_its_cursor(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    log = RunLog(tmp_path, "", total_steps=2000)
    log.step(STEP)
    log.evaluation({"step": 1200, "auc": 0.79})
    log.finish({"model": "[wdl]"})
    log.close()
    shown = capsys.readouterr().out
    for text in ("1200/2000", "loss 0.4512 | 18.3 ms", "auc 0.7900", "│ [wdl]"):
        assert text in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # cursor shown again after it was hidden


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (3.2e9, "3.2 GB"), (5e15, "5000.0 TB")],
)
def test_bytes_are_written_in_decimal_units(count, text):
    assert bytes_text(count) == text
