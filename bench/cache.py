"""Times the row cache on one thread: find, gather, update and insert_and_evict, compared with torch on the same rows.

    ./run.sh bench cache [rows=337000] [repeats=30]
    ./run.sh bench cache device=cuda [rows=16000000] [dim=128] [keys=1000000] [hit_rate=0.95] [repeats=30]

On the CPU it first compares the cache's results with a dictionary. Then it prints nanoseconds per unique key at hit
rates 0.5, 0.9 and 1.0, dims 32 and 128, 3 K and 53 K keys per call, and three figures at 11 K keys per call, all hits,
with a full cache: find + gather against torch.index_select of the same rows by slot, update (row and pending sum)
against torch.index_add_, and a trainer's step of 53 K ids (11 K unique): unique, read, expansion to occurrences, sum of
their gradients per key, write. Medians; the two sides of each comparison take turns. Then the whole way of a line in a
step, by part, in time and counted bytes, and its bound (bench/cache_line.py).

Last, one JSON line: {"find_gather_vs_index_select": {"32": x, "128": x}, "update_vs_index_add": {"32": x, "128": x},
"step_ms": {"32": x, "128": x}, "line": {"32": {"lines": x, "us": {part: x}, "bytes": {part: x}, "bound_us": x}, ...},
"ns_per_key": {...}, "bytes_per_row": {...}}. Ratios are of times: below 1 is faster than torch. On the GPU
(bench/cache_gpu.py): {"copy_bytes_per_s": x, "find_keys_per_s": x, ..., "gather_vs_copy": share of the copy bandwidth,
"update_vs_copy": x, "torch_vs_cache": time of torch's index_select and index_add_ relative to the cache's calls, both
with unique}.
"""

import json
import sys
import time

import numpy as np
import torch
from cache_line import show_line, time_line
from workload import parse

from hetmpi import _C
from hetmpi.table.optim import RowOptimizer
from hetmpi.world.launch import keep_freed_memory

SETTINGS = {"rows": 337_000, "repeats": 30}
ON_GPU = {"device": "cuda", "rows": 16_000_000, "dim": 128, "keys": 1_000_000, "hit_rate": 0.95, "repeats": 30}
DIMS, HIT_RATES, BATCHES = (32, 128), (0.5, 0.9, 1.0), (3_000, 53_000)
STEP_IDS, STEP_KEYS = 53_000, 11_000
LEAST = {"rows": (64_000, "since a call looks up 53,000 keys that are in the cache"), "repeats": (1, "for a median")}
KEY_STRIDE = 7  # keys in the cache are its multiples, others are not


def main():
    """Checks results, then times calls."""
    if "device=cuda" in sys.argv[1:]:
        from cache_gpu import bench_gpu

        return bench_gpu(parse("cache", ON_GPU, sys.argv[1:]))
    settings = parse("cache", {"device": "cpu", **SETTINGS}, sys.argv[1:], LEAST)
    torch.set_num_threads(1)
    keep_freed_memory()  # as in a run
    result = {"find_gather_vs_index_select": {}, "update_vs_index_add": {}, "step_ms": {}, "line": {}, "ns_per_key": {}}
    result["bytes_per_row"] = {str(dim): 8 * dim + _C.LINE_OVERHEAD_BYTES for dim in DIMS}
    for dim in DIMS:
        check(dim)
        for batch in BATCHES:
            for rate in HIT_RATES:
                row = time_calls(settings, dim, batch, rate)
                result["ns_per_key"][f"dim {dim}, {batch} keys, {rate} hits"] = row
                calls = "  ".join(f"{call} {ns:6.1f}" for call, ns in row.items())
                print(f"dim {dim:>3}  {batch:>6} keys  {rate:4.0%} hits   ns per key: {calls}", flush=True)
        versus = time_against_torch(settings, dim)
        for name in ("find_gather_vs_index_select", "update_vs_index_add", "step_ms"):
            result[name][str(dim)] = versus.pop(name)
        print(f"dim {dim:>3}  {STEP_KEYS:>6} keys  100% hits   ns per key: ", end="")
        print("  ".join(f"{name} {ns:.1f}" for name, ns in versus.items()))
        result["line"][str(dim)] = time_line(settings, dim)
        show_line(dim, result["line"][str(dim)])
    for name in ("find_gather_vs_index_select", "update_vs_index_add", "step_ms"):
        print(f"{name}: " + ", ".join(f"dim {dim} {value:.2f}" for dim, value in result[name].items()))
    print(json.dumps(result))


