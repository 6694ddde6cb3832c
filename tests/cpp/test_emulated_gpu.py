"""Tables and trainings on the emulated GPU (cuda_on_cpu/emulator.cpp), and faults it finds (support/gpu_soak.py)."""

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import emulated
import launch
import pytest
from gpu_faults import FAULTS
from test_core import CXX, FLAGS, ROOT
from test_cuda import needs_compiler

SUPPORT = ROOT / "tests/support"
NO_GPU_IN = "not first_rows"  # deselects tests without a cache
pytestmark = [pytest.mark.long, needs_compiler]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Folder of a package hetmpi with an emulated GPU."""
    folder = tmp_path_factory.mktemp("emulated")
    emulated.make_package(folder, CXX, [flag for flag in FLAGS if flag != "-g"])
    return folder


def run(package, ranks: int, *command: str, timeout_s: float = 280, **variables: str) -> launch.Outcome:
    command = [launch.mpiexec(), "-n", str(ranks), sys.executable, "-m", "mpi4py", *command]
    return launch.run(command, timeout_s=timeout_s, cwd=package, **emulated.environment(package), **variables)


def soak(package, ranks: int, *arguments: str) -> launch.Outcome:
    return run(package, ranks, str(SUPPORT / "gpu_soak.py"), *arguments)


def test_random_tables_have_the_bits_of_the_cpu(package):
    outcome = soak(package, 1, "cases=80")
    assert outcome.code == 0 and "80 cases, 0 runs, all the same" in outcome.text, outcome.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_trainings_have_the_bits_of_the_cpu(package, ranks):
    outcome = soak(package, ranks, "cases=0", "runs=4")
    assert outcome.code == 0 and "4 runs, all the same" in outcome.text, outcome.text


def test_what_is_left_out_between_streams_and_the_host_is_found(package):
    def found(fault: str) -> str:
        outcome = soak(package, 1, "cases=80", f"plant={fault}")
        return (
            "" if outcome.code != 0 and re.search(FAULTS[fault], outcome.text) else f"{fault}: {outcome.text[-2000:]}"
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [text for text in pool.map(found, FAULTS) if text]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("staleness", "waits", "most"),
    [
        ("null", [], {"launches": 6, "stream_waits": 5, "records": 7}),
        ("100", [], {"launches": 13, "waits": 1, "stream_waits": 5, "records": 8}),
        (  # its sums, of a few evicted lines, come in one copy
            "100 fresh=.02 dim=4",
            [],
            {"launches": 20, "waits": 1, "stream_waits": 8, "records": 14}
            | {"copies_to_gpu": 1, "bytes_to_gpu": 8 * 500, "copies_to_host": 1, "bytes_to_host": 500},
        ),
        ("0", ["write"], {"stream_waits": 1, "records": 1, "copies_to_gpu": 1, "bytes_to_gpu": 4 * 500 * 128}),
        (
            "0 store=gpu",
            [],
            {"launches": 3, "waits": 1, "records": 2, "memsets": 1, "copies_to_host": 1, "bytes_to_host": 4},
        ),
    ],
)
def test_a_step_with_all_rows_cached_or_on_the_gpu_makes_no_more_calls_of_cuda(package, staleness, waits, most):
    settings = f"staleness={staleness}".split()
    outcome = run(package, 1, str(SUPPORT / "gpu_cost.py"), "keys=500", *settings)
    assert outcome.code == 0, outcome.text
    found = json.loads(outcome.text.strip().splitlines()[-1])
    del found["host_us"], found["least_us"]
    assert found.pop("waits_for_gradients") == waits
    for name in ("misses", "evicted", "pushed"):  # of the table
        found.pop(name, None)
    assert all(value <= most.get(name, 0) for name, value in found.items()), found


def test_without_a_bound_the_host_looks_at_no_key_of_a_step_whose_rows_are_all_cached(package):
    least = {}
    for keys in (500, 60_000):  # a pass over so many keys takes 30 us and more
        outcome = run(package, 1, str(SUPPORT / "gpu_cost.py"), f"keys={keys}", "staleness=null", "dim=4", "steps=100")
        assert outcome.code == 0, outcome.text
        least[keys] = json.loads(outcome.text.strip().splitlines()[-1])["least_us"]
    assert least[60_000] < 2 * least[500], least


@pytest.mark.parametrize("file", ["batches_on_gpu.py", "rows_on_gpu.py", "gpu_late.py"])
def test_batches_and_tables_are_on_the_gpu(package, file):
    outcome = run(package, 1, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(SUPPORT / file))
    assert outcome.code == 0 and "passed" in outcome.text, outcome.text


def test_without_lines_steps_need_no_new_memory(package):
    outcome = run(package, 1, str(SUPPORT / "gpu_cost.py"), "keys=500", "staleness=10", "lines=0")
    assert outcome.code == 0, outcome.text
    assert "allocations" not in json.loads(outcome.text.strip().splitlines()[-1]), outcome.text


def test_rows_on_a_gpu_are_planned_for_and_refused_before_data_are_made(package):
    settings = "train", "device=cuda", "table.store=gpu", "dry_run=true", "steps=20"
    fits = run(package, 1, "-m", "hetmpi", *settings, "data.scale=0.001")
    assert fits.code == 0, fits.text
    assert re.search(r"rows and cache, at most: 4 MiB of .* free on cpu:0, .*: fits", fits.text), fits.text
    short = run(package, 1, "-m", "hetmpi", *settings, "data.scale=0.001", HETMPI_TEST_GPU_BYTES="1000000")
    assert "DOES NOT FIT: use a smaller table.dim" in short.text, short.text
    two = run(package, 2, "-m", "hetmpi", *settings, "data.path=nowhere", "data=criteo")
    assert two.code != 0 and "table.store=gpu is for one rank, this run has 2: set table.store=memory" in two.text


@pytest.mark.rare
def test_tables_keep_their_promises_with_their_rows_on_a_gpu(package):
    """Left out: what is told later there, and what changes a shard's arrays in place."""
    files = ("test_table.py", "test_checkpoint.py", "test_vocabulary.py", "test_look_ahead.py", "test_pretrained.py")
    tests = [str(ROOT / "tests/mpi" / file) for file in files]
    pytest_ = ["-m", "pytest", "-x", "-q", "-s", "-p", "no:cacheprovider", "-m", "mpi"]
    left_out = "not not_finite and not larger_than_memory"
    outcome = run(package, 1, *pytest_, "-k", left_out, *tests, HETMPI_TEST_STORE="gpu")
    assert outcome.code == 0, outcome.text


@pytest.mark.rare
def test_tables_keep_their_promises_with_their_lines_on_a_gpu(package):
    files = ("test_staleness.py", "test_joint_pulls.py", "test_vocabulary.py")
    tests = [str(ROOT / "tests/mpi" / file) for file in files]
    pytest_ = ["-m", "pytest", "-x", "-q", "-s", "-p", "no:cacheprovider", "-m", "mpi", "-k", NO_GPU_IN]
    outcome = run(package, 2, *pytest_, *tests)
    assert outcome.code == 0, outcome.text
