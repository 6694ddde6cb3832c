"""What a step of a table on the emulated GPU costs the host: microseconds of the main thread outside CUDA's calls, and
these calls by kind. All rows are cached, on one rank; none with lines=0, most with fresh.

    python gpu_cost.py [keys=29359] [staleness=null] [dim=128] [steps=12] [lines=1] [store=memory] [fresh=0]

in the environment of emulated.py. The emulator's time is left out, and kernels cost nothing, but for those that look at
keys at a bound: on a GPU the time of these calls comes on top. fresh: the share of keys that no batch had before; the
cache then is small enough that they evict others, and all kernels run, which a small dim makes cheap.
"""

import json
import statistics
import sys
import time
from functools import partial

import numpy as np
import torch
from gpu_on_cpu import CUDA, LATE, OUTSIDE, OnGpu, read_table_unseen

from hetmpi import EmbeddingTable, GpuStore, RowOptimizer, Staleness, World
from hetmpi.table.table import MOST_KNOWN
from hetmpi.world.launch import keep_freed_memory

THREADS = 256  # of a block
NUM_BATCHES = 5
WARM_UP = MOST_KNOWN + 5  # until no step needs new memory: a table keeps the keys of the last batches


def host_ns() -> int:
    """Of this thread, without the emulator."""
    return time.thread_time_ns() - CUDA.cuda_on_cpu_spent() - OUTSIDE.ns


def main():
    given = {"keys": "29359", "staleness": "null", "dim": "128", "steps": "12", "lines": "1", "store": "memory"}
    given["fresh"] = "0"
    given |= dict(argument.split("=", 1) for argument in sys.argv[1:])
    num_keys, dim, num_steps = (int(given[name]) for name in ("keys", "dim", "steps"))
    staleness = None if given["staleness"] == "null" else int(given["staleness"])
    keep_freed_memory()
    torch.set_num_threads(1)
    num_fresh = int(float(given["fresh"]) * num_keys)
    num_known = 14 * num_keys  # no set of lines is full
    capacity = 0 if staleness == 0 or given["lines"] == "0" else 6 * num_keys if num_fresh else num_known
    num_rows = num_known + (WARM_UP + num_steps + 3) * num_fresh
    table = EmbeddingTable(
        World(), num_rows, dim, RowOptimizer("sgd", 1.0), staleness=Staleness(staleness, None, 0.0),
        cache=OnGpu(capacity, admit="all"), device="cpu:0", store=GpuStore() if given["store"] == "gpu" else None,
    )  # fmt: skip
    random = np.random.default_rng(0)
    batches = [torch.from_numpy(random.permutation(num_known)[:num_keys]) for _ in range(NUM_BATCHES)]
    grads, spent, counts = torch.zeros(num_keys, dim), [], []

    def made(step: int) -> torch.Tensor:
        keys = batches[step % NUM_BATCHES].clone()  # as a loader makes them: a tensor of their own, checked before
        keys[:num_fresh] = torch.arange(num_known + step * num_fresh, num_known + (step + 1) * num_fresh)
        table.check(keys, are_fixed=True)
        return keys

    def timed(call) -> float:
        CUDA.cuda_on_cpu_run_all()  # a GPU has done by now what it was given in an earlier call
        began = host_ns()
        call()
        return (host_ns() - began) / 1e3

    def steps(begin: int, end: int):
        keys, later = made(begin), made(begin + 1)
        for step in range(begin, end):
            CUDA.counts()
            calls = partial(table.read, keys), partial(table.prefetch, later), partial(table.write, keys, grads)
            spent.append([timed(call) for call in calls])
            counts.append(CUDA.counts())
            keys, later = later, made(step + 2)

    steps(0, WARM_UP)
    waits = waits_for_gradients(table, batches)
    # Rows are not moved. With a bound the host reads what kernels say of each key, so those run.
    if not num_fresh:
        CUDA.cuda_on_cpu_be_free(0 if staleness is None or table.shard.device_rows else num_keys + THREADS)
    steps(WARM_UP, WARM_UP + num_steps + 1)  # the first was not announced
    medians = np.median(spent[WARM_UP + 1 :], 0)
    parts = ", ".join(f"{name} {value:.0f}" for name, value in zip(("read", "prefetch", "write"), medians))
    print(f"{num_keys:,} keys, s={given['staleness']}: {medians.sum():.0f} us ({parts})")
    told = {name: statistics.median(one[name] for one in counts[WARM_UP + 1 :]) for name in counts[0]}
    least = np.sum(spent[WARM_UP + 1 :], 1).min()
    result = {
        "host_us": round(medians.sum()),
        "least_us": round(least),
        **{name: value for name, value in told.items() if value},
    }
    result["waits_for_gradients"] = waits
    if num_fresh:
        result |= {name: getattr(table.counters, name) for name in ("misses", "evicted", "pushed")}
    print(json.dumps(result))
    table.close()


def waits_for_gradients(table: EmbeddingTable, batches: list[torch.Tensor]) -> list[str]:
    """Calls for which the host waits until the gradients of the last write are computed."""
    CUDA.cuda_on_cpu_be_lazy()
    keys, waits = [one.clone() for one in batches[:3]], []
    read_table_unseen(table, keys[0])
    if not table.staleness.is_exact:
        table.prefetch(keys[1])
    unseen = 0.25  # memory may be used again, with what it had before
    table.write(keys[0], torch.full((len(keys[0]), table.dim), unseen))

    def note(call: str):
        if not waits and bool((LATE[-1] == unseen).all()):
            waits.append(call)

    note("write")
    if not table.staleness.is_exact:
        table.prefetch(keys[2])
        note("prefetch")
    read_table_unseen(table, keys[1])
    note("read")
    return waits


if __name__ == "__main__":
    main()
