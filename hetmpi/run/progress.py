"""Progress: counters and times of a run since its last report, summed over ranks, for the log and the summary."""

from __future__ import annotations

import time

import numpy as np

from hetmpi.counters import Counters, lag_at, trimmed
from hetmpi.spans import Spans, by_part, own_ms, wait_ms
from hetmpi.table.group import TableGroup
from hetmpi.table.staleness import Staleness
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World


class Stopwatch:
    """Seconds of training; paused during evaluations."""

    def __init__(self):
        self._before, self._began = 0.0, None

    def start(self):
        self._began = time.perf_counter()

    def pause(self):
        self._before, self._began = self.seconds, None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._began is None else time.perf_counter() - self._began)


class Interval:
    """Steps, seconds and counters of the tables since the last report. A pause stops the times but not the counters:
    the gradients that a flush pushes before an evaluation count as training, the time of the flush does not."""

    def __init__(self, tables: TableGroup, spans: Spans, first_step: int, watch: Stopwatch):
        self.tables, self.spans, self.first_step, self.watch = tables, spans, first_step, watch
        self.restart(first_step)

    def counted(self) -> tuple[Counters, np.ndarray, np.ndarray]:
        """This rank's counters, histogram of lags and milliseconds by part since the last restart."""
        tables = self.tables
        return tables.counters.since(self.counters), tables.lags - self.lags, self.spans.as_array() - self.milliseconds

    def restart(self, steps: int) -> tuple[int, float]:
        """Returns (steps, seconds) since the last restart, and starts a new interval at `steps`."""
        now, tables = self.watch.seconds, self.tables
        passed = (steps - self.steps, now - self.began) if steps > self.first_step else (0, 0.0)
        self.steps, self.began = steps, now
        self.counters, self.lags, self.milliseconds = tables.counters, tables.lags, self.spans.as_array()
        return passed

    def pause(self):
        self.watch.pause()
        self.paused = self.spans.as_array()

    def go_on(self):
        self.milliseconds += self.spans.as_array() - self.paused
        self.watch.start()


def summed(world: World, counted: Counters, lags: np.ndarray) -> tuple[Counters, np.ndarray]:
    """Both summed over all ranks. Collective."""
    counts = np.concatenate([counted.as_array(), lags])
    world.comm.Allreduce(MPI.IN_PLACE, counts)
    return Counters.of_array(counts[: -len(lags)]), counts[-len(lags) :]


def gathered_by_rank(world: World, milliseconds: np.ndarray) -> np.ndarray | None:
    """All ranks' milliseconds by part: on rank 0 (ranks, parts), elsewhere None. Collective."""
    gathered = None if world.rank > 0 else np.empty((world.size, len(milliseconds)))
    world.comm.Gather(milliseconds, gathered)
    return gathered


def times(by_rank: np.ndarray) -> dict:
    """The log's figures of time, in ms per step: means over ranks of waiting for the table and of each part, and the
    spread of the ranks' own work. by_rank: ms per step, (ranks, parts)."""
    mean, own = by_rank.mean(0), own_ms(by_rank)
    uneven = {"own_ms_min": own.min(), "own_ms": own.mean(), "own_ms_max": own.max(), "slowest_rank": int(own.argmax())}
    return {"wait_ms": wait_ms(mean), **uneven, **in_ms(mean)}


def in_ms(milliseconds: np.ndarray) -> dict[str, float]:
    """Name in the log -> milliseconds of each part. milliseconds: (parts,)."""
    return {f"{part}_ms": ms for part, ms in by_part(milliseconds).items()}


def table_figures(sums: Counters, lags: np.ndarray, num_steps: int, staleness: Staleness) -> dict:
    """The figures of the tables per step, over all ranks. Figures of the cache are None without one."""
    has_cache = sums.hit_rate is not None
    per_step = {name: count / max(1, num_steps) for name, count in vars(sums).items()}
    cache = {
        name: per_step[name] if has_cache else None for name in ("hits", "stale", "misses", "validated", "evicted")
    }
    return {
        "hit_rate": sums.hit_rate,
        "stale_rate": sums.stale_rate,
        "pulled_bytes": sums.pulled_bytes / max(1, num_steps),
        "pushed_bytes": per_step["push_bytes"],
        "clock_bytes": per_step["clock_bytes"],
        "row_bytes": per_step["row_bytes"],
        **cache,
        "pushed": per_step["pushed"],
        "lag_p50": lag_at(lags, 0.5, staleness.bound),
        "lag_p99": lag_at(lags, 0.99, staleness.bound),
        "lags": trimmed(lags),
    }
