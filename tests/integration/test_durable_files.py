"""Files when a call fails, a process is killed or power fails: whole or absent, also of a run's checkpoints."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
from trainer_world import CONFIG, Run

from opsd import exitcodes
from opsd.checkpoints.manifest import MANIFEST, folder_of, read, steps, verify
from opsd.config import template
from opsd.durable import DRAFT
from opsd.trainer.locks import LOCKS
from tests.fakes.checkpoints import EVERY, STEPS, SavedRun
from tests.fakes.launched import Launched
from tests.fakes.posttrain import make_corpus
from tests.fakes.power_loss import ERRORS, Call, Faults, calls, changes, losses, rebuild

# Files of commands whose call fails, that are killed, or whose power fails: whole or absent, and nothing is left
# over.


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
from opsd.spares.transfer import read_corpora
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


# ``opsd launch`` on the trainer when the storage of the last checkpoint fails: exit code 0 means that it is whole.


LAST = 24

SETTINGS = (f"run.steps={LAST}", "checkpoint.every=4")


def launched_run(folder: Path, shards: Path, faults: Faults, *options: str) -> Launched:
    """The run of two ranks in ``folder`` whose persist processes meet ``faults``."""
    folder.mkdir()
    config = folder / "config.toml"
    config.write_text(CONFIG)
    settings = [f"--set={setting}" for setting in (*SETTINGS, f"data.shards={shards}")]
    program = ("-m", "opsd.trainer", str(config), *settings)
    flags = ("--nproc-per-node=2", "--no-standby", *options)
    return Launched(folder, "", *flags, program=program, env=faults.environment)


def of_last_save(folder: Path, rank: int) -> Faults:
    """Faults of the persist process of ``rank`` in the folder of the last checkpoint."""
    return Faults(folder_of(folder / "run/checkpoints", LAST), f'"rank": {rank},')


def check(folder: Path, shards: Path, faults: Faults, *options: str) -> int:
    """The exit code of the run. Every checkpoint that it leaves is whole, and with 0 the last is there."""
    log = folder.with_name(f"{folder.name}.calls")
    with launched_run(folder, shards, replace(faults, log=log), *options) as run:
        code = run.wait(120)
        assert calls(log), "no call has met the faults"
        checkpoints = run.run / "checkpoints"
        for step in steps(checkpoints):
            assert verify(folder_of(checkpoints, step)).step == step
        told = {event["step"] for event in run.events("checkpoint_committed")}
        assert (LAST in steps(checkpoints)) == (LAST in told) == (code == exitcodes.OK), run.err
    return code


def test_a_sync_of_the_last_save_fails_once(tmp_path: Path, shards: Path) -> None:
    """The second is that of the folder, after the part got its name; the part used to be removed once committed."""
    for number in (1, 2):
        faults = of_last_save(tmp_path / f"{number}", rank=1)
        assert check(tmp_path / f"{number}", shards, replace(faults, calls="fsync", first=number)) == exitcodes.OK


@pytest.mark.waiting
def test_a_last_save_that_is_never_proved_ends_no_run_well(tmp_path: Path, shards: Path) -> None:
    """Nor its restart, which finds that checkpoint: it used to end with 0."""
    root = tmp_path / "run/run/checkpoints"
    faults = Faults(root, "opsd.trainer", calls="fsync", first=1, count=100_000, exact=True)
    with launched_run(tmp_path / "run", shards, faults, "--max-restarts=1") as run:
        assert run.wait(400) != exitcodes.OK
        assert LAST in steps(root)
        assert f"could not be saved: {root}" in run.err


@pytest.mark.parametrize(("rank", "restarts"), [(0, 1), (1, 0)])
def test_a_run_that_cannot_save_its_last_step_fails(tmp_path: Path, shards: Path, rank: int, restarts: int) -> None:
    """And it says so, restarted or not; the checkpoints before are whole."""
    faults = replace(of_last_save(tmp_path / "run", rank), first=1, count=100_000, error=errno.ENOSPC)
    assert check(tmp_path / "run", shards, faults, f"--max-restarts={restarts}") != exitcodes.OK


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_of_the_last_save_fails_once(tmp_path: Path, shards: Path, rank: int, done: bool) -> None:
    """Each of them, and reported as failed although it was carried out."""
    log = tmp_path / "calls"
    with launched_run(tmp_path / "counted", shards, replace(of_last_save(tmp_path / "counted", rank), log=log)) as run:
        assert run.wait(120) == exitcodes.OK
    for call in calls(log):
        folder = tmp_path / f"{call.number}"
        faults = replace(of_last_save(folder, rank), first=call.number, done=done)
        assert check(folder, shards, faults) == exitcodes.OK, f"call {call.number}: {call.name} {call.path}"


# Checkpoints when a call of a persist process fails, one at a time: what was committed stays whole, whatever fails.


A_WHILE = 1000
"""As many calls as a process makes: storage that fails until the end."""


def of_rank(run: SavedRun, rank: int) -> Faults:
    """Faults of the persist process of ``rank``, whose command line has its plan."""
    return Faults(run.checkpoints, f'"rank": {rank},')


def saved(run: SavedRun, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the run says that its last step is saved, with ``faults`` in its persist processes."""
    with monkeypatch.context() as patch:
        for name, value in faults.environment.items():
            patch.setenv(name, value)
        return all(run.go())


