"""`bench cache device=cuda`: rates of find, gather, update and insert of the cache on the GPU, compared with the GPU's
copy bandwidth and with torch."""

from __future__ import annotations

import json
import time

import numpy as np
import torch

from hetmpi import _C
from hetmpi.table.optim import RowOptimizer

KEY_STRIDE = 7  # keys in the cache are its multiples, others are not
CHUNK = 1 << 20  # keys inserted at a time
BATCHES = 8  # timed together
# Rows read or written per key; update: gradient, row and sum read, row and sum written.
ROW_PASSES = {"gather": 2, "update": 5}


def bench_gpu(settings: dict):
    """Checks results, times calls, prints, and last the JSON line. Exits if there is no GPU."""
    if _C.gpu_problem():
        raise SystemExit(f"bench cache device=cuda: no GPU can be used: {_C.gpu_problem()}")
    filled = Filled(settings["rows"], settings["dim"])
    held = filled.held()
    if len(held) < settings["keys"]:
        raise SystemExit(
            f"bench cache device=cuda: keys={settings['keys']:,} are more than the {len(held):,} lines: take more rows"
        )
    print(f"{torch.cuda.get_device_name()}: {len(held):,} lines of dim {filled.dim}, {settings['keys']:,} keys a call")
    filled.check(held)
    copy = copy_rate(settings["repeats"])
    print(f"copying 4 GB: {copy / 1e12:.2f} TB/s, read and written")
    result = {"copy_bytes_per_s": copy, **filled.rates(held, settings, copy), "settings": settings}
    for name, value in result.items():
        if isinstance(value, float):
            print(f"{name:<28}{value:14.4g}")
    print(json.dumps(result))


