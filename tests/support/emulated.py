"""Makes a package hetmpi whose GPU is emulated (tests/cpp/cuda_on_cpu, gpu_on_cpu.py): its device=cuda is cpu:0."""

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pybind11

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted(map(str, (ROOT / "cpp/cuda").glob("*.cu")))
EMULATOR = str(ROOT / "tests/cpp/cuda_on_cpu/emulator.cpp")
INCLUDE = f"-I{ROOT / 'cpp'}"
ON_CPU = [f"-I{ROOT / 'tests/cpp/cuda_on_cpu'}", INCLUDE]


OVERLAYS = {  # module -> what is appended to it
    "gpu.py": """

def gpu_of(device):
    from gpu_on_cpu import GpuOnCpu

    return None if device.index is None else GpuOnCpu


def gpu_with(tensor):
    from gpu_on_cpu import GpuOnCpu, is_on_gpu

    return GpuOnCpu if is_on_gpu(tensor) else None
""",
    "run/device.py": """

def choose_device(world, wanted):
    return torch.device("cpu", 0) if wanted == "cuda" else torch.device("cpu")
""",
}


def make_package(folder: Path, compiler: list[str], flags: list[str]) -> Path:
    """Makes a package hetmpi in `folder`. Objects of the core that are the same with a GPU are taken from build/, if
    they are there."""
    package = folder / "hetmpi"
    shutil.copytree(ROOT / "hetmpi", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module, text in OVERLAYS.items():
        with (package / module).open("a") as lines:
            lines.write(text)
    newest = max(path.stat().st_mtime for path in (ROOT / "cpp").rglob("*"))
    complete = (path for path in (ROOT / "build").glob("objects-*/complete") if path.stat().st_mtime > newest)
    built = next((path.parent for path in complete), None)
    same = [str(path) for path in built.rglob("bindings*.o")] if built else []  # setup.py, units
    sources = [str(ROOT / "cpp/python/cuda.cpp")] if same else sorted(map(str, (ROOT / "cpp").rglob("*.cpp")))
    own = [*sources, *KERNELS, EMULATOR]
    folders = pybind11.get_include(), sysconfig.get_path("include"), pyarrow.get_include()
    command = [*compiler, *flags, "-fPIC", "-fvisibility=hidden", "-DHETMPI_HASHING=1"]
    command += ['-DHETMPI_SOURCES="emulated"', *ON_CPU, *(f"-I{path}" for path in folders), "-x", "c++", "-c"]
    objects = [str(folder / f"{number}.o") for number in range(len(own))]
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        codes = compilers.map(subprocess.call, ([*command, source, "-o", made] for source, made in zip(own, objects)))
        assert not any(codes)
    module = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.check_call([*compiler, "-shared", *objects, *same, "-o", str(module)])
    return package


def environment(folder: Path) -> dict[str, str]:
    """Variables of a program that uses the package in `folder`, with all caches on the emulated GPU."""
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "tests/support")])
    return {"PYTHONPATH": path, "HETMPI_TEST_CACHE": "gpu_on_cpu.OnGpu", "HETMPI_TEST_DEVICE": "cuda"}
