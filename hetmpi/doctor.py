"""Examines a machine for use by hetmpi.

    ./run.sh doctor                in a checkout, on NP ranks (2)
    mpirun -np N hetmpi doctor     on hosts of your choice; under Slurm srun -n N hetmpi doctor
    hetmpi doctor --clean          only removes the files of MPI that your killed runs have left in /dev/shm

Prints each finding and ends with OK and exit code 0, or with advice and exit code 1. Every way to fetch rows is checked
for correct values before it is timed.
"""

from __future__ import annotations

if __name__ == "__main__":  # above the imports that take seconds
    from hetmpi.world.oversubscription import restart_with_naps

    restart_with_naps()

import contextlib
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch

from hetmpi.errors import ReportedElsewhere, UserError
from hetmpi.memory import available_memory, cgroup_memory
from hetmpi.reductions import missing_horovod, open_reductions
from hetmpi.run.device import gpu_problem
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.commands import command
from hetmpi.world.cores import usable_cores
from hetmpi.world.early_signals import SEGMENTS
from hetmpi.world.launch import launch
from hetmpi.world.launcher import local_rank
from hetmpi.world.mpi import BUILD_HOROVOD, MPI, mpi_libraries, network, srun_mpi
from hetmpi.world.world import World

NUM_ROWS, DIM, ROWS_A_CALL, CALLS = 400_000, 32, 20_000, 5
BUSY_S = 0.5
SLOW_GET_MS = 100.0
SLOW_MROW_S = 0.5
GIB = 1 << 30
NEW_S = 60


def main(world: World):
    """Runs all examinations; rank 0 prints."""
    if unknown := sys.argv[1:]:
        raise UserError(f"hetmpi doctor does not know {unknown[0]}: give --clean, or nothing")
    report = Report(world)
    describe_mpi(world, report)
    describe_horovod(world, report)
    describe_machine(world, report)
    examine_windows(world, report)
    if not report.close():
        raise ReportedElsewhere("the advice is printed")


class Report:
    """Findings, printed by rank 0 immediately, and a list of advice."""

    def __init__(self, world: World):
        self.world, self.cures = world, []

    def line(self, name: str, found: str):
        """Prints one finding."""
        if self.world.rank == 0:
            print(f"{name:<28}{found}", flush=True)

    def cure(self, text: str):
        """Adds advice, without duplicates."""
        if text not in self.cures:
            self.cures.append(text)

    def close(self) -> bool:
        """Prints the verdict. Returns True if there is no advice. Collective."""
        cures = list(dict.fromkeys(sum(self.world.comm.allgather(self.cures), [])))
        if self.world.rank == 0:
            print("\n".join(["", "To change:", *(f"- {cure}" for cure in cures)]) if cures else "\nOK", flush=True)
        return not cures


def describe_mpi(world: World, report: Report):
    """Library, thread level, one-sided component, ranks and nodes."""
    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    version = MPI.Get_library_version().replace("\x00", "").splitlines()[0]
    report.line("MPI library", re.sub(r"\s+", " ", version))
    report.line("mpi4py uses", ", ".join(mpi_libraries()))
    report.line("MPI standard", ".".join(map(str, MPI.Get_version())))
    report.line("thread level", levels.get(MPI.Query_thread(), "multiple"))
    report.line("under Slurm", f"srun --mpi={srun_mpi()}")
    report.line("between nodes", network(version))
    report.line("one-sided component", osc_component(version))
    hosts = sorted(set(world.comm.allgather(world.host)))
    report.line("ranks, nodes", f"{world.size} rank(s), {world.node.size} on this node; hosts: {', '.join(hosts)}")


def osc_component(version: str) -> str:
    """The component that serves one-sided calls, as far as it can be determined outside the library."""
    if "Open MPI" not in version:
        return "MPICH ch4: shared memory on a node"
    chosen = os.environ.get("OMPI_MCA_osc", "chosen by Open MPI")  # noqa: SIM112
    return f"{chosen} (OMPI_MCA_osc=ucx|rdma|sm forces one; ompi_info lists them)"


