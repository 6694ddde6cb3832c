"""The checkout that this file lies in, as a package of Spack (packaging/README.md)."""

from pathlib import Path

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHetmpi(PythonPackage):
    """Data-parallel PyTorch training with embedding tables partitioned over MPI ranks."""

    homepage = git = Path(__file__).resolve().parents[6].as_uri()
    license("Apache-2.0")

    version("main", branch="main")

    variant("cuda", default=False, description="Build the GPU's half")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    with default_args(type="build"):
        depends_on("py-setuptools@77:80")
        depends_on("py-pybind11@3:")
    depends_on("python@3.10:", type=("build", "link", "run"))
    with default_args(type=("build", "run")):
        depends_on("py-hydra-core@1.3")
        depends_on("py-mpi4py@4:")
        depends_on("py-numpy@2:")
        depends_on("py-plotly")
        depends_on("py-pyarrow")
        depends_on("py-rich")
        depends_on("py-tensorboard")
        depends_on("py-torch@2.4: ~cuda", when="~cuda")
        depends_on("py-torch@2.4: +cuda", when="+cuda")
        depends_on("py-xxhash")
    depends_on("arrow+parquet+snappy+zlib+zstd")  # its header of xxhash; Parquet
    depends_on("cuda", when="+cuda")

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        env.set("HETMPI_CUDA", "1" if self.spec.satisfies("+cuda") else "0")
