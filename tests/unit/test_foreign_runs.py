"""`hetmpi report` on run folders that are damaged, or that somebody made to do harm."""

import json
import os
from pathlib import Path

import pytest

from hetmpi.bounded_file import MOST_DEPTH, open_regular, parsed_json, read_bytes
from hetmpi.errors import UserError
from hetmpi.log.record import Run
from hetmpi.log.run_files import LARGEST_LINE, LARGEST_OBJECT, MOST_KEYS
from hetmpi.report import write_report

LINE = {"step": 10, "samples": 640, "elapsed_s": 1.0, "loss": 0.7, "lags": [5, 3], "slowest_rank": 0}
SUMMARY = {"steps": 10, "auc": 0.7, "pulled_bytes": 1000, "by_rank": [{"host": "near", "own_ms": 2.0}]}
SETTINGS = {"steps": 10, "table": {"staleness": 10, "cache": {"capacity_rows": None, "capacity_fraction": 0.1}}}


def written(
    folder, settings=SETTINGS, line=LINE, evaluation=LINE, summary=SUMMARY, environment=None, status=None, curves=None
):
    """A run folder of these contents: texts as they are, other values as JSON."""
    files = {
        "config.yaml": settings,
        "metrics.jsonl": line,
        "evaluation.jsonl": evaluation,
        "summary.json": summary,
        "environment.json": environment,
        "status.json": status,
        "curves.json": curves,
    }
    for name, value in files.items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value) + "\n"
            (folder / name).write_text(text)
    return folder


def refusal(folder):
    """The message with which the report of a folder is refused."""
    with pytest.raises(UserError) as error:
        write_report([folder], folder / "report.html")
    text = str(error.value)
    assert len(text.splitlines()) == 1 and text.isprintable() and len(text) < 1000
    return text


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefghi", "bcdefghij")
)
LONG = "1" * 400


@pytest.mark.parametrize(
    "files, reason",
    [
        ({"settings": BOMB}, "settings have no aliases, as *a"),
        ({"settings": "a: " + "[" * 20_000}, "settings are nested in at most 64 levels"),
        ({"settings": "{a: " * 20_000}, "settings are nested in at most 64 levels"),
        ({"settings": "a: !!python/object/apply:os.system [ls]"}, "settings have no tags"),
        ({"settings": "a: !!bool x"}, "settings have no tags"),
        ({"settings": "a: 2020-99-99"}, "config.yaml is not YAML: month must be in 1..12"),
        ({"settings": f"a: {'1' * 5000}"}, "config.yaml is not YAML"),
        ({"settings": f"a: 0x{'f' * 5000}"}, "config.yaml is not YAML: a number is too large"),
        ({"settings": "? [a]\n: 1"}, "config.yaml is not YAML"),
        ({"settings": "a: [\x00\x07"}, "config.yaml is not YAML"),
        ({"settings": "\n" * (1 << 23)}, "config.yaml cannot be read: it is larger than 4,194,304 bytes"),
        ({"line": "[" * 20_000 + "\n"}, "metrics.jsonl, line 1 is not JSON (nested too deeply): remove the line"),
        ({"line": f'{{"step": {LONG}}}\n'}, "line 1 is not JSON (a number is too large)"),
        ({"line": f'{{"step": 1, "loss": {LONG}}}\n'}, "line 1 is not JSON (a number is too large)"),
        ({"line": '{"step": 1, "loss": 1e999}\n'}, "line 1 is not JSON (a number is too large)"),
        ({"line": '{"step": 1, "loss": NaN}\n'}, "line 1 is not JSON (NaN is not a number)"),
        ({"line": '{"step": -1}\n'}, "line 1 has no step"),
        ({"line": '{"step": true}\n'}, "line 1 has no step"),
        ({"line": {**LINE, "pulled_bytes": "many"}}, "line 1: pulled_bytes must be a number, got many"),
        ({"line": {**LINE, "samples": [1]}}, "line 1: samples must be a number"),
        ({"line": {**LINE, "elapsed_s": True}}, "line 1: elapsed_s must be a number"),
        ({"line": {**LINE, "slowest_rank": -1}}, "line 1: slowest_rank must be an integer of at least 0"),
        ({"line": {**LINE, "lags": 5}}, "line 1: lags must be a list of at most 64 counts"),
        ({"line": {**LINE, "lags": [0] * 100_000}}, "line 1: lags must be a list of at most 64 counts"),
        ({"line": {**LINE, "lags": [[1]]}}, "line 1: lags must be a list of at most 64 counts"),
        ({"line": {"step": 1, **{f"m{i}": i for i in range(MOST_KEYS + 1)}}}, "more than 1,000 names of figures"),
        ({"line": " " * (LARGEST_LINE + 2) + "\n"}, "line 1: more than 1,048,576 bytes"),
        ({"evaluation": {**LINE, "auc": "\u2028\n"}}, "auc must be a number, got \\u2028\\n"),
        ({"summary": {}}, "summary.json has an unexpected format, without steps"),
        ({"summary": {**SUMMARY, "first_step": "x"}}, "summary.json: first_step must be an integer of at least 0"),
        ({"summary": {**SUMMARY, "seconds": []}}, "summary.json: seconds must be a number"),
        ({"summary": " " * (LARGEST_OBJECT + 1)}, "summary.json cannot be read: it is larger than 16,777,216 bytes"),
        ({"environment": {"ranks_by_host": {"a": "x"}}}, "ranks_by_host must be numbers of ranks by host"),
        ({"environment": {"ranks_by_host": [1]}}, "ranks_by_host must be numbers of ranks by host"),
        ({"curves": {"step": 1, "roc": [[1]]}}, "curves.json: roc must be points of 2 numbers: remove the file"),
        ({"curves": {"step": 1, "calibration": 5}}, "calibration must be points of 3 numbers"),
        ({"curves": {"step": 1, "precision": [[0, 0]] * 2000}}, "precision must be points of 2 numbers"),
        ({"curves": {"step": 1, "unseen": {"a": [1, -1]}}}, "unseen must be two counts by column"),
        ({"curves": {"roc": []}}, "curves.json: step must be an integer of at least 0"),
        ({"curves": "[" * 100_000}, "curves.json is not JSON (nested too deeply)"),
        ({"status": {"state": "running", "time": "now"}}, "status.json: time must be a number"),
        ({"status": "[" * 100_000}, "status.json is not JSON (nested too deeply): remove the file"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_file_that_no_training_wrote_is_refused_in_one_line(tmp_path, files, reason):
    assert reason in refusal(written(tmp_path, **files))


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "evaluation.jsonl", "summary.json", "environment.json", "status.json", "curves.json"]
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_only_regular_files_are_read(tmp_path, name, make):
    written(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    assert refusal(tmp_path) == f"{tmp_path / name} cannot be read: it is not a regular file"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_settings_that_are_no_regular_file_make_no_run_folder(tmp_path, make):
    make(tmp_path / "config.yaml")
    assert "is not a run folder, as it has no config.yaml" in refusal(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"line": {**LINE, "step": 0}},
        {"line": {**LINE, "lags": [0, 0]}},
        {"line": {**LINE, "loss": 1e100, "pulled_bytes": -1e100, "samples": 1e100, "slowest_rank": 5}},
        {"line": {"step": 1, "note": "text", "other": [{"a": [1]}], "flag": True}},
        {"summary": {**SUMMARY, "steps": 0, "first_step": None}},
        {"summary": {**SUMMARY, "by_rank": [{"host": [1], "own_ms": 1}] * 2, "checkpoint": [1], "ended_early": {}}},
        {"summary": {**SUMMARY, "model": {"a": [1]}, "auc": None, "world_size": None, "extra\u2028": "\ud800"}},
        {"settings": {**SETTINGS, "model_name": ["x"], "resume": {"a": 1}, "model": {"_target_": 5}}},
        {"settings": {"table": {"staleness": "x", "ranks_per_node": "2", "cache": {"capacity_rows": "many"}}}},
        {"settings": {"table": {"staleness": 1.5, "cache": {"capacity_fraction": ["x"]}}}},
        {"settings": "1: {2020-01-01: [{2020-01-01: .inf}]}\nx: [[[]]]"},
        {"environment": {"commit": 5, "started": [1], "device": ["cuda"], "ranks_by_host": {}}},
        {"summary": None, "status": {"state": "running", "time": -1e100, "host": [1], "pid": "x"}},
        {"summary": None, "status": {"state": ["x"], "message": {"a": 1}}},
        {"summary": None, "status": {"state": "failed", "message": {"a": 1}}},
    ],
)
def test_odd_values_are_shown_as_they_are(tmp_path, files):
    written(tmp_path, **files)
    text = write_report([tmp_path, tmp_path], tmp_path / "report.html").read_text()
    assert "NaN" not in text[text.index('id="figures"') : text.rindex("</script>\n<script>")]


def test_a_report_replaces_a_link_of_its_name_and_follows_none(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("report.html", "report.html.part"):
        (run / name).symlink_to(mine)
    write_report([written(run)], run / "report.html")
    assert mine.read_text() == "precious"
    assert not (run / "report.html").is_symlink() and "<!DOCTYPE html>" in (run / "report.html").read_text()
    assert sorted(path.name for path in run.glob("report*")) == ["report.html"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)])