def describe_horovod(world: World, report: Report):
    """Horovod's build and its MPI, or that there is none, and one allreduce."""
    why = missing_horovod(world)
    hvd = open_reductions(world, "horovod" if why is None else "mpi")
    if why is not None:
        report.line("Horovod", f"none, MPI sums the dense gradients: {why}")
        cure = "use another MPI library"
    else:
        import horovod

        mpi, gpu = "yes" if hvd.mpi_built() else "no", "NCCL" if hvd.nccl_built() else "no NCCL"
        report.line("Horovod", f"{horovod.__version__}, MPI {mpi}, {gpu}, same MPI library")
        cure = f"build Horovod anew: {BUILD_HOROVOD}"
    total = hvd.allreduce(torch.ones(4), op=hvd.Sum, name="doctor")
    if not torch.equal(total, torch.full((4,), float(world.size))):
        report.cure(f"ones summed over {world.size} ranks are {total.tolist()}: {cure}")


def describe_machine(world: World, report: Report):
    """Cores, memory, /dev/shm, GPU."""
    report.line(
        "cores",
        f"{os.cpu_count()} on the node, {world.num_cores} for its ranks, {usable_cores()} for this one, "
        f"{world.compute_threads()} compute thread(s)",
    )
    limit = cgroup_memory()
    limited = "" if limit == float("inf") else f", {limit / GIB:.1f} GiB under the job's limit"
    report.line("memory free", f"{available_memory() / GIB:.1f} GiB{limited}")
    shm = os.statvfs("/dev/shm")
    shm_bytes = shm.f_bavail * shm.f_frsize
    report.line("/dev/shm free", f"{shm_bytes / GIB:.1f} GiB")
    if shm_bytes < available_memory() / 4:
        report.cure(
            f"/dev/shm has {shm_bytes / GIB:.1f} GiB of {available_memory() / GIB:.1f} GiB memory and bounds the "
            "table: mount -o remount,size=90% /dev/shm, or docker --shm-size"
        )
    left = abandoned_segments()
    left_bytes = sum(path.stat().st_size for path in left)
    report.line("left of killed runs", f"{len(left)} files of MPI in /dev/shm, {left_bytes / GIB:.1f} GiB")
    if left_bytes > shm_bytes / 10:
        report.cure(
            f"{len(left)} files of killed runs take {left_bytes / GIB:.1f} GiB of /dev/shm: remove them by "
            f"`{command('doctor --clean')}`"
        )
    problem = gpu_problem()
    report.line("GPU", f"none can be used: {problem}" if problem else f"{torch.cuda.get_device_name()}, device=cuda")


def abandoned_segments() -> list[Path]:
    """Files of MPI in /dev/shm that belong to this user and that no process maps: killed runs leave them."""
    old = []
    for path in (path for name in SEGMENTS for path in Path("/dev/shm").glob(f"{name}*")):
        with contextlib.suppress(FileNotFoundError):  # its run has just ended
            found = path.stat()
            is_old = time.time() - found.st_mtime > NEW_S  # a starting run maps its file soon
            if is_old and found.st_uid == os.getuid():
                old.append(path)
    mapped = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended or belongs to another user
            mapped += path.read_text()
    return sorted(path for path in old if str(path) not in mapped)


def clean():
    """Removes abandoned segments of this machine; of a node's ranks one does it."""
    if local_rank() not in (None, 0):
        return
    removed = []
    for path in abandoned_segments():
        with contextlib.suppress(FileNotFoundError):
            removed.append(path.stat().st_size)
            path.unlink()
    num_bytes = sum(removed)
    print(f"hetmpi: removed {len(removed)} files of killed runs from /dev/shm, {num_bytes / 1e6:.1f} MB")


def examine_windows(world: World, report: Report):
    """Creates windows as the table does, fetches rows by each transport, and from a busy rank."""
    if world.size == 1:
        again = command("doctor", ranks=2)
        report.line("fetching rows", f"not examined: one rank has no other to fetch from; on two: {again}")
        return
    ways = {"shared memory": None, "windows": 1, "messages": 1}  # for the last two each rank is a node of its own
    for name, ranks_per_node in ways.items():
        place = World(world.comm, ranks_per_node)
        error = None
        try:
            examine_way(place, name, report, is_used=name == "shared memory" or not world.is_one_node)
        except (UserError, MPI.Exception) as raised:  # on all ranks alike: report it and continue
            error = raised
        report_failure(name, error, report)


