"""The reference pages: current, complete, and without anything that is only true on the machine that made them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("yaml")

from opsd import exitcodes
from opsd.commands.main import cli
from opsd.commands.metrics import catalogue
from opsd.commands.reference import FOLDER, leftovers, rendered
from opsd.commands.runbook import all_guides
from opsd.config import known_keys, sections


def text(name: str) -> str:
    return rendered()[FOLDER / name]


def test_the_pages_are_current() -> None:
    """Run `make generate` after a change that is meant."""
    assert {path.name for path, page in rendered().items() if not path.exists() or path.read_text() != page} == set()
    assert leftovers() == []


def test_nothing_is_left_out() -> None:
    """Every metric, setting, exit code and runbook is on its page."""
    assert [m.name for _, m in catalogue() if f"| `{m.name}` |" not in text("metrics.md")] == []
    settings = text("settings.md")
    assert [name for name, _ in sections() if f"## [{name}]" not in settings] == []
    assert [key for key in known_keys() if f"| `{key.partition('.')[2]}` |" not in settings] == []
    codes = {value for name, value in vars(exitcodes).items() if name.isupper()}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text("exit-codes.md"), re.MULTILINE)} == codes
    assert [name for name in all_guides() if f"({name}.md)" not in text("runbooks/README.md")] == []


def test_links_lead_somewhere() -> None:
    """From page to page."""
    for path, page in rendered().items():
        for target in re.findall(r"\]\(([\w./-]+\.md)\)", page):
            assert (path.parent / target).resolve() in {each.resolve() for each in rendered()}, (path.name, target)


def test_nothing_depends_on_the_machine() -> None:
    """Neither home folders nor host names."""
    whole = "".join(rendered().values())
    assert str(Path.home()) + "/" not in whole
    assert str(FOLDER.parent) not in whole


def test_the_command_writes_checks_and_removes(tmp_path: Path) -> None:
    """Into any folder; pages that nobody made there stay."""
    own = tmp_path / "own.md"
    own.write_text("# Mine\n")
    assert CliRunner().invoke(cli, ["docs", "build", "--out", str(tmp_path)]).exit_code == 0
    assert CliRunner().invoke(cli, ["docs", "check", "--out", str(tmp_path)]).exit_code == 0
    (tmp_path / "metrics.md").write_text("old")
    gone = tmp_path / "runbooks" / "gone.md"
    gone.write_text((tmp_path / "runbooks" / "gpu_lost.md").read_text())
    checked = CliRunner().invoke(cli, ["docs", "check", "--out", str(tmp_path)])
    assert checked.exit_code == 1
    assert "metrics.md is not current; run: opsd docs build" in checked.output
    assert "gone.md is not current" in checked.output
    assert CliRunner().invoke(cli, ["docs", "build", "--out", str(tmp_path)]).exit_code == 0
    assert not gone.exists()
    assert own.read_text() == "# Mine\n"
