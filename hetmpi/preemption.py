"""Signals by which a scheduler says that a job must go: all ranks agree on the step after which they leave, having saved."""

from __future__ import annotations

import signal

import numpy as np

from hetmpi.world import MPI, World

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
EXIT_CODE = 85  # of a run that left, having saved: start it again with resume=auto


class Preemption:
    """Listens for SIGNALS until `close`. The first one is noted, a second one of the same kind does what it does by default: ends the process."""

    def __init__(self, world: World):
        """Only in the main thread. Collective."""
        self._comm = world.comm.Dup()
        self._noted, self._anywhere = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._sent = self._noted.copy()
        self._request: MPI.Request | None = None
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame):
        self._noted[0] = number
        signal.signal(number, signal.SIG_DFL)

    def is_agreed(self) -> bool:
        """Whether some rank had noted a signal when all last asked; the same on every rank. Asks anew, for the next call. Collective."""
        agreed = False
        if self._request is not None:
            self._request.Wait()
            agreed = bool(self._anywhere[0])
        self._sent[:] = self._noted
        self._request = self._comm.Iallreduce(self._sent, self._anywhere, MPI.MAX)
        return agreed

    def close(self):
        """Listens no more. Collective."""
        if self._request is not None:
            self._request.Wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._comm.Free()
