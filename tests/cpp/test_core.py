"""The C++ core in a separate program under sanitizers (tests/cpp/core_test.cpp)."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CXX = shlex.split(os.environ.get("CXX") or "g++")
# Without contraction, as in setup.py: the cache and its model must round alike.
FLAGS = ["-O1", "-g", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread"]
REPORTS = ("WARNING: ThreadSanitizer", "ERROR: AddressSanitizer", "ERROR: LeakSanitizer", "runtime error:")


def run(*command):
    """Exit code and output."""
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # sanitizers must come first
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200
    )  # compilers of a busy machine are slow
    return done.returncode, done.stdout


def run_built(source, program, sanitizer):
    """Exit code and output of the compiler if it fails, otherwise of the program it builds."""
    flags = [*FLAGS, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{ROOT / 'cpp'}"]
    code, text = run(*CXX, *flags, str(source), "-o", str(program))
    return (code, text) if code != 0 else run(str(program))


@pytest.fixture(params=["thread", "address,undefined"])
def sanitizer(request, tmp_path):
    """Skips the test if no compiler builds a trivial program that runs under the sanitizer."""
    if shutil.which(CXX[0]) is None:
        pytest.skip(f"there is no C++ compiler {CXX[0]}; CXX may name one")
    source = tmp_path / "trivial.cpp"
    source.write_text("int main() { return 0; }\n")
    code, text = run_built(source, tmp_path / "trivial", request.param)
    if code != 0:
        pytest.skip(f"{CXX[0]} cannot build and run a program with -fsanitize={request.param} here: {text}")
    return request.param


@pytest.mark.long
@pytest.mark.parametrize("name", ["core_test", "row_file_test"])
def test_the_core_keeps_its_invariants_and_no_sanitizer_objects(sanitizer, tmp_path, name):
    code, text = run_built(ROOT / f"tests/cpp/{name}.cpp", tmp_path / name, sanitizer)
    assert code == 0, text
    assert not any(report in text for report in REPORTS), text
