"""Messages advise lines that work in the way that the program was started."""

import subprocess
import sys

import pytest

import hetmpi
from hetmpi.errors import UserError
from hetmpi.run.command_line import parse
from hetmpi.world.commands import command
from hetmpi.world.mpi import matching


@pytest.fixture(params=["hetmpi", "run.sh", "slurm"])
def started(request, monkeypatch):
    for name in ("HETMPI_RUN_SH", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    if request.param == "run.sh":
        monkeypatch.setenv("HETMPI_RUN_SH", "../my hetmpi/run.sh")
    if request.param == "slurm":
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    return request.param


def test_a_command_on_ranks_is_advised_with_the_launcher_in_use(started):
    assert (
        command("doctor", ranks=2)
        == {
            "hetmpi": "mpirun -np 2 hetmpi doctor",
            "run.sh": "NP=2 '../my hetmpi/run.sh' doctor",
            "slurm": "srun -n 2 hetmpi doctor",
        }[started]
    )


def test_a_command_alone_is_advised_without_a_launcher(started):
    assert command("report") == ("'../my hetmpi/run.sh' report" if started == "run.sh" else "hetmpi report")


def test_advice_on_launchers_and_options_names_a_command_that_is_there(started):
    assert f"({command('doctor')} shows it)" in matching()
    with pytest.raises(UserError) as refusal:
        parse(["--no-such-option"])
    assert f"`{command('train --help')}`" in str(refusal.value)


def test_the_version_is_told():
    told = subprocess.run([sys.executable, "-m", "hetmpi", "--version"], capture_output=True, text=True, check=True)
    assert told.stdout == f"hetmpi {hetmpi.__version__}\n"