def test_a_report_replaces_only_files(tmp_path, make):
    make(written(tmp_path) / "report.html")
    reason = "it is not a regular file: choose another path with out=FILE"
    assert refusal(tmp_path) == f"cannot write {tmp_path}/report.html: {reason}"


def test_any_name_of_a_folder_is_shown_in_one_line(tmp_path):
    names = ["²", "1\n2", "\udcff\u2028", "x" * 250]
    for name in names:
        (tmp_path / name).mkdir()
        written(tmp_path / name)
    assert write_report([tmp_path], tmp_path / "report.html").stat().st_size > 0
    for name in names:
        (tmp_path / name / "summary.json").write_text("[]")
        assert "summary.json has an unexpected format" in refusal(tmp_path / name)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(UserError, match="is not a run folder"):
        write_report([loop], tmp_path / "report.html")


def test_a_file_is_read_up_to_its_limit(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_bytes(file, 5) == b"12345"
    with pytest.raises(UserError, match="file cannot be read: it is larger than 4 bytes"):
        read_bytes(file, 4)
    for other, reason in (("none", "No such file"), ("", "not a regular file"), ("\0", "embedded null")):
        with pytest.raises(UserError, match=f"cannot be read: .*{reason}"):
            open_regular(f"{tmp_path}/{other}")


def test_json_is_read_up_to_a_depth():
    assert parsed_json(f"{'[' * MOST_DEPTH}{']' * MOST_DEPTH}", "it")
    with pytest.raises(UserError, match=r"^it is not JSON \(nested too deeply\)$"):
        parsed_json(f"{'[' * (MOST_DEPTH + 1)}{']' * (MOST_DEPTH + 1)}", "it")


def test_the_slowest_rank_may_have_no_entry(tmp_path):
    run = Run(Path(written(tmp_path, line={**LINE, "slowest_rank": 7})), "a", 0)
    assert run.slowest_rank() == "rank 7, in 100% of the lines"
