"""Checkpoints when a call of a persist process fails, one at a time: what was committed stays whole, whatever fails."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.checkpoints.manifest import MANIFEST, read, steps
from opsd.trainer.locks import LOCKS
from tests.fakes.faults import ERRORS, Call, Faults, calls
from tests.fakes.power_loss import changes, losses, rebuild
from tests.fakes.saving import EVERY, STEPS, SavedRun

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


def check(run: SavedRun, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
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
            check(run, replace(of_rank(run, 1), first=first, count=count, done=done), monkeypatch)


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
    check(run, shaped(of_rank(run, rank), number, shape), monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, shape: str) -> None:
    """Each call of the persist process of a rank, in the first, the middle and the last checkpoint."""
    for call in calls_of(rank, tmp_path, monkeypatch):
        run = SavedRun(tmp_path / f"{call.number}")
        try:
            check(run, shaped(of_rank(run, rank), call.number, shape), monkeypatch)
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