class Filled:
    """A full cache of known rows: all columns of the row of key k are k / KEY_STRIDE."""

    def __init__(self, num_rows: int, dim: int):
        self.dim = dim
        self.cache = _C.HostLines(num_rows, RowOptimizer("sgd", 1.0).core(dim), "lfu")
        self.cache.set_step(1.0, 1)
        keys = np.arange(num_rows) * KEY_STRIDE
        for begin in range(0, num_rows, 10_000):
            self.insert(keys[begin : begin + 10_000])
        slots = self.find(keys)
        self.held = keys[slots >= 0]  # some sets had more keys than lines

    def find(self, keys: np.ndarray) -> np.ndarray:
        slots = np.empty(len(keys), np.int64)
        find(self.cache, keys, slots)
        return slots

    def insert(self, keys: np.ndarray):
        """Inserts those of `keys` that have no line; the sums of evicted ones are discarded."""
        slots = self.find(keys)
        self.cache.insert_and_evict(keys, slots < 0, *self.rows(keys), slots)
        self.cache.take()

    def rows(self, keys: np.ndarray) -> tuple:
        """weights, states and clocks of keys."""
        weights = np.repeat((keys / KEY_STRIDE).astype(np.float32)[:, None], self.dim, axis=1)
        return weights, np.empty((len(keys), 0), np.float32), np.zeros(len(keys), np.int32)


def check(dim: int):
    """Raises RuntimeError if rows, previews or pushed sums differ from a dictionary's."""
    filled, rng = Filled(5000, dim), np.random.default_rng(0)
    expected = {key: key / KEY_STRIDE for key in filled.held.tolist()}
    pending = dict.fromkeys(expected, 0.0)
    for _ in range(20):
        keys = rng.choice(filled.held, 1000, replace=False)
        slots, rows = filled.find(keys), np.empty((1000, dim), np.float32)
        filled.cache.gather(slots, rows)
        if not (rows == np.array([expected[key] for key in keys.tolist()], np.float32)[:, None]).all():
            raise RuntimeError("the cache returns wrong rows")
        grads = rng.integers(-3, 4, 1000).astype(np.float32)
        filled.cache.update(slots, np.repeat(grads[:, None], dim, axis=1), 1.0)
        for key, grad in zip(keys.tolist(), grads.tolist()):
            expected[key] -= grad
            pending[key] += grad
    filled.cache.take_all()
    released = filled.cache.take()
    if not (released.sums == np.array([pending[key] for key in released.keys.tolist()], np.float32)[:, None]).all():
        raise RuntimeError("the cache hands out wrong sums")


