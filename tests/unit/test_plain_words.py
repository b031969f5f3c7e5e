"""Docs, docstrings and comments are understood at the first reading: few sentences are long or put as riddles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tree import ROOT
from tests.plain import MOST_WORDS, hard, judged, sentences

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/research").glob("*.md")])
PACKAGES = sorted(path for path in (ROOT / "opsd").iterdir() if (path / "__init__.py").is_file())
PAGE_LIMIT, GUIDES_LIMIT, PACKAGE_LIMIT = 0.08, 0.05, 0.03
SPARED = 2
"""Sentences in a page or package, however small it is."""


def check(found: list[str], total: int, limit: float) -> None:
    assert len(found) <= max(SPARED, limit * total), f"{len(found)} of {total}, rewrite some of\n" + "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_read_once(page: Path) -> None:
    check(*judged([page]), PAGE_LIMIT)


def test_the_guides_of_runbooks_are_read_once() -> None:
    check(*judged(sorted((ROOT / "docs/runbooks").glob("*.md"))), GUIDES_LIMIT)


@pytest.mark.parametrize("package", [*PACKAGES, ROOT / "opsd"], ids=lambda package: package.name)
def test_docstrings_and_comments_are_read_once(package: Path) -> None:
    """The modules at the top are a package of their own."""
    folder = package.resolve()
    files = sorted(folder.glob("*.py") if package == ROOT / "opsd" else folder.rglob("*.py"))
    check(*judged(files), PACKAGE_LIMIT)


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("The agent drops a hung collector.", False),
        ("What hangs is no longer asked.", True),
        ("What is left to do?", False),
        ("Who is not heard in time is told when asking.", True),
        ("Where links are missing a folder is renamed.", True),
        ("What to do next is in the guide.", False),
        ("The runs begin anew.", True),
        ("A word " * MOST_WORDS, True),
        ("Nodes, GPUs, ranks, runs, jobs, users.", True),
    ],
)
def test_a_sentence_is_judged(sentence: str, expected: bool) -> None:
    assert hard(sentence) is expected


def test_code_and_links_are_one_word() -> None:
    """And a sentence ends before a capital letter only."""
    text = "See [the page](a/b.md) for `opsd launch --nnodes 2`. It is in v. 2 of it. Done."
    assert [len(sentence.split()) for sentence in sentences(text)] == [5, 7, 1]
