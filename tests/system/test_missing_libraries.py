"""A machine or an environment that lacks a library: one line names it and what to load or install."""

import sys
from pathlib import Path

import mpi4py
import pytest
from launch import ROOT, SMALL, environment, launcher_of, losses, run, train

WITHOUT = """
import runpy, sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without())
sys.argv = {arguments!r}
"""
COMMANDS = {
    "train": ["steps=1"],
    "predict": ["checkpoint", "out=out.parquet"],
    "export": ["checkpoint", "out"],
    "doctor": [],
}


def without(name, command, arguments=()):
    """The program `hetmpi COMMAND ARGUMENTS`, or Python text, in a Python that lacks the module `name`."""
    is_command = command in ("train", "predict", "export", "doctor", "report", "inspect")
    text = f"runpy.run_module('hetmpi.{command}', run_name='__main__', alter_sys=True)" if is_command else command
    return [sys.executable, "-c", WITHOUT.format(name=name, arguments=["hetmpi", *arguments]) + text]


def is_one_line(outcome, *words):
    text = outcome.text
    return outcome.code == 1 and text.startswith("hetmpi: ") and text.count("\n") == 1 and all(w in text for w in words)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_without_mpi4py_says_what_to_load_or_install(command, tmp_path):
    outcome = run(without("mpi4py", command, COMMANDS[command]), cwd=tmp_path)
    assert is_one_line(outcome, sys.executable, "no mpi4py", "module", "activate", "pip install mpi4py"), outcome.text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_without_a_libmpi_says_which_module_to_load(command, tmp_path):
    if not any(Path(mpi4py.__file__).parent.glob("MPI.mpich*")):
        pytest.skip("this mpi4py was built for one MPI: the wheel looks for a libmpi")
    program = [sys.executable, "-m", f"hetmpi.{command}", *COMMANDS[command]]
    outcome = run(program, cwd=tmp_path, MPI4PY_LIBMPI=str(tmp_path / "libmpi.so.40"))
    assert is_one_line(outcome, "no MPI library", "libmpi.so.40: cannot open", "module load"), outcome.text


def test_an_mpi4py_built_on_a_missing_libmpi_is_refused_as_the_wheel_is(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("class rc: pass")
    (tmp_path / "mpi4py/MPI.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')")
    outcome = run([sys.executable, "-m", "hetmpi.train"], PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert is_one_line(outcome, "no MPI library (libmpi.so.40: cannot open shared object file)"), outcome.text


def test_ranks_without_mpi4py_say_it_once():
    outcome = run([*launcher_of(2), *without("mpi4py", "train", ["steps=1"])])
    assert outcome.code != 0 and outcome.text.count("hetmpi: ") == outcome.text.count("no mpi4py") == 1, outcome.text
    assert "Traceback" not in outcome.text


def test_report_and_inspect_need_no_mpi(tmp_path):
    (tmp_path / "clicks.csv").write_text("click,item\n" + "1,a\n0,b\n" * 50)
    outcome = run(without("mpi4py", "inspect", ["clicks.csv"]), cwd=tmp_path)
    assert outcome.code == 0 and "item" in outcome.text, outcome.text
    outcome = run(without("mpi4py", "report", ["."]), cwd=tmp_path)
    assert "mpi4py" not in outcome.text and "config.yaml" in outcome.text, outcome.text


@pytest.mark.parametrize(
    "module, words", [("mpi4py", ["no mpi4py", "pip install mpi4py"]), ("hetmpi._C", ["no compiled core", "setup"])]
)
def test_a_loop_of_ones_own_says_what_is_missing(module, words):
    outcome = run(without(module, "from hetmpi import EmbeddingBag"))
    assert is_one_line(outcome, *words), outcome.text


def test_a_missing_library_can_be_caught_as_an_import_error():
    caught = "try:\n    from hetmpi import World\nexcept ImportError as error:\n    print('caught:', error.__class__)"
    outcome = run(without("mpi4py", caught))
    assert outcome.text == "caught: <class 'hetmpi.errors.MissingLibrary'>\n"


def test_a_command_without_another_package_names_it():
    started = without("pyarrow", "runpy.run_module('hetmpi', run_name='__main__')", ["inspect", "clicks.csv"])
    assert is_one_line(run(started), "has no pyarrow", "activate", "pip install pyarrow")


HOROVODS = {  # horovod/torch.py -> words
    "raise ImportError('libmpi.so.40: cannot open shared object file')": ["cannot be loaded (libmpi.so.40", "modules"],
    "def mpi_built(): return False": ["built without MPI", "HOROVOD_WITH_MPI=1"],
}


@pytest.mark.parametrize("text", HOROVODS)
def test_a_horovod_that_cannot_be_used_is_named_with_the_line_that_builds_it(text, tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod/__init__.py").write_text("__version__ = '0'")
    (tmp_path / "horovod/torch.py").write_text(text)
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    settings = ["device=cpu", "optim.dense_exchange=horovod", *SMALL]
    outcome = run([sys.executable, "-m", "hetmpi.train", *settings], cwd=tmp_path, PYTHONPATH=path)
    assert is_one_line(outcome, "Horovod", "mpicxx", *HOROVODS[text]), outcome.text


def test_a_training_by_a_missing_horovod_says_how_it_is_built(tmp_path):
    outcome = run(without("horovod", "train", ["device=cpu", "optim.dense_exchange=horovod", *SMALL]), cwd=tmp_path)
    assert is_one_line(outcome, "no Horovod", "HOROVOD_WITH_MPI=1"), outcome.text


def test_without_horovod_mpi_trains_to_the_same_bits_and_says_so_in_one_line(tmp_path):
    program = without("horovod", "train", ["device=cpu", *SMALL, f"run.dir={tmp_path}/mpi"])
    outcome = run([*launcher_of(2), *program])
    assert outcome.code == 0, outcome.text
    told = [line for line in outcome.text.splitlines() if "without Horovod" in line]
    assert len(told) == 1 and told[0].endswith("(optim.dense_exchange=horovod says how it is)"), outcome.text
    assert train(2, *SMALL, f"run.dir={tmp_path}/horovod").code == 0
    assert losses(tmp_path / "mpi") == losses(tmp_path / "horovod")
