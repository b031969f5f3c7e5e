"""Files of commands whose call fails, that are killed, or whose power fails: whole or absent, and nothing is left over.

The commands run as users run them. Each says of an error one sentence, with the file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
from trainer_world import CONFIG, Run

from opsd.checkpoints.manifest import folder_of, steps, verify
from opsd.config import template
from opsd.durable import DRAFT
from tests.fakes.corpora import make_corpus
from tests.fakes.faults import ERRORS, Call, Faults, calls
from tests.fakes.power_loss import changes, losses, rebuild
from tests.fakes.saving import SavedRun

T = TypeVar("T")


@dataclass(frozen=True)
class Writer:
    """A command that writes into ``folder``; ``whole`` tells whether its file is there as a whole."""

    command: list[str]
    folder: Path
    whole: Callable[[], bool]
    sentences: bool = True
    """Whether it says one sentence of an error, and nothing else."""
    same: bool = True
    """Whether it makes the same calls and files each time, however often it has run."""


STORAGE = "storage"
"""The folder that loses its power."""


def listed(folder: Path) -> list[str]:
    """All below ``folder``."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def drafts(folder: Path) -> list[str]:
    """The drafts among them."""
    return [name for name in listed(folder) if name.endswith(DRAFT)]


def configuration(tmp_path: Path) -> Writer:
    """``opsd config init``."""
    folder = tmp_path / STORAGE
    folder.mkdir()
    file = folder / "opsd.toml"
    command = [sys.executable, "-m", "opsd", "config", "init", str(file)]
    return Writer(command, folder, lambda: file.exists() and file.read_text() == template())


def corpus(tmp_path: Path) -> Writer:
    """``python -m opsd.trainer.data``, whose build goes on the next time."""
    folder, source = tmp_path / STORAGE / "out", tmp_path / "text"
    folder.parent.mkdir()
    source.mkdir()
    for number in range(3):
        (source / f"{number}.txt").write_text(f"some words about number {number} " * 200)
    command = [
        sys.executable, "-m", "opsd.trainer.data", str(source), "--out", str(folder), "--vocab", "300", "--workers=1",
    ]  # fmt: skip
    return Writer(command, folder, (folder / "index.json").exists)


STAGE = """
import sys
from pathlib import Path
from opsd.spares.corpus import read_corpora
from opsd.spares.stage import stage
from opsd.spares.transfer import Folder
from opsd.spares.transfer import RateLimit, StageError, Work

source = Folder(Path(sys.argv[1]))
try:
    stage(source, read_corpora(source), Path(sys.argv[2]), Work(RateLimit(None), parallel=1))
except StageError as error:
    sys.exit(f"opsd: {error}")
"""

JOURNAL = """
import sys
from pathlib import Path
from opsd.agent.journal import Journal
from opsd.agent.policy import PastAction

journal = Journal(Path(sys.argv[1]), lambda problem: None, retry_s=0.05, wall=lambda: 1000.0)
journal.open(20)
is_written = journal.action("incident", PastAction("kind", "drain_node", "node", 1000.0)).wait(20)
journal.close(20)
again = Journal(Path(sys.argv[1]), lambda problem: None, wall=lambda: 1000.0)
actions = again.open(20).actions
again.close(20)
sys.exit(0 if is_written and [action.verb for action in actions] == ["drain_node"] else f"{is_written} {actions}")
"""


def staged(tmp_path: Path) -> Writer:
    """The stager of a spare."""
    source, target = tmp_path / "source", tmp_path / STORAGE / "target"
    target.parent.mkdir()
    make_corpus(source, shards=1)

    def whole() -> bool:
        names = sorted(path.name for path in source.iterdir())
        there = listed(target) == names
        return there and all((target / name).read_bytes() == (source / name).read_bytes() for name in names)

    return Writer([sys.executable, "-c", STAGE, str(source), str(target)], target, whole)


def uploaded(tmp_path: Path) -> Writer:
    """``opsd checkpoint upload`` to a folder."""
    run, target = SavedRun(tmp_path / "run"), tmp_path / STORAGE / "target"
    target.parent.mkdir()
    assert all(run.go())
    command = [sys.executable, "-m", "opsd", "checkpoint", "upload", str(run.checkpoints), str(target)]

    def whole() -> bool:
        return steps(target) == steps(run.checkpoints) and all(verify(folder_of(target, s)) for s in steps(target))

    return Writer(command, target, whole)


def journalled(tmp_path: Path) -> Writer:
    """The agent's journal, of which an action waits until it is on the disk."""
    folder = tmp_path / STORAGE / "state"
    folder.parent.mkdir()
    return Writer(
        [sys.executable, "-c", JOURNAL, str(folder)],
        folder,
        (folder / "journal.db").exists,
        sentences=False,
        same=False,
    )


