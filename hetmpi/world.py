"""World: the ranks that train together. Starts MPI, then Horovod on the same communicator; the only starter of anything.

MPI is started with MPI_THREAD_MULTIPLE because Horovod's background thread calls it beside the main thread. mpi4py must
come first: it reads its settings at import.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
import traceback

SPEAK_DELAY_S = 1.0  # longer than a launcher takes to kill the other ranks
ABORT_LIMIT_S = 2


class Refused(ValueError):
    """Bad input, or a machine that cannot serve it: one message that says what was expected, what came, what to do."""


class ToldElsewhere(Refused):
    """A refusal that another rank prints."""


class World:
    """The ranks of one training: a communicator of their own, their places on nodes, and Horovod over them.

    comm            mpi4py communicator, private to hetmpi (a duplicate of the one given)
    node            communicator of the ranks that share this rank's node and memory
    node_ranks      world ranks of `node`, in node order
    rank, size      this rank and how many there are
    """

    def __init__(self, comm=None, ranks_per_node: int | None = None):
        """comm: mpi4py communicator, default COMM_WORLD. ranks_per_node splits each real node into smaller ones, whose
        ranks then reach each other only through MPI: for tests, and to measure RMA on one machine. Collective."""
        yield_when_idle()
        from mpi4py import MPI

        base = MPI.COMM_WORLD if comm is None else comm
        if comm is None:
            check_launcher(base.size)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise Refused(
                "hetmpi needs an MPI started with MPI_THREAD_MULTIPLE, this one gives thread level "
                f"{MPI.Query_thread()} of {MPI.THREAD_MULTIPLE}: use an MPI built with thread support "
                "and unset MPI4PY_RC_THREAD_LEVEL"
            )
        self.comm = base.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.node = split_nodes(self.comm, ranks_per_node)
        self.node_ranks = self.node.allgather(self.rank)
        self.is_one_node = self.node.size == self.size
        self.host = socket.gethostname()

    def start_horovod(self):
        """Starts Horovod on this world and returns the module horovod.torch. Raises Refused if it uses another MPI."""
        os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")  # one fixed order of summation, run after run
        import horovod.torch as hvd

        check_one_mpi(open("/proc/self/maps").read())
        if not hvd.is_initialized():
            hvd.init(comm=self.comm)
        if (hvd.rank(), hvd.size()) != (self.rank, self.size):
            raise Refused(
                f"Horovod says rank {hvd.rank()} of {hvd.size()}, MPI says {self.rank} of {self.size}: "
                "it was started on another communicator; a process can train in one world at a time"
            )
        return hvd

    def progress(self):
        """Lets MPI move messages of other ranks along while this rank waits on memory."""
        self.comm.Iprobe()

    def agree(self, error: Exception | None):
        """Raises on every rank if any rank passes an error: the lowest rank's. Collective."""
        errors = self.comm.allgather(None if error is None else (type(error).__name__, str(error)))
        failed = [rank for rank, text in enumerate(errors) if text is not None]
        if not failed:
            return
        if failed[0] == self.rank:
            raise error
        raise ToldElsewhere(f"rank {failed[0]}: {': '.join(errors[failed[0]])}")


def launch(main):
    """Runs main(world) as this rank's whole program: an error on any rank ends all of them, exit code 1."""
    try:
        world = World()
    except Refused as error:
        from mpi4py import MPI

        abort(MPI.COMM_WORLD, error)
    try:
        main(world)
    except SystemExit:  # a verdict that all ranks share
        raise
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        abort(world.comm, error)


def abort(comm, error: BaseException):
    """Prints `error` and ends all ranks of `comm`. Ranks that fail together wait by rank, so the lowest speaks alone."""
    time.sleep(SPEAK_DELAY_S * min(comm.rank, 3))
    sys.stdout.flush()
    if not isinstance(error, ToldElsewhere):
        print(describe(error, comm.rank, comm.size), file=sys.stderr, flush=True)
    time.sleep(0.05)  # the launcher forwards what was printed before it kills
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the libraries say of a violent end would hide the message
    # MPI_Abort leaves through exit(), where the destructors of Horovod's threads can wait for ever: the alarm does not.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(ABORT_LIMIT_S)
    comm.Abort(1)


def describe(error: BaseException, rank: int, size: int) -> str:
    """What the user reads: one line for a refusal, the traceback as well for anything else."""
    where = "" if size == 1 else f" (rank {rank} of {size} on {socket.gethostname()})"
    if isinstance(error, Refused):
        return f"hetmpi: {error}{where}"
    if isinstance(error, KeyboardInterrupt):
        return f"hetmpi: interrupted{where}"
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{trace}\nhetmpi: {type(error).__name__}: {error}{where}"


def local_size() -> int:
    """Ranks on this node as the launcher's variables tell it, before MPI is started; 1 if none does."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_TASKS_PER_NODE"):
        match = re.match(r"\d+", os.environ.get(name, ""))
        if match:
            return int(match.group())
    return 1


def threads_per_rank() -> int:
    """Compute threads for each rank: OMP_NUM_THREADS, or else this node's cores shared evenly, at most those this
    process may run on."""
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return max(1, min(len(os.sched_getaffinity(0)), os.cpu_count() // local_size()))


def yield_when_idle():
    """Tells MPI to give way while it waits if there are fewer than two cores a rank: each has a second busy thread,
    Horovod's, and a spinning wait takes the time of the rank it waits for. Must run before MPI starts."""
    if 2 * local_size() > os.cpu_count():
        os.environ.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def check_launcher(size: int):
    """Raises Refused if a launcher started several processes that MPI did not join: N lonely ranks of size 1."""
    launcher = [name for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if os.environ.get(name, "").isdigit()]
    for name in launcher or ["SLURM_NTASKS"]:
        declared = os.environ.get(name, "")
        if declared.isdigit() and int(declared) != size:
            ranks = [os.environ.get(n) for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")]
            if next((r for r in ranks if r is not None), "0") != "0":
                sys.exit(1)  # rank 0 speaks for all: lonely ranks cannot agree who does
            raise Refused(
                f"the launcher says {name}={declared}, but MPI sees {size} rank(s): launcher and MPI library do not "
                "match. Use the mpiexec of the MPI that mpi4py loads (./run.sh doctor shows it); under Slurm try "
                "srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH), or unset the variable to run alone"
            )


def check_one_mpi(maps: str):
    """Raises Refused if the process has loaded two MPI libraries. maps: text of /proc/self/maps."""
    paths = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    libraries = {os.path.realpath(p) for p in paths if re.search(r"/libmpi(ch|_abi|_gnu\w*|_cray\w*)?\.so", p)}
    if len(libraries) > 1:
        raise Refused(
            f"mpi4py and Horovod use different MPI libraries ({', '.join(sorted(libraries))}): "
            "set them up again on one: rm -r .venv; HETMPI_MPI=system ./run.sh setup (or HETMPI_MPI=mpich)"
        )


def split_nodes(comm, ranks_per_node: int | None):
    """The communicator of the ranks that share memory with this one. Collective."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    if ranks_per_node is None:
        return node
    if ranks_per_node < 1:
        raise Refused(f"ranks_per_node must be at least 1, got {ranks_per_node}")
    return node.Split(node.rank // ranks_per_node, key=node.rank)
