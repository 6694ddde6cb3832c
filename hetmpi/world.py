"""World: the ranks that train together. Starts MPI, then Horovod on the same communicator, unless the program has started them.

MPI is started with MPI_THREAD_MULTIPLE because Horovod's background thread calls it beside the main thread. It starts
with the first World, not at import: what the launcher says can be compared with the library before, when a mismatch can
still be told. The import only sets variables that MPI reads when it starts, as a program may call hvd.init() before it makes a
World. Modules that need mpi4py import `MPI` from here.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import re
import signal
import socket
import sys
import time
import traceback

import mpi4py
import numpy as np

mpi4py.rc.initialize = False
mpi4py.rc.finalize = True
from mpi4py import MPI  # noqa: E402

SPEAK_DELAY_S = 1.0  # longer than a launcher takes to kill the other ranks
LONGEST_DELAY_S = 6.0
ABORT_LIMIT_S = 2
LEFT_EARLY = 85  # exit code of a run that was told to leave, and saved
WARN_AFTER_S = 60
MPI_LIBRARY = re.compile(r"/libmpi(ch|_abi|_gnu\w*|_cray\w*)?\.so")


class Refused(ValueError):
    """Bad input, or a machine that cannot serve it: one message that says what was expected, what came, what to do."""


class ToldElsewhere(Refused):
    """A refusal that another rank prints."""


class World:
    """The ranks of one training: a communicator of their own, their places on nodes, and Horovod over them.

    comm            mpi4py communicator, private to hetmpi (a duplicate of the one given)
    node            communicator of the ranks that share this rank's node and memory
    node_ranks      world ranks of `node`, in node order
    is_far          which ranks are of other nodes: (size,) bool
    rank, size      this rank and how many there are
    """

    def __init__(self, comm=None, ranks_per_node: int | None = None):
        """comm: mpi4py communicator, default COMM_WORLD. ranks_per_node splits each real node into smaller ones, whose
        ranks then reach each other only through MPI: for tests, and to measure RMA on one machine. Collective.

        Raises Refused if launcher and MPI library do not match, or if MPI lacks MPI_THREAD_MULTIPLE."""
        start_mpi()
        base = MPI.COMM_WORLD if comm is None else comm
        if comm is None:
            check_launcher(base.size)
        self.comm = base.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.node = split_nodes(self.comm, ranks_per_node)
        self.node_ranks = self.node.allgather(self.rank)
        self.is_one_node = self.node.size == self.size
        self.is_far = ~np.isin(np.arange(self.size), self.node_ranks)
        self.host = socket.gethostname()

    def start_horovod(self):
        """Starts Horovod on this world and returns the module horovod.torch. Raises Refused if it uses another MPI."""
        os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")  # one fixed order of summation, run after run
        import horovod.torch as hvd

        check_one_mpi(mpi_libraries())
        if not hvd.is_initialized():
            hvd.init(comm=self.comm)
        self.check_horovod(hvd)
        return hvd

    def check_horovod(self, hvd):
        """Raises Refused if Horovod runs on other ranks."""
        if (hvd.rank(), hvd.size()) != (self.rank, self.size):
            raise Refused(
                f"Horovod says rank {hvd.rank()} of {hvd.size()}, MPI says {self.rank} of {self.size}: it was started on another communicator, "
                "or without MPI; a process can train in one world at a time"
            )

    def progress(self):
        """Lets MPI move messages of other ranks along while this rank waits on memory."""
        self.comm.Iprobe()

    def compute_threads(self) -> int:
        """Compute threads for each rank: OMP_NUM_THREADS, or else the cores that this node's ranks may use, shared
        evenly. Collective over the node."""
        if os.environ.get("OMP_NUM_THREADS", "").isdigit():
            return max(1, int(os.environ["OMP_NUM_THREADS"]))
        mine = os.sched_getaffinity(0)
        return max(1, min(len(mine), len(set().union(*self.node.allgather(mine))) // self.node.size))

    def agree(self, error: Exception | None):
        """Raises on every rank if any rank passes an error: the lowest rank's. Collective."""
        errors = self.comm.allgather(None if error is None else (type(error).__name__, str(error)))
        failed = [rank for rank, text in enumerate(errors) if text is not None]
        if not failed:
            return
        if failed[0] == self.rank:
            raise error
        raise ToldElsewhere(f"rank {failed[0]}: {': '.join(errors[failed[0]])}")


class Patience:
    """Says so, once, when a wait is long."""

    def __init__(self, world: World):
        self.world, self.warn_at = world, time.monotonic() + WARN_AFTER_S

    def check(self, what):
        """what(): a sentence's end, "in step 3 for rank 1"."""
        if time.monotonic() > self.warn_at:
            text = f"hetmpi: rank {self.world.rank} on {self.world.host} has waited {WARN_AFTER_S} s {what()}"
            print(text, file=sys.stderr, flush=True)
            self.warn_at = float("inf")


def wait_for(world: World, look, what: str):
    """What look() gives once it is true or an object: looks again and again, and says so if that takes long. what: as for
    Patience."""
    patience = Patience(world)
    while not (found := look()):
        patience.check(lambda: what)
        os.sched_yield()
    return found


