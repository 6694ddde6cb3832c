"""docs/recipes.md runs as pasted: each section's files and commands, in an empty folder."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from launch import ROOT, run

pytestmark = pytest.mark.long

PAGE = ROOT / "docs/recipes.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # as activate makes it


def sections():
    """Heading -> its blocks, [(language, text), ...]."""
    parts = re.split(r"^## (.+)\n", PAGE.read_text(), flags=re.MULTILINE)
    return {heading: BLOCK.findall(text) for heading, text in zip(parts[1::2], parts[2::2])}


RARE = "Early stopping and the best checkpoint", "Resume on another number of ranks", "A sweep"


def written(blocks, folder):
    """Writes the blocks that begin with a comment with a path, such as `# conf/model/mine.yaml`."""
    for language, text in blocks:
        path = re.match(r"# (\S+\.\w+)\n", text)
        if language not in ("bash", "sh") and path:
            (folder / path[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / path[1]).write_text(text)


def pasted(text, folder, *options, **extra):
    """Runs lines in a shell; with -e until the first that fails."""
    return run(["bash", *options, "-c", text], cwd=folder, **{"PYTHONPATH": "", "PATH": PATH, **extra})


@pytest.mark.parametrize("heading", [
    pytest.param(name, marks=pytest.mark.rare if name in RARE else ())
    for name, blocks in sections().items() if "bash" in dict(blocks)
])  # fmt: skip
def test_recipe(heading, tmp_path):
    blocks = sections()[heading]
    written(blocks, tmp_path)
    for language, text in blocks:
        if language == "bash":
            outcome = pasted(text, tmp_path, "-e")
            assert outcome.code == 0 and "Traceback" not in outcome.text, f"{text}\n{outcome.text}"


@pytest.mark.long
def test_recipe_of_another_mpi_by_a_module(tmp_path):
    """Its lines after the set-up is made, with a module that leads to the Open MPI of this machine."""
    modules, mpicc = Path("/usr/share/modules/init/bash"), shutil.which("mpicc", path="/usr/bin:/usr/local/bin")
    if not modules.exists() or mpicc is None or not (ROOT / ".venv-openmpi/hetmpi-setup").exists():
        pytest.skip("needs environment-modules, an MPI under /usr and .venv-openmpi, set up with it")
    (tmp_path / "openmpi").write_text(f"#%Module1.0\nprepend-path PATH {Path(mpicc).parent}\n")
    text = dict(sections()["Another MPI by a module"])["sh"]
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if ".venv" not in part)
    outcome = pasted(f". {modules}; module use {tmp_path}\n{text}", ROOT, timeout_s=300, LD_PRELOAD="", PATH=path)
    assert outcome.code == 0 and "Open MPI" in outcome.text and "step 200" in outcome.text, outcome.text
