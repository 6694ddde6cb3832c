"""Builds hetmpi._C, the C++ core, and the library of cpp/naps.c; everything else is said in pyproject.toml.

HETMPI_MARCH=native, or any value of -march, builds for one kind of processor. The default runs on every x86-64 or arm64
machine, because a cluster's login nodes differ from its compute nodes.

The core holds the GPU's half too where there are an NVIDIA GPU and nvcc (NVCC, CUDA_HOME/bin/nvcc, PATH, then
/usr/local/cuda). HETMPI_CUDA=1 compiles it without a GPU, HETMPI_CUDA=0 leaves it out. CUDA's runtime is linked
statically: the module imports on machines without a GPU as well.

Hashing of tabular data needs the header of xxhash that pyarrow ships. It is left out where pyarrow is missing, so that
the rest can be compiled and checked there.

Objects are kept in build/: another venv of this checkout, or a wheel, only links them where sources, flags and
compilers are the same. With HETMPI_WHEEL=PATH nothing is compiled: the libraries are those of that wheel, which must be
of the same sources (cpp/sources.py).
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Extension, setup

# No contraction: a * b + c rounds twice on every processor, so that results do not depend on HETMPI_MARCH, nor on the
# GPU. No errno: else a square root of what may be negative is a branch, and loops with one are not vectorised.
flags = ["-O3", "-g0", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno"]
if os.environ.get("HETMPI_MARCH"):
    flags.append(f"-march={os.environ['HETMPI_MARCH']}")
SETUP, CORE = Path(__file__), Path("cpp")  # where includes are written from
HEADERS = sorted(map(str, CORE.rglob("*.h")))
KERNELS = sorted(map(str, CORE.rglob("*.cu")))
# Compute capabilities that machine code is made for; the last one that nvcc knows as PTX too, for later GPUs.
GPUS = ["80", "90", "100"]
# Without --expt-relaxed-constexpr nvcc warns of each lambda that functions for CPU and GPU get from the CPU alone.
NVCC_FLAGS = ["-O3", "-std=c++17", "-fmad=false", "--expt-relaxed-constexpr", "--threads=0"]


def has_gpu() -> bool:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    nvidia_smi = shutil.which("nvidia-smi")
    return bool(nvidia_smi) and "GPU " in subprocess.run([nvidia_smi, "-L"], text=True, capture_output=True).stdout


def find_nvcc() -> str | None:
    """Path of the CUDA compiler, None if the GPU's half is left out."""
    wanted = os.environ.get("HETMPI_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"HETMPI_CUDA must be 1 (with the GPU's half), 0 (without) or empty, got {wanted}")
    if wanted == "0" or (not wanted and not has_gpu()):
        return None
    named = os.environ.get("NVCC")
    if named and not shutil.which(named):
        raise SystemExit(f"NVCC={named}: there is no such program")
    places = named, os.environ.get("CUDA_HOME", "") + "/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"
    found = next(filter(None, (shutil.which(place) for place in places if place)), None)
    if wanted and not found:
        raise SystemExit("HETMPI_CUDA=1: there is no nvcc at NVCC, in CUDA_HOME/bin, on PATH or in /usr/local/cuda/bin")
    return found


def targets(nvcc: str) -> list[str]:
    """nvcc's options for the GPUs that it knows of ours."""
    known = subprocess.run([nvcc, "--list-gpu-arch"], check=True, text=True, capture_output=True).stdout.split()
    ours = [gpu for gpu in GPUS if f"compute_{gpu}" in known]
    if not ours:
        raise SystemExit(
            f"{nvcc} knows none of the compute capabilities {', '.join(GPUS)}: take a newer one, or set HETMPI_CUDA=0"
        )
    made = [f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in ours]
    return [*made, f"-gencode=arch=compute_{ours[-1]},code=compute_{ours[-1]}"]


def runtime_folders(nvcc: str) -> list[str]:
    """Where CUDA's runtime library may lie; nvcc says so of a file it would compile, which need not exist."""
    said = subprocess.run([nvcc, "--dryrun", "-c", "none.cu"], text=True, capture_output=True).stderr
    if "TOP=" not in said:
        raise SystemExit(f"{nvcc} does not say where its libraries are: set HETMPI_CUDA=0, or take another\n{said}")
    root = Path(said.split("TOP=", 1)[1].splitlines()[0])
    return [str(folder) for folder in (root / "lib64", root / "lib", *root.glob("targets/*/lib")) if folder.is_dir()]


def arrow_headers() -> str | None:
    """Folder of pyarrow's headers, None if pyarrow is missing."""
    found = importlib.util.find_spec("pyarrow")
    return str(Path(found.origin).parent / "include") if found else None


def digest() -> str:
    """Identifies all that the objects depend on."""
    nvcc_says = run_for_text(nvcc, "--version") + repr(targets(nvcc)) if nvcc else ""
    kinds = [sys.version, platform.machine(), pybind11.__version__, version("pyarrow") if arrow else "", nvcc_says]
    kinds += [os.environ.get(name, "") for name in ("CC", "CXX", "CFLAGS", "CPPFLAGS", "CXXFLAGS")]
    kinds.append(run_for_text(*os.environ.get("CXX", "c++").split(), "--version"))
    if "-march=native" in flags:
        cpu = Path("/proc/cpuinfo").read_text().splitlines()
        kinds += next(([line] for line in cpu if line.startswith(("flags", "Features"))), [])
    files = sorted(file for file in CORE.rglob("*") if file.is_file())
    texts = [text.encode() for text in [*kinds, *map(str, files)]] + [file.read_bytes() for file in [*files, SETUP]]
    return hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()[:12]


def run_for_text(*command: str) -> str:
    return subprocess.run(command, text=True, capture_output=True).stdout


def units(sources: list[str], folder: Path) -> list[str]:
    """Two files that include all of these: the headers of pybind11 are half of what the compiler reads, and what it
    makes of them is the same each time."""
    parts: list[list[str]] = [[], []]
    for source in sorted(sources, key=os.path.getsize, reverse=True):
        min(parts, key=lambda part: sum(map(os.path.getsize, part))).append(source)
    made = [folder / f"bindings{number}.cpp" for number in range(len(parts))]
    for path, part in zip(made, parts):
        path.write_text("".join(f'#include "{os.path.relpath(source, CORE)}"\n' for source in part))
    return list(map(str, made))


class TakeExtensions(build_ext):
    """Takes the libraries from a wheel."""

    def build_extension(self, ext):
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_bytes(of_core["libraries_of"](wheel)[self.get_ext_filename(ext.name)])


class BuildExtensions(build_ext):
    """Compiles .cu files with nvcc before the others. Keeps the objects of the last complete build."""

    def finalize_options(self):
        super().finalize_options()
        self.force = True  # links anew: a library in build/ may be of other objects
        self.build_temp = f"build/objects-{digest()}"

    def run(self):
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        with open("build/lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another venv's build
            complete = folder / "complete"
            self.has_objects = complete.exists()
            core.sources = [*units(bindings, folder), *of_cuda]
            if not self.has_objects:
                sources = sum((extension.sources for extension in self.extensions), KERNELS if nvcc else [])
                print(len(sources), "files to compile")  # tools/set_up_progress.py counts them
            cores = runpy.run_path("hetmpi/world/cores.py")["usable_cores"]()  # a login node has more than those
            with ParallelCompile(default=cores, needs_recompile=lambda made, source: not self.has_objects):
                super().run()
            complete.touch()
            for other in folder.parent.glob("objects-*"):
                if other != folder:
                    shutil.rmtree(other)

    def build_extension(self, ext):
        if ext.name == "hetmpi._C" and nvcc:
            ext.extra_objects = [self.compiled(source) for source in KERNELS]
        super().build_extension(ext)

    def compiled(self, source: str) -> str:
        """The object file of a .cu file."""
        made = Path(self.build_temp, source).with_suffix(".o")
        if not self.has_objects:
            made.parent.mkdir(parents=True, exist_ok=True)
            host = ["-fPIC", "-fvisibility=hidden", *(flag for flag in flags if flag.startswith(("-ffp", "-march")))]
            flags_of_host = ["-Xcompiler", ",".join(host)]
            self.spawn([nvcc, "-c", *NVCC_FLAGS, *targets(nvcc), *flags_of_host, f"-I{CORE}", source, "-o", str(made)])
        return str(made)


of_core, wheel = runpy.run_path("cpp/sources.py"), os.environ.get("HETMPI_WHEEL")
nvcc, arrow = None if wheel else find_nvcc(), arrow_headers()
left_out = ["python/cuda.cpp"] + ([] if arrow else ["hashing.cpp"])
of_cuda = ["cpp/python/cuda.cpp"] if nvcc else []
bindings = sorted(str(file) for file in CORE.rglob("*.cpp") if not any(map(file.match, left_out)))
core = Pybind11Extension(
    "hetmpi._C",
    [*bindings, *of_cuda],
    depends=[*HEADERS, *KERNELS],
    include_dirs=[str(CORE)],
    cxx_std=17,
    extra_compile_args=flags,
    define_macros=[("HETMPI_SOURCES", f'"{of_core["digest"]()}"')],
)
if nvcc:
    core.libraries += ["cudart_static", "dl", "rt", "pthread"]
    core.library_dirs += runtime_folders(nvcc)

if arrow:
    core.define_macros.append(("HETMPI_HASHING", "1"))
    core.include_dirs.append(arrow)
    core.extra_compile_args.append("-Wno-array-bounds")  # of branches for longer texts than those that it inlines

setup(
    ext_modules=[core, Extension("hetmpi._naps", ["cpp/naps.c"], libraries=["dl"])],
    cmdclass={"build_ext": TakeExtensions if wheel else BuildExtensions},
)
