"""Checkpoints in shared memory, which outlive the rank, and on other storage, which outlive the node."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from trainer_world import Run, flip

from opsd.checkpoints.manifest import MANIFEST, folder_of, steps
from opsd.client import PERSIST
from opsd.trainer import memory
from tests.fakes.clock import until


def resume(run: Run, undisturbed: Run, world: int = 2) -> dict[str, Any]:
    """Go on for ten steps beyond what has been seen; what was computed again came out the same. How it was loaded."""
    run.finish(world=world, run__steps=max(run.curve()) + 10)
    if world == 2:
        curve, expected = run.curve(), undisturbed.curve()
        assert all(curve[step] == expected[step] for step in curve.keys() & expected.keys())
    event: dict[str, Any] = run.events("checkpoint_loaded")[-1]
    return event


def kill_after_save(run: Run) -> None:
    """Kill the ranks once a checkpoint is on disk and in memory; the next is far."""
    world = run.start(run__steps=100_000, checkpoint__every=20)
    until(lambda: steps(run.checkpoints) and all(memory.read_info(run.folder, rank) for rank in (0, 1)))
    world.kill()
    assert all(memory.read_info(run.folder, rank) for rank in (0, 1))


def test_a_killed_rank_leaves_its_state_in_memory(run: Run, undisturbed: Run) -> None:
    """After SIGKILL the next start reads the newest state from memory and the losses are the same bits."""
    kill_after_save(run)
    assert resume(run, undisturbed)["tier"] == "memory"
    assert not list(run.folder.glob("*.state*"))  # a run that has ended gives the memory back


def test_memory_goes_on_where_the_disk_ends(run: Run, undisturbed: Run) -> None:
    """A state that could not be written to the disk is not lost with its ranks."""
    run.checkpoints.mkdir(parents=True)
    blockers = [folder_of(run.checkpoints, step) for step in range(20, 2000, 20)]
    for path in blockers:
        path.write_text("a file where the folder should be")
    world = run.start(run__steps=100_000, checkpoint__every=20)
    until(lambda: run.events("checkpoint_failed"))
    world.kill()
    for path in blockers:
        path.unlink()
    event = resume(run, undisturbed)
    assert (event["tier"], event["step"] % 20) == ("memory", 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_memory_is_not_used(run: Run, undisturbed: Run, rank: int) -> None:
    """A flipped bit in one rank's memory is noticed, and all ranks read from the disk."""
    kill_after_save(run)
    path = memory.state_path(run.folder, rank)
    flip(path)
    loaded = resume(run, undisturbed)
    (event,) = run.events("checkpoint_rejected")
    assert event["file"] == path.name
    assert "does not match its checksum" in event["why"]
    assert loaded["tier"] == "local"


def test_a_damaged_memory_alone_is_not_begun_with(run: Run) -> None:
    """When nothing but a damaged state is left, each start ends with a sentence until told to begin afresh."""
    kill_after_save(run)
    for folder in run.checkpoints.glob("step-*"):
        folder.rename(run.folder / folder.name)
    flip(memory.state_path(run.folder, 0))
    for _ in range(2):
        assert run.start().wait() == [1, 1]
    assert run.printed().count("in memory, is damaged; pass --fresh to begin again at step 0") >= 2
    assert run.start("--fresh").wait() == [1, 1]  # part of the initial state had been overwritten
    assert "it has been dropped, run again to begin again at step 0" in run.printed()
    run.finish("--fresh", run__steps=5)


@pytest.mark.parametrize("change", ["older", "other attempt", "gone"])
def test_states_of_two_saves_do_not_mix(run: Run, undisturbed: Run, change: str) -> None:
    """When one rank's memory is of another save, or lost with its node, the disk is read."""
    kill_after_save(run)
    path = memory.info_path(run.folder, 1)
    info = json.loads(path.read_text())
    if change == "gone":
        path.unlink()
    else:
        path.write_text(json.dumps(info | ({"step": 5} if change == "older" else {"attempt": "00000000"})))
    assert resume(run, undisturbed)["tier"] == "local"


def test_memory_of_another_layout_is_left_alone(run: Run, undisturbed: Run) -> None:
    """With another number of ranks the disk is read, which any layout can."""
    kill_after_save(run)
    assert resume(run, undisturbed, world=1)["tier"] == "local"


def test_a_kill_while_staging_leaves_no_record(run: Run, undisturbed: Run) -> None:
    """A rank killed at any moment of a save never leaves a record of a state that is half the new one."""
    for _ in range(2):
        world = run.start(checkpoint__every=1)
        step = world.step()
        until(lambda world=world, step=step: world.step() > step + 2)
        os.kill(world.ranks[1].pid or 0, signal.SIGKILL)
        world.kill()
    run.finish()
    assert run.events("checkpoint_rejected") == []
    assert run.curve() == undisturbed.curve()


def test_a_lost_disk_is_replaced_by_the_copy(run: Run, undisturbed: Run, tmp_path: Path) -> None:
    """With its checkpoints gone, a run goes on from what has been uploaded, and says so."""
    remote = {"checkpoint__remote": f"file://{tmp_path}/bucket", "checkpoint__every": 20}
    run.finish(run__steps=20, **remote)
    assert steps(tmp_path / "bucket") == [20]
    run.checkpoints.rename(tmp_path / "lost")
    run.finish(**remote)
    (loaded,) = run.events("checkpoint_loaded")
    assert (loaded["step"], loaded["tier"]) == (20, "remote")
    assert [event["step"] for event in run.events("checkpoint_uploaded")] == [20, 40]
    assert run.curve() == undisturbed.curve()


def test_a_storage_that_refuses_stops_nothing(run: Run, undisturbed: Run) -> None:
    """When nothing can be uploaded the training goes on, the failure is told, and no checkpoint is removed."""
    run.finish(checkpoint__remote="file:///proc/nowhere", checkpoint__every=10, checkpoint__keep=1)
    assert run.events("checkpoint_upload_failed")
    assert steps(run.checkpoints)[0] == 10
    assert steps(run.checkpoints)[-1] == 40
    assert run.curve() == undisturbed.curve()


def test_a_copy_that_cannot_be_read_is_not_none(run: Run, tmp_path: Path) -> None:
    """With the disk lost and the storage out of reach, a run does not begin at step 0 unless it is told to."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    unreadable = folder_of(bucket, 20) / MANIFEST
    unreadable.mkdir(parents=True)
    remote = {"checkpoint__remote": f"file://{bucket}", "run__steps": 5}
    assert run.start(**remote).wait() == [1, 1]
    assert f"none is available from file://{bucket}" in run.printed()
    assert "--fresh" in run.printed()
    assert not (run.folder / "metrics.jsonl").exists()
    run.finish("--fresh", **remote)


def test_a_password_of_the_storage_stays_with_the_ranks(run: Run) -> None:
    """It stands in no command line of the processes that save, and in no file of the run but its settings."""
    world = run.start(
        "--fresh", world=1, run__steps=100_000, checkpoint__every=5,
        checkpoint__remote="tape://user:s3cret@archive/run",
        evaluation__harness="true {model}", evaluation__queue="sleep 1000",
    )  # fmt: skip
    persisting = Path(f"/proc/{world.worker(0, PERSIST)}/cmdline")
    until(lambda: b"tape://archive/run" in persisting.read_bytes())  # a process is forked before it is a program
    assert b"s3cret" not in persisting.read_bytes()
    until(lambda: run.events("checkpoint_upload_failed"))
    world.kill()
    files = [path for path in run.folder.iterdir() if path.suffix in (".json", ".jsonl", ".log")]
    assert "config.json" in [path.name for path in files]
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
