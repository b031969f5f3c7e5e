"""The documentation: links, names of tests, ports and attacks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from opsd.launch.run.launchers import DEFAULT_PORT, default_port
from opsd.preflight.network import rendezvous
from opsd.settings.sections import AgentSettings, PreflightSettings
from tests.fakes.tree import ROOT

# Links of README, CONTRIBUTING, ARCHITECTURE and docs/ lead to files and headings that exist.


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


# Names of test files: pytest imports each as a module of its own, and leaves out a second one of the same name.


TESTS = Path(__file__).parents[1]


def test_no_two_test_files_have_the_same_name() -> None:
    """In whichever folders they are."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []


# The ports in docs/security.md are those of the programs; each attack in docs/attacks.md names tests that exist.


PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")

ATTACKS = (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8")

ROWS = [line.strip("| ").split(" | ") for line in ATTACKS.splitlines() if line.startswith("| ")]

CASES = [(row[0], row[2]) for row in ROWS if row[0] != "attack"]


def test_the_ports_are_those_of_the_programs() -> None:
    """One that moved would be left open, or closed, by who goes by the page."""
    cells = re.findall(r"^\| ([^|]+) \|", PAGE[PAGE.index("## Ports") : PAGE.index("## Files")], re.MULTILINE)
    listed = {int(number) for cell in cells for number in re.findall(r"\b\d{4,5}\b", cell)}
    inbox = PreflightSettings.model_fields["alert_inbox"].examples or [""]
    fixed = {int(address.rpartition(":")[2]) for address in (AgentSettings().listen, str(inbox[0]))}
    first, last = 20_000, 31_999
    assert fixed | {DEFAULT_PORT, rendezvous.PORT, first, last} <= listed
    of_jobs = [default_port("r", {"SLURM_JOB_ID": str(number)}) for number in range(2_000)]
    assert first <= min(of_jobs) and max(of_jobs) <= last


def test_who_finds_a_hole_can_report_it_in_private() -> None:
    """And learns when an answer comes, and where it is said what is trusted with what."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    report = text[text.index("## Report a vulnerability") : text.index("## What counts")]
    assert "not open a public issue" in report and "security/advisories/new" in report
    assert re.search(r"within \w+ working days", report)
    assert "(docs/security.md)" in text


def words(text: str) -> str:
    """As in the name of a test."""
    return re.sub(r"\W+", "_", re.sub(r"['’]", "", text)).strip("_").lower()


@pytest.mark.parametrize(("attack", "tests"), CASES, ids=[words(attack)[:40] for attack, _ in CASES])
def test_an_attack_is_tried_by_the_tests_that_are_named(attack: str, tests: str) -> None:
    """Files by their names, and after a colon parts of the names of their tests."""
    named = re.findall(r"`([\w/]+\.py)`(?:: ([^`]+))?", tests)
    assert named, f"{attack}: no test"
    for file, parts in named:
        (found,) = (ROOT / "tests").rglob(file)
        names = re.findall(r"def (test_\w+)", found.read_text(encoding="utf-8"))
        for part in filter(None, map(words, parts.split(", "))):
            assert any(part in name for name in names), f"{file} has no test of {part}"


def test_no_row_stands_outside_of_its_table() -> None:
    """An empty line ends a table, and what follows it is shown as text."""
    assert not re.search(r"\|\n\n\| (?!attack |---)", ATTACKS)
