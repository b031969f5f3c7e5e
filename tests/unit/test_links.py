"""Links of README, CONTRIBUTING, ARCHITECTURE and docs/ lead to files and headings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def tokens(path: Path) -> Iterator[Token]:
    for token in MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8")):
        yield token
        yield from token.children or ()


@cache
def anchors(path: Path) -> set[str]:
    """The names under which GitHub and mkdocs reach the headings of a page."""
    found, heading = set(), False
    for token in tokens(path):
        if token.type == "inline" and heading:
            found.add(re.sub(r"[^\w\- ]", "", token.content.lower()).strip().replace(" ", "-"))
        heading = token.type == "heading_open"
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Files below the repository, pictures and headings; other hosts are not asked."""
    targets = [str(token.attrs.get("href") or token.attrs.get("src") or "") for token in tokens(page)]
    for target in filter(None, targets):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{target} is no file"
        assert not anchor or anchor in anchors(path), f"{target} is no heading"
