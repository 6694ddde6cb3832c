"""Pages whose commands run as pasted, beside examples/: each section of docs/recipes.md, and guides as a whole."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from docs_check import PASTED, blocks_of, written
from launch import ROOT, run

pytestmark = pytest.mark.long

PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # as activate makes it


def sections():
    """Heading of docs/recipes.md -> its blocks."""
    parts = re.split(r"^## (.+)\n", (ROOT / "docs/recipes.md").read_text(), flags=re.MULTILINE)
    return {heading: blocks_of(text) for heading, text in zip(parts[1::2], parts[2::2])}


RARE = [
    "Early stopping and the best checkpoint", "Resume on another number of ranks", "A sweep",
    "A larger batch, and 16 bits",
]  # fmt: skip


def pasted(text, folder, *options, **extra):
    """Runs lines in a shell; with -e until the first that fails."""
    return run(["bash", *options, "-c", text], cwd=folder, **{"PYTHONPATH": "", "PATH": PATH, **extra})


def run_blocks(blocks, folder):
    written(blocks, folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks:
        if block.language == "bash":
            outcome = pasted(block.text, folder, "-e", timeout_s=300)
            assert outcome.code == 0 and "Traceback" not in outcome.text, f"{block.text}\n{outcome.text}"


def is_sweep(block):
    return " train -m " in block.text


@pytest.mark.parametrize("heading", [
    pytest.param(name, marks=pytest.mark.rare if name in RARE else ())
    for name, blocks in sections().items() if any(block.language == "bash" for block in blocks)
])  # fmt: skip
def test_recipe(heading, tmp_path):
    run_blocks(sections()[heading], tmp_path)


@pytest.mark.parametrize("page", [page for page in PASTED if page != "docs/recipes.md"])
def test_guide(page, tmp_path):
    """But for sweeps, which take most of the time."""
    run_blocks([block for block in blocks_of((ROOT / page).read_text()) if not is_sweep(block)], tmp_path)


@pytest.mark.rare
@pytest.mark.parametrize("page", [
    page for page in PASTED if page != "docs/recipes.md" and any(map(is_sweep, blocks_of((ROOT / page).read_text())))
])  # fmt: skip
def test_guide_with_its_sweeps(page, tmp_path):
    run_blocks(blocks_of((ROOT / page).read_text()), tmp_path)


@pytest.mark.long
def test_recipe_of_another_mpi_by_a_module(tmp_path):
    """Its lines after the set-up is made, with a module that leads to the Open MPI of this machine."""
    modules, mpicc = Path("/usr/share/modules/init/bash"), shutil.which("mpicc", path="/usr/bin:/usr/local/bin")
    if not modules.exists() or mpicc is None or not (ROOT / ".venv-openmpi/hetmpi-setup").exists():
        pytest.skip("needs environment-modules, an MPI under /usr and .venv-openmpi, set up with it")
    (tmp_path / "openmpi").write_text(f"#%Module1.0\nprepend-path PATH {Path(mpicc).parent}\n")
    [text] = [block.text for block in sections()["Another MPI by a module"] if block.language == "sh"]
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if ".venv" not in part)
    outcome = pasted(f". {modules}; module use {tmp_path}\n{text}", ROOT, timeout_s=300, LD_PRELOAD="", PATH=path)
    assert outcome.code == 0 and "Open MPI" in outcome.text and "step 200" in outcome.text, outcome.text
