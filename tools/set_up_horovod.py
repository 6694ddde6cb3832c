"""Horovod's step of the set-up. A compiled wheel is kept under a hash of all that decides its binary, so that another
venv or checkout of the same kind installs it in seconds."""

import contextlib
import glob
import hashlib
import inspect
import os
import re
import shutil
import socket
import subprocess
import zipfile

from set_up_packages import pin
from set_up_progress import output

ASKED = r"(HOROVOD_\w+|CUDA_HOME|CC|CXX|(C|CPP|CXX|LD)FLAGS)$"  # variables that Horovod's build obeys
TORCH = """
import platform, sysconfig, torch
print("Python", platform.python_version(), sysconfig.get_config_var("SOABI"), *platform.libc_ver())
print("torch", torch.__version__, torch.version.git_version, torch.version.cuda, torch.compiled_with_cxx11_abi())
"""


class Horovod:
    """Horovod in the virtual environment of a set-up."""

    def __init__(self, set_up):
        self.set_up = set_up
        user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", "/tmp"), ".cache")
        self.cache = os.path.abspath(os.environ.get("HETMPI_CACHE") or f"{user}/hetmpi")

    def key(self):
        """For the step's stamp, from files alone. Another torch, the base Python's too, or another recipe means a new
        Horovod."""
        torch = ""
        with contextlib.suppress(OSError), open(self.set_up.read("torch")) as file:
            torch = file.read()
        text = torch + inspect.getsource(Horovod.compile)
        asked = [os.environ[name] for name in ("HOROVOD_GPU", "HOROVOD_GPU_OPERATIONS")]
        return " ".join([pin("horovod"), *asked, hashlib.sha256(text.encode()).hexdigest()[:16]])

    def remove(self):
        self.set_up.call("python", "-m", "pip", "uninstall", "-y", "horovod")

    def install(self):
        described = self.described()
        self.set_up.write("horovod.txt", described)
        # a wheel's build number, which starts with a digit
        build = f"{pin('horovod')}-0{hashlib.sha256(described.encode()).hexdigest()[:16]}"
        if self.install_kept(build):
            return
        folder = f"{self.set_up.state}/horovod"
        shutil.rmtree(folder, ignore_errors=True)
        self.compile(folder)
        [wheel] = glob.glob(f"{folder}/wheel/*.whl")
        self.install_wheel(wheel)
        self.keep(wheel, build)
        shutil.rmtree(folder)

    def described(self):
        """Everything that decides the binary, but not where the venv is: an MPI from PyPI lies in it, and is found from
        there."""
        lines = [f"Horovod {pin('horovod')}", output("python", "-c", TORCH), self.set_up.mpi_name]
        if self.set_up.mpi == "system":
            library = os.path.realpath(output("mpicxx", "-print-file-name=libmpi.so").strip())
            with contextlib.suppress(OSError):
                about = os.stat(library)
                lines.append(f"{library} {about.st_size} bytes of {int(about.st_mtime)}")
            lines.append(output("mpicxx", "-show"))
        compiler = os.environ.get("CXX", "c++" if shutil.which("c++") else "g++")
        lines.append(output(*compiler.split(), "--version"))
        if os.environ["HOROVOD_GPU"] or os.environ["HOROVOD_GPU_OPERATIONS"]:
            lines.append(output("nvcc", "--version"))
        lines += sorted(f"{name}={value}" for name, value in os.environ.items() if re.match(ASKED, name))
        return "\n".join([*lines, inspect.getsource(Horovod.compile)])

    def install_kept(self, build):
        """Whether a wheel was kept under that name, is whole, and could be installed and imported."""
        kept = glob.glob(f"{glob.escape(self.cache)}/horovod-{build}-*.whl")
        if not kept:
            return False
        progress = self.set_up.progress
        progress.log.write(f"{kept[0]} was compiled before\n")
        with contextlib.suppress(subprocess.CalledProcessError, zipfile.BadZipFile, OSError), \
                zipfile.ZipFile(kept[0]) as wheel:  # fmt: skip
            if wheel.testzip() is None:
                self.install_wheel(kept[0])
                self.set_up.call("python", "-c", "import horovod.torch")
                return True
        progress.log.write(f"{kept[0]} is of no use: compiling it anew\n")
        return False

    def install_wheel(self, wheel):
        self.set_up.packages.pip("--no-index", "--no-deps", "--force-reinstall", wheel)

    def keep(self, wheel, build):
        """Keeps the wheel, if that can be: copied aside, then renamed, as other set-ups may do the same."""
        kept = os.path.basename(wheel).replace(f"horovod-{pin('horovod')}", f"horovod-{build}")
        aside = f"{self.cache}/.{socket.gethostname()}.{os.getpid()}"
        try:
            os.makedirs(self.cache, exist_ok=True)
            shutil.copyfile(wheel, aside)
            os.replace(aside, f"{self.cache}/{kept}")
        except OSError as error:
            self.set_up.progress.log.write(f"not kept in {self.cache}: {error}\n")

    def compile(self, folder):
        """Makes folder/wheel/*.whl."""
        call, version = self.set_up.call, pin("horovod")
        pip = "python", "-m", "pip"
        quiet = "--no-input", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"
        call(*pip, "download", *quiet, "--no-binary", "horovod", "-d", folder, f"horovod=={version}")
        sources = f"{folder}/horovod-{version}"
        shutil.unpack_archive(f"{sources}.tar.gz", folder)
        cmake, of_torch = f"{sources}/CMakeLists.txt", f"{sources}/horovod/torch/CMakeLists.txt"
        for file in (cmake, of_torch):
            edit(file, r"(set\(CMAKE_CXX_STANDARD) \d+", r"\1 20")
        # the MPI of the venv comes first: $ORIGIN is .../lib/python3.*/site-packages/horovod/torch
        rpath = (
            "CMAKE_BUILD_WITH_INSTALL_RPATH ON",
            "CMAKE_INSTALL_RPATH_USE_LINK_PATH ON",
            'CMAKE_INSTALL_RPATH "$ORIGIN/../../../.."',
        )
        # its own files as one unit, those with torch's headers as another: less than half of the time
        units = "CMAKE_UNITY_BUILD ON", "CMAKE_UNITY_BUILD_BATCH_SIZE 26"
        edit(cmake, r"(?m)^project\(", "".join(f"set({it})\n" for it in (*rpath, *units)) + "project(")
        # ninja takes VERBOSE=1 for a target; debug information takes a third of the time
        edit(f"{sources}/setup.py", r"make_args\.append\('VERBOSE=1'\)", "pass")
        edit(f"{sources}/setup.py", "'RelWithDebInfo'", "'Release'")
        # horovodrun knows MPICH by a word that MPICH's launcher, Hydra, does not always print
        edit(f"{sources}/horovod/runner/mpi_run.py", "elif 'MPICH' in output:",
             "elif 'MPICH' in output or 'HYDRA' in output:")  # fmt: skip
        # MAKEFLAGS keeps Horovod from asking for eight jobs
        env = {"CMAKE_GENERATOR": "Ninja", "MAKEFLAGS": "-s", "PYTHONUNBUFFERED": "1", "HOROVOD_WITH_MPI": "1",
               "HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITHOUT_GLOO": "1", "HOROVOD_WITHOUT_TENSORFLOW": "1",
               "HOROVOD_WITHOUT_MXNET": "1"}  # fmt: skip
        env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(build_jobs()))
        on_gpu = [name for name in ("HOROVOD_GPU", "HOROVOD_GPU_OPERATIONS") if os.environ[name]]
        if not on_gpu:  # half a CUDA toolkit on PATH breaks the build
            edit(f"{sources}/cmake/Modules/FindPytorch.cmake", r"torch\.version\.cuda is not None", "False")
        # no cache of pip's: it does not know which MPI a wheel is for
        call(*pip, "wheel", "-v", *quiet, "--no-cache-dir", "-w", f"{folder}/wheel", sources, **env)


def edit(file, pattern, replacement):
    with open(file) as lines:
        text = lines.read()
    with open(file, "w") as out:
        out.write(re.sub(pattern, replacement, text))


def build_jobs():
    """As many compilers as there are cores and, at 2 GiB each, memory."""
    with open("/proc/meminfo") as lines:
        free_kb = int(re.search(r"MemAvailable: *(\d+)", lines.read())[1])
    return max(1, min(int(os.environ.get("CORES", 1)), free_kb // 2097152))
