"""`bench cache device=cuda`: the cache on the GPU, each call's rate beside the GPU's own copy bandwidth and beside torch."""

from __future__ import annotations

import json

import numpy as np
import torch

from hetmpi import _C
from hetmpi.optim import RowOptimizer

KEY_STRIDE = 7  # keys in the cache are its multiples, others are not
CHUNK = 1 << 20  # keys inserted at a time
ROW_PASSES = {"gather": 2, "update": 5}  # rows read or written per key; update: gradient, row and sum read, row and sum written


def bench_gpu(settings: dict):
    """Checks, times, prints, and last the JSON line. Exits if there is no GPU."""
    problem = "hetmpi._C was built without nvcc" if not _C.has_cuda else _C.gpu_problem()
    if problem:
        raise SystemExit(f"bench cache device=cuda: no GPU can be used: {problem}")
    filled = Filled(settings["rows"], settings["dim"])
    held = filled.held()
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
    """A full cache of rows that are known: row of key k is k / KEY_STRIDE everywhere, modulo 2^20."""

    def __init__(self, num_rows: int, dim: int):
        self.dim, self.stream = dim, torch.cuda.current_stream().cuda_stream
        self.cache = _C.CudaRowCache(num_rows, RowOptimizer("sgd", 1.0).core(dim), "lru")
        self.cache.set_step(1.0, 1)
        for begin in range(0, num_rows, CHUNK):
            self.insert(torch.arange(begin, min(begin + CHUNK, num_rows), device="cuda") * KEY_STRIDE)
        self.num_rows = num_rows

    def find(self, keys: torch.Tensor, slots: torch.Tensor):
        """keys (n,) int64 -> slots (n,) int64."""
        self.cache.look_up(keys, slots, self.stream)
        self.cache.use(slots, len(keys), self.stream)

    def insert(self, keys: torch.Tensor):
        slots = torch.empty_like(keys)
        self.find(keys, slots)
        rows = self.row_of(keys)
        states, clocks = rows[:, :0].contiguous(), torch.zeros(len(keys), dtype=torch.int32, device="cuda")
        self.cache.insert_and_evict(keys, slots < 0, rows, states, clocks, slots, self.stream)
        torch.cuda.synchronize()

    def row_of(self, keys: torch.Tensor) -> torch.Tensor:
        return (keys // KEY_STRIDE % (1 << 20)).float()[:, None].expand(-1, self.dim).contiguous()

    def held(self) -> torch.Tensor:
        """The keys that have lines: some sets were asked for more than they have."""
        kept = []
        for begin in range(0, self.num_rows, CHUNK):
            keys = torch.arange(begin, min(begin + CHUNK, self.num_rows), device="cuda") * KEY_STRIDE
            slots = torch.empty_like(keys)
            self.cache.look_up(keys, slots, self.stream)
            kept.append(keys[slots >= 0])
        return torch.cat(kept)

    def check(self, held: torch.Tensor):
        """Rows are those of their keys; keys that are not there are not found."""
        keys = held[torch.randperm(len(held), device="cuda")[: 1 << 20]]
        slots, rows = torch.empty_like(keys), torch.full((len(keys), self.dim), torch.nan, device="cuda")
        self.cache.look_up(keys, slots, self.stream)
        self.cache.gather(slots, rows, self.stream)
        assert torch.equal(rows, self.row_of(keys))
        self.cache.look_up(keys + 1, slots, self.stream)
        assert bool((slots == -1).all())

    def rates(self, held: torch.Tensor, settings: dict, copy: float) -> dict:
        """Keys a second; share of the copy bandwidth; times of find, gather and update together against torch's."""
        num, repeats = settings["keys"], settings["repeats"]
        hits = held[torch.randperm(len(held), device="cuda")[:num]]
        mixed = torch.where(torch.rand(num, device="cuda") < settings["hit_rate"], hits, hits + 1)
        slots, rows = torch.empty_like(hits), torch.empty(num, self.dim, device="cuda")
        grads = torch.randn(num, self.dim, device="cuda")
        find = seconds(lambda: self.find(mixed, slots), repeats)
        self.find(hits, slots)
        update = seconds(lambda: self.cache.update(slots, grads, 1.0, self.stream), repeats)
        gather = seconds(lambda: self.cache.gather(slots, rows, self.stream), repeats)
        row_bytes = 4 * self.dim * num
        torch_s = self.torch_seconds(hits // KEY_STRIDE, grads, repeats)
        all_hits = seconds(lambda: self.find(hits, slots), repeats)
        return {
            "find_keys_per_s": num / find, "gather_keys_per_s": num / gather, "update_keys_per_s": num / update,
            "gather_vs_copy": ROW_PASSES["gather"] * row_bytes / gather / copy,
            "update_vs_copy": ROW_PASSES["update"] * row_bytes / update / copy,
            "torch_vs_cache": torch_s / (all_hits + gather + update),
        }  # fmt: skip

    def torch_seconds(self, rows: torch.Tensor, grads: torch.Tensor, repeats: int) -> float:
        """The same with torch alone, on dense arrays of all rows: unique, index_select, index_add_ to rows and to sums."""
        weight, sums = (torch.zeros(self.num_rows, self.dim, device="cuda") for _ in range(2))

        def step():
            unique, inverse = torch.unique(rows, return_inverse=True)
            weight.index_select(0, unique)
            ordered = torch.zeros_like(grads).index_copy_(0, inverse, grads)
            weight.index_add_(0, unique, ordered, alpha=-1.0)
            sums.index_add_(0, unique, ordered)

        return seconds(step, repeats)


def copy_rate(repeats: int) -> float:
    """Bytes a second that a copy within the GPU's memory reads and writes."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), repeats)


def seconds(call, repeats: int) -> float:
    """Median time of a call on the GPU, after three that are not counted."""
    times = []
    for turn in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(begin.elapsed_time(end) / 1000)
    return float(np.median(times))
