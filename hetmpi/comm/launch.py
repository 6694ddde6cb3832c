"""launch: a program on all ranks, which end together when one of them fails."""

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
from collections.abc import Callable

from hetmpi.comm.mpi import MPI, SPEAK_DELAY_S, local_rank
from hetmpi.comm.oversubscription import missing_naps
from hetmpi.comm.waiting import wait_for
from hetmpi.comm.world import World
from hetmpi.errors import ToldElsewhere, UserError

LONGEST_DELAY_S = 6.0
ABORT_LIMIT_S = 2
LEFT_EARLY = 85  # exit code of a run that was told to leave, and saved
_failure_calls: list[Callable[[str], None]] = []


def on_failure(call: Callable[[str], None]):
    """From now on abort() calls this, and no other, with what it prints, on the rank that fails. It must not raise."""
    _failure_calls[:] = [call]


def launch(main):
    """Runs main(world) as this rank's whole program: an error on any rank ends all of them, exit code 1. LEFT_EARLY is
    the code with which all ranks leave together."""
    keep_freed_memory()
    try:
        share_gpus()
        world = World()
        advise_naps(world)
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
    """The World of a program that makes none, the same one at every call: all ranks of its job. From then on an
    exception that nobody catches ends all ranks, as in launch(). hvd.init() may come before or after. Collective.

    Raises UserError as World does, and if Horovod runs on other ranks."""
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
    """Waits until all ranks are here and none calls MPI any more: the first whose Horovod ends makes the Horovod of the
    others end MPI at once, which aborts a rank whose main thread is in a call. Collective."""
    if MPI.Is_finalized():
        return
    meeting = world.comm.Ibarrier()
    wait_for(world, lambda: meeting.Test() or time.sleep(0.001), "at its end for the other ranks")
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        hvd.barrier()  # its threads meet, and this one is out of MPI before any of them ends it


def abort(error: BaseException, is_traced: bool = False):
    """Prints `error`, a refusal too with its traceback if is_traced, and ends all ranks. Ranks that fail together wait
    by rank, so that the lowest speaks alone; what the libraries say of a violent end is kept from hiding the
    message."""
    rank, size = (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) if MPI.Is_initialized() else (0, 1)
    libc = ctypes.CDLL(None)
    # SIGTERM ends the process again: by that a launcher keeps those quiet who fail after the first. Python's own way to
    # set a handler is for the main thread alone.
    for number in (signal.SIGTERM, signal.SIGALRM):
        libc.signal(number, None)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # of a full disk
            stream.flush()
    terminal = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    time.sleep(min(LONGEST_DELAY_S, rank * max(0.1, min(SPEAK_DELAY_S, LONGEST_DELAY_S / size))))
    if not isinstance(error, ToldElsewhere):
        text = describe(error, rank, size, is_traced)
        os.write(terminal, f"{text}\n".encode(errors="replace"))
        for call in _failure_calls:
            call(text)
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
    places = [] if size == 1 else [f"rank {rank} of {size} on {socket.gethostname()}"]
    places += [f"in {error.doing}"] if hasattr(error, "doing") else []
    where = f" ({', '.join(places)})" if places else ""
    if isinstance(error, UserError) and not is_traced:
        return f"hetmpi: {error}{where}"
    if isinstance(error, KeyboardInterrupt):
        return f"hetmpi: interrupted{where}"
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{trace}\nhetmpi: {type(error).__name__}: {error}{where}"


def advise_naps(world: World):
    """Says how ranks that outnumber their cores can wait without taking them. Collective over the node."""
    library = missing_naps(world.node.size)
    if library is not None and world.node.rank == 0:
        print(
            f"hetmpi: {world.node.size} ranks share {os.cpu_count()} cores on {world.host} and take them from each "
            f"other while they wait: start them with LD_PRELOAD={library}",
            file=sys.stderr,
            flush=True,
        )


def share_gpus():
    """Leaves this rank one GPU to see, the next rank the next one, unless no launcher says which rank it is. Must run
    before MPI starts: an MPI that knows CUDA takes memory of every GPU it sees."""
    seen, rank = os.environ.get("CUDA_VISIBLE_DEVICES"), local_rank()
    num = len(re.findall(r"(?m)^nvidia\d+$", "\n".join(os.listdir("/dev"))))  # their numbers there are not CUDA's
    gpus = [str(i) for i in range(num)] if seen is None else seen.split(",")
    if rank is not None and gpus not in ([], [""]):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank % len(gpus)]


def share_cores(node):
    """Gives each rank of a node an equal share of the cores, unless the launcher has bound them or there are too few: a
    rank's threads that wait then take time from that rank alone. Threads started later keep to it. Collective over
    `node`."""
    mine = sorted(os.sched_getaffinity(0))
    of_all = node.allgather(mine)
    if node.size > len(mine) or any(cores != mine for cores in of_all):
        return
    begin, end = (len(mine) * rank // node.size for rank in (node.rank, node.rank + 1))
    os.sched_setaffinity(0, mine[begin:end])


def keep_freed_memory():
    """Tells glibc to keep memory that is freed: each step takes the same tensors again, and giving them back to the
    system costs page faults, 5 % of a step (docs/results.md)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    map_from, trim_from, grow_by = -3, -1, -2  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
    if not mallopt(map_from, 1 << 30):
        mallopt(map_from, 32 << 20)  # the most that glibc before 2.35 takes
    mallopt(trim_from, (1 << 31) - 1)
    mallopt(grow_by, 64 << 20)