def launched(tmp_path: Path) -> Writer:
    """A run's folder with the claims and events of ``opsd launch``."""
    folder = tmp_path / STORAGE / "run"
    folder.parent.mkdir()
    program = tmp_path / "program.py"
    program.write_text("")
    run_id = f"durable-{zlib.crc32(bytes(tmp_path))}"
    options = ["--nproc-per-node=1", "--run-dir", str(folder), "--run-id", run_id]
    command = [sys.executable, "-m", "opsd", "launch", *options, str(program)]

    def whole() -> bool:
        events = folder / "events.jsonl"
        told = [json.loads(line)["event"] for line in events.open()] if events.exists() else []
        return any((folder / "generations").glob("*.json")) and told[-1:] == ["finished"] and not drafts(folder)

    return Writer(command, folder, whole, sentences=False, same=False)


def run(writer: Writer, faults: Faults) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        writer.command, env=faults.environment, capture_output=True, text=True, check=False, timeout=120
    )


def made_by(writer: Writer, log: Path) -> list[Call]:
    """The calls of a run without faults, of which the files are left."""
    done = run(writer, Faults(writer.folder, log=log))
    assert (done.returncode, writer.whole()) == (0, True), done.stderr
    made = calls(log)
    assert len(made) >= 4
    return made


def age(folder: Path) -> None:
    """Make the files below ``folder`` old."""
    for path in folder.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)