def report_failure(name: str, error: Exception | None, report: Report):
    """Reports that a transport does not work here, with advice; a UserError contains its own."""
    if isinstance(error, MPI.Exception):
        report.line(name, f"FAILS: {error}")
        report.cure(
            f"{name}: this MPI cannot make the window ({error}): use another MPI, in a checkout by HETMPI_MPI=mpich "
            "./run.sh setup"
        )
    elif error is not None:
        report.line(name, f"FAILS: {error}")
        if not isinstance(error, ReportedElsewhere):
            report.cure(f"{name}: {error}")


def examine_way(world: World, name: str, report: Report, is_used: bool):
    """Checks and times reads of the next rank's rows, first idle, then computing. is_used: in a training on these
    hosts; else it gives no advice where it is slow. Collective."""
    from hetmpi.table.optim import RowOptimizer

    peer = (world.rank + 1) % world.size
    if name == "shared memory":
        peer = world.node_ranks[(world.node.rank + 1) % world.node.size]
        if world.comm.allreduce(world.node.size, MPI.MIN) == 1:
            report.line(name, "not examined: some rank is alone on its node")
            return
    exchange = "messages" if name == "messages" else "windows"
    table = EmbeddingTable(world, NUM_ROWS * world.size, DIM, RowOptimizer(), init_std=0.0, exchange=exchange)
    table.shard.assign(slice(None), np.arange(len(table.shard))[:, None] % 1000 + 1000.0 * world.rank)
    table.resume_at(0)
    rows = np.random.default_rng(world.rank).integers(0, NUM_ROWS, ROWS_A_CALL)
    keys = np.unique(rows) * world.size + peer
    seconds = min(time_read(table, keys, peer, report, name) for _ in range(CALLS))
    table.memory.fence()
    report.line(name, fetch_text(len(keys), seconds))
    if name == "windows":
        if len(keys) / seconds / 1e6 < SLOW_MROW_S and is_used:
            report.cure("one-sided MPI is slow here: see docs/sharp_bits.md, 'Slow one-sided MPI'")
        examine_busy(table, keys[:1], report, is_used)
    table.close()


def time_read(table: EmbeddingTable, keys: np.ndarray, peer: int, report: Report, name: str) -> float:
    """Seconds to read `keys`; reports wrong values."""
    began = time.perf_counter()
    out = table.peek(torch.from_numpy(keys)).numpy()
    seconds = time.perf_counter() - began
    expected = (keys // table.world.size) % 1000 + 1000.0 * peer
    if not (out == expected[:, None].astype(np.float32)).all():
        report.cure(f"{name} returned wrong rows: do not train with this MPI library")
    return seconds


def examine_busy(table: EmbeddingTable, key: np.ndarray, report: Report, is_used: bool):
    """Times a get from a rank that computes without MPI calls, so that only the thread of Horovod, or of MpiReductions,
    makes progress. Collective."""
    world = table.world
    table.memory.fence()
    if world.rank == 0:
        began = time.perf_counter()
        table.peek(torch.from_numpy(key))
        get_ms = 1000 * (time.perf_counter() - began)
        report.line("get from a busy rank", f"{get_ms:.1f} ms")
        if get_ms > SLOW_GET_MS and is_used:
            report.cure(
                f"a get from a busy rank took {get_ms:.0f} ms: no thread drives this MPI meanwhile; "
                "see docs/sharp_bits.md, 'Passive progress'"
            )
    else:
        deadline = time.perf_counter() + BUSY_S
        while time.perf_counter() < deadline:
            np.dot(np.ones(1000), np.ones(1000))
    table.memory.fence()


def fetch_text(num_rows: int, seconds: float) -> str:
    """The rate in rows per second, with its inputs."""
    return f"{num_rows / seconds / 1e6:.1f} Mrow/s ({num_rows:,} rows of dim {DIM} in {1000 * seconds:.2f} ms)"


if __name__ == "__main__":
    if sys.argv[1:] == ["--clean"]:
        clean()
    elif {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    else:
        launch(main)
