"""The reference pages: current, complete, and without anything that is only true on the machine that made them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("yaml")

from opsd import exitcodes
from opsd.commands.main import COMMANDS, cli
from opsd.commands.metrics import catalogue
from opsd.commands.reference import FOLDER, rendered
from opsd.commands.runbook import all_guides
from opsd.config import known_keys, sections
from opsd.trainer.config import Config


def text(name: str) -> str:
    return rendered()[FOLDER / name]


def test_nothing_is_left_out() -> None:
    """Every metric, setting, command, exit code and runbook is on its page; settings of the trainer are explained."""
    assert [m.name for _, m in catalogue() if f"| `{m.name}` |" not in text("metrics.md")] == []
    settings = text("settings.md")
    assert [name for name, _ in sections() if f"## [{name}]" not in settings] == []
    assert [key for key in known_keys() if f"| `{key.partition('.')[2]}` |" not in settings] == []
    trainer = text("trainer-settings.md")
    assert [name for name in Config.model_fields if f"## [{name}]" not in trainer] == []
    assert re.findall(r"^\| `(\w+)` \| [^|]* \|  \|$", trainer, re.MULTILINE) == []
    assert [name for name in COMMANDS if f"\n## opsd {name}\n" not in text("commands.md")] == []
    codes = {value for name, value in vars(exitcodes).items() if name.isupper()}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text("exit-codes.md"), re.MULTILINE)} == codes
    assert [name for name in all_guides() if f"({name}.md)" not in text("runbooks/README.md")] == []


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
