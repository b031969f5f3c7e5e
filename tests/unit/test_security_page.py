"""The ports in docs/security.md are those of the programs; each attack in docs/attacks.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opsd.launch.run.launchers import DEFAULT_PORT, default_port
from opsd.preflight.network import rendezvous
from opsd.settings.sections import AgentSettings, PreflightSettings

ROOT = Path(__file__).parents[2]
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
