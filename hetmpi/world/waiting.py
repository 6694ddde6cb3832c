"""Warnings about long waits: a rank that has waited for a minute prints the reason and the ranks that are not waiting.

Ranks that wait long send notices to a few listeners. A listener that waits long sends notices to all ranks, and those
that wait too answer at once. A rank that has sent no notice is busy, stopped or gone: the others wait for it. The
lowest listener that waits prints the warning for all. P ranks that are all stuck send about 2 P log P notices.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

WARN_AFTER_S = 60.0
LISTEN_AFTER_S = 1.0  # shorter waits do not receive the notices of others
GATHER_S = 1.0  # delay between a rank's own notice and its warning, in which the notices of others arrive
LISTEN_EVERY_S = 0.05
NAP_S = 0.0005
CROWDED_SHARE = 0.25  # of the time waited so far: naps of a rank that has no core of its own
CROWDED_NAPS_S = 0.0001, 0.005  # shortest and longest
NUM_YIELDS, SHORT_NAP_S = 50, 50e-6  # of a wait of a rank with a core of its own; the nap is short beside a step
MOST_NAMED = 4


class StallNotices:
    """The notices about long waits that the ranks of a world exchange."""

    def __init__(self, comm, hosts: list[str], is_crowded: bool = False, warn_after_s: float = WARN_AFTER_S):
        """comm: mpi4py communicator, used for notices only. hosts: host name of each rank. is_crowded: whether ranks
        outnumber cores here. warn_after_s: duration of a wait before the warning."""
        self.hosts, self.is_crowded, self.warn_after_s, self.comm = hosts, is_crowded, warn_after_s, comm
        self._listeners = listeners(comm.size)
        self.waiting: dict[int, str] = {}  # other ranks that wait -> reason
        self.polled_s = 0.0  # processor time of this thread in waits, with what it received meanwhile
        self._sends: list = []
        self._num_sent = [0] * comm.size  # to each rank
        self._num_received = 0

    def send(self, what: str | None):
        """Notifies other ranks that this one waits for `what`, or with None that the wait has ended."""
        me = self.comm.rank
        partners = range(self.comm.size) if me in self._listeners else self._listeners
        self._sends = [request for request in self._sends if not request.Test()]
        for rank in partners:
            if rank != me:
                self._sends.append(self.comm.isend((me, what), rank))
                self._num_sent[rank] += 1

    def receive(self):
        """Receives the notices of other ranks."""
        while self.comm.iprobe() or self.comm.iprobe():  # Open MPI looks first and moves data then
            rank, what = self.comm.recv()
            self._num_received += 1
            if what is None:
                self.waiting.pop(rank, None)
            else:
                self.waiting[rank] = what

    def free(self):
        """Frees the communicator, after all notices have been received: one that came later would be taken for a
        message of the next communicator, which gets the number of this one. Collective."""
        num_expected = sum(self.comm.alltoall(self._num_sent))
        while self._num_received < num_expected:
            self.receive()
        self.comm.Free()

    def warning(self, what: str, waited_s: float) -> str | None:
        """The warning about this rank's wait and those of other ranks; None if another rank prints it."""
        me = self.comm.rank
        listening = [rank for rank in self.waiting if rank in self._listeners]
        is_said_by_another = min(listening, default=me) < me if me in self._listeners else bool(listening)
        if is_said_by_another:
            return None
        others = [f"rank {rank} waits {text}" for rank, text in sorted(self.waiting.items())]
        busy = [
            f"rank {rank} on {host}" for rank, host in enumerate(self.hosts) if rank != me and rank not in self.waiting
        ]
        culprits = [f"not waiting: {', '.join(shortened(busy))}"] if busy else []
        return "; ".join(
            [f"hetmpi: rank {me} on {self.hosts[me]} has waited {waited_s:.0f} s {what}", *shortened(others), *culprits]
        )


def listeners(size: int) -> list[int]:
    """The ranks that hear of all waits: 0, the powers of 2 and the last. When ranks are stopped, such as all of one
    host, other listeners still wait."""
    return sorted({0, size - 1, *(1 << i for i in range(size.bit_length()) if 1 << i < size)})


def shortened(names: list[str]) -> list[str]:
    """The first MOST_NAMED names, and the number of further ones."""
    more = len(names) - MOST_NAMED
    return names[:MOST_NAMED] + ([f"{more} more"] if more > 0 else [])


def ranks_text(ranks: list[int]) -> str:
    """Ranks for messages: "rank 3", "ranks 1, 2 and 5 more"."""
    *first, last = shortened([str(rank) for rank in ranks] or ["?"])
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


class StallWarning:
    """A wait that prints a warning if it lasts long:

    with StallWarning(world, lambda: "in step 3 for rank 1") as stall:
        while not is_done():
            stall.check()
            stall.nap()
    """

    def __init__(self, world, what: Callable[[], str]):
        """world: the ranks that may wait for each other. what(): reason for messages, the end of a sentence: "in step 3
        for rank 1"."""
        self._notices, self._what = world.notices, what
        self._began, self._thread_began = time.monotonic(), time.thread_time()
        self._listens_at = self._next_look_at = self._began + min(LISTEN_AFTER_S, self._notices.warn_after_s)
        self._num_naps = 0
        self._notified_at: float | None = None  # time of this rank's notice
        self._has_warned = False

    def check(self):
        """To be called in the loop of the wait; sleeps briefly once the wait has lasted long."""
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
        if self._notified_at is None and (waited_s >= notices.warn_after_s or notices.waiting):
            notices.send(self._what())
            self._notified_at = now
        is_due = (
            waited_s >= notices.warn_after_s
            and self._notified_at is not None
            and now >= self._notified_at + min(GATHER_S, notices.warn_after_s)
        )
        if is_due and not self._has_warned:
            self._has_warned = True
            text = notices.warning(self._what(), waited_s)
            if text is not None:
                print(text, file=sys.stderr, flush=True)

    def nap(self):
        """Leaves the core to others for a moment: other threads, and where ranks outnumber cores the awaited rank."""
        self._num_naps += 1
        if self._notices.is_crowded:
            shortest, longest = CROWDED_NAPS_S
            time.sleep(min(max(shortest, CROWDED_SHARE * (time.monotonic() - self._began)), longest))
        elif self._num_naps <= NUM_YIELDS:
            os.sched_yield()
        else:
            time.sleep(SHORT_NAP_S)

    def __enter__(self) -> StallWarning:
        return self

    def __exit__(self, *_):
        self._notices.polled_s += time.thread_time() - self._thread_began
        if self._notified_at is not None:
            self._notices.send(None)