def of_today(found: Sequence[T], count: int | None) -> Sequence[T]:
    """About ``count`` of them, evenly spread; which ones changes with the day. All if it is None."""
    every = max(1, len(found) // (count or len(found)))
    return found[int(time.time() / 86_400) % every :: every]


def swept(writer: Writer, tmp_path: Path, *, kept: bool, count: int | None = None) -> None:
    """Fail ``count`` of the calls of ``writer``, one a run; with ``kept`` what it has made may stay, for the next time.

    All calls fail if it is None.
    """
    made = made_by(writer, tmp_path / "calls")
    after = listed(writer.folder)
    for call in of_today(made, count):
        shutil.rmtree(writer.folder)
        failed = run(writer, Faults(writer.folder, first=call.number, error=ERRORS[call.number % len(ERRORS)]))
        where = f"call {call.number}: {call.name} {call.path}: {failed.stderr}"
        assert "Traceback" not in failed.stderr, where
        if failed.returncode and writer.sentences:
            assert failed.stderr.count("\n") == 1, where
            assert str(writer.folder) in failed.stderr, where
            assert writer.whole() or kept or listed(writer.folder) == [], where
        if not writer.whole():
            again = run(writer, Faults(writer.folder))
            assert again.returncode == 0, f"{where}{again.stderr}"
        left = listed(writer.folder)
        assert writer.whole(), where
        if writer.same and left != after:  # the file that could not be removed
            assert (call.name, len(left), set(left) > set(after)) == ("unlink", len(after) + 1, True), where


def killed(writer: Writer, tmp_path: Path, count: int | None = None) -> None:
    """Kill ``writer`` at a call, before or after it; an hour later its next run leaves what an undisturbed one does.

    It is killed at ``count`` of its calls, or at each if that is None.
    """
    made = made_by(writer, tmp_path / "calls")
    after = listed(writer.folder)
    for call in of_today(made, count):
        shutil.rmtree(writer.folder)
        is_done = bool(call.number % 2) and call.name != "mkdir"  # it may exist
        ended = run(writer, Faults(writer.folder, first=call.number, kill=True, done=is_done))
        where = f"call {call.number}: {call.name} {call.path}: {ended.stderr}"
        assert ended.returncode or not writer.same, where
        age(writer.folder)
        was_whole = writer.whole()
        again = run(writer, Faults(writer.folder))
        assert (again.returncode == 0 or was_whole, writer.whole()) == (True, True), f"{where}{again.stderr}"
        if writer.same:
            left = set(listed(writer.folder)) - (set(drafts(writer.folder)) if was_whole else set())
            assert left == set(after), where


def without_power(writer: Writer, tmp_path: Path, count: int | None) -> None:
    """Let the power fail at the end of ``writer`` and ``count`` times before; its next run makes what is missing.

    It fails at every moment if ``count`` is None.
    """
    storage, record = tmp_path / STORAGE, tmp_path / "record"
    done = run(writer, Faults(storage, record=record))
    assert done.returncode == 0, done.stderr
    made, began = changes(record), storage.resolve()
    for end in [*of_today(range(len(made)), count), len(made)]:
        for number, left in enumerate(losses(made[:end], end, 1)):
            shutil.rmtree(storage)
            rebuild(left, began, storage)
            age(storage)
            where = f"{end} of {len(made)}, {number}: {listed(storage)}"
            assert end < len(made) or writer.whole(), where
            was_whole = writer.whole()
            again = run(writer, Faults(writer.folder))
            assert (again.returncode == 0 or was_whole, writer.whole()) == (True, True), f"{where}{again.stderr}"


SAMPLE = 2
"""As many calls fail in a test of ``make test``; ``make test-long`` has all of them."""
sampled = pytest.mark.parametrize(
    "count", [SAMPLE, pytest.param(None, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
Make = Callable[[Path], Writer]
WRITERS = [corpus, staged, uploaded, journalled, launched]


@sampled
def test_a_configuration_is_written_whole_or_not_at_all(tmp_path: Path, count: int | None) -> None:
    """Whichever call fails."""
    swept(configuration(tmp_path), tmp_path, kept=False, count=count)


@sampled
@pytest.mark.parametrize("writer", WRITERS)
def test_the_next_run_makes_what_is_missing(tmp_path: Path, writer: Make, count: int | None) -> None:
    """After a run in which a call has failed."""
    swept(writer(tmp_path), tmp_path, kept=True, count=count)


@sampled
@pytest.mark.parametrize("writer", [configuration, *WRITERS])
def test_the_next_run_goes_on_after_a_kill(tmp_path: Path, writer: Make, count: int | None) -> None:
    """Whichever call it comes at."""
    killed(writer(tmp_path), tmp_path, count)


@sampled
@pytest.mark.parametrize("writer", [configuration, *WRITERS])
def test_the_next_run_goes_on_after_a_power_loss(tmp_path: Path, writer: Make, count: int | None) -> None:
    """Its next run makes what the power loss took, and nothing that it had finished is lost."""
    without_power(writer(tmp_path), tmp_path, count)


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
    (tmp_path / "limited").mkdir()
    limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *command[:5], str(tmp_path / "limited"), *settings]
    refused = run(replace(writer, command=limited), Faults(target))
    assert (refused.returncode, listed(tmp_path / "limited"), refused.stderr.count("\n")) == (2, [], 1), refused.stderr
    assert "File too large" in refused.stderr
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


def test_an_old_corpus_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    """If ``--overwrite`` meets an error or is killed, one of them is there whole, or the next run completes the new."""
    writer = corpus(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for number in range(3):
        (other / f"{number}.txt").write_text(f"different things with number {number} " * 300)
    overwrite = replace(writer, command=[*writer.command[:3], str(other), *writer.command[4:], "--overwrite"])

    def contents() -> dict[str, bytes]:
        files = [name for name in listed(writer.folder) if (writer.folder / name).is_file()]
        return {name: (writer.folder / name).read_bytes() for name in files}

    assert run(writer, Faults(writer.folder)).returncode == 0
    old, kept = contents(), tmp_path / "kept"
    shutil.copytree(writer.folder, kept)
    made = made_by(overwrite, tmp_path / "calls")
    new = contents()
    assert old != new
    for call in of_today(made, SAMPLE):
        shutil.rmtree(writer.folder)
        shutil.copytree(kept, writer.folder)
        is_killed = bool(call.number % 2)
        failed = run(overwrite, Faults(writer.folder, first=call.number, error=errno.ENOSPC, kill=is_killed))
        where = f"call {call.number}: {call.name} {call.path}: {failed.stderr}"
        assert "Traceback" not in failed.stderr, where
        if writer.whole():
            there = contents()
            assert all(there[name] == old[name] for name in old) or all(there[name] == new[name] for name in new), where
        else:
            assert failed.returncode, where
            run(writer, Faults(writer.folder))
            assert contents() == new, where
        assert run(overwrite, Faults(writer.folder)).returncode == 0
        assert contents() == new, where


def test_a_corpus_whose_records_cannot_be_removed_is_complete(tmp_path: Path) -> None:
    """It says which file stays, and the next call removes it; a full disk has an exit code of its own."""
    writer = corpus(tmp_path)
    log = tmp_path / "calls"
    done = run(writer, Faults(writer.folder, calls="unlink", first=1, count=1000, log=log))
    assert (done.returncode, writer.whole(), "the corpus is complete, but" in done.stderr) == (0, True, True)
    assert run(writer, Faults(writer.folder)).returncode == 2
    assert not [name for name in listed(writer.folder) if name.startswith(("part-", "plan"))]
    shutil.rmtree(writer.folder)
    full = run(writer, Faults(writer.folder, calls="write,pwrite", first=1, count=1000, error=errno.ENOSPC))
    assert (full.returncode, full.stderr.count("\n"), "make room" in full.stderr) == (74, 1, True), full.stderr


def test_two_builds_of_one_corpus_do_not_mix(tmp_path: Path) -> None:
    """The second is refused with a sentence while the first is running."""
    writer = corpus(tmp_path)
    writer.folder.mkdir()
    descriptor = os.open(writer.folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        refused = run(writer, Faults(writer.folder))
    finally:
        os.close(descriptor)
    assert (refused.returncode, refused.stderr.count("\n"), "another build" in refused.stderr) == (2, 1, True)
    assert run(writer, Faults(writer.folder)).returncode == 0
