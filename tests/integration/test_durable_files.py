"""Files that commands write when a call of theirs fails, one at a time: whole or not at all, and nothing is left over.

The commands run as users run them. Each is told of the error, in a sentence with the file, and ends well without one.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from trainer_world import CONFIG, Run

from opsd.checkpoints.manifest import folder_of
from opsd.config import template
from tests.fakes.faults import ERRORS, Faults, calls


@dataclass(frozen=True)
class Writer:
    """A command that writes into ``folder``; ``whole`` tells whether its file is there as a whole."""

    command: list[str]
    folder: Path
    whole: Callable[[], bool]


def listed(folder: Path) -> list[str]:
    """All below ``folder``."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def configuration(tmp_path: Path) -> Writer:
    """``opsd config init``."""
    folder = tmp_path / "out"
    folder.mkdir()
    file = folder / "opsd.toml"
    command = [sys.executable, "-m", "opsd", "config", "init", str(file)]
    return Writer(command, folder, lambda: file.exists() and file.read_text() == template())


def corpus(tmp_path: Path) -> Writer:
    """``python -m opsd.trainer.data``, whose build goes on the next time."""
    folder, source = tmp_path / "out", tmp_path / "text"
    folder.mkdir()
    source.mkdir()
    for number in range(3):
        (source / f"{number}.txt").write_text(f"some words about number {number} " * 200)
    command = [
        sys.executable, "-m", "opsd.trainer.data", str(source), "--out", str(folder), "--vocab", "300", "--workers=1",
    ]  # fmt: skip
    return Writer(command, folder, (folder / "index.json").exists)


def run(writer: Writer, faults: Faults) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        writer.command, env=faults.environment, capture_output=True, text=True, check=False, timeout=120
    )


def swept(writer: Writer, tmp_path: Path, *, kept: bool, every: int = 1) -> None:
    """Fail each call of ``writer`` once; with ``kept`` what it has made so far may stay, for the next time.

    Of ``every`` so many calls it is one, another one each day.
    """
    log = tmp_path / "calls"
    faults = Faults(writer.folder, log=log)
    done = run(writer, faults)
    assert (done.returncode, writer.whole()) == (0, True), done.stderr
    after = listed(writer.folder)
    made = calls(log)
    assert len(made) >= 4
    for call in made[int(time.time() / 86_400) % every :: every]:
        for path in sorted(writer.folder.rglob("*"), reverse=True):
            path.unlink()
        failed = run(writer, replace(faults, log=None, first=call.number, error=ERRORS[call.number % len(ERRORS)]))
        where = f"call {call.number}: {call.name} {call.path}: {failed.stderr}"
        assert "Traceback" not in failed.stderr, where
        if failed.returncode:
            assert failed.stderr.count("\n") == 1, where
            assert str(writer.folder) in failed.stderr, where
            assert writer.whole() or kept or listed(writer.folder) == [], where
        if not writer.whole():
            again = run(writer, replace(faults, log=None))
            assert again.returncode == 0, f"{where}{again.stderr}"
        left = listed(writer.folder)
        assert writer.whole(), where
        assert left == after or (call.name == "unlink" and set(after) < set(left) and len(left) == len(after) + 1), (
            where
        )


def test_a_configuration_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Each call fails once."""
    swept(configuration(tmp_path), tmp_path, kept=False)


def test_a_corpus_is_made_whatever_call_fails(tmp_path: Path) -> None:
    """By the next run of the same command; some of its calls."""
    swept(corpus(tmp_path), tmp_path, kept=True, every=8)


@pytest.mark.long
def test_a_corpus_is_made_whichever_call_fails(tmp_path: Path) -> None:
    """By the next run of the same command; each of its calls."""
    swept(corpus(tmp_path), tmp_path, kept=True)


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, undisturbed: Run) -> None:
    """On a disk that is full from some call on; a folder with other files keeps them, and the next export is whole."""
    config, target = tmp_path / "config.toml", tmp_path / "model"
    config.write_text(CONFIG)
    settings = [f"--set=data.shards={undisturbed.shards}", f"--set=run.folder={undisturbed.checkpoints.parent}"]
    command = [sys.executable, "-m", "opsd.trainer.huggingface", "export", str(config), str(target), *settings]
    writer = Writer(command, target, (target / "config.json").exists)
    log = tmp_path / "calls"
    done = run(writer, Faults(target, log=log))
    assert done.returncode == 0, done.stderr
    files = listed(target)
    names = {call.name: call.number for call in calls(log)}
    assert folder_of(undisturbed.checkpoints, 40).exists()
    for first in (names["open"], names["fsync"], names["rename"]):
        for path in target.iterdir():
            path.unlink()
        (target / "README.md").write_text("mine")
        failed = run(writer, Faults(target, first=first, count=1, error=errno.ENOSPC))
        is_there = failed.returncode == 0 or "it is in place" in failed.stderr
        assert listed(target) == sorted([*files, "README.md"] if is_there else ["README.md"]), failed
        assert "Traceback" not in failed.stderr
        assert failed.returncode == 0 or ("No space left" in failed.stderr and str(target) in failed.stderr), failed
        for path in [*target.glob("config.json"), *target.glob("*.safetensors*")]:
            path.unlink()
        assert run(writer, Faults(target)).returncode == 0
        assert json.loads((target / "config.json").read_text())["model_type"]
