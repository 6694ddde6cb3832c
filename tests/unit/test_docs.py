"""./run.sh docs: one site without broken links, whose API pages document shapes and errors."""

import re
import sys
from html import unescape

import pytest
from launch import run

import hetmpi

pytest.importorskip("sphinx")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Their text, by place."""
    out = tmp_path_factory.mktemp("site")
    outcome = run([sys.executable, "-m", "sphinx", "-W", "-n", "-q", "-c", "docs", ".", str(out)])
    assert outcome.code == 0 and not outcome.text, outcome.text
    found = {path.relative_to(out).with_suffix("").as_posix(): path.read_text() for path in out.rglob("*.html")}
    return {name: " ".join(unescape(re.sub("<[^>]+>", "", text)).split()) for name, text in found.items()}


def test_every_public_name_is_on_a_page(pages):
    api = " ".join(text for name, text in pages.items() if name.startswith("docs/api/"))
    missing = [name for name in hetmpi.PLACES if not re.search(rf"hetmpi\.{name}\b ?(\(|¶)", api)]
    assert missing == []


@pytest.mark.parametrize(
    "page, said",
    [
        ("tables", "keys (U,) int64 on the CPU, unique -> rows (U, dim) float32"),
        ("tables", "Raises UserError for keys of another dtype or shape, out of range"),
        ("tables", "Raises ValueError for an unknown mode"),
        ("tables", "At staleness 0 collective"),
        ("parts", "ids: np.ndarray # (B, F) int64 keys, 0 <= key < num_rows"),
        ("programs", "shard-00003.weight.npy rows of rank 3, (n, dim) float32"),
    ],
)
def test_api_pages_say_shapes_and_errors(pages, page, said):
    assert said in pages[f"docs/api/{page}"]


def test_names_of_the_package_bring_nothing_along_until_they_are_used():
    program = (
        "import sys, hetmpi; print({'torch', 'mpi4py', 'hetmpi.world.world'} & set(sys.modules), "
        "hetmpi.RowOptimizer('adam').rule)"
    )
    assert run([sys.executable, "-c", program]).text == "set() adam\n"
    with pytest.raises(AttributeError, match="no attribute 'Tabel'"):
        hetmpi.Tabel  # noqa: B018
