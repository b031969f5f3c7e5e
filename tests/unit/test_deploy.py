"""opsd deploy: what a package brings along can be listed, shown and copied."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.commands.main import cli

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_every_file_is_listed_and_copied_with_its_mode(tmp_path: Path) -> None:
    """The copies are those files, and scripts remain executable."""
    listed = CliRunner().invoke(cli, ["deploy", "list"]).output.split()
    assert "slurm/train-spares.sbatch" in listed
    assert CliRunner().invoke(cli, ["deploy", "copy", str(tmp_path / "new")]).exit_code == exitcodes.OK
    assert sorted(str(p.relative_to(tmp_path / "new")) for p in (tmp_path / "new").rglob("*") if p.is_file()) == listed
    for name in listed:
        copied = tmp_path / "new" / name
        assert copied.read_bytes() == (DEPLOY / name).read_bytes()
        assert copied.stat().st_mode & 0o111 == (DEPLOY / name).stat().st_mode & 0o111


def test_a_file_is_shown_as_it_is() -> None:
    """So that it can be piped somewhere."""
    shown = CliRunner().invoke(cli, ["deploy", "show", "systemd/opsd.service"])
    assert shown.output == (DEPLOY / "systemd/opsd.service").read_text()


def test_an_edited_file_is_kept_unless_overwriting_is_asked_for(tmp_path: Path) -> None:
    """Nothing at all is copied then."""
    edited = tmp_path / "slurm/prolog.sh"
    edited.parent.mkdir()
    edited.write_text("mine")
    refused = CliRunner().invoke(cli, ["deploy", "copy", str(tmp_path), "slurm"])
    assert (refused.exit_code, edited.read_text()) == (2, "mine")
    assert "--overwrite" in refused.output
    assert [p.name for p in edited.parent.iterdir()] == ["prolog.sh"]
    assert CliRunner().invoke(cli, ["deploy", "copy", str(tmp_path), "slurm", "--overwrite"]).exit_code == 0
    assert edited.read_text() != "mine"


def test_copies_of_a_read_only_package_can_be_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their owner, and scripts remain executable."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "prolog.sh").touch()
    (package / "prolog.sh").chmod(0o555)
    monkeypatch.setattr("opsd.commands.deploy.FOLDER", package)
    assert CliRunner().invoke(cli, ["deploy", "copy", str(tmp_path / "new")]).exit_code == exitcodes.OK
    assert (tmp_path / "new/prolog.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    "arguments",
    [("show", "no/such"), ("show", "slurm"), ("show", "../pyproject.toml"), ("copy", "/proc/no", "install")],
)
def test_what_cannot_be_done_is_said_in_a_sentence(arguments: tuple[str, ...]) -> None:
    """A wrong name, a folder, something outside of it, and a target that cannot be written."""
    result = CliRunner().invoke(cli, ["deploy", *arguments])
    assert result.exit_code == exitcodes.USAGE
    assert result.output.count("Error: ") == 1
