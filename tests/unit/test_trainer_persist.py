"""Persist processes: parts become a checkpoint, whatever dies, fails or is late."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from opsd.checkpoints.claims import FOLDER, Claim, create
from opsd.checkpoints.manifest import (
    MANIFEST,
    commit,
    folder_of,
    read,
    steps,
    verify,
)
from opsd.jsonl import METRICS
from opsd.trainer.locks import LOCKS, hold_lock, wait_for_saves
from opsd.trainer.parts import PersistPlan
from tests.fakes.clock import until
from tests.fakes.faults import Faults, calls

STEP, SAMPLE = 20, 80


class Persister:
    """A real persist process with ``content`` staged, and this test in the place of its rank."""

    def __init__(
        self,
        root: Path,
        rank: int,
        world: int,
        content: bytes,
        attempt: str = "0000abcd",
        generation: int = 0,
        remote: str = "",
        patience_s: float = 60.0,
    ) -> None:
        self.saves = 0
        memory = os.memfd_create("test")
        os.ftruncate(memory, len(content))
        mmap.mmap(memory, len(content))[:] = content
        self.locks = hold_lock(root, rank)
        layout = {"dp": world}
        plan = PersistPlan(
            str(root), rank, world, attempt, layout, "run", 2, memory, len(content), self.locks, remote=remote,
            patience_s=patience_s,
        )  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "opsd.trainer.persist", json.dumps(asdict(plan))],
            env=os.environ
            | {"OPSD_RUN_DIR": str(root.parent), "OPSD_GENERATION": str(generation), "OPSD_REMOTE": remote},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(memory, self.locks),
            start_new_session=True,
        )
        os.close(memory)

    def command(self, **command: int | str) -> None:
        assert self.process.stdin is not None
        self.saves += "save" in command
        self.process.stdin.write(json.dumps({"digest": "d", "number": self.saves, **command}).encode() + b"\n")

    def answer(self) -> dict[str, str]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.rank_dies()

    def rank_dies(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if not self.process.stdin.closed:
            os.close(self.locks)
        self.process.stdin.close()
        self.process.stdout.close()


Start = Callable[..., Persister]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Persister] = []

    def begin(rank: int, world: int, content: bytes = b"state of a rank" * 999, **more: Any) -> Persister:
        started.append(Persister(more.pop("root", tmp_path), rank, world, content, **more))
        return started[-1]

    yield begin
    for persister in started:
        persister.end()


def test_parts_of_all_ranks_become_a_checkpoint(tmp_path: Path, start: Start) -> None:
    """Once every rank's part is durable the checkpoint exists, verifies, and every process says so."""
    world = [start(rank, 3) for rank in range(3)]
    world[0].command(save=STEP, sample=SAMPLE)
    world[1].command(save=STEP, sample=SAMPLE)
    until(lambda: len(list(tmp_path.glob("step-*/rank-*"))) == 2)
    assert steps(tmp_path) == []
    world[2].command(save=STEP, sample=SAMPLE)
    assert [persister.answer() for persister in world] == [{"state": "committed"}] * 3
    manifest = verify(folder_of(tmp_path, STEP))
    assert (manifest.step, manifest.sample, manifest.layout, len(manifest.files)) == (STEP, SAMPLE, {"dp": 3}, 3)


def test_nothing_is_saved_below_a_mount_that_is_gone(tmp_path: Path, start: Start) -> None:
    """The same path would be on the disk of the node, and the checkpoint be lost with exit code 0."""
    mounted, below = tmp_path / "mounted", tmp_path / "below"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        mounted.symlink_to(elsewhere)
        alone = start(0, 1, root=mounted)
        alone.command(save=10, sample=0)
        assert alone.answer() == {"state": "committed"}
        below.mkdir()
        mounted.unlink()
        mounted.symlink_to(below)
        alone.command(save=20, sample=0)
        answer = alone.answer()
        assert (answer["state"], "no longer mounted here" in answer["why"]) == ("failed", True)
        assert [*below.iterdir()] == []
        mounted.unlink()
        mounted.symlink_to(elsewhere)
        alone.command(save=20, sample=0)
        assert alone.answer() == {"state": "committed"}