class Filled:
    """A full cache of known rows: all columns of the row of key k are k / KEY_STRIDE modulo 2^20."""

    def __init__(self, num_rows: int, dim: int):
        self.dim = dim
        stream = torch.cuda.current_stream().cuda_stream
        self.cache = _C.CudaRowCache(num_rows, RowOptimizer("sgd", 1.0).core(dim), "lru", stream)
        self.cache.set_step(1.0, 1)
        for begin in range(0, num_rows, CHUNK):
            self.insert(torch.arange(begin, min(begin + CHUNK, num_rows), device="cuda") * KEY_STRIDE)
        self.num_rows = num_rows

    def look_up(self, keys: torch.Tensor, slots: torch.Tensor):
        self.cache.look_up(keys.data_ptr(), len(keys), slots.data_ptr())

    def insert_and_evict(self, keys: torch.Tensor, *others: torch.Tensor):
        """others: chosen (n,) bool, rows, states, clocks, slots."""
        *before, slots = (one.data_ptr() for one in (keys, *others))
        self.cache.insert_and_evict(*before, len(keys), slots)

    def gather(self, slots: torch.Tensor, rows: torch.Tensor):
        self.cache.gather(slots.data_ptr(), len(slots), rows.data_ptr())

    def update(self, slots: torch.Tensor, grads: torch.Tensor):
        self.cache.update(slots.data_ptr(), grads.data_ptr(), len(slots))

    def find(self, keys: torch.Tensor, slots: torch.Tensor):
        """keys (n,) int64 -> slots (n,) int64."""
        self.look_up(keys, slots)
        self.cache.use(slots.data_ptr(), len(keys))

    def insert(self, keys: torch.Tensor):
        slots = torch.empty_like(keys)
        self.find(keys, slots)
        rows = self.row_of(keys)
        states, clocks = rows[:, :0].contiguous(), torch.zeros(len(keys), dtype=torch.int32, device="cuda")
        self.insert_and_evict(keys, slots < 0, rows, states, clocks, slots)
        torch.cuda.synchronize()

    def row_of(self, keys: torch.Tensor) -> torch.Tensor:
        return (keys // KEY_STRIDE % (1 << 20)).float()[:, None].expand(-1, self.dim).contiguous()

    def held(self) -> torch.Tensor:
        """The keys that have lines: some sets had more keys than lines."""
        kept = []
        for begin in range(0, self.num_rows, CHUNK):
            keys = torch.arange(begin, min(begin + CHUNK, self.num_rows), device="cuda") * KEY_STRIDE
            slots = torch.empty_like(keys)
            self.look_up(keys, slots)
            kept.append(keys[slots >= 0])
        return torch.cat(kept)

    def check(self, held: torch.Tensor):
        """Checks that rows are those of their keys and that other keys are not found."""
        keys = held[torch.randperm(len(held), device="cuda")[: 1 << 20]]
        slots, rows = torch.empty_like(keys), torch.full((len(keys), self.dim), torch.nan, device="cuda")
        self.look_up(keys, slots)
        self.gather(slots, rows)
        assert torch.equal(rows, self.row_of(keys))
        self.look_up(keys + 1, slots)
        assert bool((slots == -1).all())

    def rates(self, held: torch.Tensor, settings: dict, copy: float) -> dict:
        """Keys per second; share of the copy bandwidth; time of torch relative to the cache's. Each timing uses several
        batches."""
        num, repeats = settings["keys"], settings["repeats"]
        hits = [held[torch.randperm(len(held), device="cuda")[:num]].contiguous() for _ in range(BATCHES)]
        mixed = [torch.where(torch.rand(num, device="cuda") < settings["hit_rate"], keys, keys + 1) for keys in hits]
        slots, rows = [torch.empty_like(keys) for keys in hits], torch.empty(num, self.dim, device="cuda")
        grads = torch.randn(num, self.dim, device="cuda")
        find = seconds(lambda i: self.find(mixed[i], slots[i]), repeats)
        for i in range(BATCHES):
            self.find(hits[i], slots[i])
        update = seconds(lambda i: self.update(slots[i], grads), repeats)
        gather = seconds(lambda i: self.gather(slots[i], rows), repeats)
        ids = [torch.cat([keys, keys[torch.randint(num, (num,), device="cuda")]]) for keys in hits]
        with_unique = self.against_torch(
            ids, lambda ids: torch.unique(ids, return_inverse=True)[0], slots[0], rows, grads, repeats
        )
        without = self.against_torch(
            [keys.sort().values for keys in hits], lambda keys: keys, slots[0], rows, grads, repeats
        )
        row_bytes = 4 * self.dim * num
        return {
            "find_keys_per_s": num / find,
            "gather_keys_per_s": num / gather,
            "update_keys_per_s": num / update,
            "insert_keys_per_s": num / self.insert_seconds(num),
            "gather_vs_copy": ROW_PASSES["gather"] * row_bytes / gather / copy,
            "update_vs_copy": ROW_PASSES["update"] * row_bytes / update / copy,
            "torch_vs_cache": with_unique,
            "torch_vs_cache_without_unique": without,
        }

    def against_torch(
        self, batches: list, unique, slots: torch.Tensor, rows: torch.Tensor, grads: torch.Tensor, repeats: int
    ) -> float:
        """Time of torch relative to the cache's: index_select and index_add_ on dense arrays of all rows, to rows and
        to sums, against find, gather and update; unique(batch) is part of both."""
        weight, sums = (torch.zeros(self.num_rows, self.dim, device="cuda") for _ in range(2))

        def by_torch(i):
            places = unique(batches[i]) // KEY_STRIDE
            weight.index_select(0, places)
            weight.index_add_(0, places, grads, alpha=-1.0)
            sums.index_add_(0, places, grads)

        def by_cache(i):
            self.find(unique(batches[i]), slots)
            self.gather(slots, rows)
            self.update(slots, grads)

        return seconds(by_torch, repeats) / seconds(by_cache, repeats)

    def insert_seconds(self, num: int) -> float:
        """Median time of insert_and_evict of `num` new keys into a cache full of lines with pending sums."""
        times = []
        for turn in range(BATCHES):
            keys = torch.arange(turn * num, (turn + 1) * num, device="cuda") * KEY_STRIDE + 2
            slots, rows = torch.empty_like(keys), self.row_of(keys)
            self.find(keys, slots)
            chosen, states, clocks = (
                slots < 0,
                rows[:, :0].contiguous(),
                torch.zeros(num, dtype=torch.int32, device="cuda"),
            )
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.insert_and_evict(keys, chosen, rows, states, clocks, slots)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            self.cache.drop_released()
        return float(np.median(times))


def copy_rate(repeats: int) -> float:
    """Bytes per second that a copy within GPU memory reads and writes."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda _: target.copy_(source), repeats)


def seconds(call, repeats: int) -> float:
    """Median time of call(i) on the GPU, over rounds of i from 0 to BATCHES - 1: so the GPU neither waits for Python
    between calls nor finds the last batch in its caches. The first three rounds are not counted."""
    times = []
    for turn in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # cycles in which Python gets ahead
        begin.record()
        for i in range(BATCHES):
            call(i)
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(begin.elapsed_time(end) / 1000 / BATCHES)
    return float(np.median(times))
