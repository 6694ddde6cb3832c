"""Random tables and runs with lines on the emulated GPU, compared with the same on the CPU, bit for bit.

    python gpu_soak.py [cases=100] [runs=0] [seed=1] [plant=FAULT]

in the environment of emulated.py, by mpiexec for several ranks: cases are tables of one rank each, runs are trainings
of all ranks. Exit code 0 if all are equal. plant: a fault of gpu_faults.py, to be found.
"""

import contextlib
import io
import runpy
import sys
import tempfile
from pathlib import Path

import gpu_on_cpu
import numpy as np
import torch
from gpu_on_cpu import CUDA, TORCH, GpuOnCpu, OnGpu
from launch import losses
from mpi4py import MPI

from hetmpi import CacheSettings, EmbeddingTable, GpuStore, RowOptimizer, Schedule, Staleness, World
from hetmpi.table.group import TableGroup

RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "momentum", "ftrl")


def plant(fault: str):
    """A fault of gpu_faults.py."""
    if fault == "record":
        GpuOnCpu._record = staticmethod(lambda tensor: None)
    else:
        CUDA.cuda_on_cpu_leave_out(fault.encode(), TORCH)


class Different(Exception):
    pass


def check_same(a: torch.Tensor, b: torch.Tensor, what: str):
    if a.shape != b.shape or a.contiguous().numpy().tobytes() != b.contiguous().numpy().tobytes():
        raise Different(f"{what} differ")


# Tables


def compare(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], step: int):
    for name in expected:
        check_same(expected[name], found[name], f"rows of {name} at step {step}")


