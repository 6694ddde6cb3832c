"""The cache on the GPU gives the same results as the cache on the CPU, bit for bit (tests/cpp/cuda_cache_test.cpp).

Runs on a GPU if there is one, and everywhere with the same source compiled for the CPU (tests/cpp/cuda_on_cpu)."""

import shutil
import subprocess

import launch
import numpy as np
import pytest
import torch
from emulated import EMULATOR, INCLUDE, KERNELS, ON_CPU
from test_core import CXX, FLAGS, ROOT, run

from hetmpi import _C
from hetmpi.data.batch import to_batch
from hetmpi.data.gpu_batch import GpuBatches
from hetmpi.data.synthetic import Synthetic
from hetmpi.table.cache import CacheSettings
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.world import World

SOURCES = [*KERNELS, str(ROOT / "tests/cpp/cuda_cache_test.cpp")]
NO_GPU = _C.gpu_problem()
needs_gpu = pytest.mark.skipif(bool(NO_GPU), reason=f"no GPU can be used here: {NO_GPU}")


needs_compiler = pytest.mark.skipif(
    shutil.which(CXX[0]) is None, reason=f"there is no C++ compiler {CXX[0]}; CXX may name one"
)


@pytest.mark.long
@needs_compiler
def test_the_gpu_cache_run_by_the_cpu_equals_the_cpu_cache(tmp_path):
    flags = [*FLAGS, "-fsanitize=undefined", "-fno-sanitize-recover=all", *ON_CPU]
    code, text = run(*CXX, *flags, "-x", "c++", *SOURCES, EMULATOR, "-o", str(tmp_path / "test"))
    assert code == 0, text
    for seed in (1, 2):
        code, text = run(str(tmp_path / "test"), str(seed), "40")
        assert code == 0, text


@needs_gpu
def test_the_gpu_cache_equals_the_cpu_cache(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc on PATH")
    program = str(tmp_path / "test")
    flags = ["-std=c++17", "-O2", "-fmad=false", "--expt-relaxed-constexpr", "-Xcompiler", "-ffp-contract=off"]
    flags += ["-arch=native"]
    subprocess.run(["nvcc", *flags, INCLUDE, *SOURCES, "-o", program], check=True)
    for seed in range(5):
        code, text = run(program, str(seed), "200")
        assert code == 0, text


@pytest.mark.skipif(not _C.has_cuda, reason="hetmpi._C has no GPU half")
@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_without_a_gpu_the_module_says_so():
    with pytest.raises(RuntimeError, match=r"device\.h:\d+: cuda\w+\(.*\): \w+|cuda_cache\.cu:\d+: .*: \w+"):
        _C.CudaRowCache(64, RowOptimizer().core(4), "lru", 0)


@needs_gpu
def test_batches_made_on_the_gpu_are_those_of_the_cpu():
    samples = Synthetic(0, scale=0.001).train(0, 300)
    on_cpu, on_gpu = to_batch(samples), GpuBatches(torch.device("cuda", 0), 1 << 40)(samples)
    assert torch.equal(on_cpu.keys["table"], on_gpu.keys["table"])
    for name in ("index", "dense", "label"):
        assert torch.equal(getattr(on_cpu, name), getattr(on_gpu, name).cpu()), name


@needs_gpu
@pytest.mark.parametrize("staleness", [0, 5])
def test_a_table_on_a_gpu_learns_what_one_on_the_cpu_learns(staleness):
    world = World()
    tables = [
        EmbeddingTable(
            world,
            200,
            12,
            RowOptimizer("adagrad", 0.1),
            staleness=Staleness(staleness),
            cache=CacheSettings(64 if staleness > 0 else 0, admit="all"),
            device=device,
        )
        for device in ("cpu", "cuda:0")
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        keys, grads = torch.randperm(200, generator=generator)[:40], torch.randn(40, 12, generator=generator)
        rows = []
        for table in tables:
            rows.append(table.read(keys).cpu())
            table.write(keys, grads.to(table.device))
        assert torch.equal(*rows)
    for table in tables:
        table.flush()
    assert np.array_equal(tables[0].shard.weight, tables[1].shard.weight)
    for table in tables:
        table.close()


@needs_gpu
@pytest.mark.parametrize("how", [[], ["table.staleness=null", "table.cache.capacity_fraction=1"]])
def test_a_loss_that_is_not_finite_is_told_with_its_step_and_cause(how):
    data = ["data._target_=broken_data.LabelsThatAreNan", "~data.scale"]
    outcome = launch.train(1, *launch.SMALL, *how, *data, "device=cuda")
    assert outcome.code != 0 and "loss is nan at step 3" in outcome.text, outcome.text
    assert "the data give label = nan in" in outcome.text, outcome.text


@needs_gpu
def test_rows_and_gradients_are_waited_for_by_the_stream_that_takes_them():
    """Torch's stream is delayed before every gradient: a cache that did not wait for it would read old values."""
    world, generator = World(), torch.Generator().manual_seed(0)
    on_cpu, on_gpu = (
        EmbeddingTable(
            world,
            200,
            12,
            RowOptimizer("sgd", 0.1),
            staleness=Staleness(10),
            cache=CacheSettings(64, admit="all"),
            device=device,
        )
        for device in ("cpu", "cuda:0")
    )
    batches, read = [torch.randperm(200, generator=generator)[:40] for _ in range(31)], []
    for keys, following in zip(batches, batches[1:]):
        grads = torch.randn(40, 12, generator=generator)
        expected = on_cpu.read(keys).clone()
        on_cpu.write(keys, grads)
        rows = on_gpu.read(keys)
        read.append((expected, rows + 0))
        torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
        on_gpu.prefetch(following)
        made = grads.pin_memory().to("cuda", non_blocking=True) * 1
        on_gpu.write(keys, made)
        del rows, made  # torch may reuse their memory
    for expected, found in read:
        assert torch.equal(expected, found.cpu())
    for table in (on_cpu, on_gpu):
        table.close()
