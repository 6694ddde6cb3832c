"""Figures of the README and titles that texts name are on their pages."""

import re

import pytest
from launch import ROOT

FIGURE = re.compile(r"\d*\.\d+|\d+e-\d+")
LINE_BREAK = re.compile(r"\s*\n\s*(?:#|//)?\s*")  # in a comment too
TITLE = re.compile(r'docs/(\w+)\.md, "([^"]+)"')


def claims_of_the_readme() -> list[str]:
    """Texts with figures: sentences about pictures, and the figure column of the table under "Measured"."""
    text = (ROOT / "README.md").read_text()
    pictures = [sentence for alt in re.findall(r"!\[([^]]+)\]", text) for sentence in re.split(r"\.\s", alt)]
    table = re.findall(r"^\|[^|]+\|([^|]+)\|$", text.split("\n## Measured\n")[1].split("\n## ")[0], re.MULTILINE)
    return [claim for claim in pictures + table if FIGURE.search(claim)]


def stands_in(figure: str, measured: list[str]) -> bool:
    """Whether one of the measured figures is this one, or becomes it when rounded to as many digits."""
    if "e" in figure:
        return figure in measured
    digits = len(figure.split(".")[1])
    longer = [text for text in measured if "e" not in text and len(text.split(".")[1]) >= digits]
    return any(f"{float(text):.{digits}f}" == f"{float(figure):.{digits}f}" for text in longer)


@pytest.mark.parametrize("claim", claims_of_the_readme())
def test_figures_of_the_readme_stand_in_one_section_of_the_results(claim):
    sections = (ROOT / "docs/results.md").read_text().split("\n## ")[1:]
    measured = [FIGURE.findall(section) for section in sections]
    assert any(all(stands_in(figure, found) for figure in FIGURE.findall(claim)) for found in measured), claim


def has_title(page: str, title: str) -> bool:
    """Whether the page has a heading, or a paragraph that begins in bold, with this title."""
    text = (ROOT / f"docs/{page}.md").read_text()
    return (
        re.search(rf"^(#+ {re.escape(title)}$|\*\*{re.escape(title)}\.)", text, re.MULTILINE | re.IGNORECASE)
        is not None
    )


def test_titles_that_texts_name_are_on_their_pages():
    paths = [path for folder in ("bench", "conf", "cpp", "docs", "hetmpi") for path in ROOT.glob(f"{folder}/**/*.*")]
    texts = {
        path: path.read_text() for path in paths if path.suffix in (".py", ".h", ".c", ".cpp", ".cu", ".yaml", ".md")
    }
    missing = [
        f"{path.relative_to(ROOT)}: docs/{page}.md, {title}"
        for path, text in texts.items()
        for page, title in TITLE.findall(LINE_BREAK.sub(" ", text))
        if not has_title(page, title)
    ]
    assert missing == []
