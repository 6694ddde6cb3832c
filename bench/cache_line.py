"""Time and bytes of a cache line in one step by part, for `bench cache`: from the line to what the model reads, and
from the gradients of the occurrences back to the line and to the push.

    read       look_up, use and gather: rows (U, dim)
    expand     hetmpi.look_up: the row of each occurrence (N, dim)
    backward   of look_up: the gradients' sums (U, dim)
    divide     by the number of ranks, as the trainer does, and the check that all are finite, as EmbeddingTable.write
    update     RowCache.update: pending sum and its squares, preview, drift
    push       take_due and take

A step has 2,048 samples of 26 fields of Synthetic(scale=0.02), 53,248 occurrences of about 7,900 keys. They lie among
the 337,000 lines of a cache that is 80 % full, by Adagrad with drift, at s = 10; 1 % have no line. The bytes of a part
are those of its arrays, counted once for each time that the part passes over them: what moves if no array stays in the
processor's cache.

The bound of the machine for the way without `expand` and `divide` is the time that a copy in memory takes for the bytes
that it cannot do without: a line's row is read, copied, read again and written, its sum and squares are read and
written, the gradients of its occurrences are read once, their sum is written and read, and what is due is pushed.
"""

import time

import numpy as np
import torch

from hetmpi import _C
from hetmpi.data.synthetic import Synthetic
from hetmpi.layers import look_up
from hetmpi.table.client import check_finite
from hetmpi.table.optim import RowOptimizer

BATCH, FIELDS, SCALE, STALENESS, RANKS, BATCHES = 2048, 26, 0.02, 10, 2, 24
PARTS = ("read", "expand", "backward", "divide", "update", "push")
FAR = 1e3  # limit of drift, in sizes of a row: computed, never exceeded


def time_line(settings: dict, dim: int) -> dict:
    """Lines of a step; median microseconds and counted bytes per line and step, by part."""
    batches = [_C.unique(ids) for ids in ids_of_batches()]
    cache = filled(settings["rows"], dim, np.unique(np.concatenate([keys for keys, _ in batches])))
    grads, times = 1e-3 * torch.randn(BATCH * FIELDS, dim), []
    for step in range(BATCHES + settings["repeats"]):
        keys, index = batches[step % BATCHES]
        cache.set_step(0.05, step + 3)
        times.append(1e6 * one_way(cache, keys, torch.from_numpy(index), grads) / len(keys))
    lines = float(np.mean([len(keys) for keys, _ in batches]))
    us, occurrences = np.median(times[BATCHES:], axis=0).tolist(), BATCH * FIELDS / lines
    return {
        "lines": lines, "us": dict(zip(PARTS, us)), "bytes": bytes_of(dim, occurrences),
        "bound_us": 1e6 * least_bytes(dim, occurrences) * seconds_of_a_byte(settings["repeats"]),
    }  # fmt: skip


def show_line(dim: int, line: dict):
    """Both rows of the table."""
    for unit in ("us", "bytes"):
        parts = "  ".join(
            f"{part} {value:7.2f}" if unit == "us" else f"{part} {value:7,.0f}" for part, value in line[unit].items()
        )
        total = sum(line[unit].values())
        print(f"dim {dim:>3}  {line['lines']:6,.0f} lines  {unit:>5} per line: {parts}  sum {total:,.2f}", flush=True)
    way = sum(us for part, us in line["us"].items() if part not in ("expand", "divide"))
    print(
        f"dim {dim:>3}  without expand and divide {way:.2f} us, the bound of a copy {line['bound_us']:.2f}", flush=True
    )


def ids_of_batches() -> list[np.ndarray]:
    """ids (N,) of each of BATCHES batches."""
    data = Synthetic(0, scale=SCALE)
    return [data.train(n * BATCH, (n + 1) * BATCH).ids.reshape(-1) for n in range(BATCHES)]


def filled(num_rows: int, dim: int, keys: np.ndarray):
    """A cache of `num_rows` lines with `keys` (n,) among them, each with a pending sum of two gradients."""
    others = np.arange(num_rows - len(keys)) + (1 << 40)
    cache = _C.HostLines(num_rows + num_rows // 4, RowOptimizer("adagrad", 0.05).core(dim), "lfu")
    cache.set_drift(FAR, RANKS - 1)
    for part in np.array_split(
        np.random.default_rng(0).permutation(np.concatenate([keys, others])), num_rows // 10_000
    ):
        n, slots = len(part), np.full(len(part), -1)
        rows = np.random.default_rng(1).standard_normal((n, dim)).astype(np.float32)
        cache.use(slots, n)
        cache.insert_and_evict(part, np.ones(n, bool), rows, np.ones((n, 1), np.float32), np.zeros(n, np.int32), slots)
        for step in (1, 2):
            cache.set_step(0.05, step)
            cache.update(slots, rows * 1e-3, RANKS)
    return cache


def one_way(cache, keys: np.ndarray, index: torch.Tensor, grads: torch.Tensor) -> np.ndarray:
    """One step: keys (U,), index (N,) int64, grads (N, dim) -> seconds of each part."""
    marks = [time.perf_counter()]
    slots, rows = np.empty(len(keys), np.int64), np.empty((len(keys), grads.shape[1]), np.float32)
    cache.look_up(keys, slots)
    cache.use(slots, len(keys))
    cache.gather(slots, rows)
    marks.append(time.perf_counter())
    rows = torch.from_numpy(rows).requires_grad_()
    found = look_up(rows, index)
    marks.append(time.perf_counter())
    found.backward(grads)
    marks.append(time.perf_counter())
    sums = rows.grad.div_(RANKS).numpy()
    check_finite(keys, sums)
    marks.append(time.perf_counter())
    cache.update(slots, sums, RANKS)
    marks.append(time.perf_counter())
    cache.take_due(slots, STALENESS)
    cache.take()
    marks.append(time.perf_counter())
    return np.diff(marks)


def bytes_of(dim: int, occurrences: float) -> dict:
    """Bytes per line of each part. occurrences: per line."""
    row = 4 * dim
    return {
        "read": 2 * row,
        "expand": 2 * occurrences * row,
        "backward": row + 3 * occurrences * row,  # zeroing, then gradient, and sum read and written
        "divide": 2 * row + row,
        "update": 2 * row + row + 3 * 2 * row,  # gradient and row, a second time; row, sum and squares read and written
        "push": 2 * 2 * row / (STALENESS + 1),  # sum and squares
    }


def least_bytes(dim: int, occurrences: float) -> float:
    """Bytes per line that the way without `expand` and `divide` has to move, see above."""
    return 4 * dim * (4 + 2 * 2 + occurrences + 2) + bytes_of(dim, occurrences)["push"]


def seconds_of_a_byte(repeats: int) -> float:
    """Median time of a copy that no processor's cache holds, by the bytes read and written."""
    values, to = np.ones((2, 1 << 25), np.float32)  # 128 MB each
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        np.copyto(to, values)
        times.append(time.perf_counter() - began)
    return float(np.median(times)) / (2 * values.nbytes)
