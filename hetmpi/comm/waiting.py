"""Long waits have names: a rank that has waited for a minute says what for, and which ranks do not wait.

Ranks that have waited long tell each other so. A rank that has said nothing by then is at work, stopped or gone: it is
the one that the others wait for. The lowest of the waiting ranks speaks for all of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

WARN_AFTER_S = 60.0
LISTEN_AFTER_S = 1.0  # a shorter wait does not look for the notices of others
GATHER_S = 1.0  # from a rank's own notice to its warning: the time that the notices of others may take
LISTEN_EVERY_S = 0.05
NAP_S = 0.0005
MOST_NAMED = 4


class Notices:
    """What the ranks of a world have told each other about their waits."""

    def __init__(self, comm, hosts: list[str], warn_after_s: float = WARN_AFTER_S):
        """comm: mpi4py communicator, for notices alone. hosts: of each rank. warn_after_s: a wait may last so long
        without a word."""
        self.hosts, self.warn_after_s, self._comm = hosts, warn_after_s, comm
        self.waiting: dict[int, str] = {}  # other ranks that wait -> what for
        self._sends: list = []

    def send(self, what: str | None):
        """Tells all other ranks that this one waits for `what`; None: that it waits no longer."""
        me = self._comm.rank
        self._sends = [request for request in self._sends if not request.Test()]
        self._sends += [self._comm.isend((me, what), rank) for rank in range(self._comm.size) if rank != me]

    def receive(self):
        """Takes note of what the others have sent."""
        while self._comm.iprobe():
            rank, what = self._comm.recv()
            if what is None:
                self.waiting.pop(rank, None)
            else:
                self.waiting[rank] = what

    def warning(self, what: str, waited_s: float) -> str | None:
        """What this rank says of its own wait and of the other ranks; None where a lower rank speaks."""
        me = self._comm.rank
        if any(rank < me for rank in self.waiting):
            return None
        others = [f"rank {rank} waits {text}" for rank, text in sorted(self.waiting.items())]
        busy = [
            f"rank {rank} on {host}" for rank, host in enumerate(self.hosts) if rank != me and rank not in self.waiting
        ]
        culprits = [f"not waiting: {', '.join(shortened(busy))}"] if busy else []
        return "; ".join(
            [f"hetmpi: rank {me} on {self.hosts[me]} has waited {waited_s:.0f} s {what}", *shortened(others), *culprits]
        )


def shortened(names: list[str]) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(names) - MOST_NAMED
    return names[:MOST_NAMED] + ([f"{more} more"] if more > 0 else [])


def ranks_text(ranks: list[int]) -> str:
    """Ranks by their numbers, for messages: "rank 3", "ranks 1, 2 and 5 more"."""
    *first, last = shortened([str(rank) for rank in ranks] or ["?"])
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


class Patience:
    """A wait that says so if it is long:

    with Patience(world, lambda: "in step 3 for rank 1") as patience:
        while not is_done():
            patience.check()
    """

    def __init__(self, world, what: Callable[[], str]):
        """world: whose ranks may wait for each other. what(): the end of a sentence, "in step 3 for rank 1"."""
        self._notices, self._what = world.notices, what
        self._began = time.monotonic()
        self._listens_at = self._next_look_at = self._began + min(LISTEN_AFTER_S, self._notices.warn_after_s)
        self._told_at: float | None = None  # when this rank told the others
        self._has_warned = False

    def check(self):
        """Called again and again while the wait lasts; sleeps a little once it has been long."""
        now = time.monotonic()
        if now < self._listens_at:
            return
        time.sleep(NAP_S)
        if now >= self._next_look_at:
            self._next_look_at = now + LISTEN_EVERY_S
            self._listen(now)

    def _listen(self, now: float):
        notices, waited_s = self._notices, now - self._began
        notices.receive()
        if self._told_at is None and (waited_s >= notices.warn_after_s or notices.waiting):
            notices.send(self._what())
            self._told_at = now
        is_due = (
            waited_s >= notices.warn_after_s
            and self._told_at is not None
            and now >= self._told_at + min(GATHER_S, notices.warn_after_s)
        )
        if is_due and not self._has_warned:
            self._has_warned = True
            text = notices.warning(self._what(), waited_s)
            if text is not None:
                print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Patience:
        return self

    def __exit__(self, *_):
        if self._told_at is not None:
            self._notices.send(None)


def wait_for(world, look, what: str):
    """What look() gives once it is true or an object: looks again and again, and says so if that takes long. Meanwhile
    it takes in what others send (world.drain), as they may wait for room here. what: as for Patience."""
    found = look()
    if found:
        return found
    with Patience(world, lambda: what) as patience:
        while not (found := look()):
            world.drain()
            patience.check()
            os.sched_yield()
    return found
