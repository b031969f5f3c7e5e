"""The commands of docs/planning.md, whose output the page shows."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd.commands.main import cli
from opsd.trainer.config import PRESETS
from tests.fakes.published import CONFIGS

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
SHOWN = re.findall(r"```console\n\$ (opsd [^\n]+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with the file of a run and that of a model, in which nothing was measured yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    shutil.copy(PRESETS / "smollm3-3b.toml", tmp_path / "run.toml")
    (tmp_path / "llama-3-70b.json").write_text(json.dumps(CONFIGS["llama-3-70b"]), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_page_shows_what_is_printed(folder: Path, command: str, output: str) -> None:
    """Every line that it shows, in this order."""
    result = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    printed = iter(result.stdout.splitlines())
    assert [line for line in output.splitlines() if line not in printed] == []
    for chart in folder.glob("*.svg"):
        assert chart.read_bytes() == (PAGE.parent / "pictures" / chart.name).read_bytes(), f"copy {chart} there"


def test_the_page_has_the_whole_example() -> None:
    """GPUs, a deadline, figures of the cluster, the file of a run, and charts."""
    commands = " ".join(command for command, _ in SHOWN)
    assert all(flag in commands for flag in ("--html", "--days", "--assume", "--write", "--chart"))


def test_a_written_layout_is_the_only_change(folder: Path) -> None:
    """Comments stay, a second time changes nothing, and the plan of the file is the same."""
    path = folder / "run.toml"
    before, raw = path.read_text(encoding="utf-8"), tomllib.loads(path.read_text(encoding="utf-8"))
    command = ["plan", "run.toml", "--gpus", "384", "--write", "--html", "plan.html"]
    first = CliRunner().invoke(cli, command)
    written = path.read_text(encoding="utf-8")
    second = CliRunner().invoke(cli, command)
    assert (first.stdout, path.read_text(encoding="utf-8")) == (second.stdout, written)
    assert set(before.splitlines()) <= set(written.splitlines())
    changed = tomllib.loads(written)
    assert changed.pop("parallel")["cp"] == 2
    assert changed == raw
    assert (folder / "plan.html").read_text(encoding="utf-8").count("<svg") >= 3
