"""Signals before a program handles them itself: the process exits with a code in place of dying by the signal, after
which a launcher prints a paragraph of its own. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading

from hetmpi.world.launcher import is_first_rank

# Files of MPICH and of Open MPI in /dev/shm, by how their names begin.
SEGMENTS = ("mpich_shm_", "vader_segment.", "sm_segment.", "osc_sm.", "osc_rdma.")
failed = memoryview(bytearray(1))  # whether a rank of this node ends the job, and has said why (launch.share_failure)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def exit_on_signals():
    """From now on the first of SIGNALS ends this process, even inside a library, with exit code 128 and its number,
    until another handler is set. Must be called in the main thread; a second call does nothing."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    heard, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, pass_on)
    threading.Thread(target=listen, args=(heard,), name="hetmpi-early-signals", daemon=True).start()


def pass_on(number, frame):
    """A handler that leaves the signal to listen()."""


def listen(heard: int):
    """Reads signal numbers, one byte each, from a wake-up pipe."""
    while found := os.read(heard, 1):
        if signal.getsignal(found[0]) is pass_on:
            end(found[0])


def end(number: int):
    """Ends this process. The first rank says why, but where the signal is that of a launcher which ends the other ranks
    after one has failed, as Open MPI's does."""
    if is_first_rank() and not failed[0]:
        with contextlib.suppress(OSError):
            os.write(2, f"hetmpi: ended by {signal.Signals(number).name}\n".encode())
    remove_segments()
    os._exit(128 + number)


def leave_interrupts_to_python():
    """Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is pass_on:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def remove_segments():
    """Unlinks MPI's shared-memory files in /dev/shm, which ranks leave behind when they are killed."""
    names = "|".join(map(re.escape, SEGMENTS))
    with open("/proc/self/maps") as maps:
        for path in set(re.findall(rf"/dev/shm/(?:{names})[^\s/]+", maps.read())):
            with contextlib.suppress(OSError):  # another rank has removed it
                os.unlink(path)
