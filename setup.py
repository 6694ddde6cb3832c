"""Builds hetmpi._C, the C++ core, and the library of cpp/naps.c; everything else is said in pyproject.toml.

HETMPI_MARCH=native, or any value of -march, builds for one kind of processor. The default runs on every x86-64 or arm64
machine, because a cluster's login nodes differ from its compute nodes.
"""

import os
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup

# No contraction: a * b + c rounds twice on every processor, so that results do not depend on HETMPI_MARCH.
flags = ["-O3", "-Wall", "-Wextra", "-ffp-contract=off"]
if os.environ.get("HETMPI_MARCH"):
    flags.append(f"-march={os.environ['HETMPI_MARCH']}")

core = Pybind11Extension(
    "hetmpi._C",
    sorted(glob("cpp/*.cpp")),
    depends=sorted(glob("cpp/*.h")),
    include_dirs=["cpp"],
    cxx_std=17,
    extra_compile_args=flags,
)

ParallelCompile().install()
setup(ext_modules=[core, Extension("hetmpi._naps", ["cpp/naps.c"])])