def calls_of(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of the persist process of ``rank`` in a run without faults."""
    run = SavedRun(folder / "counted")
    log = folder / "calls"
    assert saved(run, replace(of_rank(run, rank), log=log), monkeypatch)
    return calls(log)


def check_saved(run: SavedRun, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run meet ``faults``, look at what it says and at what it leaves, and go on with it."""
    is_saved = saved(run, faults, monkeypatch)
    assert is_saved or faults.count > 1
    assert (STEPS in steps(run.checkpoints)) >= is_saved
    for step in steps(run.checkpoints):
        assert run.state(step) == run.expected(step)
    assert all(run.go(STEPS + 1, STEPS + EVERY))
    for path in run.checkpoints.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    assert all(run.go(STEPS + EVERY + 1, STEPS + 2 * EVERY))
    assert sorted(left_over(run.checkpoints)) == []
    assert steps(run.checkpoints) == [STEPS + EVERY, STEPS + 2 * EVERY]


def left_over(root: Path) -> Iterator[str]:
    """What lies in the folder of the checkpoints and belongs to none."""
    for path in root.iterdir():
        if path.name != LOCKS and not (path / MANIFEST).exists():
            yield path.name
            continue
        known = {MANIFEST, *(entry.name for entry in read(path).files)} if path.is_dir() else set()
        yield from (f"{path.name}/{inner.name}" for inner in path.glob("*") if inner.name not in known)


def test_a_part_that_is_announced_is_not_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the calls of rank 1 fail from the name of its last part on, its file stays: the first rank may commit it."""
    renames = [call.number for call in calls_of(1, tmp_path, monkeypatch) if call.name == "rename"]
    assert len(renames) == STEPS // EVERY
    for first, done in ((renames[-1], True), (renames[-1] + 1, False)):
        for count in (1, A_WHILE):
            run = SavedRun(tmp_path / f"{first}-{count}")
            check_saved(run, replace(of_rank(run, 1), first=first, count=count, done=done), monkeypatch)


def test_a_save_at_the_end_alone_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one call that fails may be that of a run whose last step is no step of a checkpoint."""
    counted, log = SavedRun(tmp_path / "counted"), tmp_path / "calls"
    with monkeypatch.context() as patch:
        for name, value in replace(of_rank(counted, 0), log=log).environment.items():
            patch.setenv(name, value)
        assert all(counted.go(1, EVERY - 1))
    made = [call.number for call in calls(log) if call.name == "fsync"]
    for first in made[:2]:
        run = SavedRun(tmp_path / f"{first}")
        with monkeypatch.context() as patch:
            for name, value in replace(of_rank(run, 0), first=first).environment.items():
                patch.setenv(name, value)
            assert all(run.go(1, EVERY - 1))
        assert steps(run.checkpoints) == [EVERY - 1]


SHAPES = ("once", "until the end", "reported although done")


def shaped(faults: Faults, number: int, shape: str) -> Faults:
    """``faults`` from the call ``number`` on; the error changes with the number."""
    error = ERRORS[number % len(ERRORS)]
    count = A_WHILE if shape == "until the end" else 1
    return replace(faults, first=number, count=count, error=error, done=shape == "reported although done")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [0, 1])
def test_some_calls_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, shape: str) -> None:
    """One of each shape in each rank; which one changes with the day, so that all are met in time."""
    made = calls_of(rank, tmp_path, monkeypatch)
    number = 1 + (int(time.time() / 86_400) * 7 + 13 * SHAPES.index(shape)) % len(made)
    run = SavedRun(tmp_path / "run")
    check_saved(run, shaped(of_rank(run, rank), number, shape), monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, shape: str) -> None:
    """Each call of the persist process of a rank, in the first, the middle and the last checkpoint."""
    for call in calls_of(rank, tmp_path, monkeypatch):
        run = SavedRun(tmp_path / f"{call.number}")
        try:
            check_saved(run, shaped(of_rank(run, rank), call.number, shape), monkeypatch)
        except BaseException as error:
            error.add_note(f"call {call.number}: {call.name} {call.path}, {shape}")
            raise


def test_power_may_fail_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checkpoint that is there afterwards is whole, and of a run that had ended the last one is there."""
    run, record = SavedRun(tmp_path / "run"), tmp_path / "record"
    assert saved(run, Faults(run.checkpoints, '"rank": ', record=record), monkeypatch)
    made = changes(record)
    assert {change.call for change in made} >= {"create", "write", "sync", "rename", "link", "unlink", "mkdir"}
    seen = set()
    for end in range(len(made) + 1):
        for number, left in enumerate(losses(made[:end], end, 3)):
            again = SavedRun(tmp_path / f"{end}-{number}")
            rebuild(left, run.checkpoints.resolve(), again.checkpoints)
            found = steps(again.checkpoints)
            assert [again.state(step) for step in found] == [again.expected(step) for step in found], (end, number)
            assert end < len(made) or STEPS in found, number
            seen.update(found)
            shutil.rmtree(again.folder)
    assert seen == {*range(EVERY, STEPS + 1, EVERY)}
