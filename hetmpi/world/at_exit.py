"""What a program that ends without close() must free, as MPI over libfabric's TCP ends with an error while a window is
open."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable

from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

_open: dict[Callable[[], None], World] = {}  # those of at_exit, in their order


def at_exit(world: World, free: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls free() at its first call. The end of the program calls it too, once all ranks of
    the world have come so far, after those of later at_exit() calls. All ranks make the same calls in the same
    order."""

    def once():
        if _open.pop(once, None) is not None:
            free()

    if not _open:
        atexit.unregister(_free_all)
        atexit.register(_free_all)  # anew: it runs before what was registered earlier, such as Horovod's end of MPI
    _open[once] = world
    return once


def _free_all():
    if MPI.Is_finalized() or has_failed():
        return
    for world in {id(world.comm): world for world in _open.values()}.values():
        world.meet("at the end of the program for the other ranks")  # until then threads serve them
    while _open:
        next(reversed(_open))()


def has_failed() -> bool:
    """Whether an error ends the program: MPI's own error then ends the other ranks, which would wait for this one."""
    return hasattr(sys, "last_value") and not hasattr(sys, "ps1")  # at a prompt errors do not end it


def free_window(window: MPI.Win, stop: Callable[[], None] = lambda: None):
    """Frees a window that is locked. stop(): ends the thread that uses its memory. Collective."""
    stop()
    window.Unlock_all()
    window.Free()