def launch(main):
    """Runs main(world) as this rank's whole program: an error on any rank ends all of them, exit code 1. LEFT_EARLY is the code
    with which all ranks leave together."""
    keep_freed_memory()
    try:
        share_gpus()
        world = World()
        share_cores(world.node)
        main(world)
    except SystemExit as leaving:
        if leaving.code and leaving.code != LEFT_EARLY:
            abort(ToldElsewhere())
        raise
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        abort(error)


@functools.cache
def default_world() -> World:
    """The World of a program that makes none, the same one at every call: all ranks of its job. From then on an exception that nobody
    catches ends all ranks, as in launch(). hvd.init() may come before or after. Collective.

    Raises Refused as World does, and if Horovod runs on other ranks."""
    world = World()
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        world.check_horovod(hvd)
    if not hasattr(sys, "ps1"):  # at a prompt an error ends nothing
        sys.excepthook = lambda kind, error, trace: abort(error, is_traced=True)
    if not MPI.Is_thread_main():  # Horovod's thread started MPI: it ends it on all ranks once one of them leaves
        atexit.register(leave_together, world)
    return world


def leave_together(world: World):
    """Waits until all ranks are here. Collective."""
    if not MPI.Is_finalized():
        meeting = world.comm.Ibarrier()
        wait_for(world, lambda: meeting.Test() or time.sleep(0.001), "at its end for the other ranks")


def abort(error: BaseException, is_traced: bool = False):
    """Prints `error`, a refusal too with its traceback if is_traced, and ends all ranks. Ranks that fail together wait by rank, so that the
    lowest speaks alone; what the libraries say of a violent end is kept from hiding the message."""
    rank, size = (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) if MPI.Is_initialized() else (0, 1)
    libc = ctypes.CDLL(None)
    for number in (signal.SIGTERM, signal.SIGALRM):  # SIGTERM ends it again: by that a launcher keeps those quiet who fail after the first
        libc.signal(number, None)  # Python's own way is for the main thread
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    time.sleep(min(LONGEST_DELAY_S, rank * max(0.1, min(SPEAK_DELAY_S, LONGEST_DELAY_S / size))))
    if not isinstance(error, ToldElsewhere):
        os.write(terminal, (describe(error, rank, size, is_traced) + "\n").encode(errors="replace"))
    time.sleep(0.05)  # the launcher forwards what was printed before it kills
    # MPI_Abort leaves through exit(), where the destructors of Horovod's threads crash or wait for ever. A handler
    # registered last runs first and ends the process there; the alarm is for an MPI_Abort that itself waits.
    libc.__cxa_atexit(libc._exit, ctypes.c_void_p(1), None)
    signal.alarm(ABORT_LIMIT_S)
    remove_segments()
    if MPI.Is_initialized():
        MPI.COMM_WORLD.Abort(1)
    os._exit(1)


def remove_segments():
    """Unlinks the files in /dev/shm by which MPICH joins the ranks of a node: ranks that are killed leave them."""
    with open("/proc/self/maps") as maps:
        for path in set(re.findall(r"/dev/shm/mpich_shm_\w+", maps.read())):
            with contextlib.suppress(OSError):  # another rank was first
                os.unlink(path)


def describe(error: BaseException, rank: int, size: int, is_traced: bool = False) -> str:
    """What the user reads: one line for a refusal that is not to be traced, the traceback as well for anything else."""
    where = "" if size == 1 else f" (rank {rank} of {size} on {socket.gethostname()})"
    if isinstance(error, Refused) and not is_traced:
        return f"hetmpi: {error}{where}"
    if isinstance(error, KeyboardInterrupt):
        return f"hetmpi: interrupted{where}"
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{trace}\nhetmpi: {type(error).__name__}: {error}{where}"


def start_mpi():
    """Starts MPI unless it runs already. Raises Refused if it cannot serve several threads, or if a Horovod that is there uses another MPI."""
    if "horovod.torch" in sys.modules:
        check_one_mpi(mpi_libraries())
    if not MPI.Is_initialized():
        check_library(MPI.Get_library_version())
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise Refused(
            f"hetmpi needs an MPI started with MPI_THREAD_MULTIPLE, this one gives thread level {MPI.Query_thread()} of "
            f"{MPI.THREAD_MULTIPLE}: use an MPI built with thread support, and if your program starts MPI itself, "
            "start it so"
        )


