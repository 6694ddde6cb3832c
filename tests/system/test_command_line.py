"""The command hetmpi as a user calls it, from a folder of their own."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, environment, losses, mpiexec, ranks_of, run, summary
from own_model import MODEL

from hetmpi.checkpoint.manifest import digest_of
from hetmpi.metrics import auc
from hetmpi.world.cores import usable_cores

TINY = ["data.scale=0.0005", "table.dim=4", "batch_size=32", "steps=6", "log.every_steps=2", "eval.max_samples=500"]


def hetmpi(ranks, *arguments, cwd, **extra):
    """`hetmpi ARGUMENTS` on this many ranks, 0 without a launcher, without access to the checkout's folder."""
    mpi = [mpiexec(), "-n", str(ranks)] if ranks else []
    return run([*mpi, sys.executable, "-m", "hetmpi", *arguments], cwd=cwd, PYTHONPATH=str(ROOT), **extra)


def is_hydra():
    """Whether the launcher is MPICH's."""
    return "HYDRA" in subprocess.run([mpiexec(), "--version"], capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A user's folder: conf/model/, a model file, and a package models/ with the names of hetmpi's modules."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "conf/model").mkdir(parents=True)
    (folder / "models").mkdir()
    (folder / "mine.py").write_text(MODEL.format(name="Mine"))
    (folder / "models/wdl.py").write_text(MODEL.format(name="MyWDL"))
    (folder / "conf/model/mine.yaml").write_text("_target_: mine.Mine\n")
    (folder / "conf/model/shadow.yaml").write_text("_target_: models.wdl.MyWDL\n")
    return folder


@pytest.mark.long
def test_models_of_ones_own_are_found_beside_those_of_hetmpi(own):
    points = "model=mine,shadow,wdl"
    outcome = hetmpi(2, "train", "-m", *TINY, points, "run.dir=runs/sweep", cwd=own)
    assert outcome.code == 0, outcome.text
    runs = sorted((own / "runs/sweep").iterdir())
    assert [run.name for run in runs] == ["0-model=mine", "1-model=shadow", "2-model=wdl"]
    assert [summary(run)["dense_parameters"] for run in runs[:2]] == [26 * 4 + 13 + 1] * 2
    table = outcome.text.split("samples/s")[-1]
    assert all(f"{run.name} " in table and f"{summary(run)['auc']:.4f}" in table for run in runs), outcome.text


@pytest.mark.long
def test_a_sweep_goes_on_with_what_was_not_finished(own):
    arguments = ["train", "--multirun", *TINY, "model=mine", "optim.rows_lr=0.01,0.02", "run.dir=runs/again"]
    assert hetmpi(2, *arguments, cwd=own).code == 0
    first, second = sorted((own / "runs/again").iterdir())
    kept, found = (first / "metrics.jsonl").stat().st_mtime_ns, losses(second)
    (second / "summary.json").unlink()
    shutil.rmtree(second / "checkpoints")
    outcome = hetmpi(2, *arguments, cwd=own)
    assert outcome.code == 0 and f"{first.relative_to(own)} is done" in outcome.text, outcome.text
    assert (first / "metrics.jsonl").stat().st_mtime_ns == kept and losses(second) == found
    outcome = hetmpi(0, *arguments, "steps=7", cwd=own)
    assert outcome.code != 0 and "holds a run with other settings" in outcome.text


def test_cfg_prints_what_would_run_and_config_dir_comes_first(own, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("_target_: other.Model\n")
    outcome = hetmpi(2, "train", "--cfg", "job", "model=mine", "--config-dir", str(tmp_path), "table.dim=7", cwd=own)
    assert outcome.code == 0 and "_target_: other.Model" in outcome.text and "dim: 7" in outcome.text, outcome.text
    assert outcome.text.count("model_name: mine") == 1  # printed by rank 0 only
    search = f"hydra.searchpath=[file://{tmp_path}]"
    (tmp_path / "model/third.yaml").write_text("_target_: third.Model\n")
    assert "third.Model" in hetmpi(0, "train", "--cfg", "job", "model=third", search, cwd=own).text


@pytest.mark.rare
def test_predictions_have_the_auc_that_the_run_found(own):
    folder = own / "runs/predicted"
    assert hetmpi(2, "train", *TINY, "model=mine", f"run.dir={folder}", cwd=own).code == 0
    [checkpoint] = (folder / "checkpoints").iterdir()
    outcome = hetmpi(0, "predict", str(checkpoint), "out=p.npy", "stop=500", cwd=own)
    assert outcome.code == 1 and "if you trust it, add allow=mine" in outcome.text, outcome.text
    outcome = hetmpi(0, "predict", str(checkpoint), "out=p.npy", "stop=500", "allow=mine", cwd=own)
    assert outcome.code == 0, outcome.text
    from hetmpi.data.synthetic import Synthetic

    source = Synthetic(scale=0.0005, zipf=1.05, num_train=500000, num_valid=100000, seed=0)
    source.prepare(0, 1, lambda: None)
    found = np.load(own / "p.npy")
    assert found.shape == (500,) and found.dtype == np.float32
    assert auc(source.valid(0, 500).label, found) == pytest.approx(summary(folder)["auc"], abs=1e-9)
    foreign = own / "foreign"
    shutil.copytree(checkpoint, foreign)
    manifest = json.loads((foreign / "manifest.json").read_text())
    attack = {"_target_": "os.system", "command": f"touch {own}/harmed"}
    for key, value in [("scale", attack), ("zipf", "${oc.env:HOME}"), ("[_target_]", "os.mkdir")]:
        harmful = {**manifest, "data_config": {**manifest["data_config"], key: value}}
        harmful["xxh3_128"] = digest_of({name: entry for name, entry in harmful.items() if name != "xxh3_128"})
        (foreign / "manifest.json").write_text(json.dumps(harmful))
        outcome = hetmpi(0, "predict", str(foreign), "out=q.npy", "stop=5", "allow=mine", cwd=own)
        assert not (own / "harmed").exists() and "Traceback" not in outcome.text
        assert outcome.code == 0 if key == "[_target_]" else "must be a plain value" in outcome.text, outcome.text
    wrongs = [("data.scale=0.01", "was trained on data with"), ("stop=0", "stop must be"), ("split=x", "split must be")]
    for wrong, word in wrongs:
        outcome = hetmpi(0, "predict", str(checkpoint), "out=p.npy", "allow=mine", wrong, cwd=own)
        assert outcome.code != 0 and word in outcome.text and "Traceback" not in outcome.text, outcome.text


def test_more_ranks_than_cores_sleep_while_they_wait(own):
    """Under a plain mpiexec, which preloads nothing."""
    (own / "conf/model/naps.yaml").write_text("_target_: naps.Naps\n")
    tells = "print('NAPS' if '_naps' in open('/proc/self/maps').read() else 'none')"
    (own / "naps.py").write_text(f"{MODEL.format(name='Naps')}\n{tells}\n")
    ranks = usable_cores() + 1
    outcome = hetmpi(ranks, "train", *TINY, "model=naps", "run.dir=runs/naps", cwd=own, LD_PRELOAD="")
    assert outcome.code == 0 and outcome.text.count("NAPS") == ranks, outcome.text


def test_a_default_run_keeps_its_model_unless_told_otherwise(own):
    for chosen, kept in [("checkpoint.at_end=false", 0), ("checkpoint.at_end=true", 1)]:
        folder = own / f"runs/kept{kept}"
        assert hetmpi(0, "train", *TINY, "model=mine", chosen, f"run.dir={folder}", cwd=own).code == 0
        assert len(list(folder.glob("checkpoints/step-00000006/manifest.json"))) == kept


@pytest.mark.parametrize("presses, code", [(1, 85), (2, None)])
def test_ctrl_c_saves_and_a_second_one_ends_at_once(own, presses, code):
    """Ctrl-C in a terminal sends the signal to mpiexec and to the ranks. Open MPI's mpiexec then kills them, unless
    run.sh started it."""
    folder = own / f"runs/pressed{presses}"
    hydra = [mpiexec(), "-n", "2", sys.executable, "-m", "hetmpi.train"]
    command = [*(hydra if is_hydra() else [ROOT / "run.sh", "train"]), *TINY, "steps=1000000", f"run.dir={folder}"]
    env = environment(PYTHONPATH=str(ROOT), HETMPI_VENV=sys.prefix, NP="2")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command, cwd=own, env=env, stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(follower)
    text = ""
    while "r0 | step 20 " not in text and "20/1000000" not in text:
        text += os.read(leader, 4096).decode(errors="replace")
        assert process.poll() is None, text
    for _ in range(presses):
        os.write(leader, b"\x03")
        time.sleep(1.5)
    try:
        while data := os.read(leader, 4096):
            text += data.decode(errors="replace")
    except OSError:  # the terminal's other end is closed
        pass
    found = process.wait(20)
    os.close(leader)
    print(text[-2000:])
    saved = list(folder.glob("checkpoints/step-*/manifest.json"))
    assert "saving after this step" in text and len(saved) == 1 if presses == 1 else found != 0
    assert found == code if code else ranks_of(folder) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["mpich_shm_", "vader_segment.vm.0.109b0001.", "sm_segment.vm.0.5fbb0000."])
def test_doctor_clean_removes_segments_of_no_living_process(own, name):
    dead, living, fresh = (Path(f"/dev/shm/{name}{state}{os.getpid()}") for state in ("dead", "living", "fresh"))
    for path in (dead, living, fresh):
        path.write_bytes(b"x" * 4096)
    for path in (dead, living):
        os.utime(path, (time.time() - 3600,) * 2)
    mapped = np.memmap(living)
    try:
        outcome = hetmpi(0, "doctor", "--clean", cwd=own)
        assert outcome.code == 0 and "removed" in outcome.text
        assert [path.exists() for path in (dead, living, fresh)] == [False, True, True]
    finally:
        del mapped
        for path in (living, fresh):
            path.unlink(missing_ok=True)


def test_an_unknown_command_or_option_is_refused(own):
    assert "there is no command tarin: it is one of train, predict" in hetmpi(0, "tarin", cwd=own).text
    outcome = hetmpi(0, "train", "--no-such-option", cwd=own)
    assert outcome.code != 0 and "--no-such-option" in outcome.text and "Traceback" not in outcome.text


def test_sigterm_ends_a_run_that_still_reads_its_files(tmp_path):
    """A rank that waits inside a library, which runs no Python, as for a disk that does not answer."""
    os.mkfifo(tmp_path / "pipe")
    text = f"""
import pyarrow
from hetmpi.run.preemption import Preemption
from hetmpi.world.world import World
preemption = Preemption(World())
print("waits", flush=True)
pyarrow.OSFile({str(tmp_path / "pipe")!r})
"""
    process = subprocess.Popen(
        [sys.executable, "-c", text], env=environment(PYTHONPATH=str(ROOT)), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == "waits\n"
    time.sleep(0.2)
    process.terminate()
    errors = process.communicate(timeout=10)[1]
    assert process.returncode == 85 and errors.strip() == (
        "hetmpi: ended by SIGTERM before the first step, nothing is lost"
    )


@pytest.mark.parametrize("number, waits", [
    (signal.SIGTERM, "time.sleep(60)"), (signal.SIGINT, "time.sleep(60)"),
    (signal.SIGTERM, "pyarrow.OSFile(sys.argv[1])"),
], ids=str)  # fmt: skip
def test_the_line_of_an_ended_program_is_the_last_one(tmp_path, number, waits):
    """Ranks that a signal kills make the launcher print a paragraph."""
    if not is_hydra():
        pytest.skip("Open MPI's launcher prints a paragraph after every code but 0")
    os.mkfifo(tmp_path / "pipe")
    text = f"""
import sys, time
from hetmpi.world.early_signals import exit_on_signals
exit_on_signals()
import pyarrow
print("waits", flush=True)
{waits}
"""
    process = subprocess.Popen(
        [mpiexec(), "-n", "2", sys.executable, "-c", text, str(tmp_path / "pipe")], text=True, stdout=subprocess.PIPE,
        env=environment(PYTHONPATH=str(ROOT)), stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert [process.stdout.readline() for _ in range(2)] == ["waits\n"] * 2
    process.send_signal(number)
    output = process.communicate(timeout=20)[0]
    assert output.splitlines()[-1] == f"hetmpi: ended by {number.name}" and process.returncode == 128 + number


def test_ctrl_c_ends_a_report_in_one_line_and_leaves_no_part(tmp_path):
    """A report of a metrics.jsonl that takes seconds to read; Ctrl-C comes while it is read."""
    (tmp_path / "config.yaml").write_text("steps: 10\n")
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.writelines(f'{{"step": {step}, "x": {{}}}}\n' for step in range(1, 1_000_000))
    process = subprocess.Popen(
        [sys.executable, "-m", "hetmpi", "report", str(tmp_path)], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=environment(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and errors.splitlines() in (["hetmpi: interrupted"], ["hetmpi: ended by SIGINT"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "metrics.jsonl"]
