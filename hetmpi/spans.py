"""Spans: the time of each part of a step (cpp/spans.h)."""

from __future__ import annotations

import json

import numpy as np

from hetmpi._C import Spans  # noqa: F401

PARTS = {  # in the order of a step
    "load": "waiting for the loader's batch",
    "vocabulary": "columns with rows: open: asking for the rows of ids",
    "drain": "s = 0: waiting for all ranks' gradients, and applying them; otherwise applying and publishing gradients",
    "find": "looking keys up in the cache",
    "validate": "reading the owners' clocks, finding stale lines; requesting the rows of the next read, or replying",
    "fetch": "copying rows from owners, to the cache and to the caller",
    "prefetch": "s >= 1: requesting rows and clocks of the next batches",
    "forward": "the network",
    "backward": "the network; the allreduce starts in it",
    "push": "adding gradients to lines, sending them to owners",
    "allreduce": "waiting for the dense gradients of all ranks, and the dense optimizer",
}
OWN = ("load", "find", "forward", "backward")  # a rank's own work, independent of other ranks
WAITS = (
    "vocabulary",
    "drain",
    "validate",
    "fetch",
    "prefetch",
    "push",
)  # time that a rank with all rows in memory would not spend
IDLE = "waiting for files"  # an activity that may last, as it waits for the user


def by_part(milliseconds: np.ndarray) -> dict[str, float]:
    """The inverse of as_array, for sums or averages: part -> ms."""
    return dict(zip(PARTS, map(float, milliseconds)))


def wait_ms(milliseconds: np.ndarray) -> float:
    """Time of as_array() spent on rows and gradients of the table."""
    parts = by_part(milliseconds)
    return sum(parts[part] for part in WAITS)


def own_ms(milliseconds: np.ndarray) -> np.ndarray:
    """Time of as_array() spent on a rank's own work: (..., number of parts) -> (...)."""
    return milliseconds[..., [part in OWN for part in PARTS]].sum(-1)


def chrome_trace(traces: list, hosts: list[str]) -> str:
    """The spans of all ranks, one (part, begin, end) list and one host per rank, in the JSON format of chrome://tracing
    and Perfetto. Offsets between hosts are those of their clocks."""
    events, zero = [], min((trace[0][1] for trace in traces if trace), default=0.0)
    for rank, (trace, host) in enumerate(zip(traces, hosts)):
        name = {"name": f"rank {rank} on {host}"}
        events.append({"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": name})
        events += [
            {"ph": "X", "pid": rank, "tid": 0, "name": part, "ts": 1e6 * (begin - zero), "dur": 1e6 * (end - begin)}
            for part, begin, end in trace
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
