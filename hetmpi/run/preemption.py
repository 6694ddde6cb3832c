"""Handles signals of a scheduler and Ctrl-C, which end a run early: all ranks agree on the step after which they save
and exit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

from hetmpi.world import early_signals
from hetmpi.world.early_signals import remove_segments
from hetmpi.world.launch import LEFT_EARLY
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
ONE_KEY_S = 1.0  # Ctrl-C may arrive twice: from the terminal, and forwarded by mpiexec


class Preemption:
    """Handles SIGNALS until `close`. The first signal is recorded. The second one, of any kind, ends the process at
    once, even inside an MPI call, where Python's handlers do not run. So does a first SIGTERM before the first step:
    there is nothing to save yet, and no end of a step at which it would be seen.

    is_training  whether a run has begun its first step; to be set to False before the next run of a sweep"""

    def __init__(self, world: World):
        """Must be called in the main thread."""
        self._world = world
        self._noted, self._sent, self._anywhere = (np.zeros(1, np.int32) for _ in range(3))
        self._request: MPI.Request | None = None
        self._is_asked = self.is_training = False
        self._heard, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._listen, name="hetmpi-signals", daemon=True).start()

    def _listen(self):
        """Reads signal numbers, one byte each, from the wake-up pipe."""
        noted_at = 0.0
        while heard := os.read(self._heard, 1):
            if heard[0] not in SIGNALS:
                continue
            if self._noted[0] == signal.SIGINT == heard[0] and time.monotonic() - noted_at < ONE_KEY_S:
                continue
            if self._noted[0]:
                os._exit(128 + heard[0])
            self._noted[0], noted_at = heard[0], time.monotonic()
            if heard[0] == signal.SIGTERM and not self.is_training:
                self._leave_unsaved()
            if heard[0] == signal.SIGINT and self._world.rank == 0:
                print(
                    "\nhetmpi: saving after this step; Ctrl-C again ends the run at once", file=sys.stderr, flush=True
                )

    def _leave_unsaved(self):
        """Ends this process, and so the run, with one line of the lowest rank that has the signal; with none after a
        rank of this node has failed, as in early_signals.end()."""
        time.sleep(min(1.0, 0.1 * self._world.rank))
        if not early_signals.failed[0]:
            print("\nhetmpi: ended by SIGTERM before the first step, nothing is lost", file=sys.stderr, flush=True)
        remove_segments()
        os._exit(LEFT_EARLY)

    def ask(self):
        """This rank asks to leave, as after a signal."""
        self._is_asked = True

    def is_agreed(self) -> bool:
        """Whether some rank had recorded a signal at the time of the last call; the same on every rank. Starts the next
        allreduce. Collective."""
        agreed, self.is_training = False, True
        if self._request is not None:
            self._await("for all ranks to end the step")
            agreed = bool(self._anywhere[0])
        self._sent[0] = max(self._noted[0], self._is_asked)
        self._request = self._world.comm.Iallreduce(self._sent, self._anywhere, MPI.MAX)
        return agreed

    def is_agreed_now(self) -> bool:
        """Whether some rank has recorded a signal by now; the same on every rank. Collective."""
        return self.is_agreed() or self.is_agreed()

    def close(self):
        """Ignores signals from now on, as the process is about to end. Collective."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        if self._request is not None:
            self._await("at exit for all ranks")

    def _await(self, what: str):
        self._world.wait(self._request.Test, what)
