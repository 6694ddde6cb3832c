"""launch: runs a program on all ranks and ends all of them when one fails."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from hetmpi import put_current_folder_before_packages
from hetmpi.errors import ReportedElsewhere, UserError, one_line
from hetmpi.world import early_signals
from hetmpi.world.early_signals import leave_interrupts_to_python, remove_segments
from hetmpi.world.launcher import local_rank
from hetmpi.world.mpi import MPI, SPEAK_DELAY_S
from hetmpi.world.oversubscription import missing_naps
from hetmpi.world.world import World

LONGEST_DELAY_S = 6.0
ABORT_LIMIT_S = 2
LEFT_EARLY = 85  # exit code of a run that a signal ended early, after it saved a checkpoint
_failure_calls: list[Callable[[str], None]] = []


def on_failure(call: Callable[[str], None]):
    """From now on abort() calls this, and no other, with its message, on the rank that fails. It must not raise."""
    _failure_calls[:] = [call]


def share_failure(world: World):
    """Lets early_signals know when abort() is called on another rank of this node. Collective."""
    with contextlib.ExitStack() as until_open:
        path = None
        if world.node.rank == 0:
            with contextlib.suppress(OSError):
                file = until_open.enter_context(tempfile.NamedTemporaryFile(prefix="hetmpi-", dir="/dev/shm"))
                os.posix_fallocate(file.fileno(), 0, 1)
                path = file.name
        path = world.node.bcast(path)
        with contextlib.suppress(OSError, TypeError, ValueError), open(path, "r+b") as file:
            early_signals.failed = memoryview(mmap.mmap(file.fileno(), 1))
        world.node.Barrier()


def launch(main):
    """Runs main(world) as this rank's whole program. An error on any rank ends all ranks with exit code 1, sys.exit(n)
    with n. Exit code LEFT_EARLY is used when all ranks leave together."""
    keep_freed_memory()
    leave_interrupts_to_python()
    sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: names of files may be any bytes
    try:
        share_gpus()
        world = World()
        advise_naps(world)
        share_cores(world.node)
        check_same_command(world)
        put_current_folder_before_packages()
        share_failure(world)
        main(world)
    except SystemExit as leaving:
        code = leaving.code
        if code and code != LEFT_EARLY:
            is_code = isinstance(code, int)
            abort(UserError(f"the program called sys.exit({code})" if is_code else code), code=code if is_code else 1)
        raise
    except BaseException as error:  # of any kind: the other ranks must not wait for this one
        abort(error)


@functools.cache
def default_world() -> World:
    """The World of a program that does not create one: all ranks of its job, the same object at every call. From then
    on an uncaught exception ends all ranks, as in launch(). hvd.init() may come before or after. Collective.

    Raises UserError as World does, and if Horovod runs on other ranks."""
    world = World()
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        world.check_horovod(hvd)
    if not hasattr(sys, "ps1"):  # at an interactive prompt an error must not end the process
        sys.excepthook = lambda kind, error, trace: abort(error, is_traced=True)
    if not MPI.Is_thread_main():  # Horovod's thread started MPI, and ends it on all ranks once one of them leaves
        atexit.register(leave_together, world)
    return world


def leave_together(world: World):
    """Waits until all ranks have finished their MPI calls. When Horovod ends on one rank, the Horovod of every other
    rank calls MPI_Finalize at once, which aborts a rank whose main thread is inside an MPI call. Collective."""
    if MPI.Is_finalized():
        return
    meeting = world.comm.Ibarrier()
    world.wait(lambda: meeting.Test() or time.sleep(0.001), "at exit for the other ranks")
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        hvd.barrier()  # run by Horovod's threads: no main thread is in an MPI call when MPI ends


def abort(error: BaseException, is_traced: bool = False, code: int = 1):
    """Prints `error` and ends all ranks with an exit code. A UserError is printed with its traceback only if is_traced.
    When several ranks fail together, each delays by its rank, so that only the lowest one prints. Output of the
    libraries during the abort is suppressed, so that it does not hide the message."""
    rank, size = (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) if MPI.Is_initialized() else (0, 1)
    libc = ctypes.CDLL(None)
    # SIGTERM ends this process, so that the launcher can end the ranks that fail after the first one: by an exit, as a
    # launcher prints a paragraph about a death by a signal. libc sets it, because Python's signal.signal works in the
    # main thread only.
    for number in (signal.SIGTERM, signal.SIGALRM):
        libc.signal(number, libc._exit)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # disk full
            stream.flush()
    terminal = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    time.sleep(min(LONGEST_DELAY_S, rank * max(0.1, min(SPEAK_DELAY_S, LONGEST_DELAY_S / size))))
    if not isinstance(error, ReportedElsewhere):
        text = describe(error, rank, size, is_traced)
        os.write(terminal, f"{text}\n".encode(errors="replace"))
        for call in _failure_calls:
            call(text)
    early_signals.failed[0] = 1
    time.sleep(0.05)  # the launcher forwards the printed lines before it kills the ranks
    # MPI_Abort leaves through exit(), where the destructors of Horovod's threads crash or hang. An exit handler
    # registered last runs first and ends the process; the alarm ends an MPI_Abort that hangs itself.
    libc.__cxa_atexit(libc._exit, ctypes.c_void_p(code), None)
    signal.alarm(ABORT_LIMIT_S)
    remove_segments()
    if size > 1:
        MPI.COMM_WORLD.Abort(code)
    os._exit(code & 0xFF or 1)


def describe(error: BaseException, rank: int, size: int, is_traced: bool = False) -> str:
    """The message for the user: one line for a UserError unless is_traced, the traceback as well for any other
    error."""
    places = [] if size == 1 else [f"rank {rank} of {size} on {socket.gethostname()}"]
    places += [f"in {error.doing}"] if hasattr(error, "doing") else []
    where = f" ({', '.join(places)})" if places else ""
    if isinstance(error, UserError) and not is_traced:
        return f"hetmpi: {error}{where}"
    if isinstance(error, KeyboardInterrupt):
        return f"hetmpi: interrupted{where}"
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{trace}\nhetmpi: {type(error).__name__}: {error}{where}"


def check_same_command(world: World):
    """Raises UserError on every rank unless all ranks were started with the same arguments. Collective."""
    name = Path(sys.argv[0]).stem.rpartition(" ")[2]  # `hetmpi train`, or the path of train.py, which may differ
    commands = world.comm.allgather((world.host, [name, *sys.argv[1:]]))
    (host, first), others = commands[0], commands[1:]
    for rank, (other_host, other) in enumerate(others, 1):
        if other != first:
            here, there = first_difference(first, other)
            raise UserError(
                f"all ranks must be started with the same arguments: rank 0 on {host} has {here}, rank {rank} on "
                f"{other_host} has {there}"
            )


def first_difference(first: list[str], other: list[str]) -> tuple[str, str]:
    """Of two commands that differ, as text: the first argument of each that the other has not, else the first that
    stands in another place."""
    here = [text for text in first if text not in other]
    there = [text for text in other if text not in first]
    if not here and not there:
        here, there = zip(*[pair for pair in itertools.zip_longest(first, other) if pair[0] != pair[1]])
    return tuple(one_line(parts[0], 200) if parts and parts[0] else "nothing of the kind" for parts in (here, there))


def advise_naps(world: World):
    """Advises LD_PRELOAD of cpp/naps.c when a node has more ranks than cores. Collective over the node."""
    library = missing_naps(world.node.size, world.num_cores)
    if library is not None and world.node.rank == 0:
        print(
            f"hetmpi: {world.node.size} ranks share {world.num_cores} cores on {world.host} and take them from each "
            f"other while they wait: start them with LD_PRELOAD={library}",
            file=sys.stderr,
            flush=True,
        )


def share_gpus(devices: str = "/dev"):
    """Makes one GPU visible to this rank, round robin over the node's ranks, if the launcher's variables name the rank.
    Must run before MPI starts: a CUDA-aware MPI allocates memory on every visible GPU."""
    seen, rank = os.environ.get("CUDA_VISIBLE_DEVICES"), local_rank()
    if rank is None:
        return
    files = [file for file in Path(devices).glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name)]
    num = sum(map(can_open, files)) if seen is None else 0  # their count alone: CUDA's numbers differ
    gpus = [str(i) for i in range(num)] if seen is None else seen.split(",")
    if gpus not in ([], [""]):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank % len(gpus)]


def can_open(device: Path) -> bool:
    """Whether a GPU's file may be opened: a batch job sees those of the whole node, and may use its own."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def share_cores(node):
    """Binds each rank of a node to an equal share of the cores, unless the launcher has bound the ranks or there are
    too few cores. Threads that spin then take time from their own rank only. Threads started later inherit the binding.
    Collective over `node`."""
    mine = sorted(os.sched_getaffinity(0))
    of_all = node.allgather(mine)
    if node.size > len(mine) or any(cores != mine for cores in of_all):
        return
    begin, end = (len(mine) * rank // node.size for rank in (node.rank, node.rank + 1))
    os.sched_setaffinity(0, mine[begin:end])


def keep_freed_memory():
    """Makes glibc keep freed memory. Each step allocates the same tensors again; returning them to the system costs
    page faults, 6 % of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    map_from, trim_from, grow_by = -3, -1, -2  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
    if not mallopt(map_from, 1 << 30):
        mallopt(map_from, 32 << 20)  # the maximum of glibc before 2.35
    mallopt(trim_from, (1 << 31) - 1)
    mallopt(grow_by, 64 << 20)
