"""Watchdog: names ranks that all others wait for, and ends the job when a rank becomes unresponsive.

A thread on every rank regularly reports its rank's activity to rank 0, and rank 0's thread reports back. Two cases are
distinguished:
    lagging        the rank responds, but stays in one part of a step for long: it is named with that part, and again
                   when it continues
    unresponsive   the rank is dead, stopped or unreachable: the job ends
Rank 0 watches all ranks, the others watch rank 0. Before its first step a rank may be silent for twice as long, at
least 20 s longer: imports and the preparation of data may keep Python from running its threads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np

from hetmpi.errors import UserError
from hetmpi.spans import OWN, Spans
from hetmpi.world.launch import abort
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

BEATS = 4  # beats within the time in which a rank must respond
LONGEST_S = 5.0  # maximum time between two beats
CLOSING_POLL_S = 0.001
DOING_BYTES = 32
BEAT = np.dtype([("step", np.int64), ("ticks", np.int64), ("doing", f"S{DOING_BYTES}"), ("is_last", np.bool_)])
MOST_NAMED = 4
SETUP_S = 20.0  # minimum additional time that a rank may be silent before its first step
SETUP_CURE = "; if its set-up keeps Python busy for so long, raise watchdog.seconds"


@dataclass
class PeerState:
    """State of one rank: its last beat, the time of that beat, and the time since which its activity is unchanged."""

    beat: np.ndarray
    heard: float
    since: float

    @property
    def has_begun(self) -> bool:
        """Whether its set-up is finished."""
        return bool(self.beat["ticks"])


class Watchdog:
    """Watches until `close`."""

    def __init__(self, world: World, spans: Spans, seconds: float):
        """spans: this rank's activity. seconds: time that a rank may spend in one activity or without a response; 0
        disables the watchdog. Collective. Ends the job if other ranks do not make this call within the time that a rank
        may be silent."""
        self.world, self.spans, self.seconds = world, spans, seconds
        with self._all_in_time():
            self._hosts = world.comm.allgather(world.host)
            self._comm = world.comm.Dup()
        self._peers = [] if seconds == 0 else [0] if world.rank else range(1, world.size)
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)  # a lost link is reported like a lost rank
        self._sending: dict[int, tuple[MPI.Request, np.ndarray]] = {}
        self._gone: set[int] = set()  # peers that have closed
        self._named: set[int] = set()  # ranks named in the last warning
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hetmpi-watchdog", daemon=True)
        if self._peers:
            self._thread.start()

    @contextlib.contextmanager
    def _all_in_time(self):
        """A context for calls that wait for all ranks."""
        limit = self._limit(has_begun=False)
        late = UserError(
            f"not all ranks have begun after {limit:.0f} s (watchdog.seconds={self.seconds:g}, 0 would wait): the job "
            "ends; look for a stopped rank or an unreachable host"
        )
        timer = threading.Timer(limit, abort, [late])
        timer.daemon = True
        if self.seconds:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _limit(self, has_begun: bool) -> float:
        """Seconds that a rank may be silent."""
        return self.seconds if has_begun else self.seconds + max(self.seconds, SETUP_S)

    def close(self):
        """Ends the watch. Collective."""
        self._closing.set()
        if self._peers:
            self._thread.join()
            for peer in self._peers:
                self._send(peer, is_last=True)
            for peer in self._peers:
                self._await_last(peer)
            MPI.Request.Waitall([request for request, _ in self._sending.values()])
        self._comm.Free()

    def _await_last(self, peer: int):
        deadline = time.monotonic() + self.seconds
        while peer not in self._gone:
            if self._comm.Iprobe(peer):
                self._receive(peer)
            elif time.monotonic() > deadline:
                raise UserError(
                    f"rank {peer} on {self._hosts[peer]} has not reached the end within {self.seconds:g} s "
                    "(watchdog.seconds)"
                )
            else:
                time.sleep(CLOSING_POLL_S)

    def _run(self):
        try:
            self._watch()
        except Exception as problem:  # of any kind: the others would take this thread's silence for the rank's
            if self._closing.is_set():
                return
            if isinstance(problem, MPI.Exception):
                problem = UserError(f"the ranks cannot communicate any more: {problem}")
            abort(problem)

    def _watch(self):
        pause = min(self.seconds / BEATS, LONGEST_S)
        begun = time.monotonic()
        seen = {rank: PeerState(self._beat(), begun, begun) for rank in (*self._peers, self.world.rank)}
        while not self._closing.wait(pause):
            late, begun = time.monotonic() - begun - pause, time.monotonic()
            # Time in which this rank was stopped itself, and perhaps all others too, does not count.
            for other in seen.values():
                other.heard += late
                other.since += late
            self._note(self.world.rank, seen, self._beat(), begun)
            for peer in self._peers:
                self._send(peer)
                while self._comm.Iprobe(peer):
                    self._note(peer, seen, self._receive(peer), begun)
            self._check_answers(seen, begun)
            if self.world.rank == 0:
                self._report_laggards(seen, begun)

    def _beat(self, is_last: bool = False) -> np.ndarray:
        doing = self.spans.doing.encode()[:DOING_BYTES]
        return np.array([(self.spans.step, self.spans.ticks, doing, is_last)], BEAT)

    def _send(self, peer: int, is_last: bool = False):
        """Sends a beat unless the last one is still in transit: to a stopped rank they would accumulate."""
        request, _ = self._sending.get(peer, (MPI.REQUEST_NULL, None))
        if is_last:
            request.Wait()
        if request == MPI.REQUEST_NULL or request.Test():
            beat = self._beat(is_last)
            self._sending[peer] = self._comm.Isend([beat.view(np.uint8), MPI.BYTE], peer), beat

    def _receive(self, peer: int) -> np.ndarray:
        beat = np.empty(1, BEAT)
        self._comm.Recv([beat.view(np.uint8), MPI.BYTE], peer)
        if beat["is_last"]:
            self._gone.add(peer)
        return beat

    def _note(self, rank: int, seen: dict[int, PeerState], beat: np.ndarray, now: float):
        known = seen[rank]
        known.heard = now
        if beat["ticks"] != known.beat["ticks"]:
            if rank in self._named:
                self._named.clear()
                say(f"rank {rank} continues after {now - known.since:.0f} s")
            known.since = now
        known.beat = beat

    def _check_answers(self, seen: dict[int, PeerState], now: float):
        silent = {rank: now - seen[rank].heard for rank in self._peers if rank not in self._gone}
        lost = [rank for rank, time_s in silent.items() if time_s > self._limit(seen[rank].has_begun)]
        if lost:
            names, have = self._names(lost, seen, now), "has" if len(lost) == 1 else "have"
            raise UserError(
                f"{names} {have} not responded for {silent[lost[0]]:.0f} s (watchdog.seconds={self.seconds:g}, 0 would "
                "wait): the job ends; with checkpoints, resume=auto continues from the last one"
                + ("" if seen[lost[0]].has_begun else SETUP_CURE)
            )

    def _report_laggards(self, seen: dict[int, PeerState], now: float):
        """Names the ranks that all others wait for. As a step needs all ranks, no rank gets far ahead of a lagging
        one."""
        if self._named or not all(other.has_begun and now - other.since > self.seconds for other in seen.values()):
            return
        first = min(other.beat["step"][0] for other in seen.values())
        busy = [rank for rank, other in seen.items() if doing_of(other) in OWN]
        behind = busy or [rank for rank, other in seen.items() if other.beat["step"][0] == first]
        self._named.update(behind)
        if len(behind) < len(seen):
            say(f"all wait for {self._names(behind, seen, now)}")
        else:
            say(f"all ranks are in {place_of(seen[0])} for {now - seen[0].since:.0f} s")

    def _names(self, ranks: list[int], seen: dict[int, PeerState], now: float) -> str:
        """Rank, host, activity and its duration, for messages."""
        names = [
            f"rank {rank} on {self._hosts[rank]} (in {place_of(seen[rank])} for {now - seen[rank].since:.0f} s)"
            for rank in sorted(ranks)[:MOST_NAMED]
        ]
        more = [f"{len(ranks) - MOST_NAMED} more"] if len(ranks) > MOST_NAMED else []
        return " and ".join(names + more)


def place_of(seen: PeerState) -> str:
    return doing_of(seen) + (f" of step {seen.beat['step'][0] + 1}" if seen.has_begun else "")


def say(text: str):
    with contextlib.suppress(OSError):  # the launcher may be gone
        print(f"hetmpi: {text}", file=sys.stderr, flush=True)


def doing_of(seen: PeerState) -> str:
    return bytes(seen.beat["doing"][0]).decode()
