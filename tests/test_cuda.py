"""The cache on the GPU makes of any calls what the cache on the CPU makes of them, bit for bit (tests/cpp/cuda_cache_test.cpp).

On a GPU where there is one; everywhere by the same source compiled for the CPU (tests/cpp/cuda_on_cpu)."""

import shutil
import subprocess

import numpy as np
import pytest
import torch

from hetmpi import _C
from hetmpi.optim import RowOptimizer
from test_core import CXX, FLAGS, ROOT, run

SOURCES = [str(ROOT / "cpp/cuda_cache.cu"), str(ROOT / "tests/cpp/cuda_cache_test.cpp")]
INCLUDE = f"-I{ROOT / 'cpp'}"
NO_GPU = _C.gpu_problem()
needs_gpu = pytest.mark.skipif(bool(NO_GPU), reason=f"no GPU can be used here: {NO_GPU}")


@pytest.mark.skipif(shutil.which(CXX[0]) is None, reason=f"there is no C++ compiler {CXX[0]}; CXX may name one")
def test_the_gpu_cache_run_by_the_cpu_equals_the_cpu_cache(tmp_path):
    flags = [*FLAGS, "-fsanitize=undefined", "-fno-sanitize-recover=all", f"-I{ROOT / 'tests/cpp/cuda_on_cpu'}", INCLUDE]
    code, text = run(*CXX, *flags, "-x", "c++", *SOURCES, "-o", str(tmp_path / "test"))
    assert code == 0, text
    for seed in (1, 2):
        code, text = run(str(tmp_path / "test"), str(seed), "40")
        assert code == 0, text


@needs_gpu
def test_the_gpu_cache_equals_the_cpu_cache(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc on PATH")
    program = str(tmp_path / "test")
    subprocess.run(["nvcc", "-std=c++17", "-O2", "-fmad=false", "-Xcompiler", "-ffp-contract=off", "-arch=native", INCLUDE, *SOURCES, "-o", program], check=True)
    for seed in range(5):
        code, text = run(program, str(seed), "200")
        assert code == 0, text


@pytest.mark.skipif(not _C.has_cuda, reason="hetmpi._C was built without nvcc")
@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_without_a_gpu_the_module_says_so():
    with pytest.raises(RuntimeError, match=r"device\.h:\d+: cuda\w+\(.*\): \w+|cuda_cache\.cu:\d+: .*: \w+"):
        _C.CudaRowCache(64, RowOptimizer().core(4), "lru")


@needs_gpu
def test_python_calls_it_with_tensors_and_a_stream():
    cache = _C.CudaRowCache(64, RowOptimizer("sgd", 1.0).core(8), "lru")
    cache.set_step(1.0, 1)
    stream = torch.cuda.current_stream().cuda_stream
    keys, slots = torch.arange(10, device="cuda"), torch.empty(10, dtype=torch.int64, device="cuda")
    rows, states = torch.randn(10, 8, device="cuda"), torch.empty(10, 0, device="cuda")
    clocks, chosen = torch.zeros(10, dtype=torch.int32, device="cuda"), torch.ones(10, dtype=torch.bool, device="cuda")
    cache.look_up(keys, slots, stream)
    assert slots.tolist() == [-1] * 10
    cache.use(slots, 10, stream)
    cache.insert_and_evict(keys, chosen, rows, states, clocks, slots, stream)
    grads, out = torch.ones(10, 8, device="cuda"), torch.empty(10, 8, device="cuda")
    cache.update(slots, grads, 1.0, stream)
    cache.gather(slots, out, stream)
    assert torch.equal(out, rows - 1)
    cache.take_all(stream)
    sent, clock, count, sums = cache.take_pushes(stream)
    assert sorted(sent.tolist()) == list(range(10)) and set(clock) == set(count) == {1} and np.array_equal(sums, np.ones((10, 8)))
    with pytest.raises(ValueError, match=r"out must be contiguous, of type <f4 and shape \(10,8,\), got <f4 and \(10,4,\)"):
        cache.gather(slots, out[:, :4], stream)
    with pytest.raises(RuntimeError, match="requires grad"):
        cache.update(slots, grads.requires_grad_(), 1.0, stream)
    with pytest.raises(TypeError, match="slots must be an array in the GPU's memory, got <class 'numpy.ndarray'>"):
        cache.gather(np.zeros(10, np.int64), out, stream)
