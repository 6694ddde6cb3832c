"""The recipes of packaging/ say what pyproject.toml says."""

import re
from pathlib import Path

import yaml

import hetmpi

ROOT = Path(__file__).resolve().parents[2]
SPACK = ROOT / "packaging/spack/spack_repo/hetmpi/packages/py_hetmpi/package.py"
EASYBUILD = ROOT / f"packaging/easybuild/hetmpi-{hetmpi.__version__}-foss-2025b.eb"
CONDA_NAMES = {"torch": "pytorch", "xxhash": "python-xxhash"}
MODULES = {
    "torch": "PyTorch",
    "numpy": "SciPy-bundle",
    "hydra-core": "Hydra",
    "pyarrow": "Arrow",
    "plotly": "plotly.py",
}
MODULES |= {"xxhash": "python-xxhash", "rich": "Python-bundle-PyPI"}


def dependencies() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)[1]
    return re.findall(r'"([a-z0-9-]+)', listed)


def conda_recipe() -> dict:
    return yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())


def test_recipes_have_the_version_of_hetmpi():
    assert conda_recipe()["package"]["version"] == hetmpi.__version__
    assert f"version = '{hetmpi.__version__}'" in EASYBUILD.read_text()


def test_recipes_have_every_dependency():
    conda = {text.split()[0] for text in conda_recipe()["requirements"]["run"]}
    spack = set(re.findall(r'depends_on\("py-([a-z0-9-]+)', SPACK.read_text()))
    easybuild = set(re.findall(r"^    \('(.*?)', '", EASYBUILD.read_text(), re.MULTILINE))
    names = dependencies()
    assert "torch" in names
    assert conda == {"python", *(CONDA_NAMES.get(name, name) for name in names)}
    assert set(names) <= spack and {MODULES.get(name, name) for name in names} <= easybuild