def test_nothing_is_saved_after_a_move_before_the_first_checkpoint(tmp_path: Path, start: Start) -> None:
    """The path does not lead to the run any more, whatever is there."""
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    first = start(0, 2, root=root)
    first.command(save=10, sample=0)
    first.command(abandon=10)
    assert first.answer() == {"state": "abandoned"}
    (tmp_path / "run").rename(tmp_path / "moved")
    first.command(save=20, sample=0)
    assert "the run's folder was moved" in first.answer()["why"]
    assert not (tmp_path / "run").exists()


def test_nothing_is_saved_in_the_place_of_a_folder_that_was_moved(tmp_path: Path, start: Start) -> None:
    """The run would be in two halves, of which neither is whole. A folder of checkpoints that was removed is made."""
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    alone = start(0, 1, root=root)
    alone.command(save=10, sample=0)
    assert alone.answer() == {"state": "committed"}
    shutil.rmtree(root)
    alone.command(save=20, sample=0)
    assert alone.answer() == {"state": "committed"}
    (tmp_path / "run").rename(tmp_path / "moved")
    alone.command(save=30, sample=0)
    assert "the run's folder was moved" in alone.answer()["why"]
    assert (steps(tmp_path / "moved/checkpoints"), (tmp_path / "run").exists()) == ([20], False)