def time_calls(settings: dict, dim: int, batch: int, rate: float) -> dict:
    """Median ns per key of each call, over batches of unique keys of which `rate` are in the cache."""
    filled, rng, new_key = Filled(settings["rows"], dim), np.random.default_rng(1), 1
    grads, out, times = np.ones((batch, dim), np.float32), np.empty((batch, dim), np.float32), []
    for _ in range(max(5, settings["repeats"] // 3)):
        num_hits = round(rate * batch)
        fresh = (np.arange(batch - num_hits) + new_key) * KEY_STRIDE + 1
        new_key += len(fresh)
        keys = rng.permutation(np.concatenate([rng.choice(filled.held, num_hits, replace=False), fresh]))
        rows = filled.rows(keys)
        slots, marks = np.empty(batch, np.int64), [time.perf_counter()]
        find(filled.cache, keys, slots)
        marks.append(time.perf_counter())
        is_missing = slots < 0
        filled.cache.gather(slots, out)
        marks.append(time.perf_counter())
        filled.cache.update(slots, grads, 8.0)
        marks.append(time.perf_counter())
        filled.cache.insert_and_evict(keys, is_missing, *rows, slots)
        marks.append(time.perf_counter())
        filled.cache.take()
        filled.insert(filled.held[:batch] if rate < 1 else filled.held[:0])
        times.append(np.diff(marks) / [batch, batch, batch, max(1, is_missing.sum())])
        filled.held = filled.held[filled.find(filled.held) >= 0]
    names = ("find", "gather", "update", "insert_and_evict") if rate < 1 else ("find", "gather", "update")
    return dict(zip(names, 1e9 * np.median(times, axis=0)))


def time_against_torch(settings: dict, dim: int) -> dict:
    """Median ns per key of find + gather, index_select, update, index_add_, in turns on the same keys; their ratios;
    and milliseconds of one step."""
    filled, rng = Filled(settings["rows"], dim), np.random.default_rng(2)
    table = torch.zeros(filled.cache.capacity_rows + 31, dim)
    grads, out = np.ones((STEP_KEYS, dim), np.float32), np.empty((STEP_KEYS, dim), np.float32)
    filled.cache.update(filled.find(filled.held), np.ones((len(filled.held), dim), np.float32), 8.0)  # opens all sums
    times, steps = [], []
    for _ in range(settings["repeats"]):
        keys = rng.choice(filled.held, STEP_KEYS, replace=False)
        slots = np.empty(STEP_KEYS, np.int64)
        began = time.perf_counter()
        find(filled.cache, keys, slots)
        filled.cache.gather(slots, out)
        find_gather = time.perf_counter() - began
        places = torch.from_numpy(slots)
        select = seconds_of(lambda: table.index_select(0, places))
        update = seconds_of(lambda: filled.cache.update(slots, grads, 8.0))
        add = seconds_of(lambda: table.index_add_(0, places, torch.from_numpy(grads)))
        times.append([find_gather, select, update, add])
        ids = rng.permutation(np.concatenate([keys, rng.choice(keys, STEP_IDS - STEP_KEYS)]))
        steps.append(seconds_of(lambda: one_step(filled.cache, ids, dim)))
    find_gather, select, update, add = 1e9 * np.median(times, axis=0) / STEP_KEYS
    return {
        "find+gather": find_gather, "index_select": select, "update": update, "index_add_": add,
        "find_gather_vs_index_select": float(np.median([t[0] / t[1] for t in times])),
        "update_vs_index_add": float(np.median([t[2] / t[3] for t in times])),
        "step_ms": 1000 * float(np.median(steps)),
    }  # fmt: skip


def find(cache, keys: np.ndarray, slots: np.ndarray):
    """Look-up of one iteration: keys (n,) int64 -> slots (n,) int64."""
    cache.look_up(keys, slots)
    cache.use(slots, len(keys))


def one_step(cache, ids: np.ndarray, dim: int):
    """Unique keys, their rows, the rows of all occurrences; then the gradients of all occurrences, summed per key and
    written."""
    keys, index = _C.unique(ids)
    slots, rows = np.empty(len(keys), np.int64), np.empty((len(keys), dim), np.float32)
    find(cache, keys, slots)
    cache.gather(slots, rows)
    places = torch.from_numpy(index)
    occurrences = torch.from_numpy(rows).index_select(0, places)  # (N, dim)
    grads = torch.zeros(len(keys), dim).index_add_(0, places, occurrences)
    cache.update(slots, grads.numpy(), 8.0)


def seconds_of(call) -> float:
    """Duration of call() in seconds."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
