"""The tables of attacks in docs/security.md: each row stands in its table and names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
ATTACKS = PAGE[PAGE.index("## Attacks") :]
ROWS = [line.strip("| ").split(" | ") for line in ATTACKS.splitlines() if line.startswith("| ")]
CASES = [(row[0], row[2]) for row in ROWS if row[0] != "attack"]


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