def drive(world: World, seed: int):
    """A random sequence of calls on one or several tables. Raises Different."""
    random = np.random.default_rng(seed)

    def one_of(*values):
        return values[random.integers(len(values))]

    rule, num_rows, staleness = one_of(*RULES), int(random.integers(20, 300)), one_of(0, 1, 3, 10, 100, None)
    capacity, policy, dtype = one_of(0, 5, 64, num_rows), one_of("lru", "lfu", "lfuopt"), one_of("float32", "float16")
    if staleness == 0:
        capacity = 0
    options = {
        "optimizer": RowOptimizer(rule, 0.1, 0.01, schedule=Schedule("cosine", 3, 40)),
        "staleness": Staleness(staleness, one_of(None, 1.0), 0.0 if staleness == 0 else one_of(0.0, 0.0, 0.5)),
        "init_std": 0.1, "batches_per_pull": one_of(1, 1, 3),
    }  # fmt: skip
    dims = [one_of(1, 3, 4, 8, 20, 32) for _ in range(one_of(1, 1, 2, 3))]

    partition = one_of("round_robin", "hash", "range")
    stores = [one_of(None, GpuStore()) if staleness == 0 and world.size == 1 else None for _ in dims]

    def tables(settings: type[CacheSettings]) -> TableGroup:
        cache = settings(capacity, policy=policy, dtype=dtype, admit="all")
        of_cpu = {"store": None, "device": "cpu"}
        where = [of_cpu if settings is CacheSettings else {"store": store, "device": "cpu:0"} for store in stores]
        made = {
            f"t{i}": EmbeddingTable(
                world, num_rows, dim, name=f"t{i}", cache=cache, partition=partition, **options, **where[i]
            )
            for i, dim in enumerate(dims)
        }
        return TableGroup(made)

    on_cpu, on_gpu = tables(CacheSettings), tables(OnGpu)
    num_steps, ahead = int(random.integers(3, 30)), one_of(0, 0, 1, 2) if staleness != 0 else 0

    def batch() -> dict[str, torch.Tensor]:
        num = 0 if random.random() < 0.05 else int(random.integers(1, 60))
        skewed = [np.unique((num_rows * random.random(num) ** 3).astype(np.int64)) for _ in dims]
        return {f"t{i}": torch.from_numpy(random.permutation(keys)) for i, keys in enumerate(skewed)}

    def grads_of(keys: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shapes = {name: (len(one), dim) for (name, one), dim in zip(keys.items(), dims)}
        return {name: torch.from_numpy(random.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}

    batches, announced = [batch() for _ in range(num_steps + ahead)], 1
    for step in range(num_steps):
        keys = batches[step]
        while random.random() < 0.3 and ahead == 0:  # reads without a write
            others = batch()
            if random.random() < 0.5:
                compare(on_cpu.read(others), on_gpu.read(others), step)
            else:
                for _ in range(int(random.integers(1, 9))):
                    on_cpu.read(others)
                    gpu_on_cpu.read_unseen(on_gpu, others)
        expected, found = on_cpu.read(keys), on_gpu.read(keys)
        compare(expected, found, step)
        grads = grads_of(keys)
        if random.random() < 0.3:
            del found
        for later in range(max(announced, step + 1), step + ahead + 1):
            on_cpu.prefetch(batches[later])
            on_gpu.prefetch(batches[later])
            announced = later + 1
        if staleness == 0 or random.random() < 0.9:
            on_cpu.write(keys, grads)
            on_gpu.write(keys, grads)
            if staleness != 0 and random.random() < 0.2:  # a second write, of keys that were not read last
                others = batch()
                more = grads_of(others)
                on_cpu.write(others, more)
                on_gpu.write(others, more)
            for late in gpu_on_cpu.LATE:  # torch may write them now
                CUDA.cuda_on_cpu_write(late.data_ptr(), torch.full_like(late, 7).data_ptr(), late.nbytes, TORCH)
        gpu_on_cpu.LATE.clear()
        if random.random() < 0.1:
            for table in (*on_cpu.values(), *on_gpu.values()):
                table.await_owners()
    on_cpu.flush()
    on_gpu.flush()
    for name in on_cpu:
        a, b = on_cpu[name], on_gpu[name]
        for array in ("weight", "state", "clock"):
            check_same(*(torch.from_numpy(getattr(one.shard, array).copy()) for one in (a, b)), f"{array} of {name}")
        if capacity > 0 and not np.array_equal(a.cache.lags, b.cache.lags):
            raise Different(f"lags of {name}")
        if capacity > 0 and a.counters != b.counters:
            raise Different(f"counters of {name}: {a.counters} and {b.counters}")
        a.close()
        b.close()


# Runs


def train(comm: MPI.Comm, seed: int, folder: Path):
    """A run on the CPU and on the emulated GPU. Raises Different on rank 0."""
    random = np.random.default_rng([seed, 1])

    def one_of(*values):
        return values[random.integers(len(values))]

    staleness = (0, 100, 10, None)[seed % 4]
    settings = {
        "data.scale": 0.0005, "table.dim": one_of(4, 8), "batch_size": one_of(16, 32), "steps": one_of(8, 20),
        "log.every_steps": 1, "eval.max_samples": 100, "seed": seed, "optim.rows": one_of("sgd", "adagrad", "adam"),
        "table.staleness": "null" if staleness is None else staleness,
        "table.look_ahead": one_of("true", "true", "false"), "table.batches_per_pull": (3, 1)[seed // 4 % 2],
        "table.cache.capacity_rows": 0 if staleness == 0 else one_of(64, 200, 4000),
        "table.cache.admit": "all", "table.cache.dtype": one_of("float32", "float32", "float16"), "watchdog.seconds": 0,
        "table.drift": 0 if staleness == 0 else one_of(0, 0, 1), "loader.threads": one_of(1, 2),
    }  # fmt: skip
    if comm.size > 1:  # an order of pushes that does not depend on time
        settings |= {"table.ranks_per_node": 1, "table.exchange": "messages"}
    curves = []
    CUDA.counts()
    for device in ("cpu", "cuda"):
        run = folder / f"{seed}-{device}"
        own = {"run.dir": run, "device": device}
        if device == "cuda" and staleness == 0 and comm.size == 1:
            own["table.store"] = one_of("memory", "gpu", "gpu")
        sys.argv[1:] = [f"{key}={value}" for key, value in (settings | own).items()]
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
            runpy.run_module("hetmpi.train", run_name="__main__")
        gpu_on_cpu.LATE.clear()
        if (CUDA.counts()["launches"] > 0) != (device == "cuda"):
            raise Different(f"device={device} has the kernels of another device")
        if comm.rank == 0:
            curves.append([loss.hex() for _, loss in sorted(losses(run).items())])
    if curves and (curves[0] != curves[1] or not curves[0]):
        raise Different(f"losses differ: {settings}")


def main():
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    cases, runs, seed = (int(given.get(name, default)) for name, default in (("cases", 100), ("runs", 0), ("seed", 1)))
    if "plant" in given:
        plant(given["plant"])
    comm = MPI.COMM_WORLD
    with tempfile.TemporaryDirectory() as folder:
        world = World()
        for case in range(seed, seed + cases) if comm.size == 1 else ():
            CUDA.cuda_on_cpu_seed(case)
            try:
                drive(world, case)
            except Different as difference:
                print(f"case {case}: {difference}", flush=True)
                comm.Abort(1)
        for run in range(seed, seed + runs):
            CUDA.cuda_on_cpu_seed(run)
            try:
                train(comm, run, Path(comm.bcast(folder)))
            except Different as difference:
                print(f"run {run}: {difference}", flush=True)
                comm.Abort(1)
    if comm.rank == 0:
        print(f"gpu_soak: {cases} cases, {runs} runs, all the same")


if __name__ == "__main__":
    main()
