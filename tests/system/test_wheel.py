"""A built wheel in a separate environment that has an MPI, Horovod and torch, started from an empty folder."""

import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, mpiexec, run, summary
from own_model import MODEL

from hetmpi.world.mpi import mpi_libraries

SMALL = ["data.scale=0.001", "steps=10", "eval.max_samples=500"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment's bin/. It uses the packages of this environment, but not the checkout that is installed
    there."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = f"{sys.executable} -m pip wheel -q --no-deps --no-build-isolation -w {folder} {ROOT}".split()
    subprocess.run(wheel, check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv/bin/python"
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    (packages / "beside.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    [built] = folder.glob("*.whl")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(built)], check=True)
    return python.parent


@pytest.mark.long
def test_a_wheel_trains_from_an_empty_folder(installed, tmp_path):
    def call(*command):
        outcome = run(list(command), cwd=tmp_path, PYTHONPATH="", MPI4PY_LIBMPI=library)
        assert outcome.code == 0, outcome.text
        return outcome.text

    [library] = mpi_libraries()  # that of this environment; a wheel with its own would load another
    python, hetmpi = str(installed / "python"), str(installed / "hetmpi")
    place = call(python, "-c", "import hetmpi; print(hetmpi.__file__)")
    assert str(installed.parent) in place and str(ROOT) not in place
    call(mpiexec(), "-n", "2", python, "-m", "hetmpi.train", *SMALL, "run.dir=first")
    assert summary(tmp_path / "first")["world_size"] == 2
    (tmp_path / "mine.py").write_text(MODEL.format(name="Mine"))
    (tmp_path / "settings/model").mkdir(parents=True)
    (tmp_path / "settings/model/mine.yaml").write_text("_target_: mine.Mine\n")
    call(hetmpi, "train", *SMALL, "model=mine", "--config-dir", "settings", "run.dir=second")
    text = call(mpiexec(), "-n", "2", hetmpi, "train", *SMALL, "-m", "optim.rows_lr=0.01,0.02", "run.dir=third")
    assert "0-optim.rows_lr=0.01" in text and len(list((tmp_path / "third").glob("*/summary.json"))) == 2
    call(hetmpi, "report", "first", "second", "out=report.html")
    assert "doctor" in call(hetmpi, "--help")
