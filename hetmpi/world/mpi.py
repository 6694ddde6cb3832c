"""Starts MPI once with thread support, and raises errors where mpi4py, the MPI library or Horovod are missing, or where
launcher, MPI library and Horovod do not match.

MPI is started with MPI_THREAD_MULTIPLE because Horovod's background thread calls it concurrently with the main thread.
The first World starts it, not the import: before that, the launcher's variables can be compared with the library, and a
mismatch can still be reported. The import only sets variables that MPI reads when it starts, because a program may call
hvd.init() before it creates a World. Modules that need mpi4py import `MPI` from here.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import MutableMapping

from hetmpi.errors import MissingLibrary, ReportedElsewhere, UserError, show_in_one_line
from hetmpi.world.commands import command
from hetmpi.world.cores import cores_of_ranks
from hetmpi.world.launcher import JOB_SIZES, SIZES, is_first_rank, local_size

SPEAK_DELAY_S = 1.0  # longer than a launcher takes to kill the other ranks
MPI_LIBRARY = re.compile(r"/libmpi(ch|_abi|_gnu\w*|_cray\w*)?\.so")
SET_UP = "load the module that has it, or activate the environment of ./run.sh setup (. .venv/bin/activate)"
BUILD_HOROVOD = "HOROVOD_WITH_MPI=1 HOROVOD_WITH_PYTORCH=1 pip install --no-cache-dir --force-reinstall horovod"


def import_mpi():
    """The module MPI of mpi4py, which has not started MPI. Raises MissingLibrary without mpi4py or an MPI library, as
    one line of the first rank."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: of mpi4py's wheel, which looks for libmpi by itself
        sys.excepthook = show_in_one_line
        if getattr(error, "name", None) == "mpi4py":
            refuse_launch(f"{sys.executable} has no mpi4py: {SET_UP}, or pip install mpi4py", MissingLibrary)
        refuse_launch(
            f"mpi4py finds no MPI library ({in_one_line(error)}): load the MPI module that hetmpi was set up with "
            f"(module load openmpi, or yours), or activate the environment of ./run.sh setup (. .venv/bin/activate)",
            MissingLibrary,
        )
    return MPI


