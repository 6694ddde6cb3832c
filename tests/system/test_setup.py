"""The set-up (tools/setup.sh) and run.sh as a user meets them."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from launch import ROOT, SMALL, environment, run

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
SETUP = """
    set -euo pipefail
    ROOT={root} VENV={folder}/venv CORES=2 HETMPI_MPI=mpich MPI_NAME="MPICH 5.0.1" HETMPI_CACHE={folder}/cache
    HOROVOD_GPU= HOROVOD_GPU_OPERATIONS= HETMPI_TORCH_INDEX=
    source {root}/tools/setup.sh
"""


def shell(folder, script, **extra):
    """Runs functions of tools/setup.sh for a venv in `folder`, with this process's Python."""
    env = environment(PATH=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", **extra)
    command = ["bash", "-c", SETUP.format(root=ROOT, folder=folder) + script]
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)


@pytest.mark.parametrize(
    "log, shown",
    [
        (PIP[: PIP.index("\n") + 1], "looking for pyarrow==26.0.1"),
        (PIP, "downloading pyarrow 26.0.1 (55.0 MB)"),
        (
            PIP + "Progress 262144 of 55038406\nProgress 13759602 of 55038406\n",
            "downloading pyarrow 26.0.1 (55.0 MB), 25 %",
        ),
        (PIP + "Progress 55038406 of 55038406\n", "downloaded pyarrow 26.0.1"),
        *(
            ("".join(SDIST.splitlines(keepends=True)[:number]), shown)
            for number, shown in (
                (2, "downloading horovod 0.28.1 (3.5 MB)"),
                (3, "downloaded horovod 0.28.1"),
                (4, "preparing horovod 0.28.1"),
                (7, ""),
                (9, "preparing horovod 0.28.1"),
                (11, "preparing horovod 0.28.1"),
                (13, "building horovod"),
            )
        ),
        (PIP + "Installing collected packages: numpy, pyarrow, torch\n", "installing pyarrow [2/3]"),
        (NINJA[: NINJA.index("\n") + 1], "configuring"),
        (NINJA, "compiling [12/31] operations.cc"),
        (NINJA + "  [31/31] Linking CXX shared library /tmp/mpi_lib_v2.so\n", "linking"),
        (CORE, "compiling [2/13] cpp/python/functions.cpp"),
        (CORE + "Successfully built hetmpi\n", ""),
    ],
)
def test_progress_is_the_last_thing_a_log_tells_of(tmp_path, log, shown):
    (tmp_path / "log").write_text(log)
    assert shell(tmp_path, f"progress_in {tmp_path}/log 1").stdout.rstrip("\n") == shown


def test_a_silent_step_is_heard_of_in_a_pipe(tmp_path):
    log = tmp_path / "log"
    log.write_text(PIP)
    said = shell(tmp_path, f"QUIET_S=1; show_progress '[1/6] torch' {log} & sleep 2.7; kill $!").stdout.splitlines()
    assert len(said) == 2 and all(
        line.startswith("[1/6] torch: downloading pyarrow 26.0.1 (55.0 MB), ") for line in said
    )


def test_horovod_is_compiled_anew_for_all_that_decides_its_binary_but_not_for_another_venv(tmp_path):
    here, elsewhere = (shell(tmp_path / name, "describe_horovod").stdout for name in ("here", "elsewhere"))
    assert "torch 2" in here and here == elsewhere
    changed = shell(tmp_path, "describe_horovod", CXXFLAGS="-O1", HOROVOD_WITH_GLOO="1").stdout.splitlines()
    assert set(changed) - set(here.splitlines()) == {"CXXFLAGS=-O1", "HOROVOD_WITH_GLOO=1"}


def test_a_kept_wheel_is_found_again_and_not_used_if_damaged(tmp_path):
    made = tmp_path / "venv/hetmpi-setup/horovod/wheel/horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    made.parent.mkdir(parents=True)
    with zipfile.ZipFile(made, "w") as wheel:
        wheel.writestr("horovod/__init__.py", "version = 1\n" * 100)
    keep = "keep_wheel 0.28.1-0ab & keep_wheel 0.28.1-0ab; wait"
    assert shell(tmp_path, keep).returncode == 0
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.name == "horovod-0.28.1-0ab-cp311-cp311-linux_x86_64.whl" and kept.read_bytes() == made.read_bytes()
    assert shell(tmp_path, f"is_whole {kept}").returncode == 0
    kept.write_bytes(made.read_bytes().replace(b"version = 1", b"version = 2", 1))
    outcome = shell(tmp_path, "install_kept 0.28.1-0ab")
    assert outcome.returncode == 1 and "is of no use: compiling it anew" in outcome.stdout
    assert shell(tmp_path, "install_kept 0.28.1-0cd").stdout == ""


def test_programs_are_installed_in_the_venv_also_where_the_base_python_has_their_packages(tmp_path):
    packages = tmp_path / "venv/lib/python3.11/site-packages"
    (packages / "ruff-0.17.6.dist-info").mkdir(parents=True)
    (tmp_path / "list.txt").write_text("mpich==5.0.1  # MPI\npytest==9.2.0\nruff==0.17.6\nclang-format==23.1.5\n")
    (tmp_path / "none.txt").write_text("pytest==9.2.0\n")
    pip = f"pip_install() {{ echo pip $*; }}; cd {tmp_path}; "
    called = shell(tmp_path, pip + "install_programs list.txt; install_programs none.txt; echo done")
    lines = [line for line in called.stdout.splitlines() if line.startswith(("pip", "done"))]
    command = "pip --no-deps --ignore-installed"
    assert lines == [f"{command} mpich==5.0.1", f"{command} clang-format==23.1.5", "done"]


def test_every_dependency_of_the_package_is_installed_before_the_first_training():
    """So that `hetmpi report`, which a run suggests, works in the environment that trained."""
    dependencies = re.search(r"\ndependencies = \[(.*?)\n\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]
    names = set(re.findall(r'"([a-z0-9-]+)', dependencies))
    first = (ROOT / "requirements.txt").read_text().split("\n# [")[0]
    assert {"plotly", "torch"} < names <= set(re.findall(r"^([a-z0-9-]+)==", first, re.MULTILINE))


def test_a_set_up_without_room_is_refused(tmp_path):
    outcome = shell(
        tmp_path, f"need_room {tmp_path} 999000000 999000000 'another folder with HETMPI_VENV'; echo went on"
    )
    assert outcome.returncode == 1 and "999000.0 GB are needed: free some, or name another folder" in outcome.stdout
    assert "went on" not in outcome.stdout
    outcome = shell(tmp_path, f"need_room {tmp_path} 1 999000000 'another folder with HETMPI_VENV'; echo went on")
    assert "too little for a torch with CUDA" in outcome.stdout and outcome.stdout.endswith("went on\n")


def test_an_index_without_torch_is_named(tmp_path):
    index = f"file://{tmp_path}"
    settings = {"HETMPI_VENV": str(tmp_path / "venv"), "HETMPI_MPI": "mpich", "HETMPI_TORCH_INDEX": index}
    outcome = run([str(ROOT / "run.sh"), "setup"], cwd=tmp_path, **settings)
    assert outcome.code == 1
    for said in (
        "[1/6] venv: done in ",
        "[2/6] torch: installing ",
        f"HETMPI_TORCH_INDEX={index} does not answer or lacks",
    ):
        assert outcome.text.count(said) == 1, outcome.text
    assert f"the whole log is {tmp_path}/venv/hetmpi-setup/torch.log" in outcome.text


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