def test_lines_of_steps_are_durable_before_their_checkpoint(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody repeats these steps once the checkpoint is there, so a power failure must not take their lines."""
    (root := tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (root.parent / METRICS).write_text("{}\n")
    for name, value in Faults(tmp_path, "opsd.trainer.persist", log=tmp_path / "log").environment.items():
        monkeypatch.setenv(name, value)
    alone = start(0, 1, root=root)
    alone.command(save=10, sample=0)
    assert alone.answer() == {"state": "committed"}
    made = calls(tmp_path / "log")
    synced = next(n for n, call in enumerate(made) if (call.name, call.path.name) == ("fsync", METRICS))
    assert synced < next(n for n, call in enumerate(made) if call.name == "link")


def test_old_checkpoints_go(tmp_path: Path, start: Start) -> None:
    """The first rank's process keeps as many checkpoints as it was told to."""
    alone = start(0, 1)
    for step in (10, 20, 30):
        alone.command(save=step, sample=0)
        assert alone.answer() == {"state": "committed"}
    until(lambda: steps(tmp_path) == [20, 30])


def test_a_save_outlives_its_ranks(tmp_path: Path, start: Start) -> None:
    """Ranks that die after handing over lose nothing: the processes finish, commit and end."""
    world = [start(rank, 2) for rank in range(2)]
    for persister in world:
        persister.command(save=STEP, sample=SAMPLE)
        persister.rank_dies()
    for persister in world:
        assert persister.process.wait(timeout=60) == 0
    assert verify(folder_of(tmp_path, STEP)).step == STEP


def test_a_part_that_never_comes_is_given_up(tmp_path: Path, start: Start) -> None:
    """When a rank died before handing over its part, the others remove theirs and end."""
    world = [start(rank, 2) for rank in range(2)]
    world[0].command(save=STEP, sample=SAMPLE)
    world[0].rank_dies()
    until(lambda: len(list(tmp_path.glob("step-*/rank-0000.*"))) == 1)
    assert world[0].process.poll() is None  # the other one is alive and may still deliver
    world[1].rank_dies()
    for persister in world:
        assert persister.process.wait(timeout=60) == 0
    assert [path.name for path in tmp_path.iterdir()] == [LOCKS]


def test_the_next_generation_waits_for_saves(tmp_path: Path, start: Start) -> None:
    """wait_for_saves is False while a rank or its persist process lives, and True once both have ended."""
    assert wait_for_saves(tmp_path, 1)
    alone = start(1, 2)
    assert not wait_for_saves(tmp_path, 0)
    os.kill(alone.process.pid, signal.SIGSTOP)
    alone.rank_dies()
    assert not wait_for_saves(tmp_path, 0.1)
    os.kill(alone.process.pid, signal.SIGCONT)
    assert wait_for_saves(tmp_path, 30)


def test_an_upload_is_waited_for_by_nobody_else(tmp_path: Path, start: Start) -> None:
    """It goes on after the rank's death, without the next generation waiting, and so does what was saved during it."""
    bucket = tmp_path / "bucket"
    blocked = folder_of(bucket, 10) / MANIFEST
    blocked.parent.mkdir(parents=True)
    os.mkfifo(blocked)  # the upload waits here for a reader
    alone = start(0, 1, remote=f"file://{bucket}")
    alone.command(save=10, sample=0)
    assert alone.answer() == {"state": "committed"}
    until(lambda: any(blocked.parent.glob("rank-*")))
    alone.command(save=20, sample=0)
    assert alone.answer() == {"state": "committed"}
    alone.rank_dies()
    assert wait_for_saves(tmp_path, 30)
    assert alone.process.poll() is None
    assert blocked.read_text()
    assert alone.process.wait(timeout=60) == 0
    assert verify(folder_of(bucket, 20)).tier == "remote"


def test_parts_of_two_attempts_do_not_mix(tmp_path: Path, start: Start) -> None:
    """A part left by an earlier start of the run is not taken for one of this start."""
    earlier = start(1, 2, attempt="00000001")
    earlier.command(save=STEP, sample=SAMPLE)
    until(lambda: len(list(tmp_path.glob("step-*/rank-0001.00000001-*.safetensors"))) == 1)
    earlier.process.kill()
    first = start(0, 2)
    first.command(save=STEP, sample=SAMPLE)
    until(lambda: len(list(tmp_path.glob("step-*/rank-0000.*.safetensors"))) == 1)
    assert steps(tmp_path) == []
    start(1, 2, b"other bytes").command(save=STEP, sample=SAMPLE)
    assert first.answer() == {"state": "committed"}
    assert all(".0000abcd-1." in entry.name for entry in verify(folder_of(tmp_path, STEP)).files)


def test_an_abandoned_save_is_removed(tmp_path: Path, start: Start) -> None:
    """Told that another rank failed, a process drops its part and is ready for the next save."""
    first = start(0, 2)
    first.command(save=STEP, sample=SAMPLE)
    until(lambda: len(list(tmp_path.glob("step-*/rank-0000.*.safetensors"))) == 1)
    first.command(abandon=STEP)
    assert first.answer() == {"state": "abandoned"}
    assert not folder_of(tmp_path, STEP).exists()
    first.command(save=STEP + 20, sample=SAMPLE)
    start(1, 2).command(save=STEP + 20, sample=SAMPLE, number=2)
    assert first.answer() == {"state": "committed"}


def test_of_two_copies_of_a_run_only_the_later_writes(tmp_path: Path) -> None:
    """Once the other copy has claimed a generation, this one commits nothing more and takes its part away again."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    assert create(tmp_path, Claim(1, "a start", "n1 7"))
    cut_off, requeued = (
        Persister(root, 0, 1, b"state" * 999, f"0000000{generation}", generation) for generation in (1, 2)
    )
    try:
        cut_off.command(save=10, sample=0)
        assert cut_off.answer() == {"state": "committed"}
        assert create(tmp_path, Claim(2, "a start", "n2 7"))
        cut_off.command(save=20, sample=0)
        answer = cut_off.answer()
        assert answer["state"] == "failed"
        assert "generation 2 of the run has begun elsewhere" in answer["why"]
        assert not folder_of(root, 20).exists()
        requeued.command(save=20, sample=0)
        assert requeued.answer() == {"state": "committed"}
        assert ".00000002-1." in verify(folder_of(root, 20)).files[0].name
    finally:
        cut_off.end()
        requeued.end()


def test_claims_that_cannot_be_read_for_a_while_delay_a_commit(tmp_path: Path) -> None:
    """Nothing is committed until they can be; after the limit the save has failed, and the next one is tried."""
    root, claims = tmp_path / "checkpoints", tmp_path / FOLDER
    root.mkdir()
    claims.write_text("in the way")
    patient, hasty = (
        Persister(root, rank, 1, b"state" * 999, f"0000000{rank}", 1, patience_s=patience_s)
        for rank, patience_s in ((0, 600.0), (0, 0.0))
    )
    try:
        hasty.command(save=10, sample=0)
        answer = hasty.answer()
        assert answer["state"] == "failed"
        assert "whether generation 1 may write cannot be seen" in answer["why"]
        patient.command(save=20, sample=0)
        until(lambda: list(root.glob("step-*/rank-*.safetensors")))
        assert steps(root) == []
        claims.unlink()
        assert patient.answer() == {"state": "committed"}
        hasty.command(save=30, sample=0)
        assert hasty.answer() == {"state": "committed"}
    finally:
        patient.end()
        hasty.end()


def test_a_step_is_committed_once(tmp_path: Path, start: Start) -> None:
    """A second save of a committed step leaves the first one's files, and fails unless model and data are the same."""
    first, second = start(0, 1, attempt="00000001"), start(0, 1, b"other bytes", attempt="00000002")
    first.command(save=STEP, sample=SAMPLE)
    assert first.answer() == {"state": "committed"}
    second.command(save=STEP, sample=SAMPLE, digest="another model")
    answer = second.answer()
    assert answer["state"] == "failed"
    assert "another start of the run has committed another checkpoint of this step" in answer["why"]
    second.command(save=STEP, sample=SAMPLE)
    assert second.answer() == {"state": "committed"}
    assert ".00000001-1." in verify(folder_of(tmp_path, STEP)).files[0].name
    assert not list(tmp_path.glob("step-*/*.00000002-*"))


def test_a_torn_part_is_not_a_part(tmp_path: Path, start: Start) -> None:
    """A process killed while it writes leaves a draft at most, and no checkpoint."""
    persister = start(0, 1, bytes(200_000_000))
    persister.command(save=STEP, sample=SAMPLE)
    until(lambda: any(tmp_path.glob("step-*/.rank-*")))
    persister.process.send_signal(signal.SIGKILL)
    persister.process.wait()
    assert steps(tmp_path) == []


def test_a_full_disk_fails_the_save_and_nothing_else(small_disk: Path) -> None:
    """No space: the process says so, leaves the older checkpoint whole and nothing of the new one, and goes on."""
    persister = Persister(small_disk, 0, 1, bytes(400_000))
    try:
        persister.command(save=10, sample=0)
        assert persister.answer() == {"state": "committed"}
        (small_disk / "filler").write_bytes(bytes(400_000))
        persister.command(save=20, sample=0)
        answer = persister.answer()
        assert answer["state"] == "failed"
        assert "No space left on device" in answer["why"]
        assert steps(small_disk) == [10]
        verify(folder_of(small_disk, 10))
        assert not folder_of(small_disk, 20).exists()
        (small_disk / "filler").unlink()
        persister.command(save=30, sample=0)
        assert persister.answer() == {"state": "committed"}
    finally:
        persister.end()


def test_a_failed_commit_takes_nothing_with_it(tmp_path: Path, start: Start) -> None:
    """An older checkpoint of the same step survives a save that fails."""
    alone = start(0, 1)
    alone.command(save=STEP, sample=SAMPLE)
    assert alone.answer() == {"state": "committed"}
    folder = folder_of(tmp_path, STEP)
    manifest = read(folder)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    again = start(0, 1, attempt="00000002")
    again.command(save=STEP, sample=SAMPLE)
    assert again.answer()["state"] == "failed"
    (folder / MANIFEST).rmdir()
    commit(folder, manifest)
    assert verify(folder).files == manifest.files
