"""./run.sh docs: pages that say what a caller must know."""

import re
import sys
from html import unescape

import pytest
from launch import ROOT, run

import hetmpi

pytest.importorskip("pdoc")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Their text, by place under hetmpi."""
    out = tmp_path_factory.mktemp("api")
    outcome = run([sys.executable, "-W", "error", str(ROOT / "tools/docs.py"), str(out)])
    assert outcome.code == 0 and not outcome.text, outcome.text
    found = {path.relative_to(out).with_suffix("").as_posix(): path.read_text() for path in out.rglob("*.html")}
    return {name: " ".join(unescape(re.sub("<[^>]+>", "", text)).split()) for name, text in found.items()}


def test_there_is_a_page_for_every_name(pages):
    for name, module in hetmpi.PLACES.items():
        assert f"hetmpi.{name}:" in pages["hetmpi"]
        assert re.search(rf"(class|def) {name}\b", pages[f"hetmpi/{module.replace('.', '/')}"])


@pytest.mark.parametrize(
    "page, said",
    [
        ("table/table", "keys (U,) int64 on the CPU, unique -> rows (U, dim) float32"),
        ("table/table", "Raises UserError for keys of another dtype or shape, out of range"),
        ("table/bag", "Raises ValueError for an unknown mode"),
        ("table/bag", "At staleness 0 collective"),
        ("data/batch", "ids: np.ndarray # (B, F) int64 keys, 0 <= key < num_rows"),
        ("checkpoint/checkpoints", "shard-00003.weight.npy rows of rank 3, (n, dim) float32"),
        ("run/config", "table.cache.capacity_rows rows kept on each rank"),
    ],
)
def test_they_say_shapes_and_errors(pages, page, said):
    assert said in pages[f"hetmpi/{page}"]


def test_names_of_the_package_bring_nothing_along_until_they_are_used():
    program = (
        "import sys, hetmpi; print({'torch', 'mpi4py', 'hetmpi.comm.world'} & set(sys.modules), "
        "hetmpi.RowOptimizer('adam').rule)"
    )
    assert run([sys.executable, "-c", program]).text == "set() adam\n"
    with pytest.raises(AttributeError, match="no attribute 'Tabel'"):
        hetmpi.Tabel  # noqa: B018
