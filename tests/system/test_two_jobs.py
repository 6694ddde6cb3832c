"""Two jobs that name one folder."""

import os
import signal
import subprocess
import sys
import time

import pytest
from crafted import change_manifest
from launch import ROOT, SMALL, environment, launcher_of, ranks_of, summary, train


def newest(folder):
    return max((int(path.name[5:]) for path in folder.glob("step-????????")), default=0)


@pytest.mark.rare
def test_a_second_job_is_refused_while_the_first_runs_and_goes_on_where_it_was_killed(tmp_path):
    run_dir, saved = tmp_path / "run", tmp_path / "saved"
    settings = [*SMALL, "checkpoint.every_steps=20", f"checkpoint.dir={saved}", "resume=auto", "device=cpu"]
    command = [*launcher_of(2), sys.executable, "-m", "hetmpi.train", *settings, "steps=1000000000"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen([*command, f"run.dir={run_dir}"], cwd=ROOT, env=environment(), **quiet)
    while newest(saved) == 0 and first.poll() is None:
        time.sleep(0.05)
    others = [(2, run_dir, f"run.dir={run_dir}"), (1, tmp_path / "other", f"checkpoint.dir={saved}")]
    for ranks, folder, setting in others:
        second = train(ranks, *settings, f"run.dir={folder}")
        assert second.code == 1 and second.survivors == [], second.text
        [line] = [line for line in second.text.splitlines() if "is in use by process" in line]
        assert line.startswith(f"hetmpi: {setting} is in use by process "), second.text
    assert not (tmp_path / "other").exists()
    before = newest(saved)
    while newest(saved) < before + 40 and first.poll() is None:  # it saves as before
        time.sleep(0.05)
    assert first.poll() is None
    os.kill(ranks_of(run_dir)[0], signal.SIGKILL)
    first.wait(60)
    reached = newest(saved)
    path = saved / f"step-{reached:08d}"
    harmful = {"_target_": "harmful.Model"}  # a resumed run takes its classes from the settings
    change_manifest(path, lambda said: said.update(model_config=harmful))
    resumed = train(2, *settings, f"run.dir={run_dir}", f"steps={reached + 5}")
    assert resumed.code == 0 and f"resumed from {path}" in resumed.text, resumed.text
    assert "whether it still runs" not in resumed.text
    assert summary(run_dir)["steps"] == reached + 5
    assert not [*tmp_path.rglob(".lock*")]