def import_horovod():
    """The module horovod.torch. Raises MissingLibrary if it is missing, cannot be loaded or was built without MPI."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        if error.name == "horovod":
            message = f"{sys.executable} has no Horovod: {SET_UP}, or, with mpicxx on PATH: {BUILD_HOROVOD}"
        else:
            message = (
                f"Horovod cannot be loaded ({in_one_line(error)}): load the modules that it was built with, or build "
                f"it anew, with mpicxx on PATH: {BUILD_HOROVOD}"
            )
        raise MissingLibrary(message) from error
    if not hvd.mpi_built():
        raise MissingLibrary(f"this Horovod was built without MPI: build it anew, with mpicxx on PATH: {BUILD_HOROVOD}")
    return hvd


def in_one_line(error: Exception) -> str:
    return ", ".join(line.strip() for line in str(error).splitlines() if line.strip())


def refuse_launch(message: str, kind: type[UserError] = UserError):
    """Raises an error of this kind on the launcher's first rank. The other ranks cannot communicate with it: they wait
    a little and leave without a message."""
    if not is_first_rank():
        time.sleep(SPEAK_DELAY_S)
        raise ReportedElsewhere(message)
    raise kind(message)


MPI = import_mpi()


def start_mpi():
    """Starts MPI unless it is running. Raises UserError if MPI lacks MPI_THREAD_MULTIPLE, or if a loaded Horovod uses
    another MPI library."""
    if "horovod.torch" in sys.modules:
        check_one_mpi(mpi_libraries())
    if not MPI.Is_initialized():
        check_library(MPI.Get_library_version())
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError(
            f"hetmpi needs an MPI started with MPI_THREAD_MULTIPLE, this one provides thread level "
            f"{MPI.Query_thread()} of {MPI.THREAD_MULTIPLE}: use an MPI built with thread support; a program that "
            "starts MPI itself must request MPI_THREAD_MULTIPLE"
        )


def yield_when_idle():
    """Makes MPI yield the processor while it waits if there are fewer than two cores per rank. Each rank may have a
    second busy thread, Horovod's, and a spinning wait takes processor time from the rank it waits for. Must run before
    MPI starts."""
    if 2 * local_size() > cores_of_ranks(local_size()):
        os.environ.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def choose_network(version: str, environment: MutableMapping[str, str] = os.environ, devices: str = "/sys/class"):
    """Selects libfabric, and its TCP, for an MPICH that also supports UCX, unless there is a faster network: over TCP
    both are equally fast, but MPICH 5.0 over UCX leaks memory at every one-sided call, and over libfabric it prefers
    the deprecated provider `sockets` to `tcp`, which takes more threads and time (docs/results.md, "Scale"). What the
    user has chosen stays. Must run before MPI starts."""
    is_fast = any(os.path.isdir(f"{devices}/{kind}") for kind in ("infiniband", "cxi"))
    if "ch4:ucx,ofi" not in version or is_fast or "MPIR_CVAR_CH4_NETMOD" in environment:
        return
    environment["MPIR_CVAR_CH4_NETMOD"] = "ofi"
    if not {"FI_PROVIDER", "MPIR_CVAR_OFI_USE_PROVIDER"} & environment.keys():
        environment["FI_PROVIDER"] = "tcp"


def network(version: str) -> str:
    """What carries messages between nodes, as far as the environment says it. version: MPI.Get_library_version()."""
    if "Open MPI" in version:
        return os.environ.get("OMPI_MCA_pml", "chosen by Open MPI")  # noqa: SIM112
    provider = os.environ.get("MPIR_CVAR_OFI_USE_PROVIDER") or os.environ.get("FI_PROVIDER", "provider chosen by MPICH")
    kinds = {"ofi": f"libfabric, {provider}", "ucx": f"UCX, {os.environ.get('UCX_TLS', 'transports chosen by UCX')}"}
    return kinds.get(os.environ.get("MPIR_CVAR_CH4_NETMOD", ""), "libfabric or UCX")


yield_when_idle()
choose_network(MPI.Get_library_version())


def matching() -> str:
    """Advice where launcher and MPI library do not match."""
    return (
        f"Use the mpiexec of the MPI that mpi4py loads ({command('doctor')} shows it); under Slurm srun --mpi=pmix for "
        "Open MPI, --mpi=pmi2 for MPICH"
    )


def check_library(version: str):
    """Raises UserError if a PMIx launcher started this process and the library is an MPICH without PMIx: MPI_Init would
    abort on every rank.

    version: MPI.Get_library_version(). check_launcher detects the opposite mismatch, in which Open MPI starts N single
    ranks."""
    if "MPICH" not in version or "pmix" in version.lower():
        return
    if "PMIX_RANK" in os.environ or os.environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        refuse_launch(f"a launcher for Open MPI (PMIx) started this, but mpi4py loads MPICH. {matching()}")


def srun_mpi() -> str:
    """The value of `srun --mpi=` for the library that mpi4py loads. MPI need not have started."""
    version = MPI.Get_library_version()
    return "pmix" if "Open MPI" in version or "pmix" in version.lower() else "pmi2"


def check_launcher(size: int):
    """Raises UserError if a launcher started several processes that MPI did not join: N jobs of one rank each."""
    check_torchrun(size)
    launcher = [name for name in SIZES if os.environ.get(name, "").isdigit()]
    for name in launcher or JOB_SIZES:
        declared = os.environ.get(name, "")
        if declared.isdigit() and int(declared) != size:
            refuse_launch(
                f"the launcher says {name}={declared}, but MPI sees {size} rank(s): launcher and MPI library do not "
                f"match. {matching()}, or unset the variable to run alone"
            )


def check_torchrun(size: int):
    """Raises UserError if torchrun, or a launcher that sets its variables, started several processes of one rank."""
    declared = os.environ.get("WORLD_SIZE", "")
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("RANK", "").isdigit()
    if size == 1 and is_rank and declared.isdigit() and int(declared) > 1:
        refuse_launch(
            f"torchrun, or a launcher like it, started {declared} processes (WORLD_SIZE={declared}), each of which "
            f"would train alone: start them by MPI, as {command('train ...', int(declared))}; to run alone, unset "
            "WORLD_SIZE"
        )


def mpi_libraries() -> list[str]:
    """Paths of the MPI libraries that this process has loaded."""
    with open("/proc/self/maps") as maps:
        return libraries_in(maps.read())


def libraries_in(maps: str) -> list[str]:
    """Paths of the MPI libraries in the text of a /proc/PID/maps file."""
    paths = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    return sorted({os.path.realpath(path) for path in paths if MPI_LIBRARY.search(path)})


def check_one_mpi(libraries: list[str]):
    """Raises UserError if the process has loaded two MPI libraries."""
    if len(libraries) > 1:
        raise UserError(
            f"mpi4py and Horovod use different MPI libraries ({', '.join(libraries)}): build Horovod on that of "
            f"mpi4py, with its mpicxx on PATH: {BUILD_HOROVOD}; or, in a checkout, both anew: rm -r .venv; "
            "HETMPI_MPI=system ./run.sh setup (or HETMPI_MPI=mpich)"
        )