def local_size() -> int:
    """Ranks on this node as the launcher's variables tell it, before MPI is started; 1 if none does."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_TASKS_PER_NODE"):
        match = re.match(r"\d+", os.environ.get(name, ""))
        if match:
            return int(match.group())
    return 1


def local_rank() -> int | None:
    """This rank's place on its node as the launcher's variables tell it, before MPI is started; None if none does."""
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def share_gpus():
    """Leaves this rank one GPU to see, the next rank the next one, unless no launcher says which rank it is. Must run before MPI
    starts: an MPI that knows CUDA takes memory of every GPU it sees."""
    seen, rank = os.environ.get("CUDA_VISIBLE_DEVICES"), local_rank()
    num = len(re.findall(r"(?m)^nvidia\d+$", "\n".join(os.listdir("/dev"))))  # their numbers there are not CUDA's
    gpus = [str(i) for i in range(num)] if seen is None else seen.split(",")
    if rank is not None and gpus not in ([], [""]):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank % len(gpus)]


def yield_when_idle():
    """Tells MPI to give way while it waits if there are fewer than two cores a rank: each has a second busy thread,
    Horovod's, and a spinning wait takes the time of the rank it waits for. Must run before MPI starts."""
    if 2 * local_size() > os.cpu_count():
        os.environ.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def choose_network(version: str):
    """Takes libfabric where an MPICH has UCX as well and there is no InfiniBand: over TCP both are as fast, but MPICH 5.0
    over UCX loses memory at every one-sided call (docs/results.md). Must run before MPI starts."""
    if "ch4:ucx,ofi" in version and not os.path.isdir("/sys/class/infiniband"):
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")


yield_when_idle()
choose_network(MPI.Get_library_version())


MATCHING = (
    "Use the mpiexec of the MPI that mpi4py loads (./run.sh doctor shows it); under Slurm srun --mpi=pmix for Open MPI, "
    "--mpi=pmi2 for MPICH"
)


def check_library(version: str):
    """Raises Refused if a launcher that speaks PMIx started this process and the library is an MPICH that does not: it
    would die in its start, once per rank.

    version: MPI.Get_library_version(). The other way round, Open MPI starts alone: check_launcher sees that."""
    if "MPICH" not in version or "pmix" in version.lower():
        return
    if "PMIX_RANK" in os.environ or os.environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        refuse_launch(f"a launcher for Open MPI (PMIx) started this, but mpi4py loads MPICH. {MATCHING}")


def srun_mpi() -> str:
    """What `srun --mpi=` must be for the library that mpi4py loads. MPI need not have started."""
    version = MPI.Get_library_version()
    return "pmix" if "Open MPI" in version or "pmix" in version.lower() else "pmi2"


def check_launcher(size: int):
    """Raises Refused if a launcher started several processes that MPI did not join: N lonely ranks of size 1."""
    launcher = [name for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE") if os.environ.get(name, "").isdigit()]
    for name in launcher or ["SLURM_NTASKS"]:
        declared = os.environ.get(name, "")
        if declared.isdigit() and int(declared) != size:
            refuse_launch(
                f"the launcher says {name}={declared}, but MPI sees {size} rank(s): launcher and MPI library do not "
                f"match. {MATCHING}, or unset the variable to run alone"
            )


def refuse_launch(message: str):
    """Raises Refused on the launcher's first rank. The others cannot be told who speaks: they leave a little later."""
    ranks = [os.environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")]
    if next((rank for rank in ranks if rank is not None), "0") != "0":
        time.sleep(SPEAK_DELAY_S)
        raise ToldElsewhere(message)
    raise Refused(message)


def mpi_libraries() -> list[str]:
    """Paths of the MPI libraries that this process has loaded."""
    with open("/proc/self/maps") as maps:
        return libraries_in(maps.read())


def libraries_in(maps: str) -> list[str]:
    """Paths of the MPI libraries in the text of a /proc/*/maps."""
    paths = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    return sorted({os.path.realpath(path) for path in paths if MPI_LIBRARY.search(path)})


def check_one_mpi(libraries: list[str]):
    """Raises Refused if the process has loaded two MPI libraries."""
    if len(libraries) > 1:
        raise Refused(
            f"mpi4py and Horovod use different MPI libraries ({', '.join(libraries)}): "
            "set them up again on one: rm -r .venv; HETMPI_MPI=system ./run.sh setup (or HETMPI_MPI=mpich)"
        )


def share_cores(node):
    """Gives each rank of a node an equal share of the cores, unless the launcher has bound them or there are too few: a
    rank's threads that wait then take time from that rank alone. Threads started later keep to it. Collective over `node`."""
    mine = sorted(os.sched_getaffinity(0))
    of_all = node.allgather(mine)
    if node.size > len(mine) or any(cores != mine for cores in of_all):
        return
    begin, end = (len(mine) * rank // node.size for rank in (node.rank, node.rank + 1))
    os.sched_setaffinity(0, mine[begin:end])


def keep_freed_memory():
    """Tells glibc to keep memory that is freed: each step takes the same tensors again, and giving them back to the system
    costs page faults, 5 % of a step (docs/results.md)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    map_from, trim_from, grow_by = -3, -1, -2  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
    if not mallopt(map_from, 1 << 30):
        mallopt(map_from, 32 << 20)  # the most that glibc before 2.35 takes
    mallopt(trim_from, (1 << 31) - 1)
    mallopt(grow_by, 64 << 20)


def split_nodes(comm, ranks_per_node: int | None):
    """The communicator of the ranks that share memory with this one. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    if ranks_per_node is None:
        return node
    if ranks_per_node < 1:
        raise Refused(f"ranks_per_node must be at least 1, got {ranks_per_node}")
    return node.Split(node.rank // ranks_per_node, key=node.rank)
