"""``opsd launch`` on the trainer when the storage of the last checkpoint fails: exit code 0 means that it is whole."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from trainer_world import CONFIG

from opsd import exitcodes
from opsd.checkpoints.manifest import folder_of, steps, verify
from tests.fakes.faults import Faults, calls
from tests.fakes.launched import Launched

STEPS = 24
SETTINGS = (f"run.steps={STEPS}", "checkpoint.every=4")


def launched(folder: Path, shards: Path, faults: Faults, *options: str) -> Launched:
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
    return Faults(folder_of(folder / "run/checkpoints", STEPS), f'"rank": {rank},')


def check(folder: Path, shards: Path, faults: Faults, *options: str) -> int:
    """The exit code of the run. Every checkpoint that it leaves is whole, and with 0 the last is there."""
    log = folder.with_name(f"{folder.name}.calls")
    with launched(folder, shards, replace(faults, log=log), *options) as run:
        code = run.wait(120)
        assert calls(log), "no call has met the faults"
        checkpoints = run.run / "checkpoints"
        for step in steps(checkpoints):
            assert verify(folder_of(checkpoints, step)).step == step
        told = {event["step"] for event in run.events("checkpoint_committed")}
        assert (STEPS in steps(checkpoints)) == (STEPS in told) == (code == exitcodes.OK), run.err
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
    with launched(tmp_path / "run", shards, faults, "--max-restarts=1") as run:
        assert run.wait(400) != exitcodes.OK
        assert STEPS in steps(root)
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
    with launched(tmp_path / "counted", shards, replace(of_last_save(tmp_path / "counted", rank), log=log)) as run:
        assert run.wait(120) == exitcodes.OK
    for call in calls(log):
        folder = tmp_path / f"{call.number}"
        faults = replace(of_last_save(folder, rank), first=call.number, done=done)
        assert check(folder, shards, faults) == exitcodes.OK, f"call {call.number}: {call.name} {call.path}"
