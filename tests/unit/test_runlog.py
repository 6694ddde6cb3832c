"""The run folder and the output of rank 0."""

import json
import math
import re
import resource
import subprocess
import time

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from hetmpi.errors import UserError
from hetmpi.log import display
from hetmpi.log.environment import ROOT, environment
from hetmpi.log.figures import bytes_text, megabytes_text
from hetmpi.log.runlog import TICK_S, RunLog
from hetmpi.log.status import is_alive, read_status, write_failed
from hetmpi.spans import Spans

STEP = {
    "step": 1200, "loss": 0.45123, "step_ms": 18.26, "samples_per_s": 112_000.4,
    "pulled_bytes": 1_234_567, "pushed_bytes": 812_345, "lr": 0.01,
}  # fmt: skip
SUMMARY = {
    "model": "wdl", "world_size": 2, "is_one_node": False, "steps": 2000, "first_step": 0, "samples_per_s": 112_000.4,
    "auc": 0.79, "log_loss": 0.45, "hit_rate": 0.912, "pulled_bytes": 2e9, "pushed_bytes": 1e9,
    "seconds": 12.34, "run_dir": "runs/a b", "checkpoint": "runs/a b/checkpoints/step-00002000",
    "by_rank": [{"host": "a", "own_ms": 1.0}],
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


def scalars(events, tag):
    """(step, value) of a tag."""
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_reads_every_number_under_its_group(log, run_dir):
    log.step(STEP)
    log.step({"step": 1300, "loss": 0.4, "hit_rate": 0.9, "load_ms": 2.0, "lags": [5, 0, 1]})
    log.evaluation({"step": 1300, "auc": 0.75, "rmse": 0.5, "teacher_auc": None, "elapsed_s": 3.0})
    events = EventAccumulator(str(run_dir)).Reload()
    assert set(events.Tags()["scalars"]) == {
        "quality/loss", "quality/auc", "quality/rmse", "speed/step_ms", "speed/samples_per_s", "cache/hit_rate",
        "traffic/pulled_bytes", "traffic/pushed_bytes", "progress/lr", "time/load_ms",
    }  # fmt: skip
    assert scalars(events, "quality/auc") == [(1300, 0.75)]
    assert events.Tags()["histograms"] == ["cache/lags"] and events.Histograms("cache/lags")[0].histogram_value.num == 6


def test_tensorboard_has_the_settings_as_hyperparameters_and_the_final_figures(tmp_path):
    log = RunLog(
        tmp_path, "seed: 1\ntable: {staleness: null, exchange: windows}\nrun: {dir: x}\nresume: null\n", total_steps=10
    )
    log.finish(SUMMARY)
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    start = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    known = {
        key: value.string_value or value.number_value
        for key, value in metadata.parse_session_start_info_plugin_data(start).hparams.items()
    }
    assert known == {"seed": 1, "table.staleness": "null", "table.exchange": "windows"}
    assert events.SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.plugin_name == "hparams"
    assert scalars(events, "final/auc") == [(2000, pytest.approx(0.79))]
    assert scalars(events, "final/mb_per_step") == [(2000, pytest.approx(1.5))]


def test_what_json_cannot_hold_is_null(log, run_dir):
    log.step({"step": np.int64(1), "loss": math.nan, "lr": np.float32(0.5), "x": -math.inf})
    log.finish({**SUMMARY, "auc": math.nan, "shards": [1.0, math.inf], "exact": True})
    assert lines(run_dir / "metrics.jsonl") == [{"step": 1, "loss": None, "lr": 0.5, "x": None}]
    found = json.loads((run_dir / "summary.json").read_text())
    assert (found["auc"], found["shards"], found["exact"]) == (None, [1.0, None], True)


@pytest.mark.parametrize("changed, path", [
    ({}, "'runs/a b/checkpoints/step-00002000'"), ({"best_checkpoint": "runs/a/checkpoints/step-00000500"},
    "runs/a/checkpoints/step-00000500"), ({"checkpoint": None}, None),
])  # fmt: skip
def test_the_last_line_of_a_run_predicts_with_its_model(log, capsys, changed, path):
    log.finish({**SUMMARY, **changed}, "data.path=FILES out=OUT.parquet")
    last = capsys.readouterr().out.splitlines()[-1]
    line = None if path is None else f"predict hetmpi predict {path} data.path=FILES out=OUT.parquet"
    assert last == line or (line is None and last.startswith("next"))


def ending_of(capsys, log, **changed):
    """What a run shows at its end, word before the text -> text."""
    log.finish({**SUMMARY, **changed})
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 5 and all(len(line) <= 100 for line in shown), shown
    return dict(line.split(maxsplit=1) for line in shown)


def test_a_training_ends_with_five_lines(log, run_dir, capsys, monkeypatch):
    monkeypatch.chdir(run_dir)
    assert ending_of(capsys, log) == {
        "quality": "AUC 0.7900, log loss 0.4500",
        "speed": "112,000 samples/s, 2,000 steps in 12.3 s",
        "bytes": "1.5 MB per step between ranks (pulled 1, pushed 0.5); cache hits 91.2%",
        "model": "runs/a b/checkpoints/step-00002000",
        "next": "hetmpi report 'runs/a b'",
    }


def test_the_last_lines_say_what_there_was_not(log, capsys):
    said = ending_of(capsys, log, auc=None, log_loss=None, checkpoint=None, hit_rate=None)
    assert said["quality"] == "not measured" and said["bytes"].endswith("; no cache in use")
    assert said["model"] == "not saved: checkpoint.at_end=false"
    assert ending_of(capsys, log, is_one_node=True)["bytes"].startswith("1.5 MB per step between ranks of one node (")
    alone = ending_of(capsys, log, world_size=1, pulled_bytes=0.0, pushed_bytes=0.0)
    assert alone["bytes"].startswith("0 MB between ranks: only one rank;")
    said = ending_of(capsys, log, first_step=2000, samples_per_s=None, seconds=0.0)
    assert said["speed"] == "no step was made" and said["bytes"].startswith("no step was made")


def test_the_last_lines_have_a_task_s_own_figures(log, capsys):
    assert ending_of(capsys, log, auc=None, rmse=0.123456)["quality"] == "log loss 0.4500, rmse 0.1235"


def test_a_rerun_replaces_the_earlier_run(log, run_dir):
    log.step(STEP)
    log.evaluation({"step": 1200, "auc": 0.79})
    log.finish(SUMMARY)
    RunLog(run_dir, "seed: 2\n", total_steps=1).close()
    names = sorted(path.name.split(".")[0] for path in run_dir.iterdir())
    assert names == ["config", "environment", "events", "status"] and read_status(run_dir)["state"] == "running"
    assert (run_dir / "config.yaml").read_text() == "seed: 2\n"


def test_a_resumed_run_knows_how_long_what_it_keeps_took(log, run_dir):
    for step, seconds in ((10, 1.5), (20, 3.0), (30, 4.5)):
        log.step({"step": step, "loss": 0.5, "elapsed_s": seconds})
    log.evaluation({"step": 20, "auc": 0.7, "elapsed_s": 3.25})
    resumed = RunLog(run_dir, "", total_steps=40, resumed_at=25)
    resumed.close()
    assert (log.earlier_s, resumed.earlier_s) == (0.0, 3.25)
    assert [values["step"] for values in lines(run_dir / "metrics.jsonl")] == [10, 20]


def test_a_resumed_run_drops_a_line_whose_step_is_beyond_all_numbers(log, run_dir):
    log.step({"step": 10, "loss": 0.5, "elapsed_s": 1.5})
    log.close()
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": {10**400}}}\n')
    RunLog(run_dir, "", total_steps=40, resumed_at=25).close()
    assert [values["step"] for values in lines(run_dir / "metrics.jsonl")] == [10]


def test_a_resumed_stream_keeps_the_evaluations_of_files_that_were_opened(log, run_dir):
    for step, file in ((0, "a"), (5, "b"), (5, "c")):
        log.evaluation({"step": step, "auc": 0.5, "file": file})
    log.close()
    for at, opened, kept in ((5, ["b"], ["a", "b"]), (0, [], [])):
        RunLog(run_dir, "seed: 1\n", 8, at, files=opened).close()
        path = run_dir / "evaluation.jsonl"
        assert [json.loads(line)["file"] for line in (path.read_text() if kept else "").splitlines()] == kept
        assert path.exists() == bool(kept)


def test_other_files_in_the_folder_stay(run_dir):
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    RunLog(run_dir, "", total_steps=1).close()
    assert (run_dir / "notes.txt").read_text() == "mine"


def test_a_full_disk_is_told_once_and_the_log_goes_on_when_there_is_room(log, run_dir, capfd):
    (run_dir / "metrics.jsonl").symlink_to("/dev/full")
    log.step(STEP)
    log.step(STEP)
    told = f"hetmpi: run folder: cannot write {run_dir}/metrics.jsonl: No space left on device: training continues"
    assert capfd.readouterr().err.count(told) == 1
    (run_dir / "metrics.jsonl").unlink()
    log.step(STEP)
    log.finish(SUMMARY)
    log.close()
    log.close()
    assert capfd.readouterr().err == f"hetmpi: run folder {run_dir} lacks 2 entries of metrics.jsonl\n"
    assert lines(run_dir / "metrics.jsonl") == [STEP] and (run_dir / "summary.json").exists()


def test_an_entry_that_does_not_fit_leaves_no_part_of_it(log, run_dir, tmp_path):
    """A file size limit allows part of a write, like a disk that is almost full."""
    log.step(STEP)
    sizes = {path: path.stat().st_size for path in run_dir.iterdir()}
    grown = [size for path, size in sizes.items() if path.suffix == ".jsonl" or "tfevents" in path.name]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(grown) + 9, before[1]))
    try:
        log.step({**STEP, "lags": [1] * 30})
        log.write("summary.json", "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path: path.stat().st_size for path in run_dir.iterdir()} == sizes


def test_a_folder_that_cannot_be_made_is_named_with_a_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="run folder: cannot write .*file/run: Not a directory: .*another run.dir"):
        RunLog(tmp_path / "file" / "run", "", total_steps=1)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test lets pass: clock[0] += 3."""
    seconds = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: seconds[0])
    return seconds


def test_plain_lines_are_never_silent_for_long(clock, capsys):
    spans = Spans()
    shown = display.Lines(spans, first_step=0, step_samples=128)
    clock[0], spans.step = 9.0, 40
    shown.tick()
    assert capsys.readouterr().out == ""
    clock[0], spans.step = 10.0, 50
    shown.tick()
    clock[0] = 15.0
    shown.step({"step": 60, "loss": 0.5})
    clock[0] = 24.0
    shown.tick()
    clock[0] = 27.0
    spans.now("evaluation")
    shown.tick()
    assert capsys.readouterr().out.splitlines() == [
        "r0 | step 50 | 640 samples/s since step 0",
        "r0 | step 60 | loss 0.5000",
        "r0 | step 60 | no step ended for 12 s, in evaluation",
    ]


@pytest.fixture
def terminal(monkeypatch, capsys):
    """terminal(columns, call): what call(its run log) draws on a terminal, with the control characters."""

    def draw(columns, folder, call):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        monkeypatch.setenv("COLUMNS", str(columns))
        log = RunLog(folder, "", total_steps=2000, spans=(spans := Spans()))
        call(log, spans)
        log.close()
        return capsys.readouterr().out

    return draw


FULL = {**STEP, "hit_rate": 0.934, "stale_rate": 0.011, "lag_p99": 100}


@pytest.mark.parametrize("columns", [80, 100])
def test_a_terminal_s_width_is_filled_and_no_figure_is_cut(terminal, tmp_path, columns):
    shown = terminal(columns, tmp_path, lambda log, _: log.step(FULL))
    drawn = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", shown).replace("\r", "\n").splitlines()
    at = next(place for place, line in enumerate(drawn) if "1200/2000" in line)
    assert len(drawn[at]) == columns and "60%" in drawn[at]
    figures = drawn[at + 1 : at + 3]
    assert all(len(line) < columns for line in figures) and " | ".join(map(str.strip, figures)) == (
        "loss 0.4512 | 18.3 ms | 112,000 samples/s | hit 93.4% | stale 1.1% | lag p99 100 | pulled 1.2 MB | "
        "pushed 812.3 kB"
    )


def test_a_terminal_moves_between_logged_steps_and_keeps_its_cursor(terminal, tmp_path):
    def call(log, spans):
        spans.step = 77
        log.evaluation({"step": 50, "auc": 0.79})
        time.sleep(2.5 * TICK_S)
        log.finish({**SUMMARY, "run_dir": "[wdl]"})

    shown = terminal(120, tmp_path, call)
    assert "77/2000" in shown and "step 50 | auc 0.7900" in shown and "'[wdl]'" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # cursor shown again after it was hidden


# The state.


def test_a_run_s_state_follows_it(log, run_dir):
    assert read_status(run_dir)["state"] == "running" and is_alive(read_status(run_dir))
    log.stop(30, "checkpoints/step-00000030")
    assert (
        read_status(run_dir).items() >= {"state": "stopped", "step": 30, "resume": "checkpoints/step-00000030"}.items()
    )
    write_failed(run_dir, "it has left")
    assert read_status(run_dir)["state"] == "stopped"


def test_the_first_failure_stays_and_a_finished_run_has_not_failed(log, run_dir, tmp_path):
    write_failed(run_dir, "hetmpi: no disk")
    write_failed(run_dir, "hetmpi: rank 0 is gone")
    assert read_status(run_dir)["message"] == "hetmpi: no disk"
    log.finish(SUMMARY)
    write_failed(run_dir, "late")
    assert read_status(run_dir)["state"] == "finished"
    write_failed(tmp_path / "none", "nowhere to write to")


def test_another_process_of_the_same_number_is_not_the_run(log, run_dir):
    found = read_status(run_dir)
    assert not is_alive({**found, "process_start": found["process_start"] + 1})
    assert is_alive({**found, "host": "another"}) is None


def test_the_environment_says_commit_and_versions():
    found = environment(["a", "b", "a"], torch.device("cpu"))
    assert found["ranks_by_host"] == {"a": 2, "b": 1} and found["torch"] == torch.__version__
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
        assert found["commit"] == (head.stdout.strip() or None) and found["is_modified"] in (True, False, None)


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (3.2e9, "3.2 GB"), (5e15, "5000.0 TB")],
)
def test_bytes_are_written_in_decimal_units(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 MB"), (35_021, "0.035 MB"), (1_234_567, "1.23 MB"), (3e8, "300 MB"), (5, "less than 0.001 MB")],
)
def test_bytes_to_compare_are_written_in_megabytes(count, text):
    assert megabytes_text(count) == text
