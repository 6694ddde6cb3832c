"""Frees what a program has left open when it ends. Over libfabric's TCP MPI fails to end while a window is open."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable

from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

Call = Callable[[], None]
_open: dict[Call, tuple[World, Call, Call]] = {}  # those of at_exit, in their order, with world, stop() and free()


def nothing():
    """The stop() of what has no thread."""


def at_exit(world: World, free: Call, stop: Call = nothing) -> Call:
    """Returns a function that calls stop() and free(), once. If the program does not call it, its end does, when all
    ranks of the world have reached theirs. It then calls every stop() before the first free(), as a thread may use the
    memory of several tables; both in reverse order of the at_exit() calls.

    stop(): ends a thread; may be called twice. All ranks make the same calls in the same order."""

    def once():
        calls = _open.pop(once, None)  # the only reference to them: what they hold is freed at once
        if calls is not None:
            _, stop, free = calls
            stop()
            free()

    if not _open:
        atexit.unregister(_free_all)
        atexit.register(_free_all)  # anew: it runs before what was registered earlier, such as Horovod's end of MPI
    _open[once] = world, stop, free
    return once


def _free_all():
    if MPI.Is_finalized():
        return
    worlds = {id(world.comm): world for world, *_ in _open.values() if world.comm != MPI.COMM_NULL}.values()
    if has_failed() and any(world.size > 1 for world in worlds):
        MPI.COMM_WORLD.Abort(1)  # the others would wait for this rank
    for world in worlds:
        world.meet("at the end of the program for the other ranks")  # who may still read and write
        world.receivers.clear()  # later waits must not touch what is freed
    for _, stop, _ in reversed(_open.values()):
        stop()
    while _open:
        next(reversed(_open))()


def has_failed() -> bool:
    """Whether an uncaught error ends the program."""
    return hasattr(sys, "last_value") and not hasattr(sys, "ps1")  # at a prompt errors do not end it


def free_window(window: MPI.Win):
    """Frees a window that is locked. Collective."""
    window.Unlock_all()
    window.Free()
