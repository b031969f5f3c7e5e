"""``opsd train``: what it is short for, and where it is a rank itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from click.testing import CliRunner

from opsd import exitcodes, pip_install
from opsd.commands import train as command
from opsd.commands.main import cli


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The arguments with which ``opsd launch`` was called."""
    calls: list[Sequence[str]] = []

    def main(args: Sequence[str], *_: object, **__: object) -> int:
        calls.append(args)
        return exitcodes.REQUEUE

    monkeypatch.setattr(command.launch, "main", main)
    monkeypatch.delenv("RANK", raising=False)
    return calls


@pytest.mark.parametrize(
    ("devices", "options", "ranks"),
    [("0,1,2", [], "3"), ("", [], "1"), ("0,1", ["--nproc-per-node", "auto"], "auto")],
)
def test_it_is_short_for_launch(
    launched: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, devices: str, options: list[str], ranks: str
) -> None:
    """A rank for each GPU, one where there is none; settings and the exit code go through."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    result = CliRunner().invoke(
        cli, ["train", "tiny", *options, "--set", "data.shards=x", "--fresh"], standalone_mode=False
    )
    assert result.return_value == exitcodes.REQUEUE, result.output
    assert launched == [
        ["--nproc-per-node", ranks, "-m", "opsd.trainer", "--set", "data.shards=x", "--fresh", "--", "tiny"]
    ]


def test_under_a_launcher_it_is_a_rank(launched: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each rank would start a launcher of its own."""
    started: list[Sequence[str]] = []

    def execv(_path: str, args: Sequence[str]) -> None:
        started.append(args)
        raise SystemExit

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(command.os, "execv", execv)
    CliRunner().invoke(cli, ["train", "tiny"])
    assert started == [[sys.executable, "-m", "opsd.trainer", "--", "tiny"]]
    assert launched == []


def test_without_torch_one_sentence_says_so(launched: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the command line itself never loads it."""
    monkeypatch.setattr(command, "find_spec", lambda _name: None)
    result = CliRunner().invoke(cli, ["train", "tiny"])
    assert (result.exit_code, pip_install("train") in result.output) == (exitcodes.USAGE, True)
    program = "import sys; from opsd.commands import train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("arguments", [("nope",), ("tiny", "--set", "nope=1"), ("tiny", "--set", "run.nope=1")])
def test_a_wrong_configuration_starts_nothing(launched: list[Sequence[str]], arguments: tuple[str, ...]) -> None:
    """It is said in one sentence, by the command and not by each rank."""
    result = CliRunner().invoke(cli, ["train", *arguments])
    assert (result.exit_code, launched) == (exitcodes.USAGE, [])
    assert result.output.count("Error: ") == 1
