"""What a program that ends without close() must free, as MPI over libfabric's TCP ends with an error while a window is
open."""

from __future__ import annotations

import atexit
from collections.abc import Callable

from hetmpi.world.mpi import MPI

_open: list[Callable[[], None]] = []


def at_exit(free: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls free() at its first call. The end of the program calls it too, after those of later
    at_exit() calls. Where free() is collective, all ranks make the same calls in the same order."""

    def once():
        if once in _open:
            _open.remove(once)
            free()

    if not _open:
        atexit.unregister(_free_all)
        atexit.register(_free_all)  # anew: it runs before what was registered earlier, such as Horovod's end of MPI
    _open.append(once)
    return once


def _free_all():
    while _open and not MPI.Is_finalized():
        _open[-1]()


def free_window(window: MPI.Win, stop: Callable[[], None] = lambda: None):
    """Frees a window that is locked. stop(): ends the thread that uses its memory. Collective."""
    stop()
    window.Unlock_all()
    window.Free()
