"""Where long commands write their results is looked at before they begin."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.cli import cli


@pytest.mark.parametrize("command", [("bench", "client"), ("demo",)])
def test_a_result_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Nobody waits for minutes to be told that the folder for the results does not exist."""
    result = CliRunner().invoke(cli, [*command, "--json", str(tmp_path / "no" / "results.json")])
    assert result.exit_code == exitcodes.USAGE
    assert "No such file or directory" in result.output
    assert list(tmp_path.iterdir()) == []
